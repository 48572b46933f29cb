"""Configs of other trainers as penstock's: axolotl, LLaMA-Factory, and TRL's scripts.

    their keys --readers--> our keys, by section; what has no counterpart is listed, with a word on it

The three share most keys of transformers' TrainingArguments. A reader of a key takes its value and
writes ours, or raises `_NoCounterpartError`. Rows and processes are put together at the end, as theirs count
rows of a device, and ours rows of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from penstock.errors import ConfigError
from penstock.train.config.starter import commented, ranks_for
from penstock.yaml_reader import parse_yaml

Tree = Mapping[str, Any]
KeyReader = Callable[["OurKeys", Any], None]


class WithoutCounterpart(NamedTuple):
    """A key without a counterpart, and why, or what to do"""

    key: str
    value: object
    why: str


class Imported(NamedTuple):
    """sections: ours; trainer: whose config it was; left: what was not taken over"""

    sections: dict[str, dict[str, Any]]
    trainer: str
    left: tuple[WithoutCounterpart, ...]

    def text(self, source: str) -> str:
        """The config as commented YAML, with what was left as comments. source: the file that was read"""
        head = [f"# from {source}, a config of {self.trainer}"]
        head += ["# without a counterpart here:"] if self.left else []
        head += [f"#   {left.key}: {left.value}   {left.why}" for left in self.left]
        return commented([*head, ""], self.sections)


class _NoCounterpartError(Exception):
    """The reason why a value cannot be taken over."""


@dataclass
class OurKeys:
    """The keys so far. rows: of a device at once; calls: gradient accumulation"""

    sections: dict[str, dict[str, Any]] = field(default_factory=dict)
    rows: int = 1
    calls: int = 1

    def set(self, key: str, value: Any) -> None:
        section, _, name = key.partition(".")
        self.sections.setdefault(section, {})[name] = value

    def has(self, key: str) -> bool:
        section, _, name = key.partition(".")
        return name in self.sections.get(section, {})


def imported(tree: Tree, gpus: int) -> Imported:
    """Our config of theirs, for so many processes. Raises ConfigError for a tree of no known trainer."""
    trainer, readers, defaults = _trainer(tree)
    draft, left = OurKeys(rows=defaults["rows"]), list[WithoutCounterpart]()
    for key, value in tree.items():
        if value is None or key in _SILENT:
            continue
        try:
            readers.get(key, _unknown)(draft, value)
        except _NoCounterpartError as reason:
            left.append(WithoutCounterpart(key, value, str(reason)))
        except (ValueError, TypeError, OverflowError):
            left.append(WithoutCounterpart(key, value, "a value of another type than its trainer takes"))
    left += _finish(draft, gpus, defaults)
    order = ("model", "data", "pipeline", "parallel", "train", "optimizer", "adapter", "output")
    return Imported(
        {name: draft.sections[name] for name in order if name in draft.sections}, trainer, tuple(left)
    )


def flags(words: list[str]) -> dict[str, Any]:
    """The options of a command line as a tree: `--key value`, `--key=value`, and `--key` for true."""
    tree: dict[str, Any] = {}
    key = ""
    for word in words:
        if word.startswith("--"):
            key, equals, text = word[2:].partition("=")
            key = key.replace("-", "_")
            tree[key] = parse_yaml(text) if equals else True
        elif key:
            known, value = tree[key], parse_yaml(word)
            before = known if isinstance(known, list) else [known]
            tree[key] = value if known is True else [*before, value]
    return tree


def _trainer(tree: Tree) -> tuple[str, Mapping[str, KeyReader], Mapping[str, Any]]:
    """Its name, readers and defaults."""
    if "base_model" in tree:
        own = {"rows": 1, "data.sequence_length": 512, "optimizer.schedule": "cosine"}
        return "axolotl", _AXOLOTL, _DEFAULTS | own
    if "model_name_or_path" not in tree:
        rule = "axolotl's configs have base_model, and those of LLaMA-Factory and TRL model_name_or_path"
        shown = ", ".join(list(tree)[:5]) or "no key"
        raise ConfigError(f"a config with {shown}", rule, "Give one of theirs")
    if {"finetuning_type", "stage", "cutoff_len", "template"} & tree.keys():
        return "LLaMA-Factory", _LLAMA_FACTORY, _DEFAULTS | {"data.sequence_length": 2048}
    return "TRL", _TRL, _DEFAULTS | {"data.sequence_length": 1024, "optimizer.learning_rate": 2e-5}


# of transformers' TrainingArguments, where ours differ; rows: of a device at once
_DEFAULTS: dict[str, Any] = {
    "rows": 8, "train.epochs": 3.0, "train.seed": 42, "optimizer.learning_rate": 5e-5,
    "optimizer.weight_decay": 0.0, "optimizer.schedule": "linear", "optimizer.final_fraction": 0.0,
    "optimizer.betas": [0.9, 0.999],
}  # fmt: skip


# ---- readers


def _to(key: str, convert: Callable[[Any], Any] = lambda value: value) -> KeyReader:
    def read(draft: OurKeys, value: Any) -> None:
        draft.set(key, convert(value))

    return read


def _if(key: str, ours: Any) -> KeyReader:
    """For a switch: `ours` where it is on."""

    def read(draft: OurKeys, value: Any) -> None:
        if value is True:
            draft.set(key, ours)

    return read


def _no(why: str) -> KeyReader:
    """For a key that means something only if it is on."""

    def read(draft: OurKeys, value: Any) -> None:
        if value not in (False, 0, "", "none", "None", "no"):
            raise _NoCounterpartError(why)

    return read


def _words(table: Mapping[str, Any], key: str) -> KeyReader:
    def read(draft: OurKeys, value: Any) -> None:
        if str(value).lower() not in table:
            raise _NoCounterpartError(f"take one of those of {key}")
        draft.set(key, table[str(value).lower()])

    return read


def _optimizer(draft: OurKeys, value: Any) -> None:
    name = str(value).lower().replace("optimizernames.", "")
    if "muon" in name:
        draft.set("optimizer.name", "muon")
    elif "adafactor" in name:
        draft.set("optimizer.name", "adafactor")
    elif name.startswith(("adamw", "paged_adamw")):
        if "8bit" in name or "4bit" in name:
            draft.set("optimizer.states", "8bit" if "8bit" in name else "4bit")
    else:
        raise _NoCounterpartError("take optimizer.name: adamw, muon or adafactor")


def _unknown(draft: OurKeys, value: Any) -> None:
    raise _NoCounterpartError("")


def _adapter(draft: OurKeys, value: Any) -> None:
    if value not in ("lora", "qlora", True):
        raise _NoCounterpartError("adapters here are LoRA and DoRA")
    draft.sections.setdefault("adapter", {}).setdefault("kind", "lora")
    if value == "qlora":
        draft.set("adapter.quantize", "nf4")


def _targets(draft: OurKeys, value: Any) -> None:
    names = value.replace(" ", "").split(",") if isinstance(value, str) else list(value)
    draft.set("adapter.targets", "all-linear" if names in (["all"], ["all-linear"]) else names)


def _precision(draft: OurKeys, value: Any) -> None:
    if value in (True, "auto", "true"):
        draft.set("train.precision", "mixed")


def _fp16(draft: OurKeys, value: Any) -> None:
    if value is True:
        raise _NoCounterpartError("train.precision: mixed computes in bfloat16, which needs no loss scaling")


def _attention(draft: OurKeys, value: Any) -> None:
    flash = "flash_attention_2"
    names = {"fa2": flash, "flash_attention": flash, "True": flash, "auto": None, "disabled": "eager"}
    name = names.get(str(value), value)
    if name in ("sdpa", "eager", flash, "flash_attention_3"):
        draft.set("model.attention", name)


def _steps(draft: OurKeys, value: Any) -> None:
    if int(value) > 0:
        draft.set("train.steps", int(value))


def _betas(place: int) -> KeyReader:
    def read(draft: OurKeys, value: Any) -> None:
        betas = draft.sections.setdefault("optimizer", {}).setdefault("betas", [0.9, 0.999])
        betas[place] = float(value)

    return read


def _every(key: str) -> KeyReader:
    def read(draft: OurKeys, value: Any) -> None:
        if not isinstance(value, int) or value < 1:
            raise _NoCounterpartError("a share of the run; give a number of steps")
        draft.set(key, value)

    return read


def _when(key: str) -> KeyReader:
    """A strategy: when something happens."""

    def read(draft: OurKeys, value: Any) -> None:
        if value not in ("steps", "no", False):
            raise _NoCounterpartError(f"give {key}, a number of steps")

    return read


def _trackers(draft: OurKeys, value: Any) -> None:
    names = value if isinstance(value, list) else [value]
    known = [name for name in names if name in ("tensorboard", "wandb", "mlflow")]
    if known:
        draft.set("output.trackers", known)
    others = [name for name in names if name not in known and name not in ("none", "all", None)]
    if others:
        raise _NoCounterpartError("trackers here are tensorboard, wandb and mlflow")


def _wandb(draft: OurKeys, value: Any) -> None:
    if value:
        draft.set("output.trackers", [{"name": "wandb", "project": str(value)}])


def _held_out(draft: OurKeys, value: Any) -> None:
    if isinstance(value, float) and 0 < value < 1:
        draft.set("data.held_out", value)
    elif value:
        raise _NoCounterpartError("data.held_out is a share, such as 0.01")


def _rows(draft: OurKeys, value: Any) -> None:
    draft.rows = _count(value)


def _calls(draft: OurKeys, value: Any) -> None:
    draft.calls = _count(value)


def _count(value: Any) -> int:
    if isinstance(value, bool) or int(value) < 1:
        raise _NoCounterpartError("give 1 or more")
    return int(value)


_OF_SOURCE = {"split": "split", "config": "name", "revision": "revision"}


def _datasets(draft: OurKeys, value: Any) -> None:
    """axolotl's list."""
    sources = []
    for source in value if isinstance(value, list) else [value]:
        if not isinstance(source, Mapping) or not isinstance(source.get("path"), str):
            raise _NoCounterpartError("a source has a path; give data.path")
        form = source.get("type")
        known = {"chat_template": "chat", "alpaca": "chat", "completion": "auto"}
        kind = known.get(form if isinstance(form, str) else "chat_template", "chat")
        keys: dict[str, Any] = {"path": source["path"], "kind": kind}
        if field_name := source.get("field_messages"):
            keys["messages_field"] = field_name
        if kind == "auto" and source.get("field"):
            keys["text_field"] = source["field"]
        keys |= {ours: source[theirs] for ours, theirs in _OF_SOURCE.items() if source.get(theirs)}
        sources.append(keys)
    if len(sources) == 1:
        for key, one in sources[0].items():
            draft.set(f"data.{key}", one)
    else:
        draft.set("data.mixture", sources)


def _named_datasets(draft: OurKeys, value: Any) -> None:
    """LLaMA-Factory's names, which its dataset_info.json explains."""
    names = value if isinstance(value, list) else str(value).replace(" ", "").split(",")
    paths = [f"data/{name}.json" for name in names]
    if len(paths) == 1:
        draft.set("data.path", paths[0])
    else:
        draft.set("data.mixture", [{"path": path} for path in paths])
    draft.sections["data"].setdefault("kind", "chat")
    raise _NoCounterpartError("a name of dataset_info.json: check data.path")


def _stage(draft: OurKeys, value: Any) -> None:
    if value not in ("sft", "pt"):
        raise _NoCounterpartError("stages here are sft and pt; see docs/guides")
    draft.set("data.kind", "chat" if value == "sft" else "auto")


def _finetuning(draft: OurKeys, value: Any) -> None:
    if value == "lora":
        _adapter(draft, value)
    elif value != "full":
        raise _NoCounterpartError("all weights are trained here, or an adapter")


def _bits(draft: OurKeys, value: Any) -> None:
    if value in (True, 4):
        _adapter(draft, "qlora")
    elif value:
        raise _NoCounterpartError("the matrices under an adapter may have 4 bits")


_NEEDLESS = """
    do_train do_eval overwrite_output_dir overwrite_cache plot_loss ddp_timeout hub_model_id logging_dir
    logging_first_step use_cache remove_unused_columns dataloader_num_workers strict is_llama_derived_model
    model_type tokenizer_type local_rank use_liger_kernel
    gradient_checkpointing_kwargs pad_to_sequence_len eval_sample_packing dataset_prepared_path
    preprocessing_num_workers per_device_eval_batch_size eval_batch_size save_only_model disable_tqdm
    wandb_entity wandb_watch wandb_name wandb_log_model packing_strategy
"""
_SILENT = frozenset(_NEEDLESS.split())  # about the machine or the screen, or always so here

_RATES = {"cosine": "cosine", "linear": "linear", "constant": "constant", "constant_with_warmup": "constant",
          "cosine_with_restarts": "cosine_with_restarts"}  # fmt: skip

_PACKING = _to("data.packing", lambda on: "best_fit" if on is True else "none")
_SHARED: Mapping[str, KeyReader] = {
    "learning_rate": _to("optimizer.learning_rate", float),
    "weight_decay": _to("optimizer.weight_decay", float),
    "lr_scheduler_type": _words(_RATES, "optimizer.schedule"),
    "warmup_steps": _to("optimizer.warmup_steps", int),
    "warmup_ratio": _to("optimizer.warmup_ratio", float),
    "adam_beta1": _betas(0),
    "adam_beta2": _betas(1),
    "adam_epsilon": _to("optimizer.eps", float),
    "optim": _optimizer,
    "max_grad_norm": _to("train.clip_norm", float),
    "num_train_epochs": _to("train.epochs", float),
    "max_steps": _steps,
    "per_device_train_batch_size": _rows,
    "gradient_accumulation_steps": _calls,
    "bf16": _precision,
    "fp16": _fp16,
    "gradient_checkpointing": _if("train.activation_checkpointing", True),
    "logging_steps": _every("train.log_every"),
    "save_steps": _every("train.checkpoint_every"),
    "eval_steps": _every("train.evaluate_every"),
    "save_strategy": _when("train.checkpoint_every"),
    "eval_strategy": _when("train.evaluate_every"),
    "save_total_limit": _to("output.keep", lambda count: {"last": int(count)}),
    "output_dir": _to("output.folder", str),
    "report_to": _trackers,
    "seed": _to("train.seed", int),
    "label_smoothing_factor": _to("train.label_smoothing", float),
    "load_best_model_at_end": _if("output.keep", {"best": 1}),
    "trust_remote_code": _if("model.trust_remote_code", True),
    "deepspeed": _no("parallel.dp_shard shards the weights"),
    "fsdp": _no("parallel.dp_shard shards the weights"),
    "fsdp_config": _no("parallel.dp_shard shards the weights"),
    "load_in_8bit": _no("the matrices under an adapter may have 4 bits (adapter.quantize)"),
    "group_by_length": _no("rows come in random order"),
    "tf32": _no("products are in bfloat16 with train.precision: mixed"),
    "neftune_noise_alpha": _no("noise in embeddings is not here"),
}

_LORA: Mapping[str, KeyReader] = {
    "lora_r": _to("adapter.r", int),
    "lora_rank": _to("adapter.r", int),
    "lora_alpha": _to("adapter.alpha", int),
    "lora_dropout": _to("adapter.dropout", float),
    "lora_target_modules": _targets,
    "lora_target": _targets,
    "lora_modules_to_save": _to("adapter.modules_to_save"),
    "additional_target": _to("adapter.modules_to_save", lambda value: str(value).split(",")),
    "use_dora": _if("adapter.kind", "dora"),
    "use_rslora": _no("the scale here is alpha / r"),
}

_AXOLOTL: Mapping[str, KeyReader] = {
    **_SHARED,
    **_LORA,
    "base_model": _to("model.path", str),
    "revision_of_model": _to("model.revision", str),
    "tokenizer_config": _to("data.tokenizer", str),
    "adapter": _adapter,
    "load_in_4bit": _bits,
    "lora_target_linear": _if("adapter.targets", "all-linear"),
    "peft_use_dora": _if("adapter.kind", "dora"),
    "datasets": _datasets,
    "sequence_len": _to("data.sequence_length", int),
    "sample_packing": _PACKING,
    "val_set_size": _held_out,
    "micro_batch_size": _rows,
    "num_epochs": _to("train.epochs", float),
    "optimizer": _optimizer,
    "lr_scheduler": _words(_RATES, "optimizer.schedule"),
    "attn_implementation": _attention,
    "flash_attention": _attention,
    "sdp_attention": _if("model.attention", "sdpa"),
    "train_on_inputs": _if("data.loss_on", "all"),
    "wandb_project": _wandb,
    "early_stopping_patience": _to("train.early_stop", lambda count: {"patience": int(count)}),
    "saves_per_epoch": _no("give train.checkpoint_every, a number of steps"),
    "evals_per_epoch": _no("give train.evaluate_every, a number of steps"),
}

_LLAMA_FACTORY: Mapping[str, KeyReader] = {
    **_SHARED,
    **_LORA,
    "model_name_or_path": _to("model.path", str),
    "stage": _stage,
    "finetuning_type": _finetuning,
    "quantization_bit": _bits,
    "dataset": _named_datasets,
    "template": _no("chats take the tokenizer's own template, or data.chat_template"),
    "cutoff_len": _to("data.sequence_length", int),
    "packing": _PACKING,
    "val_size": _held_out,
    "flash_attn": _attention,
    "train_on_prompt": _if("data.loss_on", "all"),
    "mask_history": _if("data.loss_on", "last"),
}

_TRL: Mapping[str, KeyReader] = {
    **_SHARED,
    **_LORA,
    "model_name_or_path": _to("model.path", str),
    "model_revision": _to("model.revision", str),
    "attn_implementation": _attention,
    "use_peft": _if("adapter.kind", "lora"),
    "load_in_4bit": _bits,
    "dataset_name": _to("data.path", str),
    "dataset_config": _to("data.config", str),
    "dataset_train_split": _to("data.split", str),
    "max_length": _to("data.sequence_length", int),
    "max_seq_length": _to("data.sequence_length", int),
    "packing": _PACKING,
    "dataset_text_field": _to("data.text_field", str),
}


# ---- rows and processes


def _finish(draft: OurKeys, gpus: int, defaults: Mapping[str, Any]) -> list[WithoutCounterpart]:
    """The rows of a step on so many processes, their mesh, and their defaults where ours differ.

    Returns what such a mesh cannot have.
    """
    left = []
    ranks = ranks_for(gpus, None)
    parts = gpus // ranks
    rows = draft.rows * draft.calls * gpus
    draft.set("pipeline.ranks", ranks)
    draft.set("pipeline.microbatches", -(-rows // (parts * draft.rows)))
    if parts > 1:
        draft.set("parallel.dp_shard", parts)
        if states := draft.sections.get("optimizer", {}).pop("states", None):
            why = f"{gpus} processes are a mesh, which would change moments in few bits"
            left.append(WithoutCounterpart("optimizer", states, why))
    draft.set("train.batch_size", rows)
    if "adapter" in draft.sections and not draft.has("adapter.kind"):
        del draft.sections["adapter"]  # keys of an adapter that is off
    for key, value in defaults.items():
        if "." in key and not draft.has(key):
            draft.set(key, value)
    if draft.has("train.steps"):
        del draft.sections["train"]["epochs"]
    if draft.sections["optimizer"].get("name", "adamw") != "adamw":
        for key in ("betas", "eps"):
            draft.sections["optimizer"].pop(key, None)
    if draft.sections["optimizer"]["schedule"] == "constant":
        del draft.sections["optimizer"]["final_fraction"]
    if draft.has("optimizer.warmup_steps") and draft.has("optimizer.warmup_ratio"):
        del draft.sections["optimizer"]["warmup_ratio"]
    if not draft.has("data.path") and not draft.has("data.mixture"):
        draft.set("data.path", "data.jsonl")
    draft.sections["data"].setdefault("kind", "chat")
    for source in (draft.sections["data"], *draft.sections["data"].get("mixture", ())):
        _name_split(source)
    return left


def _name_split(source: dict[str, Any]) -> None:
    """Give the name of a data set the split that they read without one; a file has none."""
    path = source.get("path")
    if path is None:
        return
    named = not Path(path).suffix and not Path(path).expanduser().exists()
    if named:
        source.setdefault("split", "train")
    elif not Path(path).expanduser().is_dir():
        for key in _OF_SOURCE:
            source.pop(key, None)
