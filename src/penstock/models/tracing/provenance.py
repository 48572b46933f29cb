"""What tensors were made of: marks that follow values through every op.

with provenance:
    provenance.mark(weight, {"embed.weight"})
    provenance.marks(weight.sum() > 0)          # {"embed.weight"}
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from penstock.private import TorchDispatchMode, tree_leaves

Mark = int | str

# these ops look at shape, dtype and device of their arguments, and at no value
_SHAPE_ONLY = frozenset(
    {"new_zeros", "new_ones", "new_full", "new_empty", "new_empty_strided", "zeros_like", "ones_like",
     "empty_like", "full_like", "rand_like", "randn_like", "randint_like", "empty_strided"}
)  # fmt: skip


class Provenance(TorchDispatchMode):
    """Follows marks by storage, so that they also pass through detach, comparisons, no_grad and in-place ops.

    Numbers that a model reads out of a tensor lose them.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._marks: dict[int, frozenset[Mark]] = {}
        self._kept: list[Any] = []  # so that a storage's address stays its own

    def mark(self, tensor: Tensor, marks: Iterable[Mark]) -> None:
        """Replace the marks of `tensor`."""
        storage = tensor.untyped_storage()
        self._marks[storage._cdata] = frozenset(marks)
        self._kept.append(storage)

    def marked(self, tensor: Tensor, mark: Mark) -> Tensor:
        """A copy of `tensor` that a model may write into, with this mark alone."""
        new = tensor.clone()
        self.mark(new, {mark})
        return new

    def marks(self, *values: Any) -> frozenset[Mark]:
        """The marks of all tensors in `values`."""
        tensors = (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor))
        found = (self._marks.get(tensor.untyped_storage()._cdata, frozenset()) for tensor in tensors)
        return frozenset[Mark]().union(*found)

    def origins(self, *values: Any) -> tuple[set[int], set[str]]:
        """The numbers and the names among the marks of all tensors in `values`."""
        marks = self.marks(*values)
        return {m for m in marks if isinstance(m, int)}, {m for m in marks if isinstance(m, str)}

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in _SHAPE_ONLY:
            return result
        if marks := self.marks(args, kwargs):
            schema = func._schema.arguments
            written = [value for value, of in zip(args, schema, strict=False) if _is_written(of)]
            for tensor in tree_leaves((result, written)):
                if isinstance(tensor, Tensor):
                    self.mark(tensor, self.marks(tensor) | marks)
        return result


def _is_written(argument: torch.Argument) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write
