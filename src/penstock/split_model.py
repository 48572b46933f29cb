"""A model that is split: the stages of this process, their parameters, and the model's files."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from penstock.commit import together, write_folder
from penstock.errors import CheckpointError, ModelError, RunError
from penstock.models.saved import MAX_SHARD_SIZE, Layout, SavedModel
from penstock.parts import Parts, StageFacts, names_in, stage_facts
from penstock.runtime.processes import Processes
from penstock.runtime.spread import host_copy, whole
from penstock.runtime.stage import Stage
from penstock.runtime.sums import Sums

T = TypeVar("T")


class SplitModel:
    """What a Pipeline holds, whatever runs on it: this process's modules and parameters, and their files."""

    def __init__(self, parts: Parts) -> None:
        """Collective."""
        self.schedule, self._world = parts.schedule, parts.world
        self._stages = {stage.index: stage for stage in parts.stages}
        self._layers, self._saved, self._names = parts.layers, parts.saved, parts.names or {}
        placement = parts.schedule.placement
        self._info = stage_facts(parts.stages, parts.layers, placement, parts.world.processes)

    def named_parameters(self, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        """This process's parameters under the whole model's names.

        remove_duplicate: as of torch's own: a tied weight has the first of its names on every stage, so that
            groups which are made by name treat its copies alike. False gives the names that each stage has
            them under.
        Where a process holds several copies, of a tied weight or of the model, they all are given.
        """
        ties = self._saved.ties if self._saved and remove_duplicate else ()
        first = {name: names[0] for names in ties for name in names}
        for stage in self._stages.values():
            for name, parameter in stage.module.named_parameters():
                yield first.get(name, name), parameter

    def parameters(self) -> Iterator[nn.Parameter]:
        """This process's parameters, for an optimizer."""
        return (parameter for _, parameter in self.named_parameters())

    def owned_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This process's parameters without further copies of shared ones: each is owned once over all."""
        copies = self._saved.copies if self._saved else frozenset()
        return ((name, parameter) for name, parameter in self._first_copies() if name not in copies)

    def _first_copies(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Those of the first copy of the model."""
        for stage in self._first_stages().values():
            yield from stage.module.named_parameters()

    def _first_stages(self) -> dict[int, Stage]:
        """This process's stages of the first copy of the model; those of further copies are alike."""
        depth = self.schedule.placement.depth
        return {index: stage for index, stage in self._stages.items() if index < depth}

    def zero_grad(self) -> None:
        for parameter in self.parameters():
            parameter.grad = None

    @property
    def modules(self) -> Mapping[int, nn.Module]:
        """This process's modules by stage."""
        return {index: stage.module for index, stage in self._stages.items()}

    @property
    def stages(self) -> tuple[Stage, ...]:
        """This process's stages."""
        return tuple(self._stages.values())

    @property
    def parts(self) -> tuple[nn.Module, ...]:
        """This process's modules, in the order of their stages."""
        return tuple(self._stages[index].module for index in sorted(self._stages))

    @property
    def info(self) -> tuple[StageFacts, ...]:
        """Of every stage where it stands, its rank, layers, parameters and bytes, as it was built."""
        return self._info

    @property
    def config(self) -> Any:
        """The Hugging Face config of the whole model."""
        return self._needs_saved().config

    @property
    def batch_part(self) -> tuple[int, int]:
        """Which part of the whole batch `step` takes on this process, from 0, and how many parts there are.

        More than one where the mesh has ranks on dp_replicate and dp_shard: each works on its own.
        """
        return self._world.sums.part

    @property
    def sums(self) -> Sums:
        """What is summed over the ranks of the mesh beside this pipeline's."""
        return self._world.sums

    @property
    def processes(self) -> Processes:
        return self._world.processes

    def whole_values(self) -> dict[int, dict[str, Tensor]]:
        """By stage of this process what is saved of it, in host memory that is nobody else's. Collective.

        Nothing but the gathering on all but the first pipeline of a mesh.
        """
        copies, kept = self._needs_saved().copies, self.writes
        return {index: _values(stage, copies, kept) for index, stage in self._first_stages().items()}

    @property
    def writes(self) -> bool:
        """Whether this process's pipeline is the one of the mesh that writes files."""
        return self._world.sums.first

    @property
    def is_spread(self) -> bool:
        """Whether any of its weights lies on several ranks of the mesh."""
        return any(isinstance(parameter, DTensor) for parameter in self.parameters())

    def load_weights(self, folder: str | Path) -> None:
        """Read this process's weights back from a folder that save_pretrained wrote.

        Raises CheckpointError for a folder that is not there or holds other weights.
        """
        self._needs_saved().load(folder, self._stages)

    def save_pretrained(self, path: str | Path, max_shard_size: int | str = MAX_SHARD_SIZE) -> None:
        """Write a folder that `from_pretrained` opens, complete or not at all. Collective.

        max_shard_size: of each file, bytes or text such as "5GB"; a single weight may be larger
        """
        self.all_or_none(f"write {path}", self._check_savable)
        values = self.whole_values() if self.is_spread else None
        saved, stages = self._needs_saved(), self._first_stages()

        def write(folder: Path) -> None:
            layouts = laid_out(saved, stages, self.processes, values)
            saved.write(folder, layouts, self.processes, max_shard_size)

        self.first_alone(f"write {path}", lambda: write_folder(Path(path), write, self.processes))

    def first_alone(self, deed: str, work: Callable[[], None]) -> None:
        """Let the first pipeline of the mesh do what is done once; all wait for it. Collective.

        Raises what `work` raises; on the other pipelines RunError.
        """
        self.all_or_none(deed, lambda: work() if self.writes else None)

    def all_or_none(self, deed: str, work: Callable[[], T]) -> T:
        """What `work` gives, or an error on all pipelines of the mesh where it fails on any. Collective.

        work: fails on all processes of a pipeline or on none
        Raises what `work` raises; on the other pipelines RunError.
        """
        made: list[T] = []
        failure: Exception | None = None
        try:
            made.append(work())
        except Exception as error:
            failure = error
        told = self._world.sums.agree(None if failure is None else f"{type(failure).__name__}: {failure}")
        if failure is not None:
            raise failure
        if told is not None:
            raise RunError("another pipeline of the mesh", f"it could not {deed}: {told}", "Mend that first")
        return made[0]

    def _check_savable(self) -> None:
        self._check_names()
        self._check_whole()

    def _check_names(self) -> None:
        """Raises ModelError, on every rank, where weights are not under the names that they came with."""
        mine = [min(names ^ names_in(self._stages[index].module), default=None)
                for index, names in self._names.items()]  # fmt: skip
        for name in (name for part in self.processes.gather(mine) for name in part):
            if name is not None:
                raise ModelError(
                    f"weights with {name}, which only the model or what parallelize_fn made of it has",
                    "a folder holds the model's weights under its own names",
                    "Put the model's own modules back, e.g. by merging adapters, or save `modules` yourself",
                )

    def _check_whole(self) -> None:
        """Raises CheckpointError, on every rank, where a weight is spread over ranks of another mesh."""
        ours = self._world.sums.ranks
        mine = min(
            (
                name
                for name, p in self.named_parameters()
                if isinstance(p, DTensor) and not ours.issuperset(p.device_mesh.mesh.flatten().tolist())
            ),
            default=None,
        )
        for name in self.processes.gather(mine):
            if name is not None:
                raise CheckpointError(
                    f"{name}, a DTensor",
                    "its weights are sharded over another mesh; gather them first",
                    "Save full_tensor() of each in `modules`, or use torch.distributed.checkpoint",
                )

    def _needs_saved(self) -> SavedModel:
        if self._saved is None:
            raise ModelError(
                "a pipeline made by from_provider",
                "only its provider knows its files",
                "Save `modules` yourself",
            )
        return self._saved


def laid_out(
    saved: SavedModel,
    stages: Mapping[int, Stage],
    processes: Processes,
    states: Mapping[int, Mapping[str, Tensor]] | None = None,
) -> dict[int, Layout]:
    """SavedModel.lay_out, or an error on all processes where it fails on any. Collective."""
    layouts: dict[int, Layout] = {}
    together(processes, "lay out its weights", lambda: layouts.update(saved.lay_out(stages, states)))
    return layouts


def _values(stage: Stage, left_out: Collection[str], kept: bool) -> dict[str, Tensor]:
    """What the stage holds, in host memory that is nobody else's; a tied weight is copied once.

    kept: False takes part in the gathering of what is spread, and keeps nothing of it
    """
    made: dict[int, Tensor] = {}
    values: dict[str, Tensor] = {}
    for name, value in stage.module.state_dict(keep_vars=True).items():
        if name in left_out:
            continue
        if id(value) not in made:
            made[id(value)] = host_copy(value) if kept else whole(value).new_empty(0)
        values[name] = made[id(value)]
    return values if kept else {}
