"""Patterns in an adapter's settings, tried on a model's names in a process of their own.

An adapter's folder may come from anyone, and a pattern such as (.*)*(.*)*z takes longer than anyone waits, in
one call that nothing interrupts. So a process does first what PEFT does next, and the kernel ends it in time.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from penstock.errors import ConfigError

SECONDS = 2  # of a processor
# by setting, how PEFT matches its patterns
_FORMS = {
    "target_modules": ("fullmatch", "{}"),
    "exclude_modules": ("fullmatch", "{}"),
    "modules_to_save": ("match", r"(^|.*\.){}($|\..*)"),
    "layers_pattern": ("match", r"(?:^|.*?\.){}\.(?P<idx>\d+)\."),
    "rank_pattern": ("match", r"(.*\.)?({})$"),
    "alpha_pattern": ("match", r"(.*\.)?({})$"),
}
TRIAL = """\
import json, re, resource, sys
seconds, forms, names = json.load(sys.stdin)
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
for method, pattern in forms:
    try:
        match = getattr(re.compile(pattern), method)
    except (re.error, RecursionError, OverflowError):  # PEFT says what is wrong with it
        continue
    for name in names:
        match(name)
"""


def check_patterns(settings: Mapping[str, Any], names: Sequence[str]) -> None:
    """Raise ConfigError where the patterns of an adapter's settings take too long on these names.

    A pattern that is none passes: PEFT says what is wrong with it.
    """
    forms = [(method, form.replace("{}", text)) for method, form, text in _patterns(settings)]
    if not forms:
        return
    tried = subprocess.run(
        [sys.executable, "-I", "-c", TRIAL], input=json.dumps([SECONDS, forms, names]).encode(),
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    if tried.returncode < 0:
        keys = sorted(key for key in _FORMS if any(_repeats(text) for text in _texts(settings.get(key))))
        rule = f"its patterns take more than {SECONDS} s of a processor on the names of the model's modules"
        raise ConfigError(f"the adapter's {' and '.join(keys)}", rule, "Write the names, in a list")


def _patterns(settings: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Method, form and text of each pattern that may take long: plain names take no time, and no process."""
    for key, (method, form) in _FORMS.items():
        for text in _texts(settings.get(key)):
            if _repeats(text):
                yield method, form, text


def _texts(value: Any) -> list[str]:
    """The texts of a setting: one, several, or the keys of a mapping."""
    values = (
        [value] if isinstance(value, str) else value if isinstance(value, list | tuple | set | dict) else []
    )
    return [text for text in values if isinstance(text, str)]


def _repeats(text: str) -> bool:
    return any(sign in text for sign in "*+{")
