"""What schedules are called: their own names, and the spellings of other libraries and the papers."""

from __future__ import annotations

import difflib
import re

from penstock.errors import ConfigError
from penstock.schedule.config import CONFIGS

# by letters and digits only
_ALIASES = {
    "afab": "gpipe",
    "allforwardallbackward": "gpipe",
    "pipedreamflush": "1f1b",
    "interleaved": "interleaved_1f1b",
    "zb1p": "zb_h1",
    "zbvzerobubble": "zb_v",
    "zerobubblev": "zb_v",
}
_SPELT = {re.sub(r"[^a-z0-9]", "", name): name for name in CONFIGS} | _ALIASES


def canonical(name: str) -> str:
    """The schedule's own name, from any of its spellings: 1F1B, afab, zero_bubble_v. Raises ConfigError."""
    key = re.sub(r"[^a-z0-9]", "", name.lower()).removeprefix("schedule")
    if key in _SPELT:
        return _SPELT[key]
    near = difflib.get_close_matches(key, _SPELT, n=1)
    known = ", ".join(CONFIGS)
    remedy = f"Did you mean {_SPELT[near[0]]!r}?" if near else "Take one of these"
    raise ConfigError(f"schedule {name!r}", f"the known schedules are {known}", remedy)
