"""How large each step is: rows, tokens a row, and the pipeline calls that the rows go through.

train.accumulate calls of pipeline.microbatches microbatches make one step of the optimizer. With train.ramp
the first steps have fewer rows, or shorter ones. The rows of a microbatch stay the same, and the number of
microbatches grows:

    batch_size: 16, microbatches: 4, ramp: [{until: 2, batch_size: 4}, {until: 3, batch_size: 8}]

    step              1    2    3    4    5 ...
    rows              4    4    8    16   16
    microbatches      1    1    2    4    4        of 4 rows each
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

from penstock.batch.microbatches import split
from penstock.train.config.sections import TrainConfig


class Size(NamedTuple):
    """The size of one step.

    rows: of the whole batch, over all parts
    length: tokens after which a row is cut
    calls: the number of microbatches of each pipeline call
    """

    rows: int
    length: int
    calls: tuple[int, ...]

    @property
    def microbatches(self) -> int:
        """The microbatches of each part of the batch, over all calls."""
        return sum(self.calls)


@dataclass(frozen=True)
class StepSizes:
    """The size of each step. phases: those of a ramp, each with its last step; full: the steps after them"""

    phases: tuple[tuple[int, Size], ...]
    full: Size

    @classmethod
    def of(cls, config: TrainConfig, parts: int) -> StepSizes:
        """parts: pipelines that a batch is divided among"""
        section, length = config.train, config.data.sequence_length
        of_a_call = config.pipeline.microbatches
        most = of_a_call * section.accumulate

        def size(rows: int, length: int) -> Size:
            count = -(-rows * most // section.batch_size)  # no microbatch has more rows than in a full batch
            call_count = -(-count // of_a_call)
            calls = tuple(count // call_count + (call < count % call_count) for call in range(call_count))
            return Size(rows, length, calls)

        phases = tuple(
            (phase.until, size(phase.batch_size or section.batch_size, phase.sequence_length or length))
            for phase in section.ramp
        )
        return cls(phases, size(section.batch_size, length))

    def at(self, step: int) -> Size:
        """The size of step `step`, from 1."""
        return next((size for until, size in self.phases if step <= until), self.full)

    def rows_before(self, step: int) -> int:
        """Rows of all steps before `step`: where its batch begins in the data."""
        rows, done = 0, 0
        for until, size in self.phases:
            taken = max(min(step - 1, until) - done, 0)
            rows, done = rows + taken * size.rows, done + taken
        return rows + (step - 1 - done) * self.full.rows

    def steps_of(self, rows: int) -> int:
        """The fewest steps that take so many rows, 1 or more."""
        done = 0
        for until, size in self.phases:
            of_phase = -(-rows // size.rows)
            if done + of_phase <= until:
                return done + of_phase
            rows, done = rows - (until - done) * size.rows, until
        return done + -(-rows // self.full.rows)


def calls_of(content: Any, calls: Sequence[int], built: int) -> list[Any]:
    """The content of each pipeline call of a step, in order.

    content: of the whole step, as penstock.train.data.rows.Content
    built: the number of microbatches into which the pipeline splits a mapping by itself
    """
    if tuple(calls) == (built,):
        return [content]
    microbatches = split(content, sum(calls), {}) if isinstance(content, dict) else content
    ends = accumulate(calls)
    return [microbatches[end - count : end] for count, end in zip(calls, ends, strict=True)]
