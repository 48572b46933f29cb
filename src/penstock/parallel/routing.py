"""What routers choose: the same again where a forward is run again, and how evenly over all ranks.

A choice hangs on tiny differences: what runs twice, in activation recomputation or on another machine,
may choose another expert where two are nearly tied, and its gradients belong to another forward then. So the
choices of a forward are recorded for each microbatch, and replayed:

    record             forward of m    the router chooses, its choices are kept
    replay_forward     forward of m    choices that were given take the place of the router's
    replay_backward    backward of m   what is run again takes those of m's forward, recorded or given

Only the choice is fixed. What stands beside it, the weights and all gradients, comes from the router's logits
of the moment.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from penstock.errors import ConfigError, ModelError
from penstock.parallel.choice import Seat, What, watched
from penstock.parallel.expert import count_of, mixtures


class RoutingReplay:
    """Records and replays what the routers of `module` choose.

    module: a model or a stage of one, before activation checkpointing is put into its layers. Each mixture's
        block, the module that calls its experts, gets a class whose forward watches its top-k's.

    Each op of a microbatch runs under one of `record`, `replay_forward` and `replay_backward`; a forward and
    a backward may run side by side in two threads. Left alone are evaluation (in eval mode, or without
    gradients), shape inference (meta tensors), and forwards under none of the three.
    Raises ModelError for mixtures of a form that is not known. A router that chooses by something other than
    one top-k is found out in its first forward, which raises ModelError.
    """

    def __init__(self, module: nn.Module) -> None:
        self._forward: tuple[str, int] | None = None  # mode and microbatch
        self._backward: int | None = None
        self._kept: dict[int, dict[str, Tensor]] = {}
        self._experts = {name: count_of(part) for name, part in mixtures(module).items()}
        made: dict[type[nn.Module], type[nn.Module]] = {}
        for name in self._experts:
            self._sit(module, name, made)

    def _sit(self, module: nn.Module, name: str, made: dict[type[nn.Module], type[nn.Module]]) -> None:
        block, experts = module.get_submodule(name.rpartition(".")[0]), module.get_submodule(name)
        if hasattr(block, "_routing_seat"):
            raise ModelError(
                f"{name}, a second mixture in a {type(block).__name__}, or replayed already",
                "choices are told apart by the block that makes them",
                "Train this model without routing replay",
            )
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
        self._kept[microbatch] = {}
        with self._in_forward("record", microbatch):
            yield

    @contextmanager
    def replay_forward(self, microbatch: int) -> Iterator[None]:
        """For a forward of `microbatch`: its routers choose what was given or recorded.

        Raises ConfigError where there is nothing.
        """
        self._of(microbatch)
        with self._in_forward("replay", microbatch):
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
        return dict(self._of(microbatch))

    def give(self, microbatch: int, choices: Mapping[str, Tensor]) -> None:
        """What `microbatch` is to choose, in the form of `choices`; other stages' mixtures may be in it.

        Raises ConfigError.
        """
        if missing := [name for name in self._experts if name not in choices]:
            rule = "each mixture of the module is told what to choose"
            raise ConfigError(f"choices without {', '.join(missing)}", rule, "Give those of the whole model")
        for name in self._experts:
            _check_choices(name, choices[name], self._experts[name])
        self._kept[microbatch] = {name: choices[name].detach() for name in self._experts}

    def release(self, microbatch: int) -> None:
        """Let go of what is kept of `microbatch`: its last backward has run."""
        self._kept.pop(microbatch, None)

    @property
    def held(self) -> list[int]:
        """The microbatches of which something is kept."""
        return sorted(self._kept)

    @contextmanager
    def _in_forward(self, mode: str, microbatch: int) -> Iterator[None]:
        before, self._forward = self._forward, (mode, microbatch)
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

    def _what(self, name: str) -> What | None:
        """What is to be done in the forward of a block that begins now in this thread, None for nothing."""
        if torch._C._current_graph_task_id() != -1:  # in the backward, on whatever thread of the engine
            return self._again(name)
        if self._forward is None:
            return None
        mode, microbatch = self._forward
        if mode == "record":
            return functools.partial(self._keep, microbatch, name)
        return self._kept_of(microbatch, name)

    def _again(self, name: str) -> Tensor | None:
        if self._backward is None:
            if not self._kept:
                return None
            raise ConfigError(
                f"{name}, run again in a backward of nobody knows which microbatch",
                "where choices are kept, what is run again replays those of its own microbatch",
                "Run each backward under replay_backward(microbatch)",
            )
        return self._kept_of(self._backward, name)

    def _kept_of(self, microbatch: int, name: str) -> Tensor:
        kept = self._of(microbatch)
        if name not in kept:  # e.g. reentrant checkpointing, whose first forward has no gradients
            raise ConfigError(
                f"{name}, to be replayed for microbatch {microbatch}",
                "its forward has left no choice to replay",
                "Run the forward under record(), in training and with gradients enabled",
            )
        return kept[name]

    def _keep(self, microbatch: int, name: str, chosen: Tensor) -> None:
        kept = self._kept[microbatch]
        if name in kept:
            raise ModelError(
                f"{name}, called twice in one forward",
                "choices are told apart by mixture and microbatch",
                "Train this model without routing replay",
            )
        kept[name] = chosen


def _check_choices(name: str, chosen: Tensor, experts: int) -> None:
    whole = not (chosen.is_floating_point() or chosen.is_complex() or chosen.dtype == torch.bool)
    ordered = chosen.sort(-1).values if whole and chosen.dim() == 2 else None
    outside = ordered is None or bool(((ordered < 0) | (ordered >= experts)).any())
    if outside or ordered is None or bool((ordered.diff(dim=-1) == 0).any()):
        raise ConfigError(
            f"choices of {name}: {chosen.dtype} {list(chosen.shape)}",
            f"for each token they are top_k different numbers of its {experts} experts, counted from 0",
            "Give integers of shape (tokens, top_k), as RoutingReplay.choices returns them",
        )
