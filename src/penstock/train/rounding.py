"""How far rounding alone carries a model: the same backward again, with each weight moved by its last digit.

Where ranks of cp, ep and tp add up in another order than one process does, a right split differs from the
whole model by such rounding, more so the deeper the model is. And a choice among scores that are nearly tied,
a router's, may become another one, after which all differs. Neither is known beforehand, but both are seen
here: what the last digits of the weights change is what the order of the sums may change.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

ROUNDS = 4.0  # how often as far as it was seen to
_TOPK = (torch.topk, Tensor.topk)


@torch.no_grad()
def nudge(model: nn.Module, turn: int) -> None:
    """Move each entry of each weight by about its dtype's epsilon, up or down, in place.

    turn: from 0; another one moves them in other directions
    """
    for number, parameter in enumerate(model.parameters()):
        if parameter.is_floating_point():
            generator = torch.Generator(parameter.device).manual_seed(turn * 10**6 + number)
            options: dict[str, Any] = {"generator": generator, "device": parameter.device}
            signs = torch.randint(0, 2, parameter.shape, dtype=torch.int8, **options).to(parameter.dtype)
            parameter.mul_(1 + torch.finfo(parameter.dtype).eps * (2 * signs - 1))


class Scores(TorchFunctionMode):
    """While it is entered, keeps what each top-k chooses among, in float32 on the host.

    calls: the scores, the choices along the last dimension, and how many are chosen
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Tensor, int]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _TOPK:
            self._keep(*args, **kwargs)
        return func(*args, **kwargs)

    def _keep(self, input: Tensor, k: int, dim: int = -1, *_: Any, **__: Any) -> None:
        if input.is_floating_point() and k < input.shape[dim]:
            self.calls.append((input.detach().movedim(dim, -1).float().cpu(), k))


def near_ties(before: Scores, after: Scores) -> int:
    """How many choices rounding may turn: those whose last one is ahead of the next by no more than ROUNDS
    times what the scores have moved by.
    """
    pairs = list(zip(before.calls, after.calls, strict=False))
    return sum(_near(*one, other) for one, (other, _) in pairs)


def _near(scores: Tensor, chosen: int, moved: Tensor) -> int:
    if scores.shape != moved.shape:  # another number of tokens got here: an earlier choice was another
        return scores[..., 0].numel()
    top = scores.topk(chosen + 1).values
    ahead = top[..., chosen - 1] - top[..., chosen]
    change = torch.where(scores == moved, 0.0, (scores - moved).abs()).amax(-1)  # inf stays where it is
    return int((ahead <= ROUNDS * change).sum())
