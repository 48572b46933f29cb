"""Write docs/config.md from the sections of penstock.train.config: ``python docs/config.py``.

What a key means is the comment that stands behind it in the source, or above it; for an option that
AutoPipeline has too, the sentence in penstock.options. What it may hold is what the model checks.
tests/test_docs.py checks that the page is what this writes, has every key, and that each form below is one
that the trainer takes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from penstock.schedule.choose import MAKERS, NEEDED, options_of
from penstock.train.config.meanings import meanings_of, section_of
from penstock.train.config.sections import TrainConfig

PAGE = Path(__file__).with_name("config.md")
SCHEMA: dict[str, Any] = TrainConfig.model_json_schema()
EXAMPLE = """model:
  config: {model_type: qwen3, hidden_size: 64}
data:
  path: text.txt
  tokenizer: bytes
"""
_TYPES = {
    "integer": "whole number",
    "number": "number",
    "string": "text",
    "boolean": "`true` or `false`",
    "object": "mapping",
    "null": "`null`",
}
_LIMITS = {
    "minimum": "{} or more",
    "exclusiveMinimum": "above {}",
    "maximum": "{} or less",
    "exclusiveMaximum": "below {}",
}


class Form(NamedTuple):
    """A way to write a key that takes values of several kinds: the line below `place`, and what it means.

    beside: a section that it needs, in a line
    """

    place: str
    line: str
    means: str
    beside: str = ""


class Key(NamedTuple):
    """A key of a section. group: the comment over it that is of the keys after it as well"""

    name: str
    schema: dict[str, Any]
    means: str
    group: str


class Table(NamedTuple):
    """A section, at the keys that lead to it: "" for the whole config."""

    place: str
    title: str
    schema: dict[str, Any]


_PAIRS = "data: {path: pairs.jsonl, kind: preference, tokenizer: bytes}"
FORMS = (
    Form("", "model: {path: models/my-qwen3}", "a folder with `config.json`, and weights where it has some"),
    Form("", "model: {config: {model_type: qwen3, num_hidden_layers: 4}}", "random weights"),
    Form("", "optimizer: {learning_rate: 1e-3}", "AdamW"),
    Form("", "optimizer: {name: muon, adamw: {learning_rate: 1e-3}}", "Muon, and AdamW of what it leaves"),
    Form("", "optimizer: {name: adafactor}", "Adafactor"),
    Form("", "optimizer: {states: 8bit}", "AdamW with moments of 8 bits, by torchao"),
    Form("", "train: {precision: mixed}", "float32 weights, and products in bfloat16"),
    Form("", "optimizer: {groups: [{match: norm, weight_decay: 0.1}]}", "norms decay too"),
    Form("", "pipeline: {shapes: padded, padding: {buckets: [64, 128]}}",
         "each microbatch as long as the first of these that holds the longest row of its step"),
    Form("", "data: {kind: dummy, sequence_length: 8000}", "1,000 made-up documents of random tokens"),
    Form("", "data: {path: hellaswag/train.parquet, kind: chat, tokenizer: bytes, "
         "columns: {prompt: ctx, completion: endings, choice: label}}",
         "HellaSwag: the loss counts the right ending"),
    Form("", "data: {path: texts.jsonl, tokenizer: bytes, packing: best_fit, document_length: 4096, "
         "sequence_length: 16384}",
         "rows of 16,384 tokens, of documents that have 4,096 at most"),
    Form("pipeline", "schedule: zb_v", "by its name, in any spelling; [schedules.md](schedules.md) has all"),
    Form("pipeline", "schedule: {schedule: 1f1b, stages_per_rank: 2}", "with options, see below"),
    Form("pipeline", "schedule: {schedule: file, path: best.json}",
         "what `penstock schedule search --out best.json` wrote, or PyTorch as CSV, of as many ranks and "
         "microbatches as the keys beside say; from the working folder"),
    Form("pipeline", "schedule: {schedule: searched, costs: {forward: [1, 1.8]}, seconds: 10}",
         "searched when the run starts, for costs with the keys of `penstock.schedule.Costs`"),
    Form("pipeline", "layout: Ett|(ttt|)*2tL",
         "embedding and 2 layers; 3 layers, twice; a layer and the head"),
    Form("pipeline", "layout: [[embedding, decoder], [decoder, loss]]", "the same as `Et|tL`"),
    Form("pipeline", "layers_per_stage: 4", "4 at most on each stage: 16 layers on 2 ranks in 2 each"),
    Form("pipeline", "layers_per_stage: [4, 4, 3]", "on each of three stages"),
    Form("", "adapter: {kind: dora, targets: all-linear}", "DoRA on every linear layer but the head"),
    Form("adapter", "targets: [q_proj, v_proj]", "modules with these last names"),
    Form("adapter", "targets: '.*layers\\.[0-3]\\.mlp\\..*_proj'", "modules whose whole names match"),
    Form("adapter", "ranks: {down_proj: 32}", "the rest have `r`"),
    Form("train", "activation_checkpointing: true", "of every layer, all but its input; the same as `full`"),
    Form("train", "activation_checkpointing: selective", "all but what costs most to make"),
    Form("train", "activation_checkpointing: {every: 2, save: [attention]}",
         "of every second layer, all but its input and what attention made"),
    Form("train", "compile: true", "each layer and the loss, by inductor"),
    Form("train", "compile: {layers: products, loss: false}", "each layer around its products"),
    Form("train", "activation_offloading: {modules: [mlp], layers: 4}",
         "what the `mlp` of the first 4 layers of each stage saves"),
    Form("train", "chunked_loss: liger", "the head and its loss by Liger's fused kernel"),
    Form("train", "loss: simpo", "SimPO with its defaults", _PAIRS),
    Form("train", "loss: {kind: dpo, beta: 0.3}", "DPO", _PAIRS),
    Form("train", "loss: reward", "a reward model: one score a row", _PAIRS),
    Form("train", "loss: {kind: distillation, teacher: models/my-teacher}", "from a teacher"),
    Form("train", "loss: kto", "KTO with its defaults", _PAIRS.replace("preference", "unpaired")),
    Form("train", "loss: {kind: contrastive, temperature: 0.02}", "an embeddings model",
         "data: {path: pairs.jsonl, kind: pair, tokenizer: bytes}"),
    Form("train", "profile: {steps: [10, 12]}", "a trace of steps 10, 11 and 12"),
    Form("train", "ramp: [{until: 50, batch_size: 4}]", "4 rows in each of the first 50 steps"),
    Form("train", "early_stop: {patience: 3}", "the end after three evaluations without a lower loss"),
    Form("train", "spike: {factor: 4}", "steps are skipped whose loss is above four times the median"),
    Form("train.activation_checkpointing", "in_flight: 2", "of the first two in flight on every rank"),
    Form("train.activation_checkpointing", "in_flight: [2, 1, 0, 0]", "of two, one and none, by rank"),
    Form("train.activation_checkpointing", "memory_limit: 8 GiB", "or 8 GB, which is less"),
    Form("train.activation_checkpointing", "memory_limit: 8589934592", "bytes"),
    Form("output", "keep: {last: 2, every: 1000}", "the two newest, and those of steps 1000, 2000, ..."),
    Form("output", "trackers: [tensorboard]", "for `tensorboard --logdir runs/train/tensorboard`"),
    Form("output", "trackers: [{name: wandb, project: mine, mode: offline}, mlflow]", "one with options"),
)  # fmt: skip

_HEAD = f"""# The config of `penstock train`

Written by `python docs/config.py` from `src/penstock/train/`; do not edit.

A YAML file of sections of keys. This is a whole one, as every other key has a default:

```yaml
{EXAMPLE}```

`penstock train config.yaml train.steps=200 pipeline.schedule=zb_v` puts keys over those of the file; the
values are YAML. Numbers are those of YAML 1.2: `017` is 17, and `1:30` is text. `yes`, `no`, `on` and `off`
are booleans. `model='{{path: models/mine}}'` replaces a whole section, and `adapter=null` leaves it out.
An unknown key, a value of another type and numbers that do not fit together are refused before any weight is
loaded. `penstock train config.yaml --print-config` prints every key with its value.

`penstock init` writes a first config. `penstock schema --out penstock.schema.json` writes a JSON schema: with
the line `# yaml-language-server: $schema=penstock.schema.json` at a config's top, an editor completes its
keys, shows what they mean, and marks mistakes.
"""


def page() -> str:
    """The whole page."""
    return "\n".join([_HEAD, *map(_section, tables())])


def tables() -> Iterator[Table]:
    """The config and all its sections, each once and before those within it."""
    yield Table("", "Sections", SCHEMA)
    yield from _within("", SCHEMA, set())


def _within(place: str, schema: dict[str, Any], shown: set[str]) -> Iterator[Table]:
    for key, value in schema["properties"].items():
        below = f"{place}.{key}".removeprefix(".")
        for definition in _definitions(value):
            if definition["title"] not in shown:
                shown.add(definition["title"])
                yield Table(below, _title(below, definition), definition)
                yield from _within(below, definition, shown)


def _definitions(value: dict[str, Any]) -> list[dict[str, Any]]:
    """The sections that a key may hold, or a list of."""
    value = value.get("items", value)
    if alternatives := value.get("anyOf", value.get("oneOf")):
        return [definition for each in alternatives for definition in _definitions(each)]
    return [SCHEMA["$defs"][value["$ref"].rpartition("/")[2]]] if "$ref" in value else []


def _title(place: str, definition: dict[str, Any]) -> str:
    for key in ("name", "kind"):
        if name := definition["properties"].get(key, {}).get("const"):
            return f"{place}, {key}: {name}"
    return place


def _section(table: Table) -> str:
    lines = ["| key | value | default | meaning |", "|---|---|---|---|"]
    group = ""
    for key in keys(table):
        if key.group not in ("", group):
            lines.append(f"| | | | *{_cell(key.group)}* |")
        group = key.group
        default = _default(key.schema) if "default" in key.schema else "needed"
        kinds = _cell(_words(key.schema))
        lines.append(f"| `{key.name}` | {kinds} | {default} | {_cell(key.means)} |")
    forms = [
        f"| {_cell(f'`{form.line}`')} | {_cell(form.means)} |" for form in FORMS if form.place == table.place
    ]
    if forms:
        lines += ["", "| for example | which means |", "|---|---|", *forms]
    if table.place == "pipeline":
        lines += ["", *_options()]
    return "\n".join([f"## {table.title}", "", table.schema.get("description", ""), "", *lines, ""])


def keys(table: Table) -> Iterator[Key]:
    """Of one section: its own in the order of the source, then those that it shares with AutoPipeline."""
    section = section_of(table.schema["title"])
    meanings = meanings_of(section)
    for name in section.keys_in_order():
        value, (group, means) = table.schema["properties"][name], meanings[name]
        described = [definition.get("description", "") for definition in _definitions(value)]
        yield Key(name, value, " ".join((means or " ".join(described)).split()), group)


def _words(value: dict[str, Any]) -> str:
    """What a key takes, in plain words."""
    match value:
        case {"$ref": _}:
            (definition,) = _definitions(value)
            title = next(table.title for table in tables() if table.schema is definition)
            anchor = re.sub(r"[^\w -]", "", title).replace(" ", "-")
            return f"keys of [{title}](#{anchor})"
        case {"anyOf": parts} | {"oneOf": parts}:
            return "; or ".join(_words(part) for part in parts)
        case {"const": word}:
            return f"`{word}`"
        case {"enum": words}:
            return ", ".join(f"`{word if isinstance(word, str) else json.dumps(word)}`" for word in words)
        case {"prefixItems": [first, *others]}:
            return f"list of {1 + len(others)}: {_words(first)}"
        case {"type": "array", "items": items}:
            many = re.sub(r"^(whole number|number|list)", r"\1s", _words(items))
            return f"list of {many}"
    # json: some versions of pydantic make 0.0 of 0
    limits = [
        words.format(json.dumps(value[name]).removesuffix(".0"))
        for name, words in _LIMITS.items()
        if name in value
    ]
    return ", ".join([_TYPES[value["type"]], *limits])


def _default(value: dict[str, Any]) -> str:
    default = value["default"]
    if isinstance(default, dict):
        return "its own"
    return f"`{default if isinstance(default, str) else json.dumps(default)}`"


def _options() -> Iterator[str]:
    """What the schedules of a mapping take."""
    yield from ["| `schedule:` | its options, with their defaults |", "|---|---|"]
    for name in MAKERS:
        options = [
            f"`{key}`, needed" if default is NEEDED else f"`{key}: {json.dumps(default)}`"
            for key, default in options_of(name).items()
        ]
        yield f"| `{name}` | {', '.join(options)} |"


def _cell(text: str) -> str:
    """`text` as Markdown shows it in a table, with what stands in backticks as it is."""
    parts = text.split("`")
    parts[::2] = [re.sub(r"([*<])", r"\\\1", part) for part in parts[::2]]
    return "`".join(parts).replace("|", r"\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
