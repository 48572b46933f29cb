"""Where the router of one mixture chooses: found, watched and replaced from outside of the model's code.

Routers differ in all but two things: the choice is a top-k, and the experts are called with its result. So
while a block runs, the module that calls its experts, every top-k in it is seen (a TorchFunctionMode), and
the one whose result arrives at the experts is the choice. Others, e.g. among groups, stay as they are.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from penstock.errors import ConfigError, ModelError
from penstock.parallel.dispatch import without_values

_TOPK = (torch.topk, Tensor.topk)


class Seat:
    """A mixture's place: its name, and which top-k of its block is the choice.

    now: tells what is to be done in a forward that begins in this thread, by the mixture's name and whether
        a backward will follow; None for nothing
    """

    def __init__(self, name: str, now: Callable[[str, bool], What | None]) -> None:
        self.name, self.now = name, now
        self.number: int | None = None  # the choice is the block's top-k of this number; None: not known yet
        self._running = threading.local()  # a forward and a recomputation may run side by side

    @contextmanager
    def running(self, choosing: Choosing) -> Iterator[None]:
        self._running.choosing = choosing
        try:
            with choosing:
                yield
        finally:
            self._running.choosing = None

    def arrived(self, chosen: Tensor) -> None:
        """The experts are called with `chosen`: (tokens, top_k)."""
        choosing: Choosing | None = getattr(self._running, "choosing", None)
        if choosing is not None:
            choosing.arrived(chosen)


class What(NamedTuple):
    """What is to be done in one forward of a block.

    choices: to replay, (tokens, top_k), where a token with negative numbers is the router's own affair; None
        leaves all of them to it
    keep: takes those that were made, (tokens, top_k)
    """

    choices: Tensor | None
    keep: Callable[[Tensor], None] | None


class _Take(torch.autograd.Function):
    """The entries of a tensor at given places, with a top-k's gradient and nothing saved but the places."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, places: Tensor, dim: int) -> Tensor:
        ctx.save_for_backward(places)
        ctx.shape, ctx.dim = input.shape, dim
        return input.gather(dim, places)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (places,) = ctx.saved_tensors
        return gradient.new_zeros(ctx.shape).scatter(ctx.dim, places, gradient), None, None


class Choosing(TorchFunctionMode):
    """One forward of a block: watches its top-k's, and replaces the one that is the choice."""

    def __init__(self, seat: Seat, what: What) -> None:
        super().__init__()
        self._seat, self._what = seat, what
        self._calls: list[Tensor] = []  # the indices that each top-k gave
        self._over = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _TOPK or self._over:
            return func(*args, **kwargs)
        if len(self._calls) == self._seat.number:
            result = self._choose(func, *args, **kwargs)
        else:
            result = func(*args, **kwargs)
        self._calls.append(result[1])
        return result

    def _choose(self, topk: Any, input: Tensor, k: int, dim: int = -1, **options: Any) -> Any:
        """By one autograd function, recorded or replayed: what runs again must save what was saved before."""
        chosen = topk(input.detach(), k, dim, **options)[1]
        if self._what.choices is not None:
            given = self._fitting(self._what.choices, input, k, dim)
            chosen = torch.where(given < 0, chosen, given)
        values = _Take.apply(input, chosen, dim)  # type: ignore[no-untyped-call]
        return torch.return_types.topk((values, chosen))

    def _fitting(self, given: Tensor, input: Tensor, k: int, dim: int) -> Tensor:
        shape = torch.Size((*input.shape[:-1], k))
        if dim not in (-1, input.dim() - 1) or given.shape[-1] != k or given.numel() != shape.numel():
            raise ConfigError(
                f"choices {list(given.shape)} to replay in {self._seat.name}",
                f"this forward chooses {k} experts for each of {shape[:-1].numel()} tokens",
                "Give the choices of the same microbatch",
            )
        return given.to(input.device, torch.int64).reshape(shape)

    def arrived(self, chosen: Tensor) -> None:
        if self._seat.number is None:
            self._seat.number = self._number(chosen)
        self._over = True  # what comes after the experts are called chooses nothing for them
        if self._seat.number >= len(self._calls):
            raise not_top_k(self._seat.name)
        if self._what.keep is not None:
            own = self._calls[self._seat.number]
            self._what.keep(own.detach().reshape(-1, own.shape[-1]).clone())

    def candidates(self, chosen: Tensor) -> list[int]:
        """Which top-k's so far may have given `chosen`: the very tensor, or those that are like it."""
        place = chosen.untyped_storage()._cdata  # which tells storages apart that have no values, too
        same = [n for n, own in enumerate(self._calls) if own.untyped_storage()._cdata == place]
        if len(same) == 1 and chosen.numel():
            return same
        return [
            number
            for number, own in enumerate(self._calls)
            if own.shape[-1] == chosen.shape[-1] and own.numel() == chosen.numel()
        ]

    def _number(self, chosen: Tensor) -> int:
        alike = self.candidates(chosen)
        if len(alike) > 1:  # groups of experts are chosen by a top-k too
            alike = [n for n in alike if torch.equal(self._calls[n].reshape(chosen.shape), chosen)]
        if len(alike) != 1:
            raise not_top_k(self._seat.name)
        return alike[0]


def not_top_k(name: str) -> ModelError:
    return ModelError(
        name,
        "choices are replayed in the one top-k of the block whose result the experts are called with",
        "Train this model without routing replay",
    )


class _LearntError(Exception):
    """Ends a forward that was run only to see which top-k is the choice."""


def _learn(block: nn.Module, seat: Seat, forward: Callable[[], Any]) -> None:
    """Find out which top-k of the block is the choice, once.

    The forward ends where the experts are called: before anything is sent, and on every rank alike.
    """

    def stop(chosen: Tensor) -> None:
        raise _LearntError

    training = [(part, part.training) for part in block.modules()]
    for part, _ in training:
        part.training = False  # so that nothing random is drawn, and no noise put on the input in place
    try:
        with torch.no_grad(), suppress(_LearntError), seat.running(Choosing(seat, What(None, stop))):
            forward()
    finally:
        for part, before in training:
            part.training = before


def watched(own: type[nn.Module]) -> type[nn.Module]:
    """The class of a block whose choices may be recorded or replaced; the block has a `_routing_seat`."""
    plain: Callable[..., Any] = own.forward

    @functools.wraps(plain)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        seat: Any = self._routing_seat
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        what: What | None = None
        if not any(map(without_values, tensors)):
            what = seat.now(seat.name, self.training and torch.is_grad_enabled())
        if what is None:
            return plain(self, *args, **kwargs)
        if seat.number is None:
            _learn(self, seat, functools.partial(plain, self, *args, **kwargs))
        with seat.running(Choosing(seat, what)):
            return plain(self, *args, **kwargs)

    return type(own.__name__, (own,), {"__module__": own.__module__, "forward": forward})
