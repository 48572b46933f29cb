"""Pause Python's cyclic garbage collector while very many objects are made: ops, or a deep model's."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_VERY_MANY = 100_000  # young objects. For fewer, collections should come as often as they do


@contextmanager
def collector_paused(all_stay: bool = False) -> Iterator[None]:
    """The collector would visit all objects repeatedly, which takes as long as making them.

    all_stay: what is made is no garbage: very many objects count as old at once, as if they had been walked.
        So does what was young before
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            if all_stay and gc.get_count()[0] > _VERY_MANY and not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()  # into the oldest generation: nobody else has frozen any, which this would thaw
            gc.enable()
