"""A model's local folder: its config, and the other files that transformers reads. Nothing in it is trusted.

transformers would read a named pipe forever, build a model of a million layers, and ask on stdin whether to
run the folder's Python code. So the folder is checked first, and its code runs only if the user allows it.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Mapping
from fnmatch import fnmatch
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory

from transformers import AutoConfig, PretrainedConfig

from penstock.errors import InputError, ModelError
from penstock.reading import LARGEST_JSON, MIB, check_regular, read_json, size

# files of a model folder, other than weights and config, that transformers reads: of tokenizers (the
# vocabularies of each kind, chat templates), and of generation and processors
TOKENIZER = (
    "*token*.json", "*vocab*.json", "*vocab*.txt", "*vocab*.bpe", "merges.txt", "*.model", "*.spm",
    "*.tiktoken", "*.codes", "*.tokenizer", "dict.txt", "emoji.json", "normalizer.json", "byte_maps.json",
    "word_*.json", "chat_template*", "additional_chat_templates/*.jinja",
)  # fmt: skip
OTHERS = ("generation_config.json", "*processor*.json")
_CONFIG = "config.json"
_ADAPTER = "adapter_config.json"
_CODE = "*.py"  # belongs to the model if it is trusted

_LARGEST = 64 * MIB  # of a tokenizer's file: those of 260,000 tokens have 33
_UNPARSED = MIB  # larger JSON is a vocabulary, which is not parsed twice because that takes long
_MOST_LAYERS = 10_000  # the deepest models have some 1,000

# limits of a config's numbers: a pattern of keys, the least and the greatest value of any model, and the rule
_BOUNDS = (
    (r"(.*_)?(n_layer|layers|depth)", -inf, _MOST_LAYERS, f"a model has at most {_MOST_LAYERS:,} layers"),
    (r"num_hidden_layers|n_layers?|num_layers|decoder_layers", 1, inf, "a model has one layer or more"),
    (r"max_position_embeddings|max_sequence_length|n_positions|n_ctx", 1, inf, "a row has one token or more"),
    (r"(.*_)?(dropout|pdrop|drop)(_(p|prob|rate))?", 0, 1, "it is a share, from 0 to 1"),
)


def other_files(
    folder: Path, patterns: tuple[str, ...] = (*TOKENIZER, *OTHERS), *, trusted: bool = False
) -> dict[str, Path]:
    """The files of tokenizer, generation and processors in a model's folder, by their names in it.

    trusted: with its Python code
    """
    patterns = (*patterns, _CODE) if trusted else patterns
    files = {name: file for name, file in _below(folder).items() if file.is_file()}
    return {name: file for name, file in files.items() if any(fnmatch(name, pattern) for pattern in patterns)}


def _below(folder: Path) -> dict[str, Path]:
    files = (*sorted(folder.glob("*")), *sorted(folder.glob("*/*.jinja")))
    return {file.relative_to(folder).as_posix(): file for file in files}


def check_folder(folder: Path, kind: type[InputError] = ModelError) -> None:
    """Raise an error of `kind` for a file that transformers would read but should not.

    These are files that are not regular, that are too large, or whose JSON is invalid or nested too deeply.
    """
    for name, file in _below(folder).items():
        known = any(fnmatch(name, pattern) for pattern in (_CONFIG, *TOKENIZER, *OTHERS))
        if not known or file.is_dir() or (file.is_symlink() and not file.exists()):
            continue
        most = LARGEST_JSON if name == _CONFIG else _LARGEST
        try:
            byte_count = check_regular(file)
            if byte_count > most:
                raise OSError(errno.EFBIG, f"it has {byte_count:,} bytes, and {size(most)} are read at most")
            parsed = name == _CONFIG or (file.suffix == ".json" and byte_count < _UNPARSED)
            if parsed and not isinstance(read_json(file), dict) and "vocab" not in name:
                raise ValueError("it holds no keys")
        except OSError as error:
            rule = f"transformers would read it: {error.strerror}"
            raise kind(str(file), rule, "Replace it, or remove it") from error
        except ValueError as error:
            raise kind(str(file), f"it is not JSON of a model: {error}", "Fix or replace the file") from error


def config_of(folder: Path, trusted: bool = False) -> PretrainedConfig:
    """The config of a model's folder. trusted: whether its Python code may run. Raises ModelError."""
    check_folder(folder)
    if not (folder / _CONFIG).is_file():
        remedy = "Give the path of a local Hugging Face model folder"
        if (folder / _ADAPTER).is_file():
            remedy = "It holds an adapter: merge it (penstock merge), or give its base model's folder"
        elif checkpoints := sorted((folder / "checkpoints").glob("step-*")):
            remedy = f"It is a run's folder: give a checkpoint of it, such as {checkpoints[-1]}"
        raise ModelError(
            f"model folder {folder}",
            "it holds no config.json" if folder.is_dir() else "there is no such folder",
            remedy,
        )
    if (folder / _ADAPTER).is_file():
        raise ModelError(
            f"model folder {folder}",
            f"it also has an adapter: transformers reads that, and the base model that {_ADAPTER} names",
            "Move the adapter's files to a folder of their own",
        )
    check_numbers(read_json(folder / _CONFIG), f"{folder / _CONFIG}: ")
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=trusted
        )
    except Exception as cause:
        if is_refused_code(cause):
            raise code_refused(f"model folder {folder}") from None
        raise ModelError(
            str(folder / _CONFIG), f"transformers cannot read it: {cause}", "Fix or replace the file"
        ) from cause
    if (file := getattr(config, "transformers_weights", None)) is not None:
        rule = "transformers reads the weights from that file, but penstock reads model.safetensors"
        remedy = "Rename the file, or save the model anew with transformers"
        raise ModelError(f"{folder / _CONFIG}: transformers_weights={file!r}", rule, remedy)
    return config


def config_from(kind: type[PretrainedConfig], text: str) -> PretrainedConfig:
    """A config of this class from the text of its config.json, by transformers' own reader.

    The reader has its own form for values that JSON lacks, such as infinity. Raises the errors of the class.
    """
    with TemporaryDirectory() as folder:
        file = Path(folder) / _CONFIG
        file.write_text(text, encoding="utf-8")
        return kind.from_json_file(file)


def check_numbers(keys: object, prefix: str, kind: type[InputError] = ModelError) -> None:
    """Raise an error of `kind` for a number in a config's keys that no model has.

    prefix: goes before the key in the error
    """
    for key, value in keys.items() if isinstance(keys, Mapping) else ():
        for pattern, smallest, largest, rule in _BOUNDS if type(value) in (int, float) else ():
            if re.fullmatch(pattern, str(key)) and not smallest <= value <= largest:
                raise kind(f"{prefix}{key}={value}", rule, "Fix that number")
        check_numbers(value, f"{prefix}{key}.", kind)


# ---- Code of a folder


def is_refused_code(cause: BaseException) -> bool:
    """Whether `cause` says that transformers would have to run a folder's code, which is not allowed."""
    return isinstance(cause, ValueError) and "trust_remote_code" in str(cause)


def names_code(folder: Path, kind: str) -> bool:
    """Whether the folder names its own Python code for an auto class, such as AutoTokenizer."""
    for name in (_CONFIG, "tokenizer_config.json"):
        if (folder / name).is_file():
            classes = read_json(folder / name).get("auto_map")
            if isinstance(classes, Mapping) and kind in classes:
                return True
    return False


def code_refused(value: str, kind: type[InputError] = ModelError) -> InputError:
    """The error for a folder whose code is not trusted. value: names the folder"""
    return kind(
        value,
        "transformers cannot make it by itself, and Python code of a folder (auto_map) runs if it is trusted",
        "Read that code; then set model.trust_remote_code=true (of commands without a config "
        "--trust-remote-code, in Python AutoPipeline(trust_remote_code=True))",
    )
