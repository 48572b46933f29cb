"""Does a forward mix the positions of a sequence anywhere but in attention?

The forward runs without values on one row of LENGTH tokens, a length that no other dimension has, with an
attention that keeps positions apart. Every op on a tensor derived from the tokens is checked: a tensor with
one dimension of LENGTH must keep it, and no op may work along it.

    hidden.roll(1, dims=1)        works along the sequence
    hidden.mean(1)                has lost it
    hidden[:, 1:]                 has lost it
    hidden @ hidden.mT            has it twice
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from penstock.private import TorchDispatchMode, tree_leaves

LENGTH = 2 * 4999  # tokens; twice a prime, so that no product of other sizes is likely to be the same

# they move dimensions, and leave values where they are
_VIEWS = frozenset({"transpose", "permute", "unsqueeze", "squeeze", "movedim", "slice", "split", "unbind",
                    "select", "split_with_sizes", "cat", "stack", "expand", "narrow"})  # fmt: skip
# ops that look up entries by index
_BY_INDEX = frozenset({"index", "index_put", "index_put_", "_index_put_impl_", "as_strided"})


class MixedPositionsError(Exception):
    """The op that mixes positions, in `args[0]`."""


class Positions(TorchDispatchMode):
    """Follows values derived from tokens. Raises MixedPositionsError at the first op that mixes positions."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._made_of_tokens: dict[int, Any] = {}  # storages by address; kept, so that no other gets it

    def follow(self, *values: Any) -> None:
        """Mark all tensors in `values` as derived from tokens."""
        for leaf in tree_leaves(values):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                self._made_of_tokens[storage._cdata] = storage

    def _follows(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._made_of_tokens

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        followed = [leaf for leaf in leaves if self._follows(leaf)]
        name = func.overloadpacket.__name__
        if followed and not name.startswith("new_") and not name.endswith("_like"):  # these read no value
            along = [leaf for leaf in followed if LENGTH in leaf.shape]
            if along and (_works_along(func, name, args, kwargs or {}) or _changes(along, result)):
                raise MixedPositionsError(name)
            self.follow(result)
        return result


def _changes(along: list[Tensor], result: Any) -> bool:
    """Whether the sequence is lost or doubled in the results."""
    results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    return any(_sequences(leaf) != 1 for leaf in results) or any(_sequences(leaf) > 1 for leaf in along)


def _sequences(tensor: Tensor) -> int:
    return list(tensor.shape).count(LENGTH)


def _works_along(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the op's arguments say that it works along the sequence."""
    first = next((leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)), None)
    if first is None or name in _VIEWS:
        return False
    if name in _BY_INDEX:
        return True
    if name in ("mm", "bmm", "addmm", "baddbmm", "addbmm"):
        left, right = args[-2:]
        return bool(left.shape[-1] == LENGTH or right.shape[-2] == LENGTH)
    if name.startswith(("conv", "_conv", "unfold", "im2col")):
        return LENGTH in first.shape
    arguments = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    if name == "native_layer_norm":
        return LENGTH in arguments["normalized_shape"]
    for key in ("dim", "dims", "dimension"):
        dims = arguments.get(key)
        for dim in (dims,) if isinstance(dims, int) else dims or ():
            if isinstance(dim, int) and first.dim() and first.shape[dim] == LENGTH:
                return True
    return False
