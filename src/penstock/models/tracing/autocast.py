"""torch.autocast for forwards without values: torch has none on the meta device, and hides its casts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from penstock.private import tree_map_only
from penstock.runtime.around import around
from penstock.runtime.split_backward.casts import WeightCasts, is_weight

# the ops among torch's "ops that autocast to lower precision" that language models call
_LOWERED = frozenset({
    F.linear, F.conv1d, F.conv2d, torch.conv1d, torch.conv2d, F.scaled_dot_product_attention, torch.einsum,
    torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm, torch.bmm, Tensor.bmm, torch.baddbmm,
    Tensor.baddbmm, torch.addmm, Tensor.addmm,
})  # fmt: skip


class AutocastWithoutValues(TorchFunctionMode):
    """Casts float32 to `dtype` before products. Inputs that autocast widens are float32 here anyway.

    casts: of weights, which a stage makes once for all microbatches
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.casts = WeightCasts()
        self._dtype = dtype

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _LOWERED:
            args, kwargs = tree_map_only(Tensor, self._lowered, (args, kwargs))
        return func(*args, **kwargs)

    def _lowered(self, tensor: Tensor) -> Tensor:
        if tensor.dtype != torch.float32:
            return tensor
        return self.casts.of(tensor, self._dtype) if is_weight(tensor) else tensor.to(self._dtype)


def cast_again(layer: nn.Module, mode: AutocastWithoutValues) -> None:
    """Let the forward of `layer` run under `mode`, within whatever else runs it again in the backward.

    Under a mode around the whole backward, a tape of split backwards would see what is not cast yet.
    """
    around(layer, forward=_under)
    vars(layer)["casts_again"] = mode


def _under(plain: Callable[..., Any]) -> Callable[..., Any]:
    def forward(layer: Any, *args: Any, **kwargs: Any) -> Any:
        with layer.casts_again:
            return plain(layer, *args, **kwargs)

    return forward
