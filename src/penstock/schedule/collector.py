"""Pause Python's cyclic garbage collector while very many objects are made: ops, or a deep model's."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused(all_stay: bool = False) -> Iterator[None]:
    """To walk all of them again and again takes as long as to make them.

    all_stay: what is made is no garbage: it counts as old at once, so that no collection of young objects
        walks it. So does what was young before
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            if all_stay and not gc.get_freeze_count():  # else this would thaw what another has frozen
                gc.freeze()
                gc.unfreeze()  # into the oldest generation
            gc.enable()
