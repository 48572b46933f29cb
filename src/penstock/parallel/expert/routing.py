"""Finds, records and replaces the choice of a router, without changes to the model's code.

Routers differ in all but two things: the choice is a top-k, and the experts are called with its result. So in
a forward of a block, the module that calls its experts, a TorchFunctionMode sees every top-k, and the one
whose result reaches the experts is the choice. Others, e.g. among groups of experts, are not changed.

    block --> top-k among groups --> top-k among experts --> experts(hidden, chosen, weights)
              not the choice         the choice: top-k 1 of this block

A forward without values shows this index when the pipeline is built, so that no block has to run for it.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from penstock.errors import ConfigError, ModelError
from penstock.parallel.expert.dispatch import without_values
from penstock.runtime.around import around

_TOPK = (torch.topk, Tensor.topk)


class Task(NamedTuple):
    """The task of a router in one forward.

    choices: to replay, (tokens, top_k); the router chooses for tokens with negative entries, and for all
        tokens if None
    kept: gets the actual choices, (tokens, top_k), by the name of the mixture
    """

    choices: Tensor | None = None
    kept: dict[str, Tensor] | None = None


class Marks(Protocol):
    """Follows marks through every op (penstock.models.tracing.provenance)."""

    def mark(self, tensor: Tensor, marks: Iterable[int | str]) -> None:
        """Replace the marks of `tensor`."""

    def marks(self, *values: Any) -> frozenset[int | str]:
        """The marks of all tensors that `values` were computed from."""


class TopKs(TorchFunctionMode):
    """Sees every top-k of a block's forward, and makes the one with index `choice` follow its task.

    Attributes:
        over: set when the experts are called; a later top-k is not their choice
    """

    def __init__(
        self, name: str, choice: int | None = None, task: Task | None = None, marks: Marks | None = None
    ) -> None:
        """marks: given in a forward without values; marks each top-k's result with its index"""
        super().__init__()
        self.indices: list[Tensor] = []  # the result of each top-k so far
        self.over = False
        self.task = Task() if task is None else task
        self._name, self._choice, self._marks = name, choice, marks

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _TOPK or self.over:
            return func(*args, **kwargs)
        run = functools.partial(self._replace, func) if len(self.indices) == self._choice else func
        result = run(*args, **kwargs)
        if self._marks is not None:
            self._marks.mark(result[1], self._marks.marks(result[1]) | {len(self.indices)})
        self.indices.append(result[1])
        return result

    def _replace(self, topk: Any, input: Tensor, k: int, dim: int = -1, **options: Any) -> Any:
        """The same autograd function records and replays: a recomputation must save the same tensors."""
        chosen = topk(input.detach(), k, dim, **options)[1]
        if (choices := self.task.choices) is not None:
            shape = torch.Size((*input.shape[:-1], k))
            if dim not in (-1, input.dim() - 1) or choices.shape[-1] != k or choices.numel() != shape.numel():
                raise ConfigError(
                    f"choices {list(choices.shape)} to replay in {self._name}",
                    f"this forward chooses {k} experts for each of {shape[:-1].numel()} tokens",
                    "Give the choices of the same microbatch",
                )
            choices = choices.to(input.device, torch.int64).reshape(shape)
            chosen = torch.where(choices < 0, chosen, choices)
        values = _Take.apply(input, chosen, dim)  # type: ignore[no-untyped-call]
        return torch.return_types.topk((values, chosen))

    def number_of(self, chosen: Tensor) -> int:
        """Index of the top-k that `chosen` was computed from. Raises ModelError where there is none.

        A top-k among groups of experts comes before the one among experts: the last one counts.
        """
        assert self._marks is not None
        made_of = self._marks.marks(chosen)
        form = chosen.shape[-1:], chosen.numel()
        same = [
            index
            for index, indices in enumerate(self.indices)
            if index in made_of and (indices.shape[-1:], indices.numel()) == form
        ]
        if not same:
            raise not_top_k(self._name)
        return same[-1]


class _Take(torch.autograd.Function):
    """The entries of a tensor at some indices, with a top-k's gradient; saves the indices only."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, places: Tensor, dim: int) -> Tensor:
        ctx.save_for_backward(places)
        ctx.shape, ctx.dim = input.shape, dim
        return input.gather(dim, places)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (places,) = ctx.saved_tensors
        return gradient.new_zeros(ctx.shape).scatter(ctx.dim, places, gradient), None, None


class Router:
    """The router of one mixture: records or replaces its choices in the forwards of its block.

    Args:
        name: of the module of experts
        choice: index of the block's top-k that is the choice
        task: called with `name` and whether a backward will follow, when a forward of the block begins in
            this thread; returns the task, or None to leave the forward alone
    """

    def __init__(self, name: str, choice: int, task: Callable[[str, bool], Task | None]) -> None:
        self._name, self._choice, self._task = name, choice, task
        self._thread = threading.local()  # a forward and a recomputation may run at the same time

    def attach(self, module: nn.Module) -> None:
        """Make the forward of the mixture's block in `module` call `run`.

        Raises ModelError where the block has a router already.
        """
        block = module.get_submodule(self._name.rpartition(".")[0])
        if hasattr(block, "_router"):
            kind = type(block).__name__
            raise one_too_many(self._name, f"a second mixture in a {kind}, or replayed already")
        block._router = self  # type: ignore[assignment]
        around(block, forward=_routed)
        experts = module.get_submodule(self._name)
        experts.register_forward_pre_hook(lambda *_: self._experts_called())

    def run(self, forward: Callable[[], Any], trains: bool) -> Any:
        """Run a forward of the block under its task. trains: whether a backward will follow"""
        task = self._task(self._name, trains)
        if task is None:
            return forward()
        with self._watching(task):
            return forward()

    @contextmanager
    def _watching(self, task: Task) -> Iterator[None]:
        self._thread.running = TopKs(self._name, self._choice, task)
        try:
            with self._thread.running:
                yield
        finally:
            self._thread.running = None

    def _experts_called(self) -> None:
        """Called when the experts are called."""
        topks: TopKs | None = getattr(self._thread, "running", None)
        if topks is None:
            return
        topks.over = True
        if self._choice >= len(topks.indices):
            raise not_top_k(self._name)
        if (kept := topks.task.kept) is not None:
            if self._name in kept:
                raise one_too_many(self._name, "called twice in one forward")
            chosen = topks.indices[self._choice]
            kept[self._name] = chosen.detach().reshape(-1, chosen.shape[-1]).clone()


def _routed(plain: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a block that has a `_router`."""

    def forward(block: Any, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(value, Tensor) and without_values(value) for value in (*args, *kwargs.values())):
            return plain(block, *args, **kwargs)
        router: Router = block._router
        trains = block.training and torch.is_grad_enabled()
        return router.run(functools.partial(plain, block, *args, **kwargs), trains)

    return forward


def not_top_k(name: str) -> ModelError:
    """The error for a mixture whose choice is not one top-k."""
    return ModelError(
        name,
        "choices are replayed in the one top-k of the block whose result the experts are called with",
        "Train this model without routing replay",
    )


def one_too_many(name: str, why: str) -> ModelError:
    """The error for a mixture that shares its block, or that a forward calls twice."""
    return ModelError(
        f"{name}, {why}",
        "a choice is identified by its block, which makes one in each forward",
        "Train this model without routing replay",
    )
