"""Reads a TrainConfig from a YAML file and overrides, or raises one ConfigError with everything wrong."""

from __future__ import annotations

import difflib
import re
from collections.abc import Hashable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import ValidationError

from penstock.errors import ConfigError
from penstock.reading import DEEPEST, read_text, size
from penstock.train.config.sections import TrainConfig
from penstock.train.config.values import Section
from penstock.train.optimizers.optimizer import OPTIMIZERS
from penstock.train.records.trackers import TRACKERS

# tags of unions, which pydantic adds to a key's path; no key has such a name
_TAGGED: dict[str, type[Section]] = {f"of {name}": choice.section for name, choice in OPTIMIZERS.items()}
_TAGGED |= {f"of {name}": section for name, section in TRACKERS.items()}
_SHOWN = 20  # findings in an error


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
    try:
        return TrainConfig.model_validate(tree)
    except ValidationError as error:
        wrong = error.errors(include_url=False)
    findings = [_finding(entry) for entry in wrong[:_SHOWN]]
    if len(wrong) == 1:
        raise ConfigError(*findings[0])
    lines = "".join(f"\n  {value}: {rule}. {remedy}" for value, rule, remedy in findings)
    lines += f"\n  and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
    raise ConfigError(f"config {path}", f"{len(wrong)} things are wrong with it:{lines}", "Fix each of them")


def _read(path: Path) -> dict[str, Any]:
    try:
        tree = _parse(read_text(path, _LARGEST))
    except OSError as error:
        rule = f"the config file cannot be read ({error.strerror})"
        remedy = f"Give the path of a YAML file of at most {size(_LARGEST)}"
        raise ConfigError(f"config {path}", rule, remedy) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        rule = f"it is not YAML: {_in_a_line(error)}"
        raise ConfigError(f"config {path}", rule, "Fix that line") from None
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
    value, (name, _, text) = f"argument {_shown(override)}", override.partition("=")
    keys = name.split(".")
    rule = "what follows the config file is section.key=value"
    remedy = "Write it like train.steps=200, or a whole section like model='{path: models/mine}'"
    if not is_override(override) or len(keys) > DEEPEST or not all(keys):
        raise ConfigError(value, rule, remedy)
    if (meant := _UNSAID.get(text.strip())) is not None:
        raise ConfigError(value, meant, f"Write it out, or {name}=null for none")
    try:
        parsed = _parse(text)
    except yaml.YAMLError as error:
        raise ConfigError(value, f"its value is not YAML: {_in_a_line(error)}", "Quote it") from None
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

_REMEDIES = {
    **dict.fromkeys(("int_type", "int_from_float", "int_parsing"), "Write a whole number, such as 8"),
    **dict.fromkeys(("float_type", "float_parsing", "finite_number"), "Write a number, such as 0.1"),
    **dict.fromkeys(("tuple_type", "too_short", "too_long"), "Write a list, such as [a, b]"),
    "string_type": "Write text, in quotes where it looks like something else",
    "bool_type": "Write true or false",
    "literal_error": "Take {expected}",
    "greater_than_equal": "Give {ge} or more",
    "less_than_equal": "Give {le} or less",
    "greater_than": "Give more than {gt}",
    "less_than": "Give less than {lt}",
}


def _finding(entry: Any) -> tuple[str, str, str]:
    """Value, rule and remedy of one finding."""
    name = ".".join(str(key) for key in entry["loc"] if key not in _TAGGED)
    match entry["type"]:
        case "extra_forbidden":
            return _unknown_key(name, entry)
        case "missing":
            return f"{name} is missing", "the run needs it", f"Write it into the config, or give {name}=..."
        case "value_error":  # a validator of ours: "rule; remedy"
            rule, _, remedy = str(entry["ctx"]["error"]).partition("; ")
            remedy = remedy or "fix one of them"
            return name or "config", rule, remedy[0].upper() + remedy[1:]
    rule = entry["msg"].replace("Input should", "it should")
    remedy = _REMEDIES.get(entry["type"], "See the keys and their types in penstock.train.config.sections")
    return f"{name}={_shown(entry['input'])}", rule, remedy.format(**entry.get("ctx", {}))


# our words for the keys of other trainers
_HERE = {
    "optimizer.learning_rate": "lr peak_lr",
    "train.clip_norm": "max_grad_norm grad_clip gradient_clipping clip_grad",
    "pipeline.microbatches: a step's batch_size rows are split into so many; or, where that many do not fit "
    "into one pipeline call, train.accumulate calls": "gradient_accumulation_steps accumulate_grad_batches",
    "train.batch_size, the rows of a step, and pipeline.microbatches, their parts":
        "micro_batch_size per_device_train_batch_size",
    "train.checkpoint_every": "save_every save_steps save_interval",
    "train.evaluate_every": "eval_every eval_steps eval_interval",
    "train.steps": "max_steps num_steps train_iters",
    "parallel.dp_shard (FSDP2 shards the weights) or parallel.dp_replicate (copies of them)":
        "dp data_parallel_size",
    "pipeline.ranks": "pp pipeline_parallel_size pipeline_model_parallel_size",
    "parallel.tp": "tensor_parallel_size tensor_model_parallel_size",
    "parallel.cp": "context_parallel_size",
    "parallel.ep": "expert_parallel_size expert_model_parallel_size",
    "data.sequence_length": "seq_len seq_length max_seq_length block_size",
    "train.activation_checkpointing": "gradient_checkpointing",
    "train.precision=mixed, or bfloat16": "bf16 mixed_precision",
    "optimizer.name, and optimizer.states for AdamW in 8 bits": "optim",
    "output.folder": "output_dir out_dir",
    "adapter.r": "lora_r lora_rank",
    "adapter.targets": "lora_target_modules lora_target target_modules",
    **{f"adapter.{key}": f"lora_{key}" for key in ("alpha", "dropout", "modules_to_save")},
    "adapter.quantize=nf4": "load_in_4bit quantization_bit",
}  # fmt: skip
_ELSEWHERE = {key: f"Write {here}" for here, keys in _HERE.items() for key in keys.split()}


def _unknown_key(name: str, entry: Any) -> tuple[str, str, str]:
    *path, key = entry["loc"]  # the key itself may hold a dot
    section = ".".join(str(part) for part in path if part not in _TAGGED)
    names = list(dict.fromkeys(_names(TrainConfig)))
    known = [other.rpartition(".")[2] for other in names if other.rpartition(".")[0] == section]
    if path and path[-1] in _TAGGED:  # the keys of this member of the union alone
        known = _TAGGED[path[-1]].keys_in_order()
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    elsewhere = [other for other in names if f".{other}".endswith(f".{key}")]
    if key in _ELSEWHERE:
        remedy = _ELSEWHERE[key]
    elif near:
        remedy = f"Did you mean {section}.{near[0]}?" if section else f"Did you mean {near[0]}?"
    elif elsewhere:
        remedy = f"Did you mean {elsewhere[0]}?"
    else:
        remedy = f"Take one of {', '.join(known)}"
    where = f"section {section}" if section else "a config"
    return f"{name}={_shown(entry['input'])}", f"{where} has no such key", remedy


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


def _in_a_line(error: Exception) -> str:
    return " ".join(str(error).split())[:500]


def _shown(value: object) -> str:
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


# ---- YAML as people mean it. PyYAML reads YAML 1.1, where 1:30 is 90, 017 is 15 and 1e-3 is text. Here
# numbers are those of YAML 1.2; yes, no, on and off stay booleans. A date is text, and a key given twice is
# an error. A few lines may expand to a huge value: ten nested lists of ten aliases each make ten thousand
# million values

_LARGEST = 256 * 1024  # bytes of a file, which PyYAML takes seconds to parse
_EXPANDED = 1 << 20  # characters and values, with each alias counted as its expansion
_DIGITS = 100  # of a number
_TAG = "tag:yaml.org,2002:"
_NUMBERS = (f"{_TAG}int", f"{_TAG}float")
_UNWRITABLE = re.compile("[\0\ud800-\udfff]")
_PLAIN = {f"{_TAG}{name}" for name in ("null", "bool", "int", "float", "str", "seq", "map")}
_INT = re.compile(r"([-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$")
_FLOAT = re.compile(
    r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$|[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$"
)


def _parse(text: str) -> Any:
    """Raises yaml.YAMLError."""
    try:
        return yaml.load(text, _Loader)  # a SafeLoader: plain values only
    except (ValueError, KeyError) as error:  # PyYAML's, of a tag that does not fit, as in !!bool maybe
        raise yaml.YAMLError(f"a value is not what its tag says ({error})") from error


_refused = partial(yaml.MarkedYAMLError, None, None)  # takes what is wrong, and where


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = {  # noqa: RUF012 - as in PyYAML
        first: [pair for pair in resolvers if pair[0] in (f"{_TAG}bool", f"{_TAG}null", f"{_TAG}merge")]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    yaml_constructors = {  # noqa: RUF012 - as in PyYAML; without dates, sets and bytes, which no key takes
        tag: constructor
        for tag, constructor in yaml.SafeLoader.yaml_constructors.items()
        if tag is None or tag in _PLAIN
    }

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._depth = 0
        self._expanded: dict[yaml.Node, int] = {}  # by whole node

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
        self._depth += 1
        if self._depth > DEEPEST:
            raise _refused(f"it nests deeper than {DEEPEST} levels", mark)
        is_alias = self.check_event(yaml.AliasEvent)
        node = super().compose_node(parent, index)
        self._depth -= 1
        if is_alias and node not in self._expanded:
            raise _refused("an alias is within its own expansion", mark)
        if node is not None and not is_alias:
            self._expanded[node] = self._size(node, mark)
        return node

    def _size(self, node: yaml.Node, mark: yaml.Mark) -> int:
        if isinstance(node, yaml.ScalarNode):
            return 1 + len(node.value)
        pairs = isinstance(node, yaml.MappingNode)
        inner = [child for pair in node.value for child in pair] if pairs else node.value
        size = 1 + sum(self._expanded[child] for child in inner)
        if size > _EXPANDED:
            raise _refused(f"with its aliases expanded it has more than {_EXPANDED:,} characters", mark)
        return size

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> Any:
        if node.tag in _NUMBERS and len(node.value) > _DIGITS:
            raise _refused(f"a number of more than {_DIGITS} digits", node.start_mark)
        if isinstance(node, yaml.ScalarNode) and _UNWRITABLE.search(node.value):
            rule = "a text with a NUL or half a surrogate pair, which no file can hold"
            raise _refused(rule, node.start_mark)
        return super().construct_scalar(node)

    def construct_integer(self, node: yaml.ScalarNode) -> int:
        text = self.construct_scalar(node)
        return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]  # PyYAML refuses the others
        known = set[str]()
        for key in keys:
            if key.value in known:
                raise _refused(f"key {key.value!r} is given twice", key.start_mark)
            known.add(key.value)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(_NUMBERS[0], _INT, list("-+0123456789"))
_Loader.add_implicit_resolver(_NUMBERS[1], _FLOAT, list("-+.0123456789"))
_Loader.add_constructor(_NUMBERS[0], _Loader.construct_integer)
