"""Every schedule in each of its forms, as configs, and the sizes that it takes."""

from __future__ import annotations

from functools import cache
from typing import Any

from penstock.schedule import Schedule, build

Config = dict[str, Any]

# what a name is known by in test ids -> the config
FORMS: dict[str, Config] = {
    "gpipe": {"schedule": "gpipe"},
    "looped_bfs": {"schedule": "looped_bfs"},
    "1f1b": {"schedule": "1f1b"},
    "1f1b zero bubble": {"schedule": "1f1b", "zero_bubble": True},
    "interleaved_1f1b": {"schedule": "1f1b", "stages_per_rank": 2},
    "interleaved_1f1b v=3": {"schedule": "interleaved_1f1b", "stages_per_rank": 3},
    "interleaved_zero_bubble": {"schedule": "1f1b", "stages_per_rank": 2, "zero_bubble": True},
    "zb_h1": {"schedule": "zb_h1"},
    "zb_h2": {"schedule": "zb_h2"},
    "zb_v": {"schedule": "zb_v"},
    "v_half": {"schedule": "v_half"},
    "v_min": {"schedule": "v_min"},
    "dualpipe_v": {"schedule": "dualpipe_v"},
    "dualpipe": {"schedule": "dualpipe"},
    "hanayo": {"schedule": "hanayo"},
    "hanayo w=2": {"schedule": "hanayo", "waves": 2},
    "searched": {"schedule": "searched", "seconds": 0.2, "memory_limit": 6},
    "searched v": {"schedule": "searched", "placement": "v", "seconds": 0.2},
}


def takes(form: str, ranks: int, microbatches: int) -> bool:
    """Whether the schedule exists in this size."""
    return form != "dualpipe" or ranks % 2 == microbatches % 2 == 0


@cache
def built(form: str, ranks: int, microbatches: int) -> Schedule:
    """A form in one size. Kept, as a searched one takes its time."""
    config = dict(FORMS[form])
    return build(config.pop("schedule"), ranks=ranks, microbatches=microbatches, **config)
