"""Sample a step whose ops do not always take the same time, on one pipeline or on thousands of replicas.

Two replicas of 1F1B with P = 2, m = 2; rank 0 of the first is slow. R sums the gradients of a stage over the
replicas, so that the ranks that hold it meet there:

    replica 0, rank 0 | F0 F0 F1 F1 .  .  B0 B0 B0 B1 B1 B1 R
    replica 0, rank 1 | .  .  F0 B0 B0 F1 B1 B1 R
    replica 1, rank 0 | F0 F1 .  .  B0 B0 .  B1 B1 .  .  .  R      waits for rank 0 of replica 0
    replica 1, rank 1 | .  F0 B0 B0 F1 B1 B1 .  R

The order of the ops is fixed. So the ends of one op in all samples and replicas are one array, and a step of
10,000 ranks is as many operations on arrays as one pipeline has ops. These are those of `simulate`, in its
order: a sample has, to the last digit, the times that `simulate` gives for its durations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil, inf
from statistics import fmean, pstdev
from typing import TYPE_CHECKING

from penstock.errors import ConfigError
from penstock.schedule.collector import collector_paused
from penstock.schedule.ops import Op, Schedule, not_a_count
from penstock.schedule.simulation.costs import Costs, is_number
from penstock.schedule.simulation.simulate import delays_of, durations_of, pairs_of
from penstock.schedule.turns import Turns, last_gradients
from penstock.schedule.verify import Proof, verify

if TYPE_CHECKING:
    from numpy.random import Generator

    from penstock.schedule.op_arrays import Floats

_AT_ONCE = 2048  # samples times replicas in one array: it stays in a core's cache
_WIDEST = 0.3  # of a jitter: with more, a normally distributed time would be negative at times
_MOST = 1_000_000  # samples times replicas: an op's array has some megabytes


@dataclass(frozen=True)
class Sampled:
    """The times of sampled steps, in the unit of the costs.

    steps: of each sample, until the last rank of the last replica has ended
    undisturbed: the step if every op takes what it costs
    by_slow_rank: how much longer the undisturbed step takes, as a share of it, if this rank alone is as slow
        as `sample` was asked for
    """

    name: str
    ranks: int
    replicas: int
    steps: tuple[float, ...]
    undisturbed: float
    by_slow_rank: Mapping[int, float]

    @property
    def mean(self) -> float:
        return fmean(self.steps)

    @property
    def deviation(self) -> float:
        """The standard deviation of a step."""
        return pstdev(self.steps)

    @property
    def loss(self) -> float:
        """How much longer a step takes on average than the undisturbed one, as a share of that one."""
        return _longer(self.mean, self.undisturbed)

    def percentile(self, percent: float) -> float:
        """The least step time that `percent` of the samples do not exceed. percent: above 0, up to 100"""
        if not 0 < percent <= 100:
            raise ConfigError(f"percentile({percent!r})", "it is above 0 and at most 100", "Give 50 for half")
        return sorted(self.steps)[ceil(len(self.steps) * percent / 100) - 1]


def sample(
    schedule: Schedule | Proof,
    costs: Costs | None = None,
    *,
    jitter: float = 0.0,
    spread: float = 0.0,
    slow: Mapping[int, float] | None = None,
    replicas: int = 1,
    samples: int = 100,
    seed: int = 0,
) -> Sampled:
    """Sample steps of `schedule` on `replicas` pipelines that sum their gradients.

    costs: the mean of each op; messages and reductions take what they cost
    jitter: the standard deviation of an op's time, as a share of it; every op is drawn anew, normally
        distributed
    spread: the standard deviation of a rank's speed: what it draws for a step is a factor of all its ops
    slow: factors of all ops of these ranks, in one of the replicas
    replicas: pipelines next to each other. They meet where a stage's gradients are summed, even if
        `Costs.reduction` is 0

    Equal arguments give equal samples. Raises ScheduleError for a schedule that `verify` refuses, ConfigError
    for numbers that are not possible, and for activations that wait in host memory.
    """
    costs, slow = costs or Costs(), dict(slow or {})
    proof = schedule if isinstance(schedule, Proof) else verify(schedule)
    _check(proof.schedule, costs, jitter, spread, slow)
    _check_size(replicas, samples, seed)
    with collector_paused(all_stay=True):
        run = _Sweep(proof, costs)
        undisturbed, *alone = _slow_steps(run, slow)
        steps = _drawn_steps(run, jitter, spread, slow, replicas, samples, seed)
    if len(steps) < samples:  # nothing was drawn
        steps *= samples
    shares = (_longer(step, undisturbed) for step in alone)
    by_slow_rank = dict(zip(slow, shares, strict=True))
    return Sampled(proof.schedule.name, proof.schedule.ranks, replicas, steps, undisturbed, by_slow_rank)


def slow_rank_costs(
    schedule: Schedule | Proof, costs: Costs | None = None, factor: float = 1.01
) -> tuple[float, ...]:
    """By rank, how much longer a step takes, as a share of it, if the ops of this rank alone take `factor`.

    Raises as `sample` does.
    """
    costs = costs or Costs()
    proof = schedule if isinstance(schedule, Proof) else verify(schedule)
    slow = dict.fromkeys(range(proof.schedule.ranks), factor)
    _check(proof.schedule, costs, 0.0, 0.0, slow)
    with collector_paused(all_stay=True):
        undisturbed, *alone = _slow_steps(_Sweep(proof, costs), slow)
    return tuple(_longer(step, undisturbed) for step in alone)


def _longer(step: float, undisturbed: float) -> float:
    """How much longer a step takes, as a share of the undisturbed one."""
    return step / undisturbed - 1 if undisturbed else 0.0


# ---- Many runs at once


class _Sweep:
    """A schedule that runs many times at once. Arrays are by sample and replica."""

    def __init__(self, proof: Proof, costs: Costs) -> None:
        arrays, schedule = proof.arrays, proof.schedule
        self.ranks, self.rank = schedule.ranks, arrays.rank.tolist()
        self.durations = durations_of(arrays, costs).tolist()
        self.pairs = pairs_of(arrays, costs)
        self.waits = _waits(self.pairs, arrays.ops, schedule, costs)
        takes = costs.of_stages("reduction", schedule.placement)
        self._reductions = {at: takes[stage] for stage, at in last_gradients(arrays).items()}
        delays = delays_of(arrays, costs)
        self._turns = Turns.of(arrays, proof.order, delays, self.pairs, self._reductions)
        self._is_last, self._read_last = self._uses()

    def _uses(self) -> tuple[list[bool], list[list[int]]]:
        """By turn: whether it is the last of its rank, and the turns whose ends nobody reads after it."""
        readers = list(zip(self._turns.needed.tolist(), self._turns.before.tolist(), strict=True))
        is_last, last_reader = [True] * (len(readers) + 1), [*range(len(readers) + 1)]
        for turn, (needed, before) in enumerate(readers, 1):
            is_last[before] = False
            last_reader[needed] = last_reader[before] = turn
        read_last: list[list[int]] = [[] for _ in last_reader]
        for turn, reader in enumerate(last_reader[1:], 1):
            read_last[reader].append(turn)
        return is_last, read_last

    def steps(self, takes: Callable[[int], Floats | float], shape: tuple[int, int]) -> tuple[float, ...]:
        """The time of each sample's step, until its last rank has ended.

        takes: how long the op with this index takes, by sample and replica; called in the order of the turns
        shape: numbers of samples and replicas
        """
        import numpy as np

        turns = self._turns
        ended, spare = {0: np.zeros(shape)}, [np.empty(shape)]
        steps = np.zeros(shape[0])
        columns = (turns.op, turns.reduces, turns.needed, turns.before, turns.delays)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        for turn, (op, reduces, needed, before, delay) in enumerate(rows, 1):
            end = spare.pop() if spare else np.empty(shape)
            if reduces:  # here the replicas meet
                end[...] = ended[before].max(axis=1, keepdims=True) + self._reductions[op]
            else:
                np.add(ended[needed], delay, out=end)
                np.maximum(end, ended[before], out=end)
                end += takes(op)
            if self._is_last[turn]:
                np.maximum(steps, end.max(axis=1), out=steps)
            ended[turn] = end
            spare += [ended.pop(read) for read in self._read_last[turn]]
        return tuple(steps.tolist())


def _waits(
    pairs: Mapping[int, float], ops: list[Op], schedule: Schedule, costs: Costs
) -> dict[int, tuple[float, float]]:
    """By the first op of each pair, how long its two ops wait for other ranks within themselves."""
    if not pairs:
        return {}
    names = ("exchange", "exchange_in_backward")
    forward, backward = (costs.rows(name, schedule.placement, schedule.microbatches) for name in names)

    def of(one: int) -> tuple[float, float]:
        (stage, _, microbatch), (other, _, of_other) = ops[one : one + 2]
        return forward[stage][microbatch], backward[other][of_other]

    return {one: of(one) for one in pairs}


class _Durations:
    """How long ops take in samples and replicas.

    speed: by rank, factors of all its ops, by sample and replica; without them it takes what it costs
    jitter: the standard deviation of a factor that is drawn for each op, in the order of the turns
    """

    def __init__(
        self,
        run: _Sweep,
        shape: tuple[int, int],
        speed: Mapping[int, Floats],
        jitter: float,
        random: Generator,
    ) -> None:
        import numpy as np

        self._run, self._speed, self._jitter, self._random = run, speed, jitter, random
        self._drawn = np.empty(shape)

    def __call__(self, op: int) -> Floats | float:
        run, rank = self._run, self._run.rank[op]
        if op in run.pairs:  # its time counts with that of the second
            return 0.0
        if op - 1 in run.pairs:
            return self._side_by_side(op - 1, rank)
        factor, duration = self._factor(rank), float(run.durations[op])
        return duration if factor is None else duration * factor

    def _side_by_side(self, one: int, rank: int) -> Floats | float:
        """A pair takes what both compute, or the longer of its ops."""
        import numpy as np

        run, (in_forward, in_backward) = self._run, self._run.waits[one]
        of_forward, of_backward = self._factor(rank), self._factor(rank)
        if of_forward is None or of_backward is None:
            return run.pairs[one]
        forward, backward = run.durations[one] * of_forward, run.durations[one + 1] * of_backward
        compute = forward - in_forward * of_forward + backward - in_backward * of_backward
        longest: Floats = np.maximum(np.maximum(forward, backward), compute)
        return longest

    def _factor(self, rank: int) -> Floats | None:
        speed = self._speed.get(rank)
        if not self._jitter:
            return speed
        factor = _around_one(self._random.standard_normal(self._drawn.shape), self._jitter)
        return factor if speed is None else factor * speed


def _around_one(drawn: Floats, deviation: float) -> Floats:
    """Factors with a mean of 1, from standard normal ones, and in their memory."""
    import numpy as np

    drawn *= deviation
    drawn += 1.0
    return np.maximum(drawn, 0.0, out=drawn)


def _slow_steps(run: _Sweep, slow: Mapping[int, float]) -> tuple[float, ...]:
    """The undisturbed step, and those in which one of these ranks alone is slow."""
    import numpy as np

    shape = (1 + len(slow), 1)
    speed = {rank: np.ones(shape) for rank in slow}
    for at, (rank, factor) in enumerate(slow.items(), 1):
        speed[rank][at] = factor
    return run.steps(_Durations(run, shape, speed, 0.0, np.random.default_rng(0)), shape)


def _drawn_steps(
    run: _Sweep,
    jitter: float,
    spread: float,
    slow: Mapping[int, float],
    replicas: int,
    samples: int,
    seed: int,
) -> tuple[float, ...]:
    import numpy as np

    random = np.random.default_rng(seed)
    steps: list[float] = []
    at_once = max(1, _AT_ONCE // replicas)
    if not (jitter or spread):
        at_once = samples = 1
    for begun in range(0, samples, at_once):
        shape = (min(at_once, samples - begun), replicas)
        varied = range(run.ranks) if spread else ()
        speed = {rank: _around_one(random.standard_normal(shape), spread) for rank in varied}
        for rank, factor in slow.items():
            speed.setdefault(rank, np.ones(shape))[:, 0] *= factor
        steps += run.steps(_Durations(run, shape, speed, jitter, random), shape)
    return tuple(steps)


# ---- Refusals


def _check(schedule: Schedule, costs: Costs, jitter: float, spread: float, slow: Mapping[int, float]) -> None:
    if costs.offloads and schedule.trains:
        rule = "copies to host memory are not sampled"
        raise ConfigError("Costs(offloaded=...)", rule, "Leave it out, or simulate one step")
    for name, value in (("jitter", jitter), ("spread", spread)):
        if not (is_number(value) and 0 <= value <= _WIDEST):
            rule = f"it is a share of an op's time, and above {_WIDEST} times would be negative"
            raise ConfigError(f"{name}={value!r}", rule, f"Give 0 to {_WIDEST}")
    for rank, factor in slow.items():
        if type(rank) is not int or not 0 <= rank < schedule.ranks:
            rule = f"the schedule has ranks 0 to {schedule.ranks - 1}"
            raise ConfigError(f"slow rank {rank!r}", rule, "Give one of these")
        if not (is_number(factor) and 0 < factor < inf):
            rule = "it is a factor of the rank's times, finite and above 0"
            raise ConfigError(f"slow rank {rank} with {factor!r}", rule, "Give 1.01 for 1 % slower")


def _check_size(replicas: int, samples: int, seed: int) -> None:
    for name, count in (("replicas", replicas), ("samples", samples)):
        if type(count) is not int or count < 1:
            raise not_a_count(name, count)
        if count > _MOST:
            rule = f"more than {_MOST:,} would fill the memory"
            raise ConfigError(f"{name}={count}", rule, "Give fewer")
    if type(seed) is not int or seed < 0:
        raise ConfigError(f"seed={seed!r}", "it is a whole number from 0 on", "Give 0 or more")
