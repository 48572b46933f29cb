"""Hostile folders, read in a process that watches itself: ``python -m support.hostile FOLDER FIRST END``.

    the test     starts it, kills it where a case takes too long, and starts it again at the next one
    here         a line for each case: how it ended, and what it did that it must not

FOLDER has `model` and `adapter`, which are good, and `outside`, which nothing may open. A case copies them,
and makes the copy hostile; its number seeds all choices. An audit hook sees what Python opens, runs and
connects to. That a library in another language read a file of `outside` shows in the time of its last access.
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import logging as transformers_logging

from models.weights.test_fuzz_folders import adapted, edited_header, edited_text, encoded, ours, stray
from penstock.errors import PenstockError
from penstock.models.name_patterns import TRIAL
from penstock.train.encoding import templates
from penstock.train.encoding.chat import ChatEncoder
from penstock.train.encoding.tokenizer import open_tokenizer
from support.mutations import seeded

ADDRESSES = 8 << 30  # bytes that this process may have
CHAT = {"messages": [{"role": "user", "content": "Keep it full"}, {"role": "assistant", "content": "Yes"}]}
OWN_CODE = "open('{}', 'w').close()\nclass Config: pass\n"
TEMPLATES = (
    "{{ messages[0].content }}", "{% for m in messages %}{{ m.content }}{% endfor %}", "{% include 'a' %}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ cycler.__init__.__globals__.os.system('true') }}",
    "{% import '/etc/passwd' as x %}{{ x }}", "{{ 'a' * 10 ** 10 }}", "{{ range(10 ** 10) | list }}", "{{",
    "{% set ns = namespace(a=[]) %}{{ ns.a.append(ns.a) }}{{ ns.a }}", "{{ '%1000000000d' % 1 }}",
    "{{ 1 // 0 }}", "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", "{{ raise_exception('no') }}",
    "\x00", "{{ '\ud800' }}", "{{ lipsum(n=100000) }}", "{% generation %}",
    "{{ strftime_now('%' + 'Y' * 5000) }}", "[" * 5000, "{{" + "(" * 500, "{{ messages | tojson }}",
    "{{ messages[9].content.x.y }}", "{{ ('a' * 30) | replace('a', 'b' * 10000) | wordcount }}",
)  # fmt: skip
ENDLESS = "{% for i in range(99999999) %}{% for j in range(99999999) %}{% endfor %}{% endfor %}"
OF_FILES = (
    "tokenizer_file", "vocab_file", "merges_file", "tokenizer_class", "auto_map", "auto_mapping",
    "base_model_name_or_path", "_name_or_path", "name_or_path", "transformers_weights", "chat_template",
    "custom_generate", "attn_implementation", "experts_implementation", "processor_class", "peft_type",
    "init_lora_weights", "gguf_file", "subfolder", "special_tokens_map_file", "init_inputs", "target_modules",
)  # fmt: skip
NAMES = (
    "auto_map", "tokenizer_file", "vocab_file", "merges_file", "tokenizer_class", "processor_class",
    "auto_mapping", "base_model_name_or_path", "_name_or_path", "name_or_path", "transformers_weights",
    "quantization_config", "dtype", "torch_dtype", "architectures", "model_type", "chat_template",
    "target_modules", "layers_pattern", "rank_pattern", "alpha_pattern", "modules_to_save",
    "exclude_modules", "layers_to_transform", "custom_generate", "attn_implementation",
    "_attn_implementation", "experts_implementation", "peft_type", "megatron_config", "init_lora_weights",
    "loftq_config", "corda_config", "fix_mistral_regex", "added_tokens_decoder", "use_fast",
    "extra_special_tokens", "backend", "gguf_file", "subfolder", "hidden_size", "vocab_size",
    "num_hidden_layers", "rope_parameters", "rope_scaling", "num_attention_heads", "head_dim",
    "layer_types", "r", "lora_alpha", "model_max_length", "additional_special_tokens", "tokenizer_type",
    "task_type", "target_parameters",
)  # fmt: skip
SLOW_PATTERNS = ("(a+)+$", r"(.*)*(.*)*(.*)*z", r"(\w+\.?)+!", r"(a|a)*b")


def values(outside: Path) -> Sequence[Any]:
    """What someone who means harm writes into a JSON file."""
    return (
        str(outside / "secret.json"), "../outside/secret.json", "../../outside", str(outside), "/dev/zero",
        "/proc/self/environ", "~/.ssh/id_rsa", "http://127.0.0.1:9/x", "someone/model", "own.Config",
        "os.system", "posix:system", "builtins.exec",
        {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model", "AutoTokenizer": [None, "own.T"]},
        {"base_model_class": "system", "parent_library": "os"},
        {"base_model_class": "Config", "parent_library": "own"}, {"quant_method": "awq", "bits": 4},
        {"quant_method": "someone/else"}, "kernels-community/flash-attn", "LORA_GA", "olora",
        *SLOW_PATTERNS, dict.fromkeys(SLOW_PATTERNS, 2), [10**12], 10**12, 10**400, -1, 0,
        2**31 - 1, 1e308, [[]] * 50, {"rope_type": "yarn", "factor": 1e308}, {"0": {"content": "x" * 9999}},
        "\x00", "\ud800", "x" * 300, True, None, {}, [],
    )  # fmt: skip


# ---- what is made hostile


def with_key(choices: random.Random, file: Path, outside: Path) -> None:
    """Set one key of a JSON file, or edit it at random."""
    content = json.loads(file.read_text())
    if choices.random() < 0.3 or not isinstance(content, dict):
        edited_text(choices, file)
        return
    for _ in range(choices.choice((1, 1, 2))):  # half of them a name of a file or of code, and a key for one
        if choices.random() < 0.5:
            content[choices.choice(OF_FILES)] = choices.choice(values(outside)[:16])
        else:
            content[choices.choice((*NAMES, *content))] = choices.choice(values(outside))
    file.write_text(json.dumps(content))


def with_paths(choices: random.Random, folder: Path, outside: Path) -> None:
    """An index that names files elsewhere, or is edited at random."""
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    if choices.random() < 0.4:
        edited_text(choices, index)
        return
    for name in choices.sample(sorted(content["weight_map"]), 2):
        content["weight_map"][name] = choices.choice(
            (*values(outside), "./model-00001.safetensors", "..", "a/../b")
        )
    index.write_text(json.dumps(content))


def with_template(choices: random.Random, folder: Path, outside: Path) -> None:
    """A hostile template, by itself or cut together from two; seldom one that never ends."""
    one, other = choices.choice(TEMPLATES), choices.choice(TEMPLATES)
    text = (
        ENDLESS
        if choices.random() < 0.01
        else one
        if choices.random() < 0.6
        else one + other[: choices.randrange(40)]
    )
    (folder / "chat_template.jinja").write_bytes(text.encode("utf-8", "surrogatepass"))


def with_strange_files(choices: random.Random, folder: Path, outside: Path) -> None:
    """A file that is no regular one, that is endless, or that lies elsewhere."""
    file = choices.choice(sorted(each for each in folder.iterdir() if each.is_file()))
    file.unlink()
    match choices.randrange(7):
        case 0:
            os.mkfifo(file)
        case 1:
            file.mkdir()
        case 2:
            file.symlink_to(choices.choice(("/dev/zero", "/proc/kmsg", "/proc/self/pagemap", "/dev/tty")))
        case 3:
            file.symlink_to(file)
        case 4:
            with file.open("wb") as made:
                made.truncate(1 << 40)
        case 5:
            file.write_text(
                choices.choice(("[" * 10**5, "{" + '"a":{' * 5000, "[" + "[]," * 10**5, "nan", "\x00"))
            )
        case _:
            file.write_bytes(choices.randbytes(choices.randrange(400)))


def of(*names: str) -> Callable[[random.Random, Path, Path], None]:
    """Edits one of these JSON files."""
    return lambda choices, folder, outside: with_key(choices, folder / choices.choice(names), outside)


def shards(choices: random.Random, folder: Path, outside: Path) -> None:
    if folder.name == "model" and choices.random() < 0.3:
        stray(choices, folder)
    else:
        edited_header(choices, choices.choice(sorted(folder.glob("*.safetensors"))))


def read_model(case: Path) -> None:
    ours(case / "model")


def read_tokenizer(case: Path) -> None:
    encoded(case / "model", "Keep the pipe full, 100 % " + "a" * 40)


def read_chat(case: Path) -> None:
    ChatEncoder(open_tokenizer(str(case / "model"), chat=True)).encode("a chat", CHAT)  # type: ignore[arg-type]


def read_adapter(case: Path) -> None:
    adapted(case / "model", case / "adapter")


Edit = Callable[[random.Random, Path, Path], None]
# the folder that is made hostile, how, and who reads it
KINDS: Sequence[tuple[str, Edit, Callable[[Path], None]]] = (
    ("model", of("config.json", "generation_config.json"), read_model),
    ("model", with_paths, read_model),
    ("model", shards, read_model),
    ("model", with_strange_files, read_model),
    ("model", of("tokenizer.json", "tokenizer_config.json"), read_tokenizer),
    ("model", with_strange_files, read_tokenizer),
    ("model", with_template, read_chat),
    ("adapter", of("adapter_config.json"), read_adapter),
    ("adapter", shards, read_adapter),
    ("adapter", with_strange_files, read_adapter),
)  # fmt: skip


# ---- what must not happen


class Guard:
    """What this process did in a case that no reader of a folder does. Hooks cannot be taken out again."""

    def __init__(self, case: Path, outside: Path) -> None:
        self.case, self.outside, self.seen = str(case), outside, list[str]()
        own = (
            sys.prefix,
            sys.base_prefix,
            os.getcwd(),
            tempfile.gettempdir(),
            "/usr/",
            "/dev/null",
            "/dev/urandom",
            "/etc/ld",
        )
        self._own, self._active = tuple(map(os.path.realpath, own)), False
        sys.addaudithook(self._hook)

    @contextmanager
    def watching(self) -> Iterator[None]:
        self.seen.clear()
        for file in self.outside.iterdir():
            os.utime(file, (0, file.stat().st_mtime))  # so that the next access is recorded
        self._active = True
        try:
            yield
        finally:
            self._active = False
            self.seen += [f"{file} was read" for file in self.outside.iterdir() if file.stat().st_atime]

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._active:
            return
        if event == "open" and isinstance(arguments[0], str | bytes):
            path = os.path.realpath(os.fsdecode(arguments[0]))
            if path.startswith(str(self.outside)) or not path.startswith((self.case, *self._own)):
                self.seen.append(f"{path} was opened")
        elif event in ("compile", "exec"):
            code = arguments[1] if event == "compile" else arguments[0].co_filename
            if str(code).startswith(self.case):
                self.seen.append(f"{event} of {code}")
        elif event in ("socket.connect", "socket.getaddrinfo", "pickle.find_class", "os.system", "os.exec"):
            self.seen.append(f"{event} {arguments[-1]}")
        elif event == "subprocess.Popen" and not {templates.__name__, TRIAL}.intersection(arguments[1]):
            self.seen.append(f"{event} {arguments[1]}")


def check_itself(guard: Guard) -> None:
    """Raise AssertionError where the guard does not see what it is for."""
    secret = str(guard.outside / "secret.json")
    deeds: dict[str, Callable[[], object]] = {
        "was opened": Path(secret).read_bytes,
        "exec of": lambda: exec(compile("1", f"{guard.case}/own.py", "exec")),
        "socket.connect": lambda: socket.socket().connect_ex(("127.0.0.1", 9)),
        "was read": lambda: Tokenizer.from_file(secret),  # which is not written in Python
    }
    for words, deed in deeds.items():
        with guard.watching():
            deed()
        assert any(words in seen for seen in guard.seen), words


def outcome(case: Path, read: Callable[[Path], None]) -> str:
    """How it ended: read, refused, or in an error that is none of penstock's."""
    try:
        read(case)
    except PenstockError as error:
        return "refused" if str(error) else "an error without words"
    except BaseException as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__}: {str(error)[:200]} at {where.filename}:{where.lineno}"
    return "read"


def outcomes(folder: Path, numbers: Sequence[int]) -> Iterator[dict[str, Any]]:
    """A line for each case."""
    case, outside = folder / "case", folder / "outside"
    guard = Guard(case, outside)
    check_itself(guard)
    for number in numbers:
        with seeded(number) as choices:
            shutil.rmtree(case, ignore_errors=True)
            for name in ("model", "adapter"):
                shutil.copytree(folder / name, case / name)
                (case / name / "own.py").write_text(OWN_CODE.format(outside / "ran"))
            name, edit, read = KINDS[number % len(KINDS)]
            edit(choices, case / name, outside)
            began = time.process_time()
            with guard.watching():
                ended = outcome(case, read)
            seconds = time.process_time() - began
        yield {"kind": f"{name} {read.__name__}", "ended": ended, "seen": guard.seen, "seconds": seconds}


if __name__ == "__main__":
    lines = os.dup(1)
    os.dup2(2, 1)  # as libraries print, too
    warnings.simplefilter("ignore")
    transformers_logging.set_verbosity(transformers_logging.CRITICAL)
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESSES, ADDRESSES))
    for line in outcomes(Path(sys.argv[1]), range(*map(int, sys.argv[2:]))):
        os.write(lines, json.dumps(line).encode() + b"\n")
