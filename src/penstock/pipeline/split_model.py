"""A model split into stages: this process's modules and parameters, the global norm, the model's files."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.profiler import record_function
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial

from penstock.errors import CheckpointError, ModelError, RunError
from penstock.models.weights.folder import Hashed, together, write_folder
from penstock.models.weights.saved import MAX_SHARD_SIZE, SavedModel
from penstock.parallel.reductions import Reductions
from penstock.parallel.world import World
from penstock.pipeline.building.stages import BuiltStages, StageFacts, parameter_names, stage_facts
from penstock.private import foreach_mul_, foreach_norm
from penstock.runtime.device.copies import BackgroundCopies, background_copies
from penstock.runtime.sharded_weights import full_tensor, host_copy, local_shard
from penstock.runtime.stage import Stage
from penstock.runtime.transport.calls import collective
from penstock.runtime.transport.distributed import patient
from penstock.runtime.transport.groups import Processes

T = TypeVar("T")


class SplitModel:
    """This process's stages of a model: parameters, gradients and files. Pipeline adds the steps.

    Attributes:
        not_finite: ranks and hosts whose gradients were not finite in the last norm; empty where all were
    """

    not_finite = ""
    _spoiled: list[tuple[int, str, int]] | None = None  # `_not_finite_here` before a norm spoilt the others
    _copies_under_way: BackgroundCopies | None = None  # of what a checkpoint saves

    def __init__(self, built: BuiltStages) -> None:
        """Collective."""
        self.schedule, self._world = built.schedule, built.world
        self._stages = {stage.index: stage for stage in sorted(built.stages, key=lambda stage: stage.index)}
        weights = built.weights
        self._layers, self._saved = built.layers, weights.saved
        self._names, self._copies = weights.names, weights.copies
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
        """Position, rank, layers, parameters and bytes of every stage, when it was built."""
        return self._info

    @property
    def config(self) -> Any:
        """The Hugging Face config of the whole model. Raises ModelError for one made by from_provider."""
        return self._saved_model.config

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
    def processes(self) -> Processes:
        """The processes of this pipeline."""
        return self._world.processes

    # ---- parameters and gradients

    def named_parameters(self, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this process's parameters under the whole model's names.

        A process that holds several copies, of a tied weight or of the model, yields them all.

        Args:
            remove_duplicate: give a tied weight the first of its names on every stage, so that parameter
                groups made by name treat its copies equally; False gives the name that each stage has for it
        """
        ties = self._saved.ties if self._saved and remove_duplicate else ()
        first = {name: names[0] for names in ties for name in names}
        for stage in self._stages.values():
            for name, parameter in stage.module.named_parameters():
                yield first.get(name, name), parameter

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield this process's parameters, for an optimizer."""
        return (parameter for _, parameter in self.named_parameters())

    def owned_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this process's parameters so that over all processes each weight comes once."""
        tied = self._saved.copies if self._saved else frozenset()
        for index, stage in self._first_copy.items():
            copies = tied | self._copies.get(index, frozenset())
            yield from ((n, p) for n, p in stage.module.named_parameters() if n not in copies)

    @property
    def _first_copy(self) -> dict[int, Stage]:
        """This process's stages of the model's first copy; those of a second copy are equal."""
        depth = self.schedule.placement.depth
        return {index: stage for index, stage in self._stages.items() if index < depth}

    def zero_grad(self) -> None:
        """Set the gradients of this process's parameters to None."""
        for parameter in self.parameters():
            parameter.grad = None

    @collective
    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> float:
        """Scale all gradients so that their global norm is at most `max_norm`. Collective.

        Returns the norm before: one over all stages and ranks, a shared weight counted once; the same
        number on every rank.
        """
        with record_function("clip"):
            norm = self._norm()
            self._clip(norm, max_norm)
        return norm

    @torch.no_grad()
    def _squared_norm(self) -> Tensor:
        """The square of the norm of this rank's stages, as a vector of one entry.

        Collective over the ranks that host them. Raises ModelError for a sparse gradient.
        """
        for name, parameter in self.named_parameters():
            if parameter.grad is not None and parameter.grad.is_sparse:
                raise ModelError(
                    f"the gradient of {name}, which is sparse",
                    "the norm is one over dense gradients",
                    "Build the embedding with sparse=False",
                )
        counted = [parameter.grad for _, parameter in self.owned_parameters() if parameter.grad is not None]
        squares = torch.zeros(1, dtype=torch.float64, device=self._world.device)
        for holders, held in _by_holders(counted, self._world).items():
            norms = torch.stack([norm.to(self._world.device) for norm in foreach_norm(held)])
            squares += norms.double().square().sum() / holders
        return self._world.reductions.sum_over_mesh(squares)

    @collective
    @torch.no_grad()
    def find_not_finite(self) -> str:
        """The ranks with gradients that are not finite, each with the first of these. Collective.

        Returns words for an error, the same on all ranks of the pipeline; empty where all are finite, as of a
        norm that is larger than its dtype. Of a sharded gradient a process looks at its own shard. After
        `clip_grad_norm_`, which then spoils the others too, as torch's does, they are those from before it.
        """
        ours = self._not_finite_here() if self._spoiled is None else self._spoiled
        everyone = sorted(tuple(each) for process in self.processes.gather(ours) for each in process)
        return " and ".join(
            f"{self._world.transport.name_of(rank)} ({name}{f' and {more} more' if more else ''})"
            for rank, name, more in everyone
        )

    def _not_finite_here(self) -> list[tuple[int, str, int]]:
        """Of this process's ranks: the first gradient that is not finite, and how many more."""
        names: dict[int, list[str]] = {}
        for index, stage in self._stages.items():
            for name, parameter in stage.module.named_parameters():
                if parameter.grad is not None and not local_shard(parameter.grad).isfinite().all():
                    names.setdefault(self.schedule.placement.rank_of[index], []).append(name)
        return [(rank, first, len(more)) for rank, (first, *more) in names.items()]

    @torch.no_grad()
    def _norm(self) -> float:
        """The norm over all gradients. Collective."""
        squares, places = self._squared_norm(), range(len(self._world.ranks))
        # the first rank of a process gives the square for all of its ranks
        ours = [squares if place == 0 else squares.new_zeros(1) for place in places]
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

        Raises CheckpointError for a folder that is missing or holds other weights.
        """
        self._settle_copies()
        self._saved_model.load(folder, self._stages)

    @collective
    def save_pretrained(self, path: str | Path, max_shard_size: int | str = MAX_SHARD_SIZE) -> None:
        """Write a folder that `from_pretrained` opens: complete or not at all. Collective.

        Of a model with an adapter it is PEFT's folder, for `PeftModel.from_pretrained(base_model, path)`.

        Args:
            path: on a file system that all processes share
            max_shard_size: of each file, bytes or text such as "5GB"; a single weight may be larger

        Raises ModelError for weights that are not under the model's names, CheckpointError for weights of
        another mesh; RunError on all ranks but the one that failed.
        """
        action = f"write {path}"
        self._all_or_none(action, lambda: self._check_savable(pretrained=True))
        write, processes = self._weights_writer(), patient(self.processes)

        def write_all(folder: Path) -> Hashed:
            return write(folder, processes, max_shard_size)

        self._first_alone(action, lambda: write_folder(Path(path), write_all, processes))

    def _background_copies(self) -> BackgroundCopies:
        """What copies what is saved into host memory; nothing on a pipeline that does not write."""
        return background_copies(self._world.device, kept=self._writes)

    def _settle_copies(self) -> None:
        """Wait until weights may be changed."""
        if self._copies_under_way is not None:
            self._copies_under_way.wait()

    def _weights_writer(self, copies: BackgroundCopies | None = None) -> Callable[..., Hashed]:
        """Collect what is saved now; the result writes it: (folder, processes, max_shard_size).

        Collective over the mesh; the result is collective over the processes it gets.
        copies: what copies into host memory, so that training may go on meanwhile; None: what is not sharded
            is written from where it lies
        """
        saved, stages = self._saved_model, self._first_copy
        sharded = any(isinstance(parameter, DTensor) for parameter in self.parameters())
        values = None
        if copies is not None or sharded:
            to_host = copies or self._background_copies()
            values = {i: _values(stage, saved.written(stage.module), to_host) for i, stage in stages.items()}
            if copies is None:
                to_host.begin()
                to_host.result()

        def write(folder: Path, processes: Processes, size: int | str = MAX_SHARD_SIZE) -> Hashed:
            layouts: dict[int, Any] = {}

            def lay_out() -> None:
                if copies is not None:
                    copies.result()
                layouts.update(saved.lay_out(stages, values))

            together(processes, "lay out its weights", lay_out)
            return saved.write(folder, layouts, processes, size)

        return write

    @property
    def _saved_model(self) -> SavedModel:
        """The whole model's files. Raises ModelError for a pipeline made by from_provider."""
        if self._saved is None:
            raise ModelError(
                "a pipeline made by from_provider",
                "only its provider knows its files",
                "Save `modules` yourself",
            )
        return self._saved

    def _check_savable(self, *, pretrained: bool) -> None:
        """Raise, on every rank of the pipeline, ModelError for weights that are not under the model's names,
        and CheckpointError for a weight that is sharded over another mesh.

        pretrained: whether from_pretrained is to read all of them
        """
        odd = [name for index, names in self._names.items()
               for name in names ^ parameter_names(self._stages[index].module)]  # fmt: skip
        unread = self._saved_model.unread(self._stages, pretrained=pretrained)
        odd += [] if unread is None else [unread]
        ours = self._world.reductions.stage_ranks
        foreign = [name for name, p in self.named_parameters()
                   if isinstance(p, DTensor) and not ours.issuperset(_ranks_of(p))]  # fmt: skip
        everyone = self.processes.gather((min(odd, default=None), min(foreign, default=None)))
        if name := next((name for name, _ in everyone if name is not None), None):
            raise ModelError(
                f"weights with {name}, which only the model or what was made of it has",
                "a folder holds weights under the names that from_pretrained reads, or an adapter's alone",
                "Put the model's own modules back, freeze what an adapter does not hold, or save `modules` "
                "yourself",
            )
        if name := next((name for _, name in everyone if name is not None), None):
            raise CheckpointError(
                f"{name}, a DTensor",
                "its weights are sharded over another mesh; gather them first",
                "Save full_tensor() of each in `modules`, or use torch.distributed.checkpoint",
            )

    # ---- what penstock.checkpoint uses too

    @property
    def _everyone(self) -> Processes:
        """The processes of all pipelines of the mesh."""
        return self.reductions.everyone or self.processes

    @property
    def _writes(self) -> bool:
        """Whether this process's pipeline is the one of the mesh that writes files."""
        return self._world.reductions.is_first

    def _first_alone(self, action: str, work: Callable[[], None]) -> None:
        """Let the first pipeline of the mesh do `work` while the others wait. Collective.

        Raises the error of `work` there; RunError on the other pipelines.
        """
        self._all_or_none(action, lambda: work() if self._writes else None)

    def _all_or_none(self, action: str, work: Callable[[], T]) -> T:
        """Return the result of `work`, or raise on all pipelines of the mesh if it fails on one. Collective.

        work: fails on all processes of a pipeline or on none
        Raises the error of `work` there; RunError on the other pipelines.
        """
        results: list[T] = []
        failure: Exception | None = None
        try:
            results.append(work())
        except Exception as error:
            failure = error
        words = self._world.reductions.first_problem(
            None if failure is None else f"{type(failure).__name__}: {failure}"
        )
        if failure is not None:
            raise failure
        if words is not None:
            raise RunError(
                "another pipeline of the mesh", f"it could not {action}: {words}", "Fix that first"
            )
        return results[0]


def _values(stage: Stage, names: Collection[str], copies: BackgroundCopies) -> dict[str, Tensor]:
    """Copy the stage's values of `names` into host memory; a tied weight once. Collective where sharded."""
    made: dict[int, Tensor] = {}
    values: dict[str, Tensor] = {}
    for name, value in stage.module.state_dict(keep_vars=True).items():
        if name not in names:
            continue
        if id(value) not in made:
            made[id(value)] = host_copy(value, copies, steady=isinstance(value, nn.Parameter))
        values[name] = made[id(value)]
    return values


# ---- the norm of all gradients, over all stages and all ranks of the mesh


def clip_scale(norm: float, max_norm: float) -> float:
    """What gradients of this norm are multiplied by, if it is below 1."""
    return max_norm / (norm + 1e-6)  # as torch.nn.utils.clip_grad_norm_


def _by_holders(gradients: Sequence[Tensor], world: World) -> dict[int, list[Tensor]]:
    """This rank's gradients or shards of them, by the number of ranks of its stage that hold the same."""
    replicas = max(1, len(world.reductions.stage_ranks))
    held: dict[int, list[Tensor]] = {}
    for gradient in gradients:
        if not isinstance(gradient, DTensor):
            held.setdefault(replicas, []).append(gradient)
        elif world.reductions.stage_ranks.issuperset(_ranks_of(gradient)):
            held.setdefault(replicas // _shard_count(gradient), []).append(gradient.to_local())
        else:  # of a mesh of the user's own
            held.setdefault(replicas, []).append(full_tensor(torch.linalg.vector_norm(gradient)))
    return held


def _ranks_of(tensor: DTensor) -> list[int]:
    ranks: list[int] = tensor.device_mesh.mesh.flatten().tolist()
    return ranks


def _shard_count(gradient: DTensor) -> int:
    mesh, placements = gradient.device_mesh, gradient.placements
    assert not any(isinstance(placement, Partial) for placement in placements), "a sum not yet made"
    return math.prod(mesh.size(dim) for dim, each in enumerate(placements) if not each.is_replicate())
