"""The origins of tensors: marks that follow values through every op.

with provenance:
    provenance.mark(weight, {"embed.weight"})
    provenance.marks(weight.sum() > 0)          # {"embed.weight"}
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

from penstock.private import TorchDispatchMode, tree_leaves

ProvenanceMark = int | str

_PLAIN = frozenset({bool, int, float, str, type(None), torch.dtype, torch.device, torch.layout})
# these ops read shape, dtype and device of their arguments, but no value
_SHAPE_ONLY = frozenset(
    {"new_zeros", "new_ones", "new_full", "new_empty", "new_empty_strided", "zeros_like", "ones_like",
     "empty_like", "full_like", "rand_like", "randn_like", "randint_like", "empty_strided"}
)  # fmt: skip


class Provenance(TorchDispatchMode):
    """Follows marks by storage, so that they also pass through detach, comparisons, no_grad and in-place ops.

    Python numbers that a model reads from a tensor have no marks.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._marks: dict[int, frozenset[ProvenanceMark]] = {}
        self._kept: list[Any] = []  # so that no other storage gets an address

    def mark(self, tensor: Tensor, marks: Iterable[ProvenanceMark]) -> None:
        """Replace the marks of `tensor`."""
        storage = tensor.untyped_storage()
        self._marks[storage._cdata] = frozenset(marks)
        self._kept.append(storage)

    def marked(self, tensor: Tensor, mark: ProvenanceMark) -> Tensor:
        """A copy of `tensor` that a model may modify, with only this mark."""
        new = tensor.clone()
        self.mark(new, {mark})
        return new

    def marks(self, *values: Any) -> frozenset[ProvenanceMark]:
        """The marks of all tensors in `values`."""
        storages = (tensor.untyped_storage()._cdata for tensor in _tensors(values))
        return frozenset[ProvenanceMark]().union(
            *(self._marks.get(storage, frozenset()) for storage in storages)
        )

    def origins(self, *values: Any) -> tuple[set[int], set[str]]:
        """The layer indices and the names among the marks of all tensors in `values`."""
        marks = self.marks(*values)
        return {m for m in marks if isinstance(m, int)}, {m for m in marks if isinstance(m, str)}

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in _SHAPE_ONLY:
            return result
        if marks := self.marks(args, kwargs):
            written = [args[index] for index in _written(func) if index < len(args)]
            for tensor in _tensors((result, written)):
                self.mark(tensor, self.marks(tensor) | marks)
        return result


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among the leaves of `values`. Each op calls this three times: pytree would be slow."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif type(value) in (tuple, list):
            yield from _tensors(value)
        elif type(value) is dict:
            yield from _tensors(value.values())
        elif type(value) not in _PLAIN:
            yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


@cache
def _written(func: Any) -> tuple[int, ...]:
    """The indices of the arguments that an op writes into."""
    aliases = (argument.alias_info for argument in func._schema.arguments)
    return tuple(index for index, alias in enumerate(aliases) if alias is not None and alias.is_write)
