"""Warn once where split backwards defer little: zero-bubble schedules gain only from deferred gradients.

I computes the gradient of a weight at once where penstock does not see the weight's product, as in compiled
layers, Transformer Engine and torchao's float8, where a hook reads the gradient, or where the loss runs the
head in blocks (docs/split-backward.md).
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, Sequence

from torch import nn

from penstock.models.huggingface.head import deferred
from penstock.pipeline.steps.step import Step, StepPart
from penstock.runtime.around import is_around
from penstock.runtime.split_backward.deferred import PLAIN, Deferral, is_hooked
from penstock.runtime.split_backward.modules import is_compiled
from penstock.runtime.stage import Stage
from penstock.runtime.stage_part import StagePart
from penstock.schedule.ops import Kind

_LEAST = 0.8  # of the weight gradients' FLOPs
_COMPILED, _HOOKED, _CHUNKED = "torch.compile", "hooks on gradients", "the chunked loss"
_REMEDIES = {
    _COMPILED: "compile layers by penstock.compile_around_products",
    _CHUNKED: "set chunked_loss=False if there is memory for whole logits",
}


class WholeBackwards(StepPart):
    """Warns about each stage whose I deferred less than 80 % of the weight gradients' FLOPs to W.

    It warns after the first step, and counts all its microbatches, as some may have no images.
    """

    def __init__(self, stages: Sequence[Stage]) -> None:
        self.counters = [DeferralCounter(stage) for stage in stages]
        self._counts = True

    def end(self, step: Step) -> None:
        counters, self._counts = self.counters if self._counts else (), False
        for counter in counters:
            counter.stage.use([part for part in counter.stage.parts if part is not counter])
        for counter in counters:  # last: a warning may be an error, and no later step says it again
            if counter.deferral is not None and (warning := _warning(counter.stage, counter.deferral)):
                warnings.warn(warning, stacklevel=5)  # the caller of step()


class DeferralCounter(StagePart):
    """Counts how much the I of a stage defers to W; None where its backwards are not split."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.deferral: Deferral | None = None
        stage.use([*stage.parts, self])

    def after_backward(self, index: int, kind: Kind) -> None:
        if kind == "I":
            self.deferral = self.stage.deferred[index].deferral.after(self.deferral)


def _warning(stage: Stage, deferral: Deferral) -> str:
    """The warning for a stage; empty where enough is deferred."""
    at_once = _at_once(stage, deferral)
    everything = deferral.total + at_once.total()
    share = deferral.total / everything if everything else 1.0
    if share >= _LEAST:
        return ""
    causes = ", ".join(f"{cause} {flops / everything:.0%}" for cause, flops in at_once.most_common(4))
    remedies = [remedy for cause, remedy in _REMEDIES.items() if cause in at_once]
    remedies.append("take a schedule with whole backwards, such as 1f1b")
    return (
        f"Stage {stage.index} defers {share:.0%} of the FLOPs of its weight gradients, "
        f"and I computes the rest at once: {causes}. A zero-bubble schedule gains from the deferred ones. "
        f"To gain more, {', or '.join(remedies)}."
    )


def _at_once(stage: Stage, deferral: Deferral) -> Counter[str]:
    """The FLOPs of weight gradients that the stage's I computed at once for a microbatch, by cause.

    They are two for each entry of a weight and row of the microbatch. The model's config gives the number of
    experts per row.
    """
    config = getattr(stage.module, "config", None)
    experts = getattr(config, "num_experts_per_tok", None) or 1
    gathered = stage.sharding.gathered_by_shard
    known = set(deferral.flops)
    flops: Counter[str] = Counter()
    for module, parameter, compiled in _matrices(stage.module):
        key = id(gathered.get(id(parameter), parameter))
        if key in known or parameter.grad is None:
            continue
        known.add(key)
        entries = parameter.numel()
        if parameter.dim() > 2:
            entries = entries // parameter.shape[0] * experts
        flops[_cause(module, parameter, compiled)] += 2 * entries * max(1, deferral.rows)
    return flops


def _matrices(module: nn.Module, compiled: bool = False) -> Iterator[tuple[nn.Module, nn.Parameter, bool]]:
    """The weights of products, with their modules, and whether these are in compiled code."""
    compiled |= is_compiled(module)
    if not isinstance(module, nn.Embedding):
        for parameter in module._parameters.values():
            if parameter is not None and parameter.dim() >= 2:
                yield module, parameter, compiled
    for child in module.children():
        yield from _matrices(child, compiled)


def _cause(module: nn.Module, parameter: nn.Parameter, compiled: bool) -> str:
    if compiled:
        return _COMPILED
    if is_hooked(parameter):
        return _HOOKED
    if is_around(deferred, module):
        return _CHUNKED
    return type(module).__name__ if type(parameter) in PLAIN else type(parameter).__name__
