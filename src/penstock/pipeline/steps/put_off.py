"""Say once where split backwards put little off: a zero-bubble schedule gains by what waits for W alone.

I computes the gradient of a weight at once where it does not see the weight's product, as in compiled layers,
Transformer Engine and torchao's float8, where a hook looks at the gradient, or where the loss runs the head
in blocks (docs/split-backward.md).
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Iterator

from torch import nn

from penstock.models.huggingface.head import deferred
from penstock.runtime.around import is_around
from penstock.runtime.split_backward.deferred import PLAIN, is_hooked
from penstock.runtime.split_backward.modules import is_compiled
from penstock.runtime.stage import Stage

_LEAST = 0.8  # of the weight gradients' FLOPs
_COMPILED, _HOOKED, _CHUNKED = "torch.compile", "hooks on gradients", "the chunked loss"
_REMEDIES = {
    _COMPILED: "compile layers by penstock.compile_around_products",
    _CHUNKED: "set chunked_loss=False if there is memory for whole logits",
}


def warn_of_whole_backwards(stages: Iterable[Stage]) -> None:
    """Warn of each stage whose I left less than 80 % of the weight gradients' FLOPs for W.

    After the first step, of which all microbatches count: some have no images.
    """
    for stage in stages:
        stage.watches_put_off = False
        if stage.put_off is None:  # its backwards are not split
            continue
        put_off, at_once = stage.put_off.total, _at_once(stage)
        everything = put_off + at_once.total()
        if put_off >= _LEAST * everything:
            continue
        causes = ", ".join(f"{cause} {flops / everything:.0%}" for cause, flops in at_once.most_common(4))
        remedies = [remedy for cause, remedy in _REMEDIES.items() if cause in at_once]
        remedies.append("take a schedule with whole backwards, such as 1f1b")
        warnings.warn(
            f"Stage {stage.index} puts off {put_off / everything:.0%} of the FLOPs of its weight gradients, "
            f"and I computes the rest at once: {causes}. A zero-bubble schedule gains by what is put off. "
            f"To gain more, {', or '.join(remedies)}.",
            stacklevel=4,  # of the call of step()
        )


def _at_once(stage: Stage) -> Counter[str]:
    """The FLOPs of weight gradients that the stage's I computed for a microbatch, by their cause.

    Two for each entry of a weight and row of the microbatch. Of a bank of experts as many work on a row as
    the model's config says.
    """
    assert stage.put_off is not None
    config = getattr(stage.module, "config", None)
    experts = getattr(config, "num_experts_per_tok", None) or 1
    gathered = stage.sharding.gathered_by_shard
    known = set(stage.put_off.flops)
    flops: Counter[str] = Counter()
    for module, parameter, compiled in _matrices(stage.module):
        key = id(gathered.get(id(parameter), parameter))
        if key in known or parameter.grad is None:
            continue
        known.add(key)
        entries = parameter.numel()
        if parameter.dim() > 2:
            entries = entries // parameter.shape[0] * experts
        flops[_cause(module, parameter, compiled)] += 2 * entries * max(1, stage.put_off.rows)
    return flops


def _matrices(module: nn.Module, compiled: bool = False) -> Iterator[tuple[nn.Module, nn.Parameter, bool]]:
    """The weights of products, with their modules, and whether these are compiled or within what is."""
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
