"""Logits that no rank holds whole: a tensor's facts, and what a loss needs.

    head -> DeferredLogits -> the model's own arithmetic, recorded -> DeferredLogits.cross_entropy

A row of logits is as long as the vocabulary, so that whole logits are often the largest tensors of a step. A
head may return `DeferredLogits` in their place: those of `HeadLogits` (head_logits.py) are computed in blocks
of the vocabulary, and those of `ShardedLogits` (penstock.parallel.tensor.sharded_logits) are sharded over the
ranks of tp. The model's forward continues with them as with plain logits.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from penstock.batch.hits import Hits
from penstock.batch.logit_sums import Penalties
from penstock.errors import ModelError
from penstock.private import DisableTorchFunctionSubclass, make_wrapper_subclass, tree_map_only

LogitsStep = Callable[[Tensor], Tensor]  # arithmetic on logits, entry by entry


class DeferredLogits(Tensor):
    """Logits (rows, sequence, vocabulary) that are not computed, or not gathered.

    Arithmetic with numbers, casts and slices of rows and tokens give another DeferredLogits. Any other use,
    such as a user's hook that reads values, takes the whole logits and continues with a plain tensor.
    """

    _whole: Tensor | None = None
    _source: tuple[DeferredLogits, Any] | None = None  # of a slice: what it is a view of, and the index

    @classmethod
    def _made(cls, shape: Sequence[int], dtype: torch.dtype, device: torch.device, trains: bool) -> Self:
        """A tensor without values. A gradient of its own would be lost, and raises ModelError."""
        made = make_wrapper_subclass(cls, shape, dtype=dtype, device=device, requires_grad=trains)
        if trains:
            with DisableTorchFunctionSubclass():
                made.register_hook(_refuse_gradient)  # type: ignore[no-untyped-call]
        return made

    @abstractmethod
    def cross_entropy(self, labels: Tensor, ignored: int, penalties: Penalties, hits: Hits) -> Tensor:
        """The cross-entropy summed over the tokens, those with the label `ignored` left out.

        Args:
            labels: of the shape of the logits without the vocabulary.
            hits: gets the logits of the labels, and the greatest ones.

        Half precision is summed in float32. Backward of the backward is refused.
        """

    @abstractmethod
    def stepped(self, step: LogitsStep) -> Self:
        """The logits after one more step of arithmetic."""

    @abstractmethod
    def sliced(self, index: Any) -> Self:
        """The logits of some rows and tokens. index: of slices that leave the vocabulary as it is"""

    def hooked(self, hook: Callable[[Tensor], Tensor | None]) -> RemovableHandle | None:
        """Call `hook` in the backward, if it does not read the gradient; None where it may read it."""
        return None

    @abstractmethod
    def _computed(self) -> Tensor:
        """The whole logits. Called outside of `__torch_function__`."""

    @property
    def is_whole(self) -> bool:
        """Whether someone has taken the whole logits, which may have been modified in place since."""
        return self._whole is not None or (self._source is not None and self._source[0].is_whole)

    def whole(self) -> Tensor:
        """The logits, computed once, with a graph also where the first reader needs none."""
        if self._whole is None:
            with DisableTorchFunctionSubclass(), torch.set_grad_enabled(self.requires_grad):
                if self._source is None:
                    self._whole = self._computed()
                else:  # a view, so that a change in place is one of the source, too
                    source, index = self._source
                    self._whole = source.whole()[index]
        return self._whole

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with DisableTorchFunctionSubclass():
            if func in _FACTS or getattr(func, "__self__", None) in _FACTS:
                return func(*args, **kwargs)
            first = args[0] if args else None
            if isinstance(first, DeferredLogits) and not first.is_whole:
                later = first._later(func, args[1:], kwargs)
                if later is not None:
                    return later
            plain = tree_map_only(DeferredLogits, lambda logits: logits.whole(), (args, dict(kwargs)))
            return func(*plain[0], **plain[1])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        raise _below_autograd(f"read by {func}")

    def _later(
        self, func: Any, others: Sequence[Any], options: Mapping[str, Any]
    ) -> Self | RemovableHandle | None:
        """The result of a call, without the values; None for a function that needs them."""
        if func is Tensor.register_hook and others:
            return self.hooked(others[0])
        if self.requires_grad and not torch.is_grad_enabled():  # the results would have no gradient
            return None
        if func is Tensor.__getitem__:
            index = others[0] if isinstance(others[0], tuple) else others[:1]
            # slices that leave the vocabulary, the last dimension, as it is
            if len(index) < self.dim() and all(isinstance(entry, slice) for entry in index):
                made = self.sliced(others[0])
                made._source = self, others[0]
                return made
        numbers = all(isinstance(other, int | float | torch.dtype) for other in (*others, *options.values()))
        if func not in _BY_ENTRY or not numbers:
            return None
        if func is Tensor.contiguous and self._source is not None:  # a copy or not, by the slice
            return None

        def step(logits: Tensor) -> Tensor:
            return func(logits, *others, **options)  # type: ignore[no-any-return]

        probe = torch.empty(0, dtype=self.dtype)
        return self if step(probe) is probe else self.stepped(step)  # as a cast to the same dtype

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype})"


def _below_autograd(reader: str) -> ModelError:
    return ModelError(
        f"logits that are not whole, {reader}",
        "a forward or a hook reads them below autograd, where penstock cannot compute them",
        "Set chunked_loss=False; with tp give a loss_fn, which gets whole logits",
    )


def _refuse_gradient(gradient: Tensor) -> None:
    raise _below_autograd("which an autograd.Function took")


_FACTS = {
    *(getattr(Tensor, name) for name in ("shape", "dtype", "device", "ndim", "layout", "requires_grad")),
    *(getattr(Tensor, name) for name in ("is_cuda", "is_meta", "is_leaf", "is_sparse", "is_nested", "_base")),
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.get_device, Tensor.is_floating_point),
    *(Tensor.is_complex, Tensor.__len__, Tensor.__hash__, Tensor.__repr__),
}
_ARITHMETIC = ("mul", "div", "tanh", "add", "sub", "neg")
_BY_ENTRY = {
    *(getattr(kind, name) for kind in (torch, Tensor) for name in _ARITHMETIC),
    *(Tensor.__mul__, Tensor.__rmul__, Tensor.__truediv__, Tensor.__add__, Tensor.__radd__, Tensor.__sub__),
    *(Tensor.__neg__, Tensor.float, Tensor.to, Tensor.contiguous),
}


def whole(output: Any) -> Any:
    """`output` with plain tensors in place of each DeferredLogits."""
    return tree_map_only(DeferredLogits, DeferredLogits.whole, output)
