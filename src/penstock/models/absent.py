"""What stands on a stage in the place of other stages' modules beside the layers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from penstock.errors import ModelError


class Absent(nn.Module):
    """Stands where a module of another stage stood. What is asked of it, such as an embedding's width or the
    dtype of its weight, the module itself answers; its weights are zeros that take no memory.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        memo: dict[int, Any] = {id(t): torch.empty_like(t, device="meta") for t in module.buffers()}
        memo |= {id(p): nn.Parameter(torch.empty_like(p, device="meta"), False) for p in module.parameters()}
        self.__dict__["_module"] = copy.deepcopy(module, memo)  # not among the parts, or its weights would be
        self.__dict__["_here"] = torch.zeros((), dtype=torch.bool, device="cpu")  # and nobody's buffer

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return copy.copy(self)  # nothing in it ever changes but what is known

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self.__dict__["_here"] = fn(self._here)  # of `to`: it goes where the model goes
        return self

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.__dict__["_module"], name)
        if isinstance(value, nn.Module):
            value = Absent(value)
            value.to(self._here.device)
        elif isinstance(value, Tensor):
            dtype = self._computed(value.dtype)
            value = torch.zeros((), dtype=dtype, device=self._here.device).expand(value.shape)
        return value

    def _computed(self, dtype: torch.dtype) -> torch.dtype:
        """What weights of `dtype` are computed in, see `compute_in`."""
        narrow: torch.dtype | None = self.__dict__.get("_narrow")
        return dtype if narrow is None or not dtype.is_floating_point else narrow


class Before(Absent):
    """Of a module that runs before the layers, where its result is thrown away: it gives zeros of its shape.

    The shape is learnt from the module itself without values, once for each shape that comes in.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.__dict__["_known"] = {}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        leaves = tree_leaves((args, kwargs))
        key = tuple((leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves)
        known = self.__dict__["_known"]
        if key not in known:
            known[key] = self._learn(args, kwargs)
        device = self._here.device
        return tree_map_only(
            Shape,
            lambda given: torch.zeros(given.of, dtype=self._computed(given.dtype), device=device),
            known[key],
        )

    @torch.no_grad()
    def _learn(self, args: Any, kwargs: Any) -> Any:
        with _disable_current_modes():  # of who counts bytes, or has fake tensors only
            args, kwargs = tree_map_only(
                Tensor, lambda t: torch.empty(t.shape, dtype=t.dtype, device="meta"), (args, kwargs)
            )
            given = self.__dict__["_module"](*args, **kwargs)
            return tree_map_only(Tensor, lambda t: Shape(t.shape, t.dtype), given)


@dataclass(frozen=True)
class Shape:
    of: torch.Size
    dtype: torch.dtype


class After(Absent):
    """Of a module that runs after the layers, or never, on a stage whose forward does not get there."""

    def __init__(self, module: nn.Module, name: str) -> None:
        super().__init__(module)
        self.__dict__["_name"] = name

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        raise ModelError(
            f"{self._name}, called on a stage that does not hold it",
            "the last stage alone holds what runs after the layers, and what no text goes through",
            "Set the config's layer dropping to 0; give images and sounds as inputs_embeds",
        )


def compute_in(stage: nn.Module, dtype: torch.dtype) -> None:
    """Let what stands for other stages' modules answer as those do, whose weights are computed in `dtype`."""
    for module in stage.modules():
        if isinstance(module, Absent):
            module.__dict__["_narrow"] = dtype
