"""The differences that rounding explains: gradients that it moves, and router flips.

Ranks of cp, ep and tp sum in another order than one process does, so a correct split differs from the
reference model by rounding, the more the deeper the model is. A router may also choose the other one of two
experts whose scores are nearly tied, after which one token gets another expert's output in one layer.

Neither effect is known beforehand, so both are measured: the reference model runs again with the last digit
of each weight changed. A gradient that moves with that may also move with the order of summation.

A router flip may change anything in the gradients of the mixture in which it happens. In every other gradient
it is one token among many, and the loss is the mean over all tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import isfinite, sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from penstock.pipeline.compare import Report

ROUNDS = 4.0  # times the measured rounding: the largest difference that passes
LOSS = 0.05  # of the loss; flipping every token's last choice moved the loss of small models by 0.034
_UNEVEN = 10.0  # how much more than its share one token may add to a gradient; in small models up to 8.4
_TOPK = (torch.topk, Tensor.topk)


@torch.no_grad()
def nudge(model: nn.Module, turn: int) -> None:
    """Move each entry of each weight by about its dtype's epsilon, up or down, in place.

    Args:
        turn: from 0; each turn moves the entries in other directions
    """
    for index, parameter in enumerate(model.parameters()):
        if parameter.is_floating_point():
            generator = torch.Generator(parameter.device).manual_seed(turn * 10**6 + index)
            options: dict[str, Any] = {"generator": generator, "device": parameter.device}
            signs = torch.randint(0, 2, parameter.shape, dtype=torch.int8, **options).to(parameter.dtype)
            parameter.mul_(1 + torch.finfo(parameter.dtype).eps * (2 * signs - 1))


class Scores(TorchFunctionMode):
    """A context that records the scores of every top-k, in float32 on the host.

    Attributes:
        calls: the scores with the choices along the last dimension, and the number of chosen ones
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Tensor, int]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _TOPK:
            self._record(*args, **kwargs)
        return func(*args, **kwargs)

    def _record(self, input: Tensor, k: int, dim: int = -1, *_: Any, **__: Any) -> None:
        if input.is_floating_point() and k < input.shape[dim]:
            self.calls.append((input.detach().movedim(dim, -1).float().cpu(), k))


def near_ties(before: Scores, after: Scores) -> int:
    """The number of choices that rounding may flip.

    In these, the last chosen score leads the next one by at most ROUNDS times the change of the scores
    between `before` and `after` a nudge.
    """
    pairs = zip(before.calls, after.calls, strict=False)
    return sum(_near(scores, chosen, moved) for (scores, chosen), (moved, _) in pairs)


def _near(scores: Tensor, chosen: int, moved: Tensor) -> int:
    if scores.shape != moved.shape:  # another number of tokens: an earlier choice has flipped
        return scores[..., 0].numel()
    top = scores.topk(chosen + 1).values
    lead = top[..., chosen - 1] - top[..., chosen]
    change = torch.where(scores == moved, 0.0, (scores - moved).abs()).amax(-1)  # inf - inf is no change
    return int((lead <= ROUNDS * change).sum())


def explained_by_flips(report: Report, near: int, tokens: int) -> bool:
    """Can `near` flipped router choices explain every difference?

    Args:
        report: the comparison, with tensors measured by their norms
        near: the number of choices that may flip
        tokens: the number of tokens in the batch
    """
    if not near or report.losses is None:
        return False
    split, reference = report.losses
    if not abs(split - reference) <= LOSS * max(1.0, abs(reference)):  # also true for NaN
        return False
    mixtures = mixture_weights(tensor.name for tensor in report.tensors)
    share = _UNEVEN * sqrt(2 * near / tokens)  # a random sum: each flip takes one summand and adds another
    for tensor in report.wrong:
        if tensor.remark:  # a gradient that one of the two lacks, as of an expert that got no token
            if not any(map(_is_experts, tensor.name.split("."))):
                return False
        elif not isfinite(tensor.difference) or (
            tensor.name not in mixtures and tensor.difference > share * tensor.size
        ):
            return False
    return True


def mixture_weights(names: Iterable[str]) -> frozenset[str]:
    """The names that belong to mixtures: experts, and the routers and shared experts next to them.

    The rest of such a module does not: a layer that holds its experts directly (gemma4) has attention too.
    """
    split = {name: name.split(".") for name in names}
    homes = {
        tuple(path[:at]) for path in split.values() for at, module in enumerate(path) if _is_experts(module)
    }
    return frozenset(
        name
        for name, path in split.items()
        if any(tuple(path[:at]) in homes and _is_in_mixture(module) for at, module in enumerate(path))
    )


def _is_experts(module: str) -> bool:
    return "expert" in module and "shared" not in module


def _is_in_mixture(module: str) -> bool:
    return "expert" in module or "router" in module or module == "gate"
