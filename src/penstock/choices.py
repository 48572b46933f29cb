"""Which experts the tokens of the last step chose, put together from all stages."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from penstock.cutter import Cutter
from penstock.cutting import MeshCutter
from penstock.errors import ConfigError
from penstock.evaluation import in_rows, to_all
from penstock.parallel.routed import Recorded
from penstock.runtime.routed_stage import RoutedStage
from penstock.runtime.stage import Stage
from penstock.runtime.world import World


def chosen_experts(
    stages: Mapping[int, Stage], microbatches: int, cutter: Cutter, world: World
) -> Tensor | list[Tensor]:
    """(rows, sequence, mixtures, top_k) of this pipeline's part of the batch, on each of its processes; a
    list by microbatch where these differ in length. Collective over the pipeline, and over cp.

    Raises ConfigError, on all of them, where the last step recorded nothing.
    """
    mine: dict[int, tuple[list[int], Tensor]] = {}
    for index, stage in stages.items():
        found: Mapping[int, Recorded] = stage.routing.recorded if isinstance(stage, RoutedStage) else {}
        for number, (places, chosen, length) in sorted(found.items()):
            if length is not None and isinstance(cutter, MeshCutter):
                chosen = cutter.beside.whole(chosen, length)
            mine[index * microbatches + number] = list(places), chosen
    parts: dict[int, list[tuple[list[int], Tensor]]] = {}
    for key, part in to_all(mine, world).items():
        parts.setdefault(key % microbatches, []).append(part)
    if len(parts) < microbatches:
        raise ConfigError(
            f"routed_experts() of {len(parts)} microbatches, where a step has {microbatches}",
            "they are what the last step chose, in a pipeline with replay_routing=True and in training mode",
            "Call step() first",
        )
    return in_rows([_in_order(parts[number]) for number in range(microbatches)])  # type: ignore[no-any-return]


def _in_order(parts: list[tuple[list[int], Tensor]]) -> Tensor:
    """The mixtures of all stages, in the order of the layers."""
    order = [place for places, _ in parts for place in places]
    together = torch.cat([chosen for _, chosen in parts], 2)
    return together[:, :, torch.tensor(order, device=together.device).argsort()]
