"""Parts of a step: what they see, in which order, and what follows where one of them refuses or fails."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from penstock import AutoPipeline, Pipeline
from penstock.batch.shapes import Microbatch
from penstock.errors import ConfigError, PeerLostError
from penstock.pipeline.steps.step import Step, StepPart
from support.families import ragged_batch, tiny_model
from support.refusals import refuses


class Traced(StepPart):
    def __init__(self, fails_in: str = "", error: Exception | None = None) -> None:
        self.trace: list[str] = []
        self._fails_in, self._error = fails_in, error

    def _add(self, what: str) -> None:
        self.trace.append(what)
        if self._error is not None and what == self._fails_in:
            raise self._error

    def check(self, microbatches: Sequence[Microbatch]) -> None:
        self._add("check")
        assert len(microbatches) == 2

    def begin(self, step: Step) -> None:
        self._add("begin")
        assert not step.reports

    @contextmanager
    def around(self, step: Step) -> Iterator[None]:
        self._add("around")
        yield
        self._add("left")

    def end(self, step: Step) -> None:
        self._add("end")
        assert step.result.loss > 0
        assert len(step.reports) == 2

    def failed(self) -> None:
        self._add("failed")

    def close(self) -> None:
        self._add("close")


# _parts: parts of the test's own are put into the pipeline's list
def pipeline(*parts: StepPart) -> Pipeline:
    pipe = AutoPipeline(ranks=2, microbatches=2).build(tiny_model("llama", layers=2))
    pipe._parts = [*pipe._parts, *parts]
    return pipe


def test_a_part_sees_a_step_from_the_check_to_the_end() -> None:
    part = Traced()
    pipe = pipeline(part)
    pipe.step(ragged_batch())
    pipe.close()
    assert part.trace == ["check", "begin", "around", "left", "end", "close"]


# _parts: the part that refuses is taken out
def test_a_part_that_refuses_leaves_a_pipeline_that_goes_on() -> None:
    refusing = Traced("check", ConfigError("a part", "it refuses", "Leave it out"))
    pipe = pipeline(refusing)
    with refuses(ConfigError, "a part", "it refuses"):
        pipe.step(ragged_batch())
    assert refusing.trace == ["check", "failed"]
    pipe._parts = pipe._parts[:-1]
    pipe.step(ragged_batch())


# _training: what a step leaves behind is seen there alone
@pytest.mark.parametrize("where", ["begin", "around", "left", "end"])
def test_all_parts_learn_of_a_failure(where: str) -> None:
    first, failing = Traced(), Traced(where, PeerLostError("rank 1", "it is gone", "Look at its log"))
    pipe = pipeline(first, failing)
    with refuses(PeerLostError, "rank 1"):
        pipe.step(ragged_batch())
    assert failing.trace[-2:] == [where, "failed"]
    assert first.trace[-1] == "failed"
    assert [executor.left_over for executor in pipe._training.executors] == [0, 0]
