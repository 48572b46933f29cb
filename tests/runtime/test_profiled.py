"""A profiler shows every op under its name, and without one no op pays for it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch.autograd import profiler
from torch.profiler import ProfilerActivity, profile

from penstock import Pipeline
from runtime.test_executor import Chunk, batch, squares
from support.covering import every
from support.schedules import FORMS

OP = re.compile(r"op (\d+[FBIW]\d+)")


def ops_in(names: list[str]) -> Counter[str]:
    return Counter(found[1] for name in names if (found := OP.fullmatch(name)))


def ops_of(pipe: Pipeline, steps: int = 1) -> Counter[str]:
    return Counter({str(op): steps for program in pipe.schedule.programs for op in program})


# acc_events: without it torch 2.11 warns of a second cycle at the start of the first
cpu_profile = partial(profile, activities=[ProfilerActivity.CPU], acc_events=True)


def profiled(pipe: Pipeline, steps: int, **options: Any) -> Counter[str]:
    with cpu_profile(**options) as found:
        for _ in range(steps):
            pipe.step(batch(8))
    return ops_in([event.name for event in found.events()])


@pytest.mark.parametrize("form", every(4, FORMS))
def test_every_op_is_shown_once_a_step(form: str) -> None:
    pipe = Pipeline.from_provider(Chunk, schedule=FORMS[form], ranks=2, microbatches=4, loss_fn=squares)
    pipe.step(batch(8))
    assert profiled(pipe, 2) == ops_of(pipe, 2)


def test_an_op_is_an_nvtx_range_where_a_profiler_asks_for_these(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch makes an NVTX range of what `record_function` names inside `emit_nvtx`. It needs a GPU: here the
    names are looked at."""
    names: list[str] = []

    @contextmanager
    def named(name: str) -> Iterator[None]:
        names.append(name)
        yield

    for missing in ("_enable_profiler", "_disable_profiler"):
        monkeypatch.setattr(profiler, missing, lambda *_: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(profiler, "record_function", named)
    pipe = Pipeline.from_provider(Chunk, schedule="zb_h1", ranks=2, microbatches=4, loss_fn=squares)
    with profiler.emit_nvtx():  # type: ignore[no-untyped-call]
        pipe.step(batch(8))
    assert ops_in(names) == ops_of(pipe)


def test_without_a_profiler_no_op_makes_a_range(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = Pipeline.from_provider(Chunk, schedule="zb_h1", ranks=2, microbatches=4, loss_fn=squares)
    assert profiled(pipe, 1) == ops_of(pipe)
    monkeypatch.setattr(profiler, "record_function", None)
    pipe.step(batch(8))
    with pytest.raises(TypeError), cpu_profile():
        pipe.step(batch(8))
