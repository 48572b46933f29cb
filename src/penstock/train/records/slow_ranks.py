"""Names a rank that computes more slowly than its share of the work predicts, once, with its times.

    predicted    several pipelines: the median of the rank's peers, which host the same stages in the others
                 one pipeline: its cost (multiply-adds of its ops) times the median of the other ranks'
                 seconds / cost; an op with towers that work on images has no prediction
    slow         it took more than 1.3 times the prediction in each of 20 steps in a row
    named again  only after 20 steps in a row in which it did not

The seconds are those of the ops, without the waits between them; every rank has all of them at a step's end
anyway. A wait within an op (FSDP2, cp, ep, tp) counts as the op's own time.
"""

from __future__ import annotations

import math
import socket
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.models.split.balanced_split import LayerCosts
from penstock.models.split.multiply_adds import MultiplyAdds
from penstock.schedule import Schedule
from penstock.train.data.rows import Fill
from penstock.train.part import Run, RunPart, TrainStep
from penstock.train.records.metrics import MetricsRow

FACTOR = 1.3  # of the predicted seconds
IN_A_ROW = 20  # steps
KINDS = "FBIW"
_SUMMED = ("token", "square", "image", "trained")
_FIRST = 2  # steps after a start in which memory is first touched and layers are compiled
_HOSTS = 16  # shown at most, the slowest first

RankSeconds = npt.NDArray[np.float64]  # (pipelines, ranks, kinds)


class Host(NamedTuple):
    """The host of a rank. pipeline: its index among the pipelines with different rows or tokens"""

    pipeline: int
    rank: int
    name: str


@dataclass(frozen=True)
class _Costs:
    """The costs of each rank's ops in a step of one schedule, and the number of ops: (ranks, kinds).

    Each cost is that of the forward, whatever the kind: only ops of one kind are compared.

    token, square: per token of the batch, and per squared length of a document
    towers: whether an op includes vision towers: these have other layers and shapes, and their multiply-adds
        are estimates, so a multiply-add takes another time than in a decoder layer
    """

    schedule: Schedule
    token: RankSeconds
    square: RankSeconds
    counts: RankSeconds
    towers: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, schedule: Schedule, works: Sequence[MultiplyAdds]) -> _Costs:
        """works: of each stage of the model, without its copies"""
        depth = len(works)
        token, square, counts, towers = (np.zeros((schedule.ranks, len(KINDS))) for _ in range(4))
        for rank, program in enumerate(schedule.programs):
            for op in program:
                kind, work = KINDS.index(op.kind), works[op.stage % depth]
                token[rank, kind] += work.token / schedule.microbatches
                square[rank, kind] += work.square / schedule.microbatches
                counts[rank, kind] += 1
                towers[rank, kind] += work.image if op.kind == "F" else work.trained
        return cls(schedule, token, square, counts, towers > 0)

    def at(self, fill: Fill) -> RankSeconds:
        """The costs for a batch; NaN where towers work on its images, as their cost is not known."""
        costs = self.token * fill.tokens + self.square * fill.squares
        return np.where(self.towers & (fill.images > 0), np.nan, costs)


class SlowRankWatch(RunPart):
    """Names slow ranks in the row of a step and in the log, and lists the hosts at the end.

    Args:
        works: of each layer, the embedding and the head
        measured: their measured times, if the split is by these: then they are the costs

    Collective. Only the first process compares.
    """

    def __init__(self, run: Run, works: Sequence[MultiplyAdds], measured: LayerCosts | None) -> None:
        super().__init__(run)
        pipe = run.pipe
        if measured is not None:
            costs = (*measured.layers, measured.embedding, measured.head)
            works = [work._replace(token=cost, square=0) for work, cost in zip(works, costs, strict=True)]
        *layers, embedding, head = works
        stages = []
        for facts in pipe.info[: pipe.schedule.placement.depth]:
            parts = [layers[layer] for layer in facts.layers]
            parts += [embedding] * facts.info.is_first
            parts += [head] * facts.info.is_last
            sums = {name: sum(getattr(part, name) for part in parts) for name in _SUMMED}
            stages.append(MultiplyAdds(**sums))
        own_ranks = {pipe.schedule.placement.rank_of[stage] for stage in pipe.modules}
        ours = [[pipe.reductions.loss_place, rank, socket.gethostname()] for rank in own_ranks]
        hosts = [Host(*host) for process in pipe.ranks.gather(ours) for host in process]
        # if only some microbatches are recomputed, or some layers have no gradient, backwards differ in more
        again = run.config.train.activation_checkpointing
        alike = again is None or (again.every, again.in_flight, again.memory_limit) == (1, None, None)
        even = run.config.adapter is None and alike
        self._ranks = SlowRanks(stages, hosts, pipe.batch_part[1] > 1, KINDS if even else "F")

    def row(self, step: TrainStep) -> MetricsRow:
        run, pipe = self.run, self.run.pipe
        if run.owner is None:
            return {}
        slow = self._ranks.after(pipe.last_schedule, np.array(pipe.op_seconds), step.batch.fill)
        for entry in slow:
            run.display.say(self._ranks.words(entry))
        return {"slow_ranks": slow} if slow else {}

    def summary(self) -> Iterator[str]:
        if lines := self._ranks.by_host():
            yield "hosts, by the time of the slowest rank over its prediction:"
            yield from (f"  {line}" for line in lines)


class SlowRanks:
    """Compares the ranks after each step.

    Args:
        works: of each stage
        hosts: of all ranks of all pipelines
        peers: whether the pipelines have different rows, and none waits for another within an op
        kinds: of ops that are compared: F alone, if the backwards of stages differ by more than their work
    """

    def __init__(
        self, works: Sequence[MultiplyAdds], hosts: Sequence[Host], peers: bool, kinds: str = KINDS
    ) -> None:
        self._works, self._kinds = works, np.array([kind in kinds for kind in KINDS])
        self._hosts = {(host.pipeline, host.rank): host.name for host in hosts}
        self._costs: _Costs | None = None
        shape = 1 + max(host.pipeline for host in hosts), 1 + max(host.rank for host in hosts)
        self._several, self._peers = shape[0] > 1, peers
        self._steps = 0
        self._in_a_row = np.zeros(shape, dtype=np.int64)  # steps that contradict the rank's entry in _slow
        self._slow = np.zeros(shape, dtype=np.bool_)
        # of the last steps: seconds of an op and its prediction, by kind, and their ratio over all kinds
        self._last: deque[tuple[RankSeconds, RankSeconds, RankSeconds]] = deque(maxlen=IN_A_ROW)

    def after(self, schedule: Schedule, seconds: RankSeconds, fill: Fill) -> list[dict[str, Any]]:
        """The ranks that become slow with a step, each as an entry of its row.

        Args:
            schedule: of the step
            seconds: of compute, for each rank of each pipeline, by kind of op
            fill: of the batch
        """
        self._steps += 1
        if seconds.shape[:2] == (1, 1) or self._steps <= _FIRST:
            return []
        if self._costs is None or self._costs.schedule is not schedule:
            self._costs = _Costs.of(schedule, self._works)
        counts = self._costs.counts
        predicted = self._predicted(seconds, self._costs.at(fill))
        known = np.isfinite(predicted)
        expected = np.where(known, predicted, 0).sum(-1)
        with np.errstate(all="ignore"):
            ratio = np.where(known, seconds, 0).sum(-1) / expected
            self._last.append((seconds / counts, predicted / counts, ratio))
        changed = (ratio > FACTOR) != self._slow
        self._in_a_row = np.where(changed, self._in_a_row + 1, 0)
        turned = self._in_a_row == IN_A_ROW
        self._slow ^= turned
        self._in_a_row[turned] = 0
        return [self._entry(*indices) for indices in np.argwhere(turned & self._slow).tolist()]

    def _predicted(self, seconds: RankSeconds, costs: RankSeconds) -> RankSeconds:
        """The predicted seconds of each rank, by kind; NaN where there is nothing to compare it with."""
        rates = np.where((seconds > 0) & self._kinds, seconds, np.nan)
        if self._peers:
            return _medians_of_others(rates.reshape(len(rates), -1)).reshape(rates.shape)
        with np.errstate(all="ignore"):
            costs = np.where(costs > 0, costs, np.nan)
            return np.stack([_medians_of_others(of_pipeline) for of_pipeline in rates / costs]) * costs

    def _entry(self, pipeline: int, rank: int) -> dict[str, Any]:
        """The medians of a rank over the last steps."""
        columns = (np.stack(steps)[:, pipeline, rank] for steps in zip(*self._last, strict=True))
        ops, predicted, ratio = map(_medians, columns)
        known = [(i, kind) for i, kind in enumerate(KINDS) if np.isfinite(predicted[i])]
        entry: dict[str, Any] = {"rank": rank, "host": self._hosts.get((pipeline, rank), "an unknown host")}
        if self._several:
            entry["pipeline"] = pipeline
        return entry | {
            "times": round(float(ratio), 3),
            "ms": {kind: round(1e3 * float(ops[i]), 3) for i, kind in known},
            "predicted_ms": {kind: round(1e3 * float(predicted[i]), 3) for i, kind in known},
        }

    def words(self, entry: dict[str, Any]) -> str:
        """A line for the log."""
        than = "its peers in the other pipelines" if self._peers else "its share of the work"
        slower = f"{_name(entry)} is {entry['times']:.2f} times slower than {than}, for {IN_A_ROW} steps"
        return f"penstock: warning: {slower}: {_numbers(entry)}"

    def by_host(self) -> list[str]:
        """A line for each host, of its slowest rank in the last steps; the slowest host first."""
        if not self._last:
            return []
        entries = [self._entry(pipeline, rank) for pipeline, rank in self._hosts]
        known = [entry for entry in entries if np.isfinite(entry["times"])]
        slowest: dict[str, dict[str, Any]] = {}  # by host
        for entry in sorted(known, key=lambda entry: -entry["times"]):
            slowest.setdefault(entry["host"], entry)
        lines = [f"{entry['times']:.2f}  {_name(entry)}: {_numbers(entry)}" for entry in slowest.values()]
        lines, more = lines[:_HOSTS], len(lines) - _HOSTS
        return [*lines, f"and {more} faster hosts"] if more > 0 else lines


def _name(entry: dict[str, Any]) -> str:
    where = f" of pipeline {entry['pipeline']}" if "pipeline" in entry else ""
    return f"rank {entry['rank']}{where} on {entry['host']}"


def _numbers(entry: dict[str, Any]) -> str:
    """Milliseconds of an op of each kind, measured and predicted."""
    predicted = entry["predicted_ms"]
    return ", ".join(
        f"{kind} {ms:.3g} ms (predicted {predicted[kind]:.3g})" for kind, ms in entry["ms"].items()
    )


def _medians(values: RankSeconds) -> RankSeconds:
    """Medians over the first dimension, of finite values; NaN where there are none."""
    median = np.ma.median(np.ma.masked_invalid(values), axis=0)  # type: ignore[no-untyped-call]
    return np.ma.filled(median, np.nan)


def _medians_of_others(rows: RankSeconds) -> RankSeconds:
    """For each value the median of the others of its column; NaN for NaN, and where there is no other."""
    return np.array([_of_others(column) for column in rows.T.tolist()]).T


def _of_others(values: list[float]) -> list[float]:
    known = sorted(value for value in values if value == value)
    count, medians = len(known) - 1, []
    for value in values:
        if value != value or not count:
            medians.append(math.nan)
            continue
        position = bisect_left(known, value)
        middle = [known[at + (at >= position)] for at in ((count - 1) // 2, count // 2)]
        medians.append(sum(middle) / 2)
    return medians
