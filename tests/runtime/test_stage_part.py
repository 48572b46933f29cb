"""Parts of a stage: called in order, around each op, and only where they do something."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.batch.shapes import Microbatch
from penstock.runtime.stage import Stage
from penstock.runtime.stage_part import Forward, StagePart, overriding
from penstock.schedule.ops import Kind


class Traced(StagePart):
    def __init__(self, name: str, trace: list[str]) -> None:
        self._name, self._trace = name, trace

    def _add(self, what: str) -> None:
        self._trace.append(f"{self._name} {what}")

    def before_forward(self, index: int, microbatch: Microbatch, how: Forward) -> None:
        self._add(f"before F{index}{' again' if how.recompute else ''}")

    def after_forward(self) -> None:
        self._add("after F")

    def before_inference(self, microbatch: Microbatch) -> None:
        self._add("before inference")

    def after_inference(self) -> None:
        self._add("after inference")

    def before_backward(self, index: int) -> None:
        self._add(f"before backward {index}")

    def after_backward(self, index: int, kind: Kind) -> None:
        self._add(f"after {kind}{index}")

    def reset(self) -> None:
        self._add("reset")


def stage(trace: list[str], *parts: StagePart) -> Stage:
    module = nn.Linear(2, 2)

    def call(received: tuple[Any, ...], microbatch: Microbatch) -> Tensor:
        trace.append("module")
        if microbatch["x"].isnan().any():
            raise ValueError("not a number")
        output: Tensor = module(microbatch["x"])
        return output

    return Stage(0, module, call, parts)


def test_parts_are_called_around_each_op_in_their_order() -> None:
    trace: list[str] = []
    made = stage(trace, Traced("a", trace), Traced("b", trace))
    x = {"x": torch.ones(1, 2)}
    made.forward(0, None, x, how=Forward(recompute=True))
    made.backward(0, [torch.ones(1, 2)])
    made.forward(1, None, x, how=Forward(split=True))
    made.input_backward(1, [torch.ones(1, 2)])
    made.weight_backward(1)
    made.infer(None, x)
    ops = [
        ("before F0 again", "module", "after F"), ("before backward 0", "", "after B0"),
        ("before F1", "module", "after F"), ("before backward 1", "", "after I1"),
        ("before backward 1", "", "after W1"), ("before inference", "module", "after inference"),
    ]  # fmt: skip
    expected = [
        line
        for before, module, after in ops
        for line in (f"a {before}", f"b {before}", module, f"a {after}", f"b {after}")
        if line
    ]
    assert trace == expected


def test_after_a_failed_forward_parts_are_reset() -> None:
    trace: list[str] = []
    made = stage(trace, Traced("a", trace))
    with pytest.raises(ValueError, match="not a number"):
        made.forward(0, None, {"x": torch.full((1, 2), torch.nan)})
    made.reset()
    assert trace == ["a before F0", "module", "a reset"]


def test_a_part_costs_an_op_nothing_where_it_does_nothing() -> None:
    class Reduces(StagePart):
        reduces = True

    trace: list[str] = []
    made = stage(trace, plain := Reduces(), traced := Traced("a", trace))
    assert overriding(made.parts, "before_forward") == (traced.before_forward,)
    assert overriding([plain], "after_backward") == ()
    assert made.part(Traced) is traced
    assert made.part(Reduces) is plain
    assert made.reduces
    assert not stage(trace, traced).reduces
