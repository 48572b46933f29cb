"""The gradients of shared weights: after each step every copy gets the sum of all copies' gradients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from penstock.batch.placement import to_device
from penstock.batch.shapes import Microbatch
from penstock.errors import ModelError
from penstock.pipeline.building.stages import BuiltStages
from penstock.pipeline.steps.step import Step, StepPart
from penstock.runtime.sharded_weights import local_shard
from penstock.runtime.shared_weights import copy_name


class SharedGradients(StepPart):
    """Sums the gradients of shared weights over one step."""

    def __init__(self, built: BuiltStages, modules: Mapping[int, nn.Module]) -> None:
        """Collective. Raises ModelError, on every rank, where only some copies of a weight are frozen.

        modules: those of this process, by stage
        """
        world, shared = built.world, built.weights.shared
        for group in shared:
            world.transport.share(group.ranks)
        self._shared = shared
        self._copies_by_ranks = [
            (group.ranks, [tuple(copies.values()) for copies in group.copies])
            for group in shared
            if group.copies
        ]
        self._transport, self._processes = world.transport, world.processes
        self._before: list[tuple[nn.Parameter, Tensor | None]] = []
        self._compared: list[bool] = []
        parts_of_batch = world.reductions.batch_part[1]  # each part has a copy of the model
        twice = built.schedule.placement.replicas * parts_of_batch > 1
        self._buffers = [  # buffers with several copies: no step sums a forward's writes into them
            (copy_name(f"{path}.{key}".lstrip("."), stage), inner, key)
            for stage, module in modules.items()
            for path, inner in module.named_modules()
            for key in (inner._buffers if twice or _is_on_every_stage(module, path) else ())
        ]
        self._unwritten = self._versions()
        entries = [
            (copy_name(f"{path}.{key}".lstrip("."), stage), inner._parameters, key, parameter)
            for stage, module in modules.items()
            for path, inner in module.named_modules()
            for key, parameter in inner._parameters.items()
            if parameter is not None
        ]
        # a weight is shared by several stages, or within one
        uses = Counter([*map(id, self._copies()), *(id(parameter) for *_, parameter in entries)])
        self._shared_entries = [entry for entry in entries if uses[id(entry[-1])] > 1]
        if shared:
            self.compare()

    def compare(self) -> None:
        """Raise ModelError, on every rank, for copies that would differ from now on. Collective.

        Copies differ if only some copies of a weight are frozen, or a forward has written into a buffer. Call
        it if any rank has `changed`: a rank that skipped a sum would leave the others waiting.
        """
        trained = [
            [{where: copy.requires_grad for where, copy in copies.items()} for copies in group.copies]
            for group in self._shared
        ]
        self._processes.attempt("leave its buffers as they are", self._check_buffers)
        for by_process in zip(*self._processes.gather(trained), strict=True):
            for of_weight in zip(*filter(None, by_process), strict=True):  # of processes that have copies
                _check_all_or_none({where: on for copies in of_weight for where, on in copies.items()})
        self._compared = self._trained()

    def check(self, microbatches: Sequence[Microbatch]) -> None:
        """Raise ModelError if a shared parameter of a stage has been replaced.

        The new parameter's gradients would not be summed; or, if both uses are in one stage, the norm and
        saved weights would leave it out.
        """
        for where, table, key, parameter in self._shared_entries:
            if table.get(key) is not parameter:
                raise ModelError(
                    f"{where}, another parameter than when the pipeline was built",
                    "several modules share this weight, and its gradients are summed",
                    "Copy values into the parameter, as load_state_dict() without assign=True and "
                    "pipe.load_weights() do",
                )

    @property
    def changed(self) -> bool:
        """Whether `compare` would raise an error for this process's copies."""
        return self._trained() != self._compared or self._written() is not None

    def _check_buffers(self) -> None:
        if error := self._written():
            raise error

    def _written(self) -> ModelError | None:
        """The error if this step's forwards have written into a buffer or replaced it."""
        for (where, owner, key), (buffer, version) in zip(self._buffers, self._unwritten, strict=True):
            is_saved = key not in owner._non_persistent_buffers_set  # else it is a cache
            replaced = is_saved and owner._buffers.get(key) is not buffer
            if replaced or (buffer is not None and buffer._version != version):
                return ModelError(
                    f"{where}, a buffer that the forward writes into",
                    "it has several copies (two in a schedule of dualpipe, one for each part of the batch "
                    "on dp_shard and dp_replicate, one on each stage for modules in on_every_stage), which "
                    "would differ from now on",
                    "Take a schedule with one copy (dualpipe_v, zb_v, 1f1b) without these axes, and leave "
                    "its module out of on_every_stage",
                )
        return None

    def _versions(self) -> list[tuple[Tensor | None, int]]:
        buffers = (owner._buffers.get(key) for _, owner, key in self._buffers)
        return [(buffer, 0 if buffer is None else buffer._version) for buffer in buffers]

    def _trained(self) -> list[bool]:
        return [copy.requires_grad for copy in self._copies()]

    def _copies(self) -> Iterator[nn.Parameter]:
        return (copy for _, weights in self._copies_by_ranks for copies in weights for copy in copies)

    @torch.no_grad()
    def copy_first(self, first: Sequence[nn.Parameter]) -> None:
        """Give every copy the values of the first one. Collective.

        Args:
            first: the first copies, as far as this process has them.
        """
        kept = set(map(id, first))
        for copy in self._copies():
            if id(copy) not in kept:
                copy.zero_()
        for ranks, weights in self._copies_by_ranks:
            values = [[local_shard(copy.data) for copy in copies] for copies in weights]
            self._transport.sum_shared(ranks, values)

    def begin(self, step: Step) -> None:
        """Set aside the gradients of earlier steps, which are summed already."""
        self._unwritten = self._versions()
        self._before = [(copy, copy.grad) for copy in self._copies() if copy.requires_grad]
        for copy, _ in self._before:
            copy.grad = None

    def failed(self) -> None:
        """Put the gradients of earlier steps back."""
        for copy, before in self._before:
            copy.grad = before
        self._before = []

    @torch.no_grad()
    def end(self, step: Step) -> None:
        """Sum the gradients over all copies. Collective."""
        if any(of_rank.changed for of_rank in step.reports):
            self.compare()
        for ranks, weights in self._copies_by_ranks:
            self._sum([copies for copies in weights if copies[0].requires_grad], ranks)
        for copy, before in self._before:
            if before is not None:
                copy.grad = before if copy.grad is None else copy.grad.add_(before)
        self._before = []

    def _sum(self, weights: list[tuple[nn.Parameter, ...]], ranks: tuple[int, ...]) -> None:
        """Sum the gradients of all copies. An unused weight gets no gradient, as in a single process."""
        if not weights:
            return
        counts = [sum(copy.grad is not None for copy in copies) for copies in weights]
        used = to_device(torch.tensor(counts, dtype=torch.float32), weights[0][0].device)
        # all copies are sharded in the same way, so the shards of this rank and its peers match
        gradients = [[local_shard(_gradient(copy)) for copy in copies] for copies in weights]
        self._transport.sum_shared(ranks, [*gradients, [used]])
        if all(counts):  # other ranks' counts change nothing; reading them would wait for a GPU
            return
        for copies, count in zip(weights, used.tolist(), strict=True):
            for copy in copies if count == 0 else ():
                copy.grad = None


def _is_on_every_stage(module: nn.Module, path: str) -> bool:
    """Whether a stage's module declares that every stage has a copy of its submodule at `path`."""
    names: Sequence[str] = getattr(module, "on_every_stage", ())
    return any(path == name or path.startswith(f"{name}.") for name in names)


def _check_all_or_none(trained: Mapping[str, bool]) -> None:
    """Raise ModelError if only some copies of a weight are trained. trained: by name of the copy"""
    if len(set(trained.values())) == 1:
        return
    frozen = [where for where in trained if not trained[where]]
    others = [where for where in trained if trained[where]]
    raise ModelError(
        f"{', '.join(frozen)} frozen, and {', '.join(others)} not",
        "they are copies of one weight, which would diverge",
        "Freeze every copy, on whatever rank its stage is, or none",
    )


def _gradient(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad
