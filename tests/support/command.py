"""The command `penstock` as a function: what the fixture of that name returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Ended(NamedTuple):
    code: int
    out: str
    err: str


Command = Callable[..., Ended]
