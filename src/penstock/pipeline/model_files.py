"""The files of a split model: save and load the weights of this process's stages.

pipe.files.check(...)       can these weights be saved?      each process checks its own
pipe.files.collect()        collect their present values     collective where they are sharded
    write(folder, ...)      the result writes them           then or later, in any thread
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from penstock.errors import CheckpointError, ModelError
from penstock.models.weights.files import Ties
from penstock.models.weights.folder import Hashed
from penstock.models.weights.saved import MAX_SHARD_SIZE, SavedModel
from penstock.parallel.reductions import Reductions
from penstock.pipeline.building.stages import BuiltStages, parameter_names
from penstock.runtime.device.copies import BackgroundCopies, background_copies
from penstock.runtime.ranks import Ranks
from penstock.runtime.sharded_weights import host_copy
from penstock.runtime.stage import Stage


class ModelFiles:
    """The files of a split model, and background copies of its weights for them.

    Attributes:
        stages: this process's stages of the model's first copy; those of a second copy are equal
        under_way: the copies into host memory for a checkpoint; call `settle` before weights change
    """

    under_way: BackgroundCopies | None = None

    def __init__(self, built: BuiltStages) -> None:
        self._saved, self._names = built.weights.saved, built.weights.names
        self._stages: Mapping[int, Stage] = {
            stage.index: stage for stage in sorted(built.stages, key=lambda stage: stage.index)
        }
        depth = built.schedule.placement.depth
        self.stages = {index: stage for index, stage in self._stages.items() if index < depth}
        self._device: torch.device = built.world.device
        self._reductions: Reductions = built.world.reductions

    @property
    def saved(self) -> SavedModel:
        """The whole model's files. Raises ModelError for a pipeline made by from_provider."""
        if self._saved is None:
            raise ModelError(
                "a pipeline made by from_provider",
                "only its provider knows its files",
                "Save `modules` yourself",
            )
        return self._saved

    @property
    def ties(self) -> Ties:
        """The names of each tied weight; none for a pipeline made by from_provider."""
        return () if self._saved is None else self._saved.ties

    @property
    def tied(self) -> frozenset[str]:
        """The names of tied weights, without the first name of each weight."""
        return frozenset() if self._saved is None else self._saved.copies

    @property
    def written_here(self) -> bool:
        """Whether this process's pipeline is the one that writes files for the mesh."""
        return self._reductions.is_first

    def check(self, *, pretrained: bool) -> None:
        """Check that this process's weights can be saved. Each process checks its own.

        pretrained: whether from_pretrained must be able to read all of them

        Raises ModelError for weights that do not have the model's names, CheckpointError for a weight that is
        sharded over another mesh.
        """
        odd = [name for index, names in self._names.items()
               for name in names ^ parameter_names(self._stages[index].module)]  # fmt: skip
        unread = self.saved.unread(self._stages, pretrained=pretrained)
        odd += [] if unread is None else [unread]
        if odd:
            raise ModelError(
                f"weights with {min(odd)}, which only the original model or only the stage has",
                "a folder has weights under the names that from_pretrained reads, or only an adapter's",
                "Restore the model's own modules, freeze weights outside of the adapter, or save `modules` "
                "yourself",
            )
        ours = self._reductions.stage_ranks
        for name, parameter in self._parameters():
            if isinstance(parameter, DTensor) and not ours.issuperset(ranks_of(parameter)):
                raise CheckpointError(
                    f"{name}, a DTensor",
                    "its weights are sharded over another mesh; gather them first",
                    "Save full_tensor() of each weight in `modules`, or use torch.distributed.checkpoint",
                )

    def _parameters(self) -> list[tuple[str, nn.Parameter]]:
        return [entry for stage in self._stages.values() for entry in stage.module.named_parameters()]

    def load(self, folder: str | Path) -> None:
        """Read this process's weights, or its adapter's, in place. Raises CheckpointError."""
        self.settle()
        self.saved.load(folder, self._stages)

    def new_copies(self) -> BackgroundCopies:
        """Copies into host memory for a save; they copy nothing on a pipeline that does not write."""
        return background_copies(self._device, kept=self.written_here)

    def settle(self) -> None:
        """Wait until weights may be changed."""
        if self.under_way is not None:
            self.under_way.wait()

    def collect(self, copies: BackgroundCopies | None = None) -> Callable[..., Hashed]:
        """Collect the present values; the result writes them: (folder, processes, max_shard_size).

        Collective over the mesh; the result is collective over its argument `processes`.
        copies: copies into host memory, so that training may go on meanwhile; None: weights that are not
            sharded are written without a copy
        """
        saved, stages = self.saved, self.stages
        sharded = any(isinstance(parameter, DTensor) for _, parameter in self._parameters())
        values = None
        if copies is not None or sharded:
            to_host = copies or self.new_copies()
            values = {i: _values(stage, saved.written(stage.module), to_host) for i, stage in stages.items()}
            if copies is None:
                to_host.begin()
                to_host.result()

        def write(folder: Path, processes: Ranks, size: int | str = MAX_SHARD_SIZE) -> Hashed:
            def lay_out() -> dict[int, Any]:
                if copies is not None:
                    copies.result()
                return saved.lay_out(stages, values)

            return saved.write(folder, processes.attempt("lay out its weights", lay_out), processes, size)

        return write


def _values(stage: Stage, names: Collection[str], copies: BackgroundCopies) -> dict[str, Tensor]:
    """Copy the stage's weights `names` into host memory, a tied weight once. Collective where sharded."""
    made: dict[int, Tensor] = {}
    values: dict[str, Tensor] = {}
    for name, value in stage.module.state_dict(keep_vars=True).items():
        if name not in names:
            continue
        if id(value) not in made:
            made[id(value)] = host_copy(value, copies, steady=isinstance(value, nn.Parameter))
        values[name] = made[id(value)]
    return values


def ranks_of(tensor: DTensor) -> list[int]:
    """The processes of the job that a DTensor is distributed over."""
    ranks: list[int] = tensor.device_mesh.mesh.flatten().tolist()
    return ranks
