"""A run under way: its steps, each with its batch, and parts that do nothing unless they override it."""

from __future__ import annotations

from collections.abc import Generator
from types import SimpleNamespace
from typing import Any

import torch

from penstock.train.part import Run, RunPart, Steps


class Batches:
    """Data whose batch of a step is the step's number."""

    def __init__(self) -> None:
        self.open = 0
        self.kept: list[Generator[Any]] = []  # none is closed because nothing holds it

    def batches(self, steps: range, device: torch.device) -> Generator[Any]:
        self.kept.append(self.numbers(steps))
        return self.kept[-1]

    def numbers(self, steps: range) -> Generator[Any]:
        self.open += 1
        try:
            yield from steps
        finally:
            self.open -= 1


def steps_of(data: Any, done: int, last: int) -> Any:
    return Steps(data, done, last, torch.device("cpu"))


def test_each_step_has_its_own_batch() -> None:
    steps = steps_of(Batches(), 2, 5)
    assert [(step, steps.batch()) for step in steps] == [(3, 3), (4, 4), (5, 5)]


def test_a_run_that_goes_back_gets_the_batches_from_there() -> None:
    data, other = Batches(), Batches()
    steps = steps_of(data, 0, 9)
    taken = []
    for step in steps:
        taken.append((step, steps.batch()))
        if step == 3 and len(taken) == 3:
            given: Any = other
            steps.restart(given, 1)
        if len(taken) == 5:
            break
    assert taken == [(1, 1), (2, 2), (3, 3), (2, 2), (3, 3)]
    assert (data.open, other.open) == (0, 1)
    steps.close()
    assert other.open == 0


def test_an_evaluation_follows_every_so_many_steps_and_the_last() -> None:
    run: Any = SimpleNamespace(config=SimpleNamespace(train=SimpleNamespace(evaluate_every=4, last=10)))
    assert [step for step in range(1, 11) if Run.evaluates(run, step)] == [4, 8, 10]


def test_a_part_does_nothing_by_itself() -> None:
    unused: Any = None
    part = RunPart(unused)
    with part.running(), part.training(), part.around(1):
        part.computed(1)
        assert part.judge(unused) == ""
        assert part.row(unused) == {}
        part.check(unused)
        part.after(unused)
        part.keep(unused)
    assert (part.note, [*part.summary()]) == ("", [])
