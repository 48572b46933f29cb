"""The optimizer's step inside of `pipe.step`, which a rank may take while others still compute.

    compute | exchange reports | exchange norms | clip | optimizer.step()     after pipe.step
    compute | exchange reports, and norms       | clip | optimizer.step()     in it, on the last rank
    compute | copy, optimizer.step() ... reports arrive                       in it, where a rank ends early

A rank that ends early knows its gradients, and not yet the norm over all of them. It copies what the
optimizers change, and steps as if nothing had to be clipped. The reports bring the norm. If that is above
`max_norm`, or not finite, the copies go back and the step is taken anew, or left out: parameters and states
are those of the first line, bit for bit.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.profiler import record_function
from torch.optim import LBFGS, Optimizer

from penstock.errors import ConfigError
from penstock.pipeline.split_model import SplitModel, clip_scale
from penstock.private import TreeSpec, foreach_copy_, tree_flatten, tree_unflatten
from penstock.runtime import step_report as report
from penstock.runtime.device import stream
from penstock.runtime.device.copies import BackgroundCopies
from penstock.runtime.device.stream import Time
from penstock.runtime.sharded_weights import local_shard

_NO_TENSORS = (bool, int, float, str, type(None))  # values that nothing changes in place


def optimizer_error(
    optimizers: Sequence[Optimizer], parameters: Iterable[nn.Parameter]
) -> ConfigError | None:
    """The error of optimizers that `pipe.step` cannot step. parameters: this process's"""
    ours = set(map(id, parameters))
    for optimizer in optimizers:
        name = type(optimizer).__name__
        if isinstance(optimizer, LBFGS):
            rule = "it computes loss and gradients several times in one step"
            return ConfigError(f"optimizer={name}", rule, "Take another one, AdamW for example")
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        foreign = [parameter for parameter in held if id(parameter) not in ours and parameter.numel()]
        if foreign:
            return ConfigError(
                f"optimizer={name} with a parameter of shape {list(foreign[0].shape)}",
                "it is none of this rank's: model.parameters() are those of the model that was given to "
                "build(), not of the pipeline",
                "Make the optimizer over pipe.parameters()",
            )
    return None


class Drain:
    """What the steps of a pipeline leave for the next one, which asks: is an early step worth a copy?

    Attributes:
        waited: seconds from this rank's end to that of the last rank, in the last step
        clipped: whether the last step was clipped or left out, as the next one may be
        kept, undone: number of early steps that were right, and that were not
    """

    def __init__(self) -> None:
        self.waited, self.clipped = 0.0, False
        self.kept = self.undone = 0
        self.copies = UndoCopies()

    def is_worthwhile(self) -> bool:
        """Whether this rank is likely to wait for longer than it copies, and the step to be right."""
        return self.waited > self.copies.seconds and not self.clipped


class OptimizerStep:
    """What the optimizers do in one call of `pipe.step`.

    Args:
        max_loss: the largest loss with which they do
        drain: None where all ranks step after the others' norms have arrived
    """

    def __init__(
        self,
        model: SplitModel,
        optimizers: Sequence[Optimizer],
        max_norm: float,
        max_loss: float,
        drain: Drain | None,
    ) -> None:
        self._model, self._world = model, model._world
        self._optimizers, self.max_norm, self._drain = optimizers, float(max_norm), drain
        self.max_loss = float(max_loss)
        self._expects = self._early = False

    @property
    def in_drain(self) -> bool:
        """Whether the squared norms travel with the step reports."""
        return self._drain is not None

    def squares(self) -> Tensor:
        """This rank's part of the squared norm. Collective over the ranks that host the same stages."""
        return self._model._squared_norm()

    def decide(self, squared: float) -> None:
        """Decide whether to step early. Collective as `squares`, whose value is `squared`."""
        assert self._drain is not None
        own, reductions = math.sqrt(squared), self._world.reductions
        fits = math.isfinite(own) and clip_scale(own, self.max_norm) >= 1  # the whole norm is no smaller
        early = fits and self._drain.is_worthwhile() and self._drain.copies.prepare(self._optimizers)
        ranks = max(1, len(reductions.stage_ranks))
        if ranks > 1:  # all of these ranks step early, or none: Muon gathers matrices over them
            agreeing = torch.full((1,), float(early), dtype=torch.float64, device=self._world.device)
            early = float(reductions.sum_over_mesh(agreeing)) == ranks
        self._expects = early

    def step_early(self) -> None:
        """Step, if this promises to save time and can be undone."""
        assert self._drain is not None
        if self._expects:
            self._drain.copies.take()
            self._early = True  # already: the step may fail halfway
            self._step()

    def finish(self, loss: float, reports: report.Reports) -> float:
        """Make sure that the right step is taken, or none where it is not finite or its loss is too large.

        Returns the norm.

        Collective without `in_drain`.
        """
        if self._drain is None:
            norm = self._model._norm_of(self._model._gather_squares(self._model._squared_norm()))
        else:
            norm = self._model._norm_of(torch.tensor([e.squares], dtype=torch.float64) for e in reports)
        good = math.isfinite(norm) and math.isfinite(loss) and loss <= self.max_loss
        clipped = not good or clip_scale(norm, self.max_norm) < 1
        if self._drain is not None:
            self._drain.copies.measure()
            ends = report.ends(reports)
            self._drain.waited = max(ends) - ends[self._world.ranks[0]]
            self._drain.clipped = clipped
            self._drain.kept += self._early and not clipped
        if self._early and not clipped:
            self._early = False
            return norm
        self.undo()
        if good:
            with record_function("clip"):
                self._model._clip(norm, self.max_norm)
            self._step()
        return norm

    def undo(self) -> None:
        """Take back the early step, if there was one."""
        if self._early and self._drain is not None:
            self._drain.copies.put_back()
            self._drain.undone += 1
            self._early = False

    def _step(self) -> None:
        for optimizer in self._optimizers:
            optimizer.step()


class UndoCopies:
    """Copies of all that optimizers change: parameters, states, and the options of groups.

    The memory is kept from step to step: with AdamW three times that of the parameters.

    Attributes:
        seconds: the least that a copy took, 0 before the first
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._copied: tuple[Time, Time] | None = None  # start and end of the last copy, until it is measured
        self._optimizers: Sequence[Optimizer] = ()
        self._tensors: list[Tensor] = []
        self._copies: list[Tensor] = []
        self._leaves: list[Any] = []
        self._form: TreeSpec | None = None

    def prepare(self, optimizers: Sequence[Optimizer]) -> bool:
        """List what a step may change. Returns whether it could be undone.

        A hook of an optimizer's step may change anything, and so may a step what is no tensor and no number.
        """
        groups = [group for each in optimizers for group in each.param_groups]
        options = [{key: group[key] for key in group if key != "params"} for group in groups]
        leaves, form = tree_flatten(([dict(each.state) for each in optimizers], options))
        parameters = [p for group in groups for p in group["params"] if p.requires_grad]
        states = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self._tensors = [local_shard(each.detach()) for each in (*parameters, *states)]
        self._optimizers, self._leaves, self._form = optimizers, leaves, form
        hooks = [
            getattr(hook, "__func__", hook)
            for each in optimizers
            for hook in (*each._optimizer_step_pre_hooks.values(), *each._optimizer_step_post_hooks.values())
        ]
        changes_nothing = hooks.count(BackgroundCopies.before_step) == len(hooks)
        return changes_nothing and all(isinstance(leaf, (Tensor, *_NO_TENSORS)) for leaf in leaves)

    @torch.no_grad()
    def take(self) -> None:
        """Copy what is listed."""
        forms = [[(t.shape, t.dtype, t.device) for t in each] for each in (self._tensors, self._copies)]
        if forms[0] != forms[1]:
            self._copies = []  # free them first
            self._copies = [torch.empty_like(each) for each in self._tensors]
            _copy(self._copies, self._tensors)  # the first touch of new memory takes long, and does not count
            self.seconds = math.inf
        gpus = (each.device for each in self._tensors if each.is_cuda)
        now = stream.stream_of(next(gpus, torch.device("cpu"))).now
        began = now()
        _copy(self._copies, self._tensors)
        self._copied = began, now()

    def measure(self) -> None:
        """Measure the last copy, if it is over."""
        if self._copied is not None and stream.is_over(self._copied[1]):
            self.seconds = min(self.seconds, stream.seconds(*self._copied))
            self._copied = None

    @torch.no_grad()
    def put_back(self) -> None:
        """Give all tensors the values that were copied, and states and groups the entries that they had."""
        assert self._form is not None
        _copy(self._tensors, self._copies)
        states, options = tree_unflatten(self._leaves, self._form)
        for optimizer, state in zip(self._optimizers, states, strict=True):
            optimizer.state.clear()
            optimizer.state.update(state)
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        for group, before in zip(groups, options, strict=True):
            parameters = group["params"]
            group.clear()
            group.update(before, params=parameters)


def _copy(into: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """By device: AdamW's count of steps is on the CPU."""
    by_device: dict[torch.device, list[tuple[Tensor, Tensor]]] = defaultdict(list)
    for pair in zip(into, tensors, strict=True):
        by_device[pair[0].device].append(pair)
    for pairs in by_device.values():
        foreach_copy_([there for there, _ in pairs], [here for _, here in pairs])
