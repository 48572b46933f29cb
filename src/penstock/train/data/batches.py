"""The batches of a run: which rows each step has, and each pipeline's part of them.

The number of rows before a step determines its rows; in a stream, the position does
(penstock.train.data.streaming). Every rank knows the whole batch, which is the same on any mesh, and reads
its pipeline's part.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from math import ceil
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from penstock.batch.loss import IGNORED
from penstock.batch.placement import Up, send_ahead
from penstock.errors import CheckpointError, ConfigError, DataError
from penstock.private import tree_map_only
from penstock.runtime.device.copies import CudaCopies
from penstock.train.config.training import TrainSection
from penstock.train.data.changes import Known, changes
from penstock.train.data.masking import HELD_OUT, MaskedRows, Masking
from penstock.train.data.rows import BatchLayout, Content, CutRows, Fill, FilledRows, Rows, StoredRows
from penstock.train.data.sampler import Sampler
from penstock.train.data.streaming import Position, RowStream
from penstock.train.sizes import StepSizes

_SAMPLED = 100  # steps from which the padding of a run is estimated
_AS_BEFORE = "Give the data that the run began with, or start without --resume"


class LoadedBatch(NamedTuple):
    """A pipeline's part of a step's batch, the fill of the whole batch, and a stream's position after it.

    beside: microbatches for a forward pass before the step
    """

    content: Content
    fill: Fill
    position: Position | None = None
    beside: Sequence[dict[str, Any]] = ()


@dataclass(frozen=True)
class Data:
    """The batches of a run.

    Attributes:
        rows, held_out: to train on, none for a stream, and to evaluate on
        layout: how rows become a batch
        sizes: the size of each step; a batch to evaluate on has the full one
        sampler: which rows a step has
        digest: of all tokens, labels and lengths to train on; for a stream, of files, tokenizer and options
        part, parts: batches hold this part, from 0, of so many
        stream: replaces `rows`
        done: the number of steps before the start
        taken: the number of rows of these steps, which may have had other sizes
        known: the entry of each source in a checkpoint
        masking: of tokens, for masked language modelling
    """

    rows: StoredRows
    held_out: StoredRows
    layout: BatchLayout
    sizes: StepSizes
    sampler: Sampler | None = None
    digest: str = ""
    part: int = 0
    parts: int = 1
    stream: RowStream | None = None
    done: int = 0
    taken: int = 0
    known: tuple[Known, ...] = ()
    masking: Masking | None = None

    def of(self, part: int) -> Data:
        """The same batches, with another part of each."""
        return replace(self, part=part)

    def at(self, done: int, state: Mapping[str, Any] | None, steps: int, *, accept: bool = False) -> Data:
        """Go on after `done` of `steps` steps, with the row after their last one.

        Args:
            state: the result of `state` after these steps; None for a checkpoint without it
            accept: whether the data may have changed since; a stream may not

        Raises: CheckpointError if the data has changed, or the position is none of this stream; what `check`
            raises.
        """
        if not done:
            return self
        state, change, stream = state or {}, self.change(state), self.stream
        position, planned = state.get("position"), self.sizes.rows_before(done + 1)
        if stream is not None:
            value = "the checkpoint's position in the data"
            if position is None:
                rule = "data.streaming goes on from a position, and the checkpoint was written without one"
                raise CheckpointError(value, rule, "Leave data.streaming out, or start without --resume")
            if change:
                rule = f"it is numbers of records, and the records have changed: {change}"
                raise CheckpointError(value, rule, _AS_BEFORE)
            stream, state = stream.at(position), position
        elif change and not accept:
            rule = f"it is not the data of the checkpoint, and all later batches would be others: {change}"
            accepting = "set data.changed=accept, and the next steps take the rows of this data"
            raise CheckpointError("the data of a resumed run", rule, f"{_AS_BEFORE}; or {accepting}")
        taken: int = state.get("rows", planned)
        resumed = replace(self, stream=stream, done=done, taken=taken)
        if taken != planned:  # else `load_data` has checked it
            resumed.check(steps)
        return resumed

    def without(self, done: int, step: int, position: Position | None, steps: int) -> tuple[Data, range]:
        """The data after step `done`, from the row after those of `step` on; and the rows left out.

        Args:
            position: of the batch of `step`
            steps: of the run

        Raises: ConfigError if too few rows are left; DataError.
        """
        stream = None if self.stream is None or position is None else self.stream.at(position)
        left_out = range(self._first(done + 1), self._first(step + 1))
        remaining = replace(self, stream=stream, done=done, taken=left_out.stop)
        remaining.check(steps)
        return remaining, left_out

    def change(self, state: Mapping[str, Any] | None) -> str:
        """How this data differs from that of `state`, in words; empty if it does not.

        A checkpoint of version 0.5.0 or before has no state to compare with.
        """
        if state is None or state.get("digest") == self.digest:
            return ""
        differences = changes(state.get("sources"), self.known)
        followed = (
            "its tokenizer, its order or its options" if self.stream else "its order or its held-out rows"
        )
        return (
            "; ".join(differences)
            or f"{followed} changed, or its contents (digest {self.digest}, not {state.get('digest')})"
        )

    def state(self, step: int, position: Position | None) -> dict[str, Any]:
        """The state after `step`, from which `at` goes on, in JSON. position: of its batch"""
        reached = {"rows": self._first(step + 1), "position": position}
        return {"digest": self.digest, **reached, "sources": list(self.known)}

    def first_epoch(self) -> Iterator[Sequence[int]]:
        """The rows of each step of a run from its beginning on, until as many are taken as an epoch has."""
        fresh = replace(self, done=0, taken=0)
        for step in range(1, self.sizes.steps_of(self.epoch) + 1):
            yield fresh.take(fresh._first(step), self.sizes.at(step).rows)[1]

    def rows_until(self, step: int) -> Sequence[int]:
        """The stored rows of all steps up to `step`, in order."""
        return self.take(0, self._first(step + 1))[1]

    def _first(self, step: int) -> int:
        """The number of the run's rows before `step`."""
        return self.taken + self.sizes.rows_before(step) - self.sizes.rows_before(self.done + 1)

    @property
    def epoch(self) -> int:
        """The rows of an epoch: those of all sources that any row is taken from; 0 for a stream."""
        if self.sampler is None:
            return 0
        weights = self.sampler.mixture.weights
        return sum(count for count, weight in zip(self.sampler.counts, weights, strict=True) if weight)

    def epochs_after(self, step: int) -> float | None:
        """The epochs that are done after `step`; None for a stream, which does not know."""
        return self._first(step + 1) / self.epoch if self.epoch else None

    def steps_of(self, section: TrainSection) -> int:
        """The steps of the run: of its `epochs` the fewest that take all their rows."""
        if section.epochs is None:
            return section.last
        return self.sizes.steps_of(ceil(Fraction(str(section.epochs)) * self.epoch))

    def batch(self, step: int) -> LoadedBatch:
        """The batch of step `step`, from 1."""
        rows, chosen, position = self.take(self._first(step), self.sizes.at(step).rows)
        batch = self._part(*self._sized(rows, step), chosen)
        self.rows.forget()
        return batch._replace(position=position)

    def take(self, first: int, count: int) -> tuple[Rows, Sequence[int], Position | None]:
        """The run's rows `first`, from 0, to `first + count`: all rows, the indices of these, the position.

        position: in the stream after these rows; None for stored rows
        """
        if self.stream is not None:
            rows, position = self.stream.take(first, count)
            return rows, range(count), position
        assert self.sampler is not None
        return self.rows, self.sampler.rows(first, count), None

    def batches(self, steps: range, device: torch.device) -> Generator[LoadedBatch]:
        """The batches of `steps`. A thread makes the next one while the caller works with one.

        Close the generator to end the thread. An error is raised in place of its batch.

        Args:
            steps: one or more
            device: where the step runs. A GPU gets copies of the next batch while it runs a step
        """
        make = self.batch if device.type == "cpu" else partial(self._sent_batch, CudaCopies(device).up)
        begin = device, torch.get_num_threads()
        with ThreadPoolExecutor(1, "penstock-data", _begin_thread, begin) as thread:
            ahead = thread.submit(make, steps[0])
            for step in steps[1:]:
                batch, ahead = ahead.result(), thread.submit(make, step)
                yield batch
            yield ahead.result()

    def held_out_batches(self, count: int) -> list[LoadedBatch]:
        """At most `count` batches of the full size or smaller, spread evenly over the held-out rows.

        All held-out rows where they fit. No batch has more than one row more than another.
        """
        spread = self.held_out_rows(count)
        batches = np.array_split(np.asarray(spread), -(-len(spread) // self.sizes.full.rows))
        return [self._held_out(batch.tolist()) for batch in batches]

    def held_out_rows(self, count: int) -> Sequence[int]:
        """The rows of at most `count` held-out batches."""
        available = len(self.held_out)
        rows = min(count * self.sizes.full.rows, available)
        spread: list[int] = np.linspace(0, available - 1, rows).round().astype(int).tolist()
        return spread

    def _held_out(self, chosen: list[int]) -> LoadedBatch:
        """A batch of these rows, in equally many microbatches on each part of the mesh.

        If there are fewer rows than parts, rows in which no token counts follow, so the loss stays theirs.
        """
        rows, missing = self.seen(self.held_out, HELD_OUT), self.parts - len(chosen)
        if missing > 0:
            if not self.layout.ignores:
                raise DataError(
                    f"{len(chosen)} held-out rows on a mesh of {self.parts} pipelines",
                    "each pipeline evaluates at least one, and none can stand in for a missing one",
                    "Give data.validation more, or a larger data.held_out",
                )
            rows = FilledRows(rows)
            chosen = [*chosen, *range(len(rows), len(rows) + missing)]
        return self._part(self.layout.at_most(len(chosen) // self.parts), rows, chosen)

    def expected(self, steps: int) -> Fill:
        """The fill of the first batches of a run of `steps` steps; for a stream, of the held-out ones.

        Images are not counted, as that would read tokens.
        """
        if self.stream is not None:
            return sum((batch.fill for batch in self.held_out_batches(1)), Fill())
        sampled = range(self.done + 1, min(steps, self.done + _SAMPLED) + 1)
        dealt = (self._dealt(*self._sized(self.rows, step), self._chosen(step)) for step in sampled)
        return sum((fill for _, fill in dealt), Fill())

    def check(self, steps: int) -> None:
        """Raise ConfigError if the rows end before step `steps`, and DataError for a step of a ramp whose cut
        rows have no token that counts."""
        if self.sampler is None:
            return
        total, needed = self.sampler.mixture.total, self._first(steps + 1)
        if total is not None and total < needed:
            done, size = f"{self.taken} rows are taken, and " if self.done else "", self.sizes.full.rows
            raise ConfigError(
                f"data.mixture of {total} rows in all epochs",
                f"{done}train.steps={steps} batches of {size} take {needed}",
                f"Set train.steps to {self.done + max(total - self.taken, 0) // size} or less, or leave "
                "epochs out of one of them",
            )
        if all(source.store.labels is None for source in self.rows.sources):
            return
        last = max((until for until, _ in self.sizes.phases), default=0)
        for step in range(self.done + 1, min(last, steps) + 1):
            _, rows = self._sized(self.rows, step)
            pieces = (piece for row in self._chosen(step) for piece in rows.read(row))
            if isinstance(rows, CutRows) and not any((piece.labels[1:] != IGNORED).any() for piece in pieces):
                rule = f"the rows of step {step}, cut to so many tokens, have none that the loss counts"
                remedy = "Give a larger sequence_length, or a ramp of batch_size alone"
                raise DataError(f"train.ramp with sequence_length={rows.longest}", rule, remedy)
        self.rows.forget()

    def _sized(self, rows: Rows, step: int) -> tuple[BatchLayout, Rows]:
        """The layout and the rows for the size of the step."""
        size = self.sizes.at(step)
        rows = CutRows(rows, size.length) if size.length < self.sizes.full.length else rows
        return self.layout.in_calls(size.calls), self.seen(rows, step)

    def seen(self, rows: Rows, step: int) -> Rows:
        """The rows as `step` sees them: with masks, where tokens are masked."""
        return rows if self.masking is None else MaskedRows(rows, self.masking, step)

    def _part(self, layout: BatchLayout, rows: Rows, chosen: Sequence[int]) -> LoadedBatch:
        dealt, fill = self._dealt(layout, rows, chosen)
        fill, mine = replace(fill, images=layout.image_tokens(rows, chosen)), dealt[self.part]
        return LoadedBatch(layout.content(rows, mine), fill, beside=layout.beside(rows, mine))

    def _sent_batch(self, up: Up, step: int) -> LoadedBatch:
        batch = self.batch(step)
        batch = batch._replace(content=tree_map_only(Tensor, Tensor.pin_memory, batch.content))
        send_ahead(batch.content, up)
        return batch

    def _dealt(self, layout: BatchLayout, rows: Rows, chosen: Sequence[int]) -> tuple[list[list[int]], Fill]:
        """The rows of each pipeline, and the fill of them all, without images."""
        dealt = layout.deal(rows, chosen, self.parts)
        return dealt, sum((layout.fill(rows, part) for part in dealt), Fill())

    def _chosen(self, step: int) -> Sequence[int]:
        return self.take(self._first(step), self.sizes.at(step).rows)[1]


def _begin_thread(device: torch.device, threads: int) -> None:
    """torch keeps the number of threads and the current GPU for each thread."""
    torch.set_num_threads(threads)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # else pinning takes memory of the first GPU
