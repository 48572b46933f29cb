"""Reads a TrainConfig from a YAML file and overrides, or raises one ConfigError with everything wrong."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import ValidationError

from penstock.errors import ConfigError
from penstock.findings import as_one, finding, shown
from penstock.reading import DEEPEST
from penstock.train.config.loss import LOSSES
from penstock.train.config.sections import TrainConfig
from penstock.train.config.values import Section, tag
from penstock.train.optimizers.optimizer import OPTIMIZERS
from penstock.train.records.trackers import TRACKERS
from penstock.yaml_reader import in_a_line, parse_yaml, read_yaml

# tags of unions, which pydantic adds to a key's path; no key has such a name
_TAGGED: dict[str, type[Section]] = {tag(name): choice.section for name, choice in OPTIMIZERS.items()}
_TAGGED |= {tag(name): section for name, section in TRACKERS.items()}
_TAGGED |= {tag(name): section for name, section in LOSSES.items()}


def load_config(path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> TrainConfig:
    """Load a config.

    Args:
        path: a YAML file
        overrides: ``section.key=value``, which replace the file's values, and ``section={key: value}``, which
            replaces the whole section; each value is YAML

    Raises: ConfigError that lists everything wrong at once.
    """
    tree = _read(Path(path))
    for override in overrides:
        _apply(tree, override)
    return validated(tree, f"config {path}")


def validated(tree: Mapping[str, Any], value: str) -> TrainConfig:
    """The config of these sections. Raises ConfigError for `value` that lists everything wrong at once."""
    try:
        return TrainConfig.model_validate(tree)
    except ValidationError as error:
        wrong = error.errors(include_url=False)
    raise as_one(value, [_finding(entry) for entry in wrong])


def _read(path: Path) -> dict[str, Any]:
    tree = read_yaml(path, "config")
    if not isinstance(tree, dict):
        rule = f"it holds sections of keys, and here is {_kind(tree)}"
        remedy = f"Write sections like model: and data: ({', '.join(TrainConfig.model_fields)})"
        raise ConfigError(f"config {path}", rule, remedy)
    return tree


def is_override(argument: str) -> bool:
    """Whether an argument of the command is key=value. A slash before the = makes a path of it."""
    name, equals, _ = argument.partition("=")
    return bool(equals) and "/" not in name


# what a shell may leave of a value, and YAML reads as null, or as a list of null
_UNSAID = {
    "": "nothing follows the =, as if a shell's variable is not set",
    "~": "~ alone would be null, and not your home",
    "-": "- alone would be a list, and nothing is read from standard input",
}


def _apply(tree: dict[str, Any], override: str) -> None:
    value, (name, _, text) = f"argument {shown(override)}", override.partition("=")
    keys = name.split(".")
    rule = "what follows the config file is section.key=value"
    remedy = "Write it like train.steps=200, or a whole section like model='{path: models/mine}'"
    if not is_override(override) or len(keys) > DEEPEST or not all(keys):
        raise ConfigError(value, rule, remedy)
    if (meant := _UNSAID.get(text.strip())) is not None:
        raise ConfigError(value, meant, f"Write it out, or {name}=null for none")
    try:
        parsed = parse_yaml(text)
    except yaml.YAMLError as error:
        raise ConfigError(value, f"its value is not YAML: {in_a_line(error)}", "Quote it") from None
    if len(keys) == 1 and not (parsed is None or isinstance(parsed, dict)):  # null: a section left out
        raise ConfigError(value, rule, remedy)
    for key in keys[:-1]:
        if tree.get(key) is None:
            tree[key] = {}
        tree = tree[key]
        if not isinstance(tree, dict):
            raise ConfigError(value, f"{key} holds {_kind(tree)} and no keys", "Name a key of a section")
    tree[keys[-1]] = parsed


def _kind(value: object) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"


# ---- pydantic's findings in the user's words


def _finding(entry: Any) -> tuple[str, str, str]:
    """Value, rule and remedy of one finding."""
    name = ".".join(str(key) for key in entry["loc"] if key not in _TAGGED)
    match entry["type"]:
        case "extra_forbidden":
            return _unknown_key(name, entry)
        case "missing":
            return f"{name} is missing", "the run needs it", f"Write it into the config, or give {name}=..."
        case "model_type":
            value = f"{name}={shown(entry['input'])}"
            return value, "it is a section of keys", "Give its keys, or leave it out"
    return finding(entry, name or "config", "See the keys and their types in docs/config.md")


# our words for the keys of other trainers; with their section where it alone says what is meant
_HERE = {
    "optimizer.learning_rate": "lr peak_lr max_learning_rate",
    "optimizer.final_fraction, a share of the learning rate":
        "min_lr min_learning_rate min_lr_rate min_lr_ratio",
    "optimizer.schedule": "lr_scheduler lr_scheduler_type lr_schedule lr_decay_style",
    "optimizer.warmup_ratio": "warmup_fraction lr_warmup_fraction",
    "optimizer.warmup_steps": "num_warmup_steps lr_warmup_steps lr_warmup_iters warmup_iters",
    "optimizer.betas, as [0.9, 0.95]": "adam_beta1 adam_beta2 beta1 beta2",
    "optimizer.eps": "adam_epsilon adam_eps epsilon",
    "optimizer.weight_decay": "wd",
    "train.epochs": "epochs num_epochs num_train_epochs n_epochs max_epochs",
    "train.nonfinite": "skip_nan",
    "train.label_smoothing": "label_smoothing_factor",
    "train.log_every": "logging_steps log_interval log_every_n_steps logging_interval",
    "train.early_stop={patience: N}": "early_stopping_patience early_stopping",
    "train.compile": "torch_compile compile_model",
    "output.keep={last: N}": "save_total_limit keep_last_n_checkpoints",
    "output.keep={best: 1}, which checkpoints/best links to": "load_best_model_at_end save_best save_top_k",
    "output.trackers": "report_to loggers logger wandb_project use_wandb",
    "the command penstock train CONFIG --resume":
        "resume_from_checkpoint auto_resume_from_checkpoints resume",
    "model.path": "base_model model_name_or_path model_name pretrained_model_name_or_path hf_path",
    "model.attention": "attn_implementation attn_impl flash_attention flash_attn",
    "data.path": "dataset datasets dataset_name dataset_path train_file data_files",
    "data.validation": "validation_file eval_dataset test_datasets val_data",
    "data.held_out": "val_set_size validation_split eval_split val_split",
    "data.packing=best_fit": "sample_packing pack pack_samples packed",
    "data.loss_on": "train_on_inputs assistant_only_loss completion_only_loss train_on_input",
    "data.workers": "dataset_num_proc preprocessing_num_workers dataset_processes",
    "train.clip_norm": "max_grad_norm grad_clip gradient_clipping clip_grad gradient_clip_val",
    "pipeline.microbatches: a step's batch_size rows are split into so many; or, where that many do not fit "
    "into one pipeline call, train.accumulate calls": "gradient_accumulation_steps accumulate_grad_batches",
    "train.batch_size, the rows of a step, and pipeline.microbatches, their parts":
        "micro_batch_size per_device_train_batch_size train_batch_size global_batch_size",
    "train.evaluate_batches, of batch_size rows": "per_device_eval_batch_size eval_batch_size eval_iters",
    "train.checkpoint_every": "save_every save_steps save_interval save_strategy",
    "train.evaluate_every": "eval_every eval_steps eval_interval eval_strategy evaluation_strategy",
    "train.steps": "max_steps num_steps train_iters num_iterations max_iters",
    "parallel.dp_shard (FSDP2 shards the weights) or parallel.dp_replicate (copies of them)":
        "dp data_parallel_size",
    "pipeline.ranks": "pp pipeline_parallel_size pipeline_model_parallel_size",
    "parallel.tp": "tensor_parallel_size tensor_model_parallel_size",
    "parallel.cp": "context_parallel_size",
    "parallel.ep": "expert_parallel_size expert_model_parallel_size",
    "data.sequence_length":
        "seq_len seq_length max_seq_length block_size max_length sequence_len cutoff_len model_max_length",
    "train.activation_checkpointing": "gradient_checkpointing",
    "train.precision=mixed, or bfloat16": "bf16 fp16 mixed_precision torch_dtype",
    "optimizer.name, and optimizer.states for AdamW in 8 bits": "optim optimizer_type",
    "output.folder": "output_dir out_dir save_dir",
    "adapter.r": "adapter.rank lora_r lora_rank",
    "adapter.kind": "peft_type peft_method use_dora use_rslora",
    "adapter.targets": "lora_target_modules lora_target target_modules",
    **{f"adapter.{key}": f"lora_{key}" for key in ("alpha", "dropout", "modules_to_save")},
    "adapter.quantize=nf4": "load_in_4bit quantization_bit load_in_8bit",
}  # fmt: skip
_ELSEWHERE = {key: f"Write {here}" for here, keys in _HERE.items() for key in keys.split()}


def _unknown_key(name: str, entry: Any) -> tuple[str, str, str]:
    *path, key = entry["loc"]  # the key itself may hold a dot
    section = ".".join(str(part) for part in path if part not in _TAGGED)
    names = _all_names()
    known = [other.rpartition(".")[2] for other in names if other.rpartition(".")[0] == section]
    if path and path[-1] in _TAGGED:  # the keys of this member of the union alone
        known = _TAGGED[path[-1]].keys_in_order()
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    # a member of a union lacks keys of the others, which have the same names
    elsewhere = [other for other in names if f".{other}".endswith(f".{key}") and other != name]
    if (here := _ELSEWHERE.get(name, _ELSEWHERE.get(key))) is not None:
        remedy = here
    elif near:
        remedy = f"Did you mean {section}.{near[0]}?" if section else f"Did you mean {near[0]}?"
    elif elsewhere:
        remedy = f"Did you mean {elsewhere[0]}?"
    else:
        remedy = f"Take one of {', '.join(known)}"
    where = f"section {section}" if section else "a config"
    return f"{name}={shown(entry['input'])}", f"{where} has no such key", remedy


@functools.cache
def _all_names() -> tuple[str, ...]:
    return tuple(dict.fromkeys(_names(TrainConfig)))


def _names(model: type[Section], section: str = "") -> Iterator[str]:
    """Every key below `model` with the keys that lead to it: train, train.steps, ..."""
    for key in model.keys_in_order():
        yield section + key
        for inner in _models_in(model.model_fields[key].annotation):
            yield from _names(inner, f"{section}{key}.")


def _models_in(annotation: Any) -> Iterator[type[Section]]:
    """The sections in an annotation, which may be a union."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
    else:
        for inner in get_args(annotation):
            yield from _models_in(inner)
