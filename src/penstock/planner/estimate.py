"""Predict a step of a candidate: its timeline, and the memory of each rank.

    op              roofline of its parts, and the collectives of tp, cp and ep within it      stages.py
    edge            a message of hidden states to the next stage's rank
    first F         and FSDP's gathering of the stage's weights, layer by layer under the layers before
    last W or B     then the reduction of the stage's gradients, while its result is on the way
    after all       the sum of tied weights' gradients, the norm, and the optimizer

The schedule's simulation has all but the last line. What is not counted: data loading, checkpoints, the time
of the host, and waiting for slow ranks.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from itertools import chain, pairwise
from typing import Any, NamedTuple

from penstock.errors import ConfigError
from penstock.models.activation_offloading import check_schedule
from penstock.models.split.balanced_split import LayerCosts, balanced_split, ranges
from penstock.models.split.partition import check_enough
from penstock.pipeline.building.memory import RankMemory
from penstock.planner.at_hand import is_cpu
from penstock.planner.candidate import Candidate
from penstock.planner.communication import (
    Group,
    all_gather,
    all_reduce,
    groups,
    reduce_scatter,
    send,
)
from penstock.planner.hardware import Cluster, Device
from penstock.planner.stages import Parts, StageParts
from penstock.planner.weights import rank_memory
from penstock.planner.workload import Workload
from penstock.schedule import Costs, Placement, Proof, Schedule, Timeline, simulate, verify
from penstock.schedule.offload import STEPS, OffloadStep
from penstock.schedule.ops import KINDS
from penstock.schedule.simulation.host_link import in_front_of
from penstock.schedule.simulation.recompute import StageMicrobatches, first_in_flight, mixed
from penstock.schedule.simulation.simulate import durations_of

_OFFLOADED = 0.5  # of a host's memory for activations: the rest is for checkpoints, data and the system
_PARTS, _PARTS_OF_ENDS = 100, 20  # to which costs are rounded for a split: of layers, of embedding and head


class HostRoom(NamedTuple):
    """A device's room in its host's memory for activations. rate: bytes/s that it moves there, or back"""

    nbytes: float
    rate: float

    @classmethod
    def of(cls, cluster: Cluster) -> HostRoom | None:
        """None for a CPU, whose memory that is."""
        nbytes = _OFFLOADED * cluster.host_memory / cluster.devices
        return None if is_cpu(cluster.device) else cls(nbytes, cluster.host_link.rate)


@dataclass(frozen=True)
class Estimate:
    """A predicted step of a candidate.

    Attributes:
        candidate: with the split that was chosen
        timeline: of one pipeline, up to the last reduction
        after: seconds after it: tied weights, the norm, the optimizer
        memory: of each rank, activations included
        host: bytes that each rank has in host memory at its peak
        waits: finds the seconds of communication that each rank waits for, by axis; `host` is its host link
        flops: of the model for a step, without recomputation
        peak: FLOP/s of all devices, in the dtype of products
    """

    candidate: Candidate
    timeline: Timeline
    after: float
    memory: tuple[RankMemory, ...]
    host: tuple[float, ...]
    waits: Callable[[], Sequence[Mapping[str, float]]] = field(repr=False, compare=False)
    flops: float
    peak: float

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.timeline.makespan + self.after

    @property
    def tokens_per_second(self) -> float:
        """Of all devices."""
        return self.candidate.batch * self.candidate.length / self.seconds

    @property
    def mfu(self) -> float:
        """The share of the devices' peak that the model's own FLOPs take."""
        return self.flops / self.seconds / self.peak

    @property
    def bubble(self) -> float:
        """The share of the step in which ranks wait for others, reductions aside."""
        return self.timeline.bubble

    @cached_property
    def fullest(self) -> int:
        """The rank that holds most."""
        return max(range(len(self.memory)), key=lambda rank: self.memory[rank].total)

    @cached_property
    def exposed(self) -> Mapping[str, float]:
        """Seconds of communication that a step waits for, by axis, on the rank that waits most."""
        longest = {axis: max(waits.get(axis, 0.0) for waits in self._by_rank) for axis in self._axes}
        return {axis: time for axis, time in longest.items() if time}

    @cached_property
    def spent(self) -> Mapping[str, float]:
        """Seconds of a step by what they go to, means over ranks; they add up to a step."""
        ranks = len(self._by_rank)
        spent = {axis: sum(waits.get(axis, 0.0) for waits in self._by_rank) / ranks for axis in self._axes}
        spent["optimizer"] = self.after
        waited = sum(idle.peer + idle.outside + idle.runtime for idle in self.timeline.idle)
        spent["bubble"] = (waited - sum(self.timeline.stalled)) / ranks
        spent["compute"] = self.seconds - sum(spent.values())
        return {name: time for name, time in spent.items() if time}

    @cached_property
    def _by_rank(self) -> Sequence[Mapping[str, float]]:
        return self.waits()

    @property
    def _axes(self) -> Sequence[str]:
        return list(dict.fromkeys(axis for waits in self._by_rank for axis in waits))

    @property
    def nbytes(self) -> int:
        """What the fullest rank holds."""
        return self.memory[self.fullest].total


def estimate(model: Workload, candidate: Candidate, cluster: Cluster) -> Estimate:
    """Predict a step of `candidate`.

    Raises ConfigError where the mesh does not fit into the cluster, or the schedule does not exist for these
    numbers; PartitionError where there are more stages than layers.
    """
    return Trial.of(model, candidate, cluster).estimate()


@dataclass(frozen=True)
class Trial:
    """A candidate with all that does not depend on which microbatches are recomputed.

    candidate: with its split
    kept, recomputed: costs with every microbatch kept, and sizes with every one recomputed
    fixed: the memory of each rank without activations
    flops: of the model for a row; tied: bytes of gradients that the first and the last stage sum
    splits: whether the schedule splits backwards
    """

    candidate: Candidate
    cluster: Cluster
    proof: Proof
    stages: tuple[StageParts, ...]
    kept: Costs
    recomputed: Costs
    fixed: tuple[RankMemory, ...]
    flops: float
    tied: int
    computed: str
    splits: bool

    @classmethod
    def of(cls, model: Workload, candidate: Candidate, cluster: Cluster, *, buffers: bool = True) -> Trial:
        """buffers: whether messages hold memory, too. Without it a simulation takes half the time."""
        across = groups(candidate.ranks, candidate.axes, cluster)
        overlapped = candidate.practice.overlapped
        parts = Parts.of(model.measured(candidate), model.traffic(candidate), across, cluster, overlapped)
        everything = candidate.recomputed != "none" and candidate.in_flight is None
        proof = proven(candidate)
        splits = bool((proof.arrays.kind == KINDS.index("I")).any())
        _check_offloading(candidate, proof.schedule, splits)
        placement = proof.schedule.placement
        check_enough(model.layers, placement.depth)
        if candidate.split:
            split = ranges(candidate.split)
        else:
            split = _even(parts.layer_costs(everything), placement)
        candidate = replace(candidate, split=tuple(map(len, split)))
        stages, weights = tuple(parts.stages(split)), model.memory(candidate).stages(split)
        moved = _Mesh(candidate, cluster, across, buffers, splits, parts.shared)
        kept = moved.costs(placement, stages, weights)
        most_live = _most_live(proof)
        fixed = tuple(
            rank_memory(
                [weights[stage % placement.depth] for stage in placement.stages_of(rank)],
                candidate.reshard,
                [most_live[stage] > 1 for stage in placement.stages_of(rank)],
            )
            for rank in range(candidate.ranks)
        )
        return cls(
            candidate,
            cluster,
            proof,
            stages,
            kept,
            replace(kept, **moved.sizes(stages, recomputed=True)),
            fixed,
            model.flops(candidate.length),
            model.tied(candidate) if placement.depth > 1 else 0,
            model.computed,
            splits,
        )

    def costs(self) -> Costs:
        """With the microbatches recomputed that the candidate says."""
        if self.candidate.recomputed == "none":
            return self.kept
        return mixed(self.proof.schedule, self.kept, self.recomputed, self.again)

    def busy(self) -> list[float]:
        """By rank, the seconds of its ops."""
        import numpy as np

        times, placement = durations_of(self.proof.arrays, self.kept), self.proof.schedule.placement
        busy = [float(np.sum(times[first:last])) for first, last in pairwise(self.proof.arrays.bounds)]
        recomputed = self.kept.of_stages("recomputed", placement)
        for stage, count in Counter(stage for stage, _ in self.again).items():
            busy[placement.rank_of[stage]] += count * recomputed[stage]
        return busy

    def estimate(self) -> Estimate:
        """Simulate it."""
        timeline = simulate(self.proof, self.costs())
        memory = tuple(
            rank._replace(activations=int(peak))
            for rank, peak in zip(self.fixed, timeline.peak_memory, strict=True)
        )
        peak = self.cluster.device.peak(self.computed) * self.candidate.devices
        return Estimate(
            self.candidate,
            timeline,
            self.after(),
            memory,
            tuple(self.away(self.again)),
            partial(self.waits, timeline),
            self.flops * self.candidate.batch,
            peak,
        )

    @property
    def least_bytes(self) -> float:
        """What the fullest rank holds at least, with all layers recomputed or offloaded."""
        import numpy as np

        names, forms = ("activation", "offloaded", "held_in_backward"), [self.recomputed]
        if self.candidate.offload_ahead:
            forms.append(self.kept)
        placement = self.proof.schedule.placement
        rows = ([costs.rows(name, placement, 1) for name in names] for costs in forms)
        sizes = [(np.array(kept) - np.array(away), back) for kept, away, back in rows]
        activation, backward = (np.min(columns, axis=0)[:, 0] for columns in zip(*sizes, strict=True))
        least = 0.0
        for rank, (fixed, live) in enumerate(zip(self.fixed, self.proof.peak_live, strict=True)):
            stages = placement.stages_of(rank)
            together = live * min(activation[stage] for stage in stages)
            least = max(least, fixed.fixed + max(together, max(backward[stage] for stage in stages)))
        return least

    def peaks(self, places: StageMicrobatches) -> list[float]:
        """By rank, the most bytes of activations; of messages, too, where these hold memory.

        places: the (stage, microbatch) whose layers run again
        """
        if self.kept.counts_buffers:
            costs = mixed(self.proof.schedule, self.kept, self.recomputed, places)
            return list(simulate(self.proof, costs).peak_memory)
        return self._peaks_without_messages(places)

    def _peaks_without_messages(self, places: StageMicrobatches) -> list[float]:
        """The order of a rank's ops decides, not their times."""
        import numpy as np

        arrays, again = self.proof.arrays, self._is_again(places)

        def size(name: str) -> Any:
            return self._sizes(name, again)[arrays.stage, arrays.microbatch]

        kept, forward, backward, for_weight = map(
            size, ("activation", "held_in_forward", "held_in_backward", "held_for_weight")
        )
        is_f, is_b, is_i, is_w = (arrays.kind == kind for kind in range(4))
        start = np.select([is_f, is_b | is_i], [forward, backward - kept], 0.0)
        ends = [kept - forward, -backward, for_weight - backward, -for_weight]
        end = np.select([is_f, is_b, is_i, is_w], ends, 0.0)
        return self._highest([self._copied("reload", "release", again), start, end])

    def away(self, places: StageMicrobatches) -> list[float]:
        """By rank, the most bytes of activations in host memory. places: as for `peaks`"""
        if not self.candidate.offload_ahead:
            return [0.0] * self.proof.schedule.ranks
        return self._highest([self._copied("offload", "restore", self._is_again(places))])

    def _is_again(self, places: StageMicrobatches) -> Any:
        """An array of booleans by stage and microbatch."""
        import numpy as np

        again = np.zeros((self.proof.schedule.stages, self.proof.schedule.microbatches), bool)
        if places:
            again[tuple(np.array([*chain.from_iterable(places)]).reshape(-1, 2).T)] = True
        return again

    def _sizes(self, name: str, again: Any) -> Any:
        """An array of the sizes called `name`, by stage and microbatch. again: which of them run again"""
        import numpy as np

        both = (costs.rows(name, self.proof.schedule.placement, 1) for costs in (self.recomputed, self.kept))
        return np.where(again, *map(np.array, both))

    def _copied(self, more: OffloadStep, less: OffloadStep, again: Any) -> Any:
        """By op, what the copies in front of it change: bytes at `more`, less those at `less`."""
        import numpy as np

        changes = np.zeros(len(self.proof.arrays.ops))
        if self.candidate.offload_ahead:
            sizes = self._sizes("offloaded", again)
            for step, sign in ((more, 1.0), (less, -1.0)):
                at, stage, microbatch = _host_steps(_of_schedule(self.candidate))[step]
                np.add.at(changes, at, sign * sizes[stage, microbatch])
        return changes

    def _highest(self, changes: Sequence[Any]) -> list[float]:
        """By rank, the highest sum of changes. changes: arrays by op, in the order in which they happen"""
        import numpy as np

        by_op, bounds = np.stack(changes, axis=1), pairwise(self.proof.arrays.bounds)
        return [float(np.cumsum(by_op[first:last]).max(initial=0.0)) for first, last in bounds]

    @property
    def again(self) -> StageMicrobatches:
        """The (stage, microbatch) whose layers run again."""
        if self.candidate.recomputed == "none":
            return frozenset()
        return first_in_flight(self.proof.schedule, self.candidate.in_flight)

    def fits(self, limit: float, places: StageMicrobatches = frozenset()) -> list[bool]:
        """By rank, whether its memory is within `limit`, and its share of the host's memory is enough."""
        host = HostRoom.of(self.cluster) or HostRoom(0.0, 0.0)
        figures = zip(self.fixed, self.peaks(places), self.away(places), strict=True)
        return [rank.fixed + peak <= limit and away <= host.nbytes for rank, peak, away in figures]

    def counts(self, limit: float) -> tuple[int, ...]:
        """The least microbatches in flight that each rank recomputes to fit into `limit`; all of them fit."""
        schedule = self.proof.schedule
        low, high = [0] * schedule.ranks, list(self.proof.peak_live)
        fitting = tuple(high)
        while low != high:  # of all ranks at once: to recompute more never holds more
            middle = [(few + many) // 2 for few, many in zip(low, high, strict=True)]
            enough = self.fits(limit, first_in_flight(schedule, middle))
            if all(enough):
                fitting = tuple(middle)
            for rank, fit in enumerate(enough):
                if low[rank] < high[rank]:
                    low[rank], high[rank] = (
                        (low[rank], middle[rank]) if fit else (middle[rank] + 1, high[rank])
                    )
        if self.kept.counts_buffers and not all(self.fits(limit, first_in_flight(schedule, low))):
            return fitting  # how long a message is held depends on other ranks
        return tuple(low)

    def after(self) -> float:
        """Seconds from the last reduction to the end of the step, on the rank that takes longest."""
        across = groups(self.candidate.ranks, self.candidate.axes, self.cluster)
        norm = sum(all_reduce(8.0, across[axis], self.cluster) for axis in ("pp", "loss", "tp"))
        tied = send(self.tied, across["pp"].hosts > 1, self.cluster) if self.tied else 0.0
        return tied + norm + max(optimizer_seconds([rank], self.cluster.device) for rank in self.fixed)

    def waits(self, timeline: Timeline) -> list[Mapping[str, float]]:
        """By rank, the seconds of communication that it waits for, by axis."""
        schedule, again = self.proof.schedule, self.again
        placement, by_rank = schedule.placement, list[Mapping[str, float]]()
        gathers = self.kept.of_stages("gather", placement)
        for rank, idle in enumerate(timeline.idle):
            host = timeline.stalled[rank]
            waits = defaultdict[str, float](float, pp=idle.wire, dp=idle.reduce, host=host)
            for stage in placement.stages_of(rank):
                here = [op.microbatch for op in schedule.programs[rank] if op[:2] == (stage, "F")]
                share = sum((stage, i) in again for i in here) / max(len(here), 1)
                within = self.stages[stage % placement.depth].within(share)
                for axis, taken in within.items():
                    waits[axis] += len(here) * taken
                waits["dp"] += gathers[stage]
            by_rank.append(waits)
        return by_rank


@dataclass(frozen=True)
class _Mesh:
    """What stages take and hold on a mesh, in the terms of `schedule.Costs`."""

    candidate: Candidate
    cluster: Cluster
    across: Mapping[str, Group]
    buffers: bool
    split: bool
    shared: int

    def costs(
        self,
        placement: Placement,
        stages: Sequence[StageParts],
        weights: Sequence[Sequence[RankMemory]],
    ) -> Costs:
        """With every microbatch kept."""
        offloading = self.candidate.offloading()
        sent = [stage.works[-1].nbytes.sent if stage.works else 0 for stage in stages]
        gathers = [self.gather(*both) for both in zip(stages, weights, strict=True)]
        every = [time if self.candidate.reshard else 0.0 for time in gathers]  # gathered in each F and I anew
        return Costs(
            forward=[stage.forward + gather for stage, gather in zip(stages, every, strict=True)],
            input_grad=[stage.input_grad + gather for stage, gather in zip(stages, every, strict=True)],
            weight_grad=[stage.grad_of(self.split, self.candidate.microbatches) for stage in stages],
            bytes=self.edges(placement, sent),
            bandwidth=1.0,  # of edges in seconds: some cross hosts, and some do not
            **self.sizes(stages, recomputed=False),
            host_bandwidth=None if offloading is None else self.cluster.host_link.rate,
            offload_ahead=1 if offloading is None else offloading.ahead,
            recomputed=[stage.recomputed for stage in stages],
            buffer=sent if self.buffers else 0.0,
            gather=0.0 if self.candidate.reshard else gathers,
            reduction=[reduction_seconds(parts, self.across, self.cluster) for parts in weights],
        )

    def sizes(self, stages: Sequence[StageParts], *, recomputed: bool) -> dict[str, Any]:
        """Of a microbatch. recomputed: whether its layers run again"""
        offloading = self.candidate.offloading()
        nbytes = [stage.nbytes(recomputed, self.split, self.shared, offloading) for stage in stages]
        return {
            "activation": [size.activation for size in nbytes],
            "held_for_weight": [size.for_weight for size in nbytes],
            "held_in_forward": [size.forward_peak for size in nbytes],
            "held_in_backward": [size.backward_peak for size in nbytes],
            "offloaded": 0.0 if offloading is None else [size.offloaded for size in nbytes],
        }

    def edges(self, placement: Placement, sent: Sequence[int]) -> list[float]:
        """Seconds of a message over the edge behind each stage. Rank r begins at device r x ranks a stage."""
        stride, devices = self.candidate.axes.ranks_per_stage, self.cluster.devices
        hosts = [rank * stride // devices for rank in placement.rank_of]
        depth = placement.depth
        return [
            self._message(size, hosts[stage] != hosts[stage + 1])
            if stage + 1 < depth and placement.rank_of[stage] != placement.rank_of[stage + 1]
            else 0.0
            for stage, size in enumerate(sent)
        ]

    def _message(self, nbytes: int, between_hosts: bool) -> float:
        """Seconds. A part that a rank of tp sends is gathered behind, unless tp shards the sequence there."""
        candidate = self.candidate
        if not candidate.practice.sharded_edges:
            return send(nbytes, between_hosts, self.cluster)
        whole = 0.0 if candidate.sequence_parallel else all_gather(nbytes, self.across["tp"], self.cluster)
        return send(nbytes / candidate.axes.tp, between_hosts, self.cluster) + whole

    def gather(self, stage: StageParts, weights: Sequence[RankMemory]) -> float:
        """Seconds that a forward waits for FSDP's gatherings: of each part under the parts before it."""
        group = self.across["shards"]
        if group.size == 1:
            return 0.0
        layers = [part.forward for part in stage.layers]
        rest = stage.forward - sum(layers)  # embedding and head, which are gathered first
        here = computed = 0.0
        for part, taken in zip(weights, [rest, *layers], strict=True):
            if part.gathered_weights:
                here += all_gather(part.gathered_weights, group, self.cluster)
            computed = max(here, computed) + taken
        return computed - stage.forward


def reduction_seconds(weights: Sequence[RankMemory], across: Mapping[str, Group], cluster: Cluster) -> float:
    """Seconds of FSDP's sums of the gradients of these parts: over shards, then of the shards over copies."""
    shards, copies = across["shards"], across["dp_replicate"]
    return sum(
        reduce_scatter(part.gathered_gradients, shards, cluster)
        + all_reduce(part.gathered_gradients / shards.size, copies, cluster)
        for part in weights
        if part.gathered_gradients
    )


def optimizer_seconds(memory: Sequence[RankMemory], device: Device) -> float:
    """Seconds of the norm and the optimizer over the weights of `memory`, which the bandwidth bounds.

    The norm reads gradients once, and clipping reads and writes them. The optimizer reads gradients, and
    reads and writes weights and states.
    """
    moved = sum(4 * part.gradients + 2 * part.weights + 2 * part.optimizer for part in memory)
    return moved / (device.bandwidth * device.efficiencies.memory)


def _even(costs: LayerCosts, placement: Placement) -> list[range]:
    """The balanced split, by costs in parts of a mean layer's, so that many meshes share one."""
    mean = sum(costs.layers) / len(costs.layers) or 1.0

    def rounded(cost: float, parts: int) -> int:
        return round(cost / mean * parts) * (_PARTS // parts)

    return _split(
        tuple(rounded(cost, _PARTS) for cost in costs.layers),
        rounded(costs.embedding, _PARTS_OF_ENDS),
        rounded(costs.head, _PARTS_OF_ENDS),
        placement.depth,
        tuple(map(tuple, placement.holders)),
    )


@lru_cache(maxsize=4096)
def _split(
    layers: tuple[int, ...], embedding: int, head: int, depth: int, holders: tuple[tuple[int, ...], ...]
) -> list[range]:
    return balanced_split(LayerCosts(layers, embedding, head), depth, holders=holders)


@lru_cache(maxsize=4096)
def _proven(candidate: Candidate) -> Proof:
    return verify(candidate.built())


def proven(candidate: Candidate) -> Proof:
    """The proof of a candidate's schedule: one for all candidates with the same numbers."""
    return _proven(replace(_of_schedule(candidate), offload_ahead=0))


def _of_schedule(candidate: Candidate) -> Candidate:
    """What the order of ops and of copies depends on."""
    return Candidate(
        candidate.ranks,
        schedule=candidate.schedule,
        options=candidate.options,
        microbatches=candidate.microbatches,
        offload_ahead=candidate.offload_ahead,
    )


@lru_cache(maxsize=4096)
def _host_steps(candidate: Candidate) -> Mapping[OffloadStep, Any]:
    """By step of the copies to and from the host: arrays of the ops behind, the stages and microbatches."""
    import numpy as np

    steps: dict[OffloadStep, list[tuple[int, int, int]]] = {step: [] for step in STEPS}
    for at, copies in enumerate(in_front_of(proven(candidate).arrays, candidate.offload_ahead)):
        for step, stage, microbatch in copies:
            steps[step].append((at, stage, microbatch))
    return {step: np.array(rows, int).reshape(-1, 3).T for step, rows in steps.items()}


def offloads(candidate: Candidate) -> bool:
    """Whether the activations of any microbatch leave their device."""
    return bool(_host_steps(_of_schedule(candidate))["offload"].size)


def _check_offloading(candidate: Candidate, schedule: Schedule, splits: bool) -> None:
    """Raise ConfigError for offloaded activations that have no prediction. splits: whether backwards do"""
    if (offloading := candidate.offloading()) is None:
        return
    if splits:
        rule = "what is held of offloaded activations between I and W is not predicted"
        remedy = "Take 1f1b, or offload nothing"
        raise ConfigError(f"offloaded activations with {candidate.label}", rule, remedy)
    if candidate.sequence_parallel:
        rule = "what stays of offloaded activations that tp shards is not predicted"
        remedy = "Set sequence_parallel: false, or offload nothing"
        raise ConfigError("offloaded activations with sequence_parallel", rule, remedy)
    if not offloads(candidate):
        check_schedule(offloading, schedule, candidate.checkpointing())


def _most_live(proof: Proof) -> list[int]:
    """By stage, the most microbatches between F and the end of their backward."""
    import numpy as np

    arrays = proof.arrays
    change = np.array([{"F": 1, "B": -1, "I": 0, "W": -1}[kind] for kind in KINDS])[arrays.kind]
    stages = range(proof.schedule.stages)  # each on one rank, whose ops are in order
    return [int(np.cumsum(change[arrays.stage == stage]).max(initial=0)) for stage in stages]
