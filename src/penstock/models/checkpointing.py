"""Activation checkpointing: which layers are run again in the backward, and for which microbatches.

A chosen layer's forward runs under torch's own checkpointing: of all that it makes only its inputs are held,
and in the backward it runs once more. Selective checkpointing (selective.py) holds some ops' outputs besides:

                 full           selective                                none
    held         the inputs     and what matmul and attention gave       everything
    run again    all of it      norms, activations, dropout, residuals   nothing

The layer's `forward` is what runs again, not its `__call__`: whatever else is done when a layer is called
stays outside and is done once (the doors of hf.py, FSDP2's hooks, a user's own).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from penstock.errors import ConfigError, ModelError
from penstock.models.selective import GROUPS, Policy, contexts, contexts_for_compiler, refusal


@dataclass(frozen=True)
class Checkpointing:
    """Which activations are held for the backward. Raises ConfigError.

    every: every k-th layer is checkpointed: 0, k, 2k, ..., counted over the whole model, whatever the split
    save: ops whose outputs are held all the same: the groups `matmul` and `attention`, or names like aten.mm
    in_flight: of the microbatches in flight on a rank only the first so many are checkpointed: one number for
        all ranks, or one for each; None takes all of them
    memory_limit: bytes a rank, for which the plan chooses `in_flight`
    shape: rows and sequence of the largest microbatch; needed with `memory_limit`
    """

    every: int = 1
    save: tuple[str, ...] = ()
    in_flight: int | tuple[int, ...] | None = None
    memory_limit: float | None = None
    shape: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        for name in ("in_flight", "save"):
            if isinstance(given := getattr(self, name), list):
                object.__setattr__(self, name, tuple(given))
        if type(given := self.save) is not tuple:
            rule = "it lists names of ops or of groups"
            raise refusal("save", given, rule, f"Write save=({given!r},)")
        counts = self.in_flight if isinstance(self.in_flight, tuple) else (self.in_flight or 0,)
        if self.every < 1:
            raise refusal(
                "every", self.every, "every k-th layer is checkpointed, and k is 1 or more", "Take 1"
            )
        if min(counts, default=0) < 0:
            rule = "a number of microbatches is 0 or more"
            raise refusal("in_flight", self.in_flight, rule, "Take 0 for a rank that checkpoints none")
        if self.memory_limit is not None and self.in_flight is not None:
            rule = "memory_limit chooses how many microbatches in flight are checkpointed"
            raise refusal("in_flight", self.in_flight, rule, "Give in_flight or memory_limit, not both")
        if self.memory_limit is not None and self.shape is None:
            rule = "what a microbatch holds depends on its rows and sequence"
            raise refusal("memory_limit", self.memory_limit, rule, "Give shape=(rows, sequence) as well")
        Policy(self.save)  # for its refusals


def checkpointing(given: bool | str | Checkpointing | None) -> Checkpointing | None:
    """What `activation_checkpointing` means, from any of its forms. Raises ConfigError."""
    if isinstance(given, Checkpointing):
        return given
    if given is None or given is False or given == "none":
        return None
    if given is True or given == "full":
        return Checkpointing()
    if given == "selective":
        return Checkpointing(save=tuple(GROUPS))
    raise ConfigError(
        f"activation_checkpointing={given!r}",
        "it is true or false, 'full', 'selective' or 'none', or a Checkpointing",
        "Take 'full' for the least memory, 'selective' for the least work done again",
    )


class Switch:
    """Whether the layers that were chosen are checkpointed in a forward that runs now.

    A backward runs again what its own forward did not hold, whatever the switch says by then.
    """

    def __init__(self, on: bool = True) -> None:
        self.on = on


def install(layers: Iterable[tuple[int, nn.Module]], how: Checkpointing) -> Switch:
    """Make every `how.every`-th of `layers` checkpoint its forward, wherever the switch is on.

    layers: each with its index in the whole model. Only in training mode and where gradients are enabled; a
    layer's parameters and all else that it holds keep their names.
    Raises ModelError.
    """
    switch = Switch()
    made: dict[type[nn.Module], type[nn.Module]] = {}  # one for all layers of a kind, as compilers like it
    for index, layer in layers:
        own = type(layer)
        if index % how.every or own in made.values():  # one that stands in two places has it already
            continue
        if "forward" in vars(layer):
            raise ModelError(
                f"layer {index}, a {own.__name__} with a forward of its own",
                "checkpointing takes the place of the forward of the layer's class, which is not called here",
                "Set the layer's forward after the pipeline has been built",
            )
        if own not in made:
            made[own] = _checkpointed(own, switch, how.save)
        layer.__class__ = made[own]
    return switch


def _checkpointed(own: type[nn.Module], switch: Switch, save: tuple[str, ...]) -> type[nn.Module]:
    """The class of a layer with a forward that may be checkpointed."""
    plain: Callable[..., Any] = own.forward
    policy = Policy(save)

    @functools.wraps(plain)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not (switch.on and self.training and torch.is_grad_enabled()):
            return plain(self, *args, **kwargs)
        names = tuple(kwargs)

        def run(*values: Any) -> Any:
            return plain(self, *values[: len(args)], **dict(zip(names, values[len(args) :], strict=True)))

        # all by position, so that one that is modified before the backward is an error, not a wrong gradient
        values = (*args, *kwargs.values())
        if not save:
            return checkpoint(run, *values, use_reentrant=False)
        if torch.compiler.is_dynamo_compiling():  # which takes a function and constants, and nothing else
            return checkpoint(
                run, *values, use_reentrant=False, context_fn=functools.partial(contexts_for_compiler, save)
            )
        return checkpoint(run, *values, use_reentrant=False, context_fn=functools.partial(contexts, policy))

    return type(own.__name__, (own,), {"__module__": own.__module__, "forward": forward})
