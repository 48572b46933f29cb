"""The schedules known by name, one file per family."""

from __future__ import annotations

from collections.abc import Callable

from penstock.schedule.builders.dualpipe import dualpipe, dualpipe_v
from penstock.schedule.builders.gpipe import gpipe, inference, looped_bfs
from penstock.schedule.builders.hanayo import hanayo
from penstock.schedule.builders.interleaved_1f1b import interleaved_1f1b
from penstock.schedule.builders.one_f_one_b import one_f_one_b
from penstock.schedule.builders.v_schedules import v_half, v_min, zb_v
from penstock.schedule.builders.zero_bubble import interleaved_zero_bubble, zb_h1, zb_h2
from penstock.schedule.ops import Schedule

Builder = Callable[..., Schedule]  # called as builder(ranks=..., microbatches=..., **options)

BUILDERS: dict[str, Builder] = {
    "inference": inference,
    "gpipe": gpipe,
    "looped_bfs": looped_bfs,
    "1f1b": one_f_one_b,
    "interleaved_1f1b": interleaved_1f1b,
    "interleaved_zero_bubble": interleaved_zero_bubble,
    "zb_h1": zb_h1,
    "zb_h2": zb_h2,
    "hanayo": hanayo,
    "zb_v": zb_v,
    "v_half": v_half,
    "v_min": v_min,
    "dualpipe_v": dualpipe_v,
    "dualpipe": dualpipe,
}

__all__ = ["BUILDERS", "Builder"]
