"""Edge shapes: a rank knows what will cross an edge before it arrives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import Tensor

from penstock.batch.payload import SINGLE, EdgeSpecs, Form
from penstock.errors import BatchError, ShapeError
from penstock.private import is_any_autocast_enabled, tree_flatten
from penstock.schedule import Op

Microbatch = Mapping[str, Any]
MicrobatchKey = tuple[tuple[str, Any], ...]  # each entry's name, and what its shapes depend on


def model_input(microbatch: Microbatch) -> Tensor:
    """input_ids (rows, tokens) or inputs_embeds (rows, tokens, width). Raises BatchError without either."""
    inputs = microbatch.get("input_ids", microbatch.get("inputs_embeds"))
    if not isinstance(inputs, Tensor):
        rule = "a model reads input_ids or inputs_embeds"
        raise BatchError(f"a batch of {sorted(microbatch)}", rule, "Give one of them")
    return inputs


def logits_in(output: Any) -> Any:
    """The logits of what a model or the last stage returns: its entry of that name, or all of it."""
    return output["logits"] if isinstance(output, Mapping) else output


class EdgeShapes(Protocol):
    """The shapes on each edge."""

    def __call__(self, stage: int, microbatch: Microbatch) -> EdgeSpecs:
        """The output of `stage`, counted within its copy of the model, for `microbatch`."""


def check(op: Op, tensors: tuple[Tensor, ...], form: Form, expected: EdgeSpecs) -> None:
    """Raise ShapeError unless the buffer that the receiver has posted fits.

    gloo would part-fill a buffer that is too long, reinterpret another dtype, and abort the receiving
    process on one that is too short.
    """
    specs = expected.tensors
    if len(tensors) != len(specs) or form != expected.form:
        _refuse(op, tensors, form, expected)
    for tensor, spec in zip(tensors, specs, strict=True):
        if tensor.shape != spec.shape or tensor.dtype != spec.dtype:
            _refuse(op, tensors, form, expected)
        if tensor.requires_grad and not spec.differentiable:
            rule = "one of these tensors needs a gradient, and the next stage sends none"
            remedy = "Detach it, or declare it differentiable; if it was unfrozen since, build a new pipeline"
            raise ShapeError(f"{op} gave {EdgeSpecs.of(tensors, SINGLE)}", rule, remedy)


def _refuse(op: Op, tensors: tuple[Tensor, ...], form: Form, expected: EdgeSpecs) -> None:
    if form.constants != expected.form.constants and form.tree == expected.form.tree:
        remedy = "Numbers made of a tensor's values cannot be known beforehand: use shapes='exchanged'"
    elif is_any_autocast_enabled():
        remedy = (
            "Autocast is on in a region of yours, and shapes are inferred outside of it: use the option "
            "autocast= instead, let stages end in .to(dtype), or use shapes='exchanged'"
        )
    else:
        remedy = (
            "Make the stage's output follow from its input's shape and the model's dtype, or use "
            "shapes='exchanged'"
        )
    specs = EdgeSpecs.of(tensors, form)
    raise ShapeError(f"{op} gave {specs}", f"the next rank expects {expected}", remedy)


def microbatch_key(microbatch: Microbatch) -> MicrobatchKey:
    """Equal for microbatches whose tensors agree in name, shape and dtype, and which agree in all else."""
    return tuple((name, _key(microbatch[name])) for name in sorted(microbatch))


def _key(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape, value.dtype
    if value is None or isinstance(value, bool | int | float | str):
        return type(value), value
    leaves, tree = tree_flatten(value)
    if len(leaves) == 1 and leaves[0] is value:
        return type(value).__name__  # an object of the user's, represented by its type
    return repr(tree), tuple(map(_key, leaves))


class CachedEdges:
    """Edge shapes with a cache by the microbatch's key: a known shape costs one look-up.

    infer: returns all edges of one microbatch, in order
    """

    MOST = 4096  # shapes that are remembered

    def __init__(self, infer: Callable[[Microbatch], tuple[EdgeSpecs, ...]]) -> None:
        self._infer = infer
        self._known: dict[object, tuple[EdgeSpecs, ...]] = {}

    def __call__(self, stage: int, microbatch: Microbatch) -> EdgeSpecs:
        key = microbatch_key(microbatch)
        if (specs := self._known.get(key)) is None:
            if len(self._known) >= self.MOST:
                self._known.pop(next(iter(self._known)))
            specs = self._known[key] = self._infer(microbatch)
        return specs[stage]
