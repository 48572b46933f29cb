"""The field of candidates: meshes, microbatches, schedules, and what is recomputed.

pp, dp     any factors of the devices             tp    within a host, where the model takes it
cp         where a row has 16,384 tokens or more  ep    within dp_shard x cp, dividing the experts
dp         all in dp_shard, all in dp_replicate, or dp_shard within a host
rows       of a microbatch: 1, 2, 4, 8
schedules  those of `SCHEDULES`, where the pipeline has several ranks
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import inf
from typing import Any, NamedTuple

from penstock.parallel.axes import Axes
from penstock.planner.candidate import Candidate
from penstock.planner.hardware import Cluster
from penstock.planner.workload import Workload

ROWS = (1, 2, 4, 8)
_LONG = 16_384  # tokens of a row, from which on cp is tried
_LEAST = 2048  # tokens of a row that a rank of cp keeps
_MOST_FORWARDS = 65_536  # of a pipeline and a step


class ScheduleKind(NamedTuple):
    """A schedule to try, and about what it promises.

    stages: of a rank
    bubble: its bubble over that of 1F1B
    live: microbatches that a rank holds at its peak, over the pipeline's ranks; inf: all
    """

    name: str
    options: dict[str, Any]
    stages: int
    bubble: float
    live: float

    @property
    def splits(self) -> bool:
        """Whether backwards are split."""
        return self.name not in ("1f1b", "looped_bfs") or "zero_bubble" in self.options


SCHEDULES = (
    ScheduleKind("1f1b", {}, 1, 1.0, 1.0),
    ScheduleKind("1f1b", {"stages_per_rank": 2}, 2, 0.5, 1.5),
    ScheduleKind("1f1b", {"stages_per_rank": 4}, 4, 0.25, 1.25),
    ScheduleKind("1f1b", {"stages_per_rank": 2, "zero_bubble": True}, 2, 0.25, 1.5),
    ScheduleKind("looped_bfs", {"stages_per_rank": 2}, 2, 0.5, inf),
    ScheduleKind("zb_h1", {}, 1, 0.4, 1.0),
    ScheduleKind("zb_h2", {}, 1, 0.1, 2.0),
    ScheduleKind("zb_v", {}, 2, 0.1, 1.0),
    ScheduleKind("v_half", {}, 2, 0.4, 0.5),
    ScheduleKind("v_min", {}, 2, 0.7, 0.33),
    ScheduleKind("dualpipe_v", {}, 2, 0.35, 1.0),
)


def meshes(model: Workload, cluster: Cluster, batch: int, length: int) -> Iterator[Candidate]:
    """A candidate for each mesh and number of rows: with 1F1B, nothing recomputed, weights kept whole."""
    experts = _experts(model)
    for ranks in _factors(cluster.world, most=model.layers):
        for tp in _factors(cluster.devices):
            rest, uneven = divmod(cluster.world, ranks * tp)
            for cp in _factors(rest, most=length // _LEAST if length >= _LONG else 1) if not uneven else ():
                for axes in _data(rest // cp, cp, tp, experts, cluster):
                    yield from _microbatches(ranks, axes, batch, length, model)


def runs(mesh: Candidate, layers: int) -> Iterator[tuple[Candidate, ScheduleKind]]:
    """The schedules of a mesh."""
    for kind in SCHEDULES:
        if mesh.ranks == 1 and (kind.name, kind.options) != ("1f1b", {}):
            continue
        stages = mesh.ranks * kind.stages
        if stages <= layers and stages * mesh.microbatches <= _MOST_FORWARDS:
            yield replace(mesh, schedule=kind.name, options=tuple(sorted(kind.options.items()))), kind


def _data(dp: int, cp: int, tp: int, experts: int, cluster: Cluster) -> Iterator[Axes]:
    """The ways to divide `dp` ranks in copies and shards."""
    inside = max(1, cluster.devices // (cp * tp))
    shards = {dp, 1, *([inside] if dp % inside == 0 else [])}
    for dp_shard in sorted(shards, reverse=True):
        for ep in _factors(dp_shard * cp, most=experts):
            if experts % ep == 0:
                yield Axes(dp_replicate=dp // dp_shard, dp_shard=dp_shard, cp=cp, ep=ep, tp=tp)


def _microbatches(ranks: int, axes: Axes, batch: int, length: int, model: Workload) -> Iterator[Candidate]:
    mine, uneven = divmod(batch, axes.batch_parts)
    for rows in ROWS:
        if not uneven and mine % rows == 0 and mine >= rows:
            yield Candidate(
                ranks,
                axes,
                rows=rows,
                length=length,
                microbatches=mine // rows,
                precision=model.precision,
                sequence_parallel=axes.tp > 1 and model.shards_sequence and length % (axes.tp * axes.cp) == 0,
            )


def _experts(model: Workload) -> int:
    """Experts of a layer; 1 for a model without a mixture."""
    config = model.config.get_text_config()
    names = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    return next((count for name in names if (count := getattr(config, name, None))), 1)


def _factors(count: int, most: int | None = None) -> list[int]:
    return [size for size in range(1, min(count, most or count) + 1) if count % size == 0]
