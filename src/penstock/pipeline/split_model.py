"""A model split into stages: this process's modules and parameters, the global norm, the model's files."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.profiler import record_function
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial

from penstock.errors import ModelError
from penstock.models.weights.folder import write_folder
from penstock.models.weights.saved import MAX_SHARD_SIZE
from penstock.parallel.reductions import Reductions
from penstock.parallel.world import World
from penstock.pipeline.building.stages import BuiltStages, StageFacts, stage_facts
from penstock.pipeline.model_files import ModelFiles, ranks_of
from penstock.private import foreach_mul_, foreach_norm
from penstock.runtime.ranks import Ranks, collective
from penstock.runtime.sharded_weights import full_tensor, local_shard
from penstock.runtime.stage import Stage


class SplitModel:
    """This process's stages of a model: parameters, gradients and files. Pipeline adds the steps.

    Attributes:
        files: saves and loads the weights of this process's stages
        not_finite: ranks and hosts with gradients that were not finite in the last norm; empty without any
    """

    not_finite = ""
    _spoiled: list[tuple[int, str, int]] | None = None  # `_not_finite_here` before clipping made all NaN

    def __init__(self, built: BuiltStages) -> None:
        """Collective."""
        self.schedule, self._world = built.schedule, built.world
        self._stages = {stage.index: stage for stage in sorted(built.stages, key=lambda stage: stage.index)}
        self._layers, self._copies = built.layers, built.weights.copies
        self.files = ModelFiles(built)
        placement = built.schedule.placement
        self._info = stage_facts(built.stages, built.layers, placement, built.world.processes)

    # ---- stages and processes

    @property
    def stages(self) -> tuple[Stage, ...]:
        """This process's stages, in order."""
        return tuple(self._stages.values())

    @property
    def modules(self) -> Mapping[int, nn.Module]:
        """This process's modules by stage, in order."""
        return {index: stage.module for index, stage in self._stages.items()}

    @property
    def info(self) -> tuple[StageFacts, ...]:
        """Position, rank, layers, parameters and bytes of every stage at the time of the build."""
        return self._info

    @property
    def config(self) -> Any:
        """The Hugging Face config of the whole model. Raises ModelError for one made by from_provider."""
        return self.files.saved.config

    @property
    def batch_part(self) -> tuple[int, int]:
        """(index, count): which part of the whole batch `step` takes on this process.

        More than one part where the mesh has ranks on dp_replicate and dp_shard.
        """
        return self._world.reductions.batch_part

    @property
    def reductions(self) -> Reductions:
        """Reductions over the ranks of the mesh that host the same stages."""
        return self._world.reductions

    @property
    def device(self) -> torch.device:
        """The device of this process's stages."""
        return self._world.device

    @property
    def processes(self) -> Ranks:
        """The processes of this pipeline."""
        return self._world.processes

    @property
    def mesh(self) -> DeviceMesh | None:
        """The mesh of all ranks; None where this process hosts all ranks."""
        return self._world.mesh

    @property
    def ranks(self) -> Ranks:
        """The processes of all pipelines of the mesh, or of this one without a mesh; they wait for a disk."""
        everyone = self.reductions.everyone
        return self.processes if everyone.count == 1 else everyone.patient

    # ---- parameters and gradients

    def named_parameters(self, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this process's parameters under the whole model's names.

        A process with several copies, of a tied weight or of the model, yields them all.

        Args:
            remove_duplicate: use the first name of a tied weight on every stage, so that parameter groups
                made by name treat its copies equally; False uses the name on the copy's own stage
        """
        ties = self.files.ties if remove_duplicate else ()
        first = {name: names[0] for names in ties for name in names}
        for stage in self._stages.values():
            for name, parameter in stage.module.named_parameters():
                yield first.get(name, name), parameter

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield this process's parameters, for an optimizer."""
        return (parameter for _, parameter in self.named_parameters())

    def owned_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this process's share of parameters, so that all processes together yield each weight once."""
        for index, stage in self.files.stages.items():
            copies = self.files.tied | self._copies.get(index, frozenset())
            yield from ((n, p) for n, p in stage.module.named_parameters() if n not in copies)

    def zero_grad(self) -> None:
        """Set the gradients of this process's parameters to None."""
        for parameter in self.parameters():
            parameter.grad = None

    @collective
    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> float:
        """Scale all gradients so that their global norm is at most `max_norm`. Collective.

        Returns the norm before clipping, over all stages and ranks, with a shared weight counted once; it is
        the same on every rank.
        """
        with record_function("clip"):
            norm = self._norm()
            self._clip(norm, max_norm)
        return norm

    @torch.no_grad()
    def _squared_norm(self) -> Tensor:
        """The square of the norm of this rank's stages, as a vector of one entry.

        Collective over the ranks with the same stages. Raises ModelError for a sparse gradient.
        """
        for name, parameter in self.named_parameters():
            if parameter.grad is not None and parameter.grad.is_sparse:
                raise ModelError(
                    f"the gradient of {name}, which is sparse",
                    "the norm is computed over dense gradients",
                    "Build the embedding with sparse=False",
                )
        counted = [parameter.grad for _, parameter in self.owned_parameters() if parameter.grad is not None]
        squares = torch.zeros(1, dtype=torch.float64, device=self._world.device)
        for holders, gradients in _by_holders(counted, self._world).items():
            norms = torch.stack([norm.to(self._world.device) for norm in foreach_norm(gradients)])
            squares += norms.double().square().sum() / holders
        return self._world.reductions.sum_over_mesh(squares)

    @collective
    @torch.no_grad()
    def find_not_finite(self) -> str:
        """The ranks with gradients that are not finite, and the first such gradient of each. Collective.

        Returns text for an error, the same on all ranks of the pipeline; empty if all gradients are finite,
        as when the norm overflows its dtype. A process checks its own shard of a sharded gradient. After
        `clip_grad_norm_`, which then makes other gradients NaN too, as torch's does, the result is that from
        before the clipping.
        """
        ours = self._not_finite_here() if self._spoiled is None else self._spoiled
        everyone = sorted(tuple(entry) for process in self.processes.gather(ours) for entry in process)
        return " and ".join(
            f"{self._world.transport.name_of(rank)} ({name}{f' and {more} more' if more else ''})"
            for rank, name, more in everyone
        )

    def _not_finite_here(self) -> list[tuple[int, str, int]]:
        """For each of this process's ranks: the first gradient that is not finite, and how many more."""
        names: dict[int, list[str]] = {}
        for index, stage in self._stages.items():
            for name, parameter in stage.module.named_parameters():
                if parameter.grad is not None and not local_shard(parameter.grad).isfinite().all():
                    names.setdefault(self.schedule.placement.rank_of[index], []).append(name)
        return [(rank, first, len(more)) for rank, (first, *more) in names.items()]

    @torch.no_grad()
    def _norm(self) -> float:
        """The norm over all gradients. Collective."""
        squares, hosted = self._squared_norm(), range(len(self._world.ranks))
        # the first rank of a process contributes the square for all of its ranks
        ours = [squares if index == 0 else squares.new_zeros(1) for index in hosted]
        by_rank = torch.stack(self._world.transport.all_gather(ours)).cpu()  # a GPU may add in another order
        odd = [rank for rank, finite in enumerate(by_rank.isfinite().flatten().tolist()) if not finite]
        self.not_finite, self._spoiled = " and ".join(map(self._world.transport.name_of, odd)), None
        return float(by_rank.sum().sqrt())

    @torch.no_grad()
    def _clip(self, norm: float, max_norm: float) -> None:
        scale = clip_scale(norm, max_norm)
        if not math.isfinite(norm):
            self._spoiled = self._not_finite_here()
        if not scale >= 1:  # a norm of NaN makes all gradients NaN, as in torch
            foreach_mul_([local_shard(p.grad) for p in self.parameters() if p.grad is not None], scale)

    # ---- files

    def load_weights(self, folder: str | Path) -> None:
        """Read this process's weights, or its adapter's, in place, from a folder that save_pretrained wrote.

        Raises CheckpointError for a folder that is missing or has other weights.
        """
        self.files.load(folder)

    @collective
    def save_pretrained(self, path: str | Path, max_shard_size: int | str = MAX_SHARD_SIZE) -> None:
        """Write a folder that `from_pretrained` opens: complete or not at all. Collective.

        For a model with an adapter it is PEFT's folder, for `PeftModel.from_pretrained(base_model, path)`.

        Args:
            path: on a file system that all processes share
            max_shard_size: of each file, bytes or text such as "5GB"; a single weight may be larger

        Raises ModelError for weights that do not have the model's names, CheckpointError for weights on
        another mesh; RunError on the other ranks where one rank fails with another error.
        """
        action = f"write {path}"
        self.ranks.attempt(action, lambda: self.files.check(pretrained=True))
        write, processes = self.files.collect(), self.processes.patient

        def write_whole() -> None:
            if self.files.written_here:
                write_folder(Path(path), lambda folder: write(folder, processes, max_shard_size), processes)

        self.ranks.attempt(action, write_whole)


# ---- the norm of all gradients, over all stages and all ranks of the mesh


def clip_scale(norm: float, max_norm: float) -> float:
    """The factor for gradients of this norm, which has an effect if it is below 1."""
    return max_norm / (norm + 1e-6)  # as torch.nn.utils.clip_grad_norm_


def _by_holders(gradients: Sequence[Tensor], world: World) -> dict[int, list[Tensor]]:
    """This rank's gradients or shards, by the number of ranks of its stage that have the same one."""
    replicas = max(1, len(world.reductions.stage_ranks))
    by_holders: dict[int, list[Tensor]] = {}
    for gradient in gradients:
        if not isinstance(gradient, DTensor):
            by_holders.setdefault(replicas, []).append(gradient)
        elif world.reductions.stage_ranks.issuperset(ranks_of(gradient)):
            by_holders.setdefault(replicas // _shard_count(gradient), []).append(gradient.to_local())
        else:  # on a user's own mesh
            by_holders.setdefault(replicas, []).append(full_tensor(torch.linalg.vector_norm(gradient)))
    return by_holders


def _shard_count(gradient: DTensor) -> int:
    mesh, placements = gradient.device_mesh, gradient.placements
    assert not any(isinstance(placement, Partial) for placement in placements), "a sum not yet made"
    return math.prod(mesh.size(dim) for dim, kind in enumerate(placements) if not kind.is_replicate())
