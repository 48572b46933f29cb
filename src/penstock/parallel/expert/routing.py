"""What routers choose: the same again where a forward is run again, and as they are told.

A choice hangs on tiny differences: what runs twice, in activation recomputation or on another machine,
may choose another expert where two are nearly tied, and its gradients belong to another forward then. So the
choices of a forward are recorded for each microbatch, and replayed:

    record             forward of m    the router chooses, its choices are kept
    replay_forward     forward of m    choices that were given take the place of the router's, and are kept
    replay_backward    backward of m   what is run again takes those of m's forward, recorded or given
    forced             any forward     choices that are given take the place of the router's

Only the choice is fixed. What stands beside it, the weights and all gradients, comes from the router's logits
of the moment.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from penstock.errors import ConfigError, ModelError
from penstock.parallel.expert.dispatch import without_values
from penstock.parallel.expert.experts import count_of, mixtures

# ---- Where the router of one mixture chooses: found, watched and replaced from outside of the model's code.
#
# Routers differ in all but two things: the choice is a top-k, and the experts are called with its result.
# So while a block runs, the module that calls its experts, every top-k in it is seen (a
# TorchFunctionMode), and the one whose result arrives at the experts is the choice. Others, e.g. among
# groups, stay as they are.


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


Choices = Mapping[str, Tensor]  # by the name of the module of experts: (tokens, top_k)


class _Forward(NamedTuple):
    """choices: what routers are told; kept: what takes the choices; None for neither"""

    choices: Choices | None
    kept: dict[str, Tensor] | None


class RoutingReplay:
    """Records and replays what the routers of `module` choose.

    module: a model or a stage of one, before activation checkpointing is put into its layers. Each mixture's
        block, the module that calls its experts, gets a class whose forward watches its top-k's.

    Each op of a microbatch runs under one of `record`, `replay_forward` and `replay_backward`; a forward and
    a backward may run side by side in two threads. Left alone are shape inference (meta tensors), forwards
    under none of them, and, but for what is replayed, evaluation (in eval mode, or without gradients).
    Raises ModelError for mixtures of a form that is not known. A router that chooses by something other than
    one top-k is found out in its first forward, which raises ModelError.
    """

    def __init__(self, module: nn.Module) -> None:
        self._forward: _Forward | None = None  # the one that runs
        self._backward: int | None = None  # the microbatch of the one that runs
        self._given: dict[int, Choices] = {}
        self._kept: dict[int, dict[str, Tensor]] = {}
        self._experts = {name: count_of(part) for name, part in mixtures(module).items()}
        made: dict[type[nn.Module], type[nn.Module]] = {}
        for name in self._experts:
            self._sit(module, name, made)

    def _sit(self, module: nn.Module, name: str, made: dict[type[nn.Module], type[nn.Module]]) -> None:
        block, experts = module.get_submodule(name.rpartition(".")[0]), module.get_submodule(name)
        if hasattr(block, "_routing_seat"):
            raise one_too_many(name, f"a second mixture in a {type(block).__name__}, or replayed already")
        seat = Seat(name, self._what)
        block._routing_seat = seat  # type: ignore[assignment]
        own = type(block)
        if own not in made:
            made[own] = watched(own)
        block.__class__ = made[own]
        experts.register_forward_pre_hook(lambda _, given: seat.arrived(given[1]))

    @property
    def names(self) -> list[str]:
        """The modules of experts."""
        return list(self._experts)

    @contextmanager
    def record(self, microbatch: int) -> Iterator[None]:
        """For a forward of `microbatch`: what its routers choose is kept until `release`."""
        with self._in_forward(None, self._begun(microbatch)):
            yield

    @contextmanager
    def replay_forward(self, microbatch: int) -> Iterator[None]:
        """For a forward of `microbatch`: its routers choose what was given or recorded.

        Raises ConfigError where there is nothing.
        """
        source = self._given.get(microbatch) or self._of(microbatch)
        with self._in_forward(source, self._begun(microbatch)):
            yield

    @contextmanager
    def forced(self, choices: Choices) -> Iterator[None]:
        """For a forward that nothing comes after: its routers choose `choices`, and nothing is kept."""
        with self._in_forward(choices, None):
            yield

    @contextmanager
    def replay_backward(self, microbatch: int) -> Iterator[None]:
        """For a backward of `microbatch`: forwards that are run again in it choose what its forward did."""
        before, self._backward = self._backward, microbatch
        try:
            yield
        finally:
            self._backward = before

    def choices(self, microbatch: int) -> dict[str, Tensor]:
        """What is kept of `microbatch`, by the names of the modules of experts: (tokens, top_k) each."""
        return dict(self._kept.get(microbatch) or self._given.get(microbatch) or self._of(microbatch))

    def give(self, microbatch: int, choices: Choices) -> None:
        """What `microbatch` is to choose, in the form of `choices`; other stages' mixtures may be in it.

        A token whose numbers are all -1 is left to the router. Raises ConfigError.
        """
        if missing := [name for name in self._experts if name not in choices]:
            rule = "each mixture of the module is told what to choose"
            raise ConfigError(f"choices without {', '.join(missing)}", rule, "Give those of the whole model")
        for name in self._experts:
            _check_choices(name, choices[name], self._experts[name])
        self.give_checked(microbatch, choices)

    def give_checked(self, microbatch: int, choices: Choices) -> None:
        """As `give`, of what is known to fit."""
        self._given[microbatch] = {name: choices[name].detach() for name in self._experts}

    def kept(self, microbatch: int) -> Choices:
        """What its forward has chosen, nothing where it has not run or was in evaluation mode."""
        return self._kept.get(microbatch, {})

    def release(self, microbatch: int) -> None:
        """Let go of what is kept of `microbatch`: its last backward has run."""
        self._given.pop(microbatch, None)
        self._kept.pop(microbatch, None)

    @property
    def held(self) -> list[int]:
        """The microbatches of which something is kept."""
        return sorted({*self._given, *self._kept})

    def _begun(self, microbatch: int) -> dict[str, Tensor]:
        kept = self._kept[microbatch] = {}
        return kept

    @contextmanager
    def _in_forward(self, choices: Choices | None, kept: dict[str, Tensor] | None) -> Iterator[None]:
        before, self._forward = self._forward, _Forward(choices, kept)
        try:
            yield
        finally:
            self._forward = before

    def _of(self, microbatch: int) -> dict[str, Tensor]:
        if microbatch not in self._kept:
            raise ConfigError(
                f"microbatch {microbatch} to replay, with choices kept of {self.held}",
                "only what was recorded or given can be replayed",
                "Run its forward under record(), or give() its choices first",
            )
        return self._kept[microbatch]

    def _what(self, name: str, trains: bool) -> What | None:
        """What is to be done in the forward of a block that begins now in this thread, None for nothing.

        trains: whether a backward will follow
        """
        if torch._C._current_graph_task_id() != -1:  # in the backward, on whatever thread of the engine
            return self._again(name) if trains else None
        if self._forward is None:
            return None
        choices, kept = self._forward
        if choices is None and not trains:
            return None
        keep = functools.partial(_keep, kept, name) if kept is not None and trains else None
        return What(None if choices is None else _one_of(choices, name), keep)

    def _again(self, name: str) -> What | None:
        if self._backward is not None:
            return What(_one_of(self._of(self._backward), name), None)
        if not self._kept:
            return None
        raise ConfigError(
            f"{name}, run again in a backward of nobody knows which microbatch",
            "where choices are kept, what is run again replays those of its own microbatch",
            "Run each backward under replay_backward(microbatch)",
        )


def _one_of(choices: Choices, name: str) -> Tensor:
    if name not in choices:  # e.g. reentrant checkpointing, whose first forward has no gradients
        raise ConfigError(
            f"{name}, to be replayed",
            "the forward of its microbatch has left no choice to replay",
            "Run the forward under record(), in training and with gradients enabled",
        )
    return choices[name]


def _keep(kept: dict[str, Tensor], name: str, chosen: Tensor) -> None:
    if name in kept:
        raise one_too_many(name, "called twice in one forward")
    kept[name] = chosen


def one_too_many(name: str, why: str) -> ModelError:
    return ModelError(
        f"{name}, {why}",
        "choices are told apart by the block that makes them, one in each forward",
        "Train this model without routing replay",
    )


def _check_choices(name: str, chosen: Tensor, experts: int) -> None:
    if not is_whole(chosen) or chosen.dim() != 2 or not bool(are_choices(chosen, experts).all()):
        raise ConfigError(
            f"choices of {name}: {chosen.dtype} {list(chosen.shape)}",
            f"for each token they are top_k different numbers of its {experts} experts, counted from 0",
            "Give integers of shape (tokens, top_k), as RoutingReplay.choices returns them",
        )


def is_whole(chosen: Tensor) -> bool:
    """Whether its numbers are whole."""
    return not (chosen.is_floating_point() or chosen.is_complex() or chosen.dtype == torch.bool)


def are_choices(chosen: Tensor, experts: int | Tensor) -> Tensor:
    """For each token, whether its top_k numbers (the last dimension) are different experts, or all -1."""
    ordered = chosen.sort(-1).values.long()  # some dtypes have no difference
    different = (ordered.diff(dim=-1) > 0).all(-1) & (ordered[..., 0] >= 0)
    return (different & (ordered[..., -1] < experts)) | (ordered == -1).all(-1)
