"""Selective checkpointing: the outputs of some ops are kept, and given in place of being computed again.

As torch's own `create_selective_checkpoint_contexts`, but for what that one takes for an error or gets wrong:
an op that is not kept may run more or fewer times than in the forward (autocast's casts do); what an op in
place has overwritten since is computed again; a graph that is kept may be run twice; and an attention that
drops at random is run again, so that whatever draws random numbers after it draws the same ones.
"""

from __future__ import annotations

import difflib
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._C import DispatchKey
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from penstock.errors import ConfigError, ModelError

# Of all devices: which op a call becomes is torch's choice, and those of other devices never come by.
GROUPS: Mapping[str, tuple[str, ...]] = {
    "matmul": (
        "aten.mm", "aten.addmm", "aten._addmm_activation", "aten.bmm", "aten.baddbmm", "aten.linear",
        "aten._grouped_mm", "aten._scaled_mm", "aten._scaled_mm_v2", "aten._scaled_grouped_mm",
        "aten._scaled_grouped_mm_v2",
    ),
    "attention": (
        "aten._scaled_dot_product_flash_attention", "aten._scaled_dot_product_flash_attention_for_cpu",
        "aten._scaled_dot_product_efficient_attention", "aten._scaled_dot_product_cudnn_attention",
        "aten._scaled_dot_product_fused_attention_overrideable",
        "aten._scaled_dot_product_attention_math_for_mps",
        "aten._flash_attention_forward", "aten._efficient_attention_forward", "aten._cudnn_attention_forward",
    ),
}  # fmt: skip
_BATCHED = ("aten.bmm", "aten.baddbmm")


class Policy:
    """Which outputs are kept. Raises ConfigError."""

    def __init__(self, names: Sequence[str]) -> None:
        known = _known_ops()
        in_groups = {op for name in names for op in GROUPS.get(name, ()) if op in known}
        named = [name for name in names if name not in GROUPS]
        for name in named:
            _check(name, known)
        ops = [op for name in {*in_groups, *named} for op in _overloads(name)]
        # where the op says with which probability it drops
        self._ops = {op: _place(op, "dropout_p") for op in ops}
        self._lean = {
            op for name in in_groups.intersection(_BATCHED).difference(named) for op in _overloads(name)
        }

    def covers(self, op: object) -> bool:
        return op in self._ops

    def keeps(self, op: OpOverload, result: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        place = self._ops[op]
        if place is not None and kwargs.get("dropout_p", args[place] if place < len(args) else 0):
            return False  # it drew random numbers, and the draws after it have to stay the same
        if op not in self._lean:
            return True
        # Scores of attention, say: cheap to make again, and quadratic in the sequence.
        made_of = [arg for arg in args if isinstance(arg, Tensor)][-2:]
        return bool(result.numel() <= sum(tensor.numel() for tensor in made_of))

    def marks(self, op: object) -> CheckpointPolicy:
        """`keeps` for a compiler, to which sizes may be unknown, and which preserves random draws itself."""
        kept = op in self._ops and op not in self._lean
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def contexts(policy: Policy) -> tuple[_Keeping, _Giving]:
    """For one forward of a layer, and for when it is run again."""
    kept: dict[tuple[OpOverload, int], _Kept] = {}
    return _Keeping(policy, kept), _Giving(policy, kept)


def contexts_for_compiler(save: tuple[str, ...]) -> Any:
    """The same for a layer that is compiled with its checkpointing: torch's own, which mark the graph."""
    policy = Policy(save)
    return create_selective_checkpoint_contexts(  # type: ignore[no-untyped-call]
        lambda _, op, *args, **kwargs: policy.marks(op)
    )


class _Kept(NamedTuple):
    """The outputs of one call, with the versions that they had then.

    views: made of them by an op that gives a view a version counter of its own, with their versions
    """

    values: Any
    versions: list[int]
    views: list[tuple[Tensor, int]]

    @classmethod
    def of(cls, result: Any) -> _Kept:
        values = tree_map(_detached, result)
        return cls(values, _versions(values), [])

    @property
    def is_unchanged(self) -> bool:
        unwritten = all(view._version == version for view, version in self.views)
        return unwritten and _versions(self.values) == self.versions


class _Counting(TorchDispatchMode):
    """Numbers the calls of each op that the policy covers. Ops that it does not are none of its business: how
    often those run may differ, as autocast's casts do, of which a forward has some in a cache."""

    supports_higher_order_operators = True  # passed on as they are

    def __init__(self, policy: Policy, kept: dict[tuple[OpOverload, int], _Kept]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._policy, self._kept = policy, kept
        self._calls: Counter[object] = Counter()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # else a compiled part of a layer would not run compiled

    def __enter__(self) -> _Counting:
        self._calls.clear()  # one who keeps the graph may run the layer again twice
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not self._policy.covers(func):
            return func(*args, **(kwargs or {}))
        self._calls[func] += 1
        return self._run(func, self._calls[func], args, kwargs or {})

    def _run(self, op: OpOverload, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError


class _Keeping(_Counting):  # type: ignore[no-untyped-call]
    """In the forward."""

    def __init__(self, policy: Policy, kept: dict[tuple[OpOverload, int], _Kept]) -> None:
        super().__init__(policy, kept)
        self._by_storage: dict[int, _Kept] = {}

    def __exit__(self, *error: Any) -> None:
        self._by_storage.clear()  # or what is given away later would be held here
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        # a matmul of three dimensions is one of two, and this: who writes into it writes into what was kept
        if func is torch.ops.aten._unsafe_view.default:
            kept = self._by_storage.get(result.untyped_storage()._cdata)
            if kept is not None:
                kept.views.append((_detached(result), result._version))
        return result

    def _run(self, op: OpOverload, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = op(*args, **kwargs)
        if self._policy.keeps(op, result, args, kwargs):
            kept = self._kept[op, number] = _Kept.of(result)
            for value in tree_leaves(kept.values):
                if isinstance(value, Tensor):
                    self._by_storage[value.untyped_storage()._cdata] = kept
        return result


class _Giving(_Counting):  # type: ignore[no-untyped-call]
    """When the forward is run again: what was kept is given once, as it becomes a part of that graph."""

    def _run(self, op: OpOverload, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kept = self._kept.pop((op, number), None)
        if kept is None or not kept.is_unchanged:  # an op in place has been at it since
            return op(*args, **kwargs)
        return kept.values


def _detached(value: Any) -> Any:
    """The same memory and version counter, and no part of a graph."""
    if not isinstance(value, Tensor):
        return value
    # in a dispatch mode views are made without their base's counter unless this key is let in
    with torch._C._SetExcludeDispatchKeyGuard(DispatchKey.ADInplaceOrView, False):
        return value.detach()


def _versions(values: Any) -> list[int]:
    return [value._version for value in tree_leaves(values) if isinstance(value, Tensor)]


def _known_ops() -> frozenset[str]:
    """As users write them: aten.mm"""
    names = torch._C._dispatch_get_all_op_names()
    return frozenset(name.split(".")[0].replace("::", ".", 1) for name in names)


def _overloads(name: str) -> list[OpOverload]:
    """The overloads of an op whose results are new tensors, and so can be handed over."""
    namespace, _, op = name.partition(".")
    packet = getattr(getattr(torch.ops, namespace), op)
    found = [getattr(packet, overload) for overload in packet.overloads()]
    return [overload for overload in found if not (overload._schema.is_mutable or overload.is_view)]


def _check(name: str, known: frozenset[str]) -> None:
    """Refuse an op that cannot be kept, or whose name would have no effect."""
    if name not in known:
        near = difflib.get_close_matches(name, [*GROUPS, *sorted(known)], n=3)
        near = near or difflib.get_close_matches(f"aten.{name}", sorted(known), n=3)
        remedy = f"Did you mean {' or '.join(near)}?" if near else f"Take {' or '.join(GROUPS)}"
        rule = f"an entry is a group ({', '.join(GROUPS)}) or an op that torch knows, such as aten.mm"
        raise refusal("save", name, rule, remedy)
    overloads = _overloads(name)
    if not overloads:
        rule = "an op that works in place or returns a view has no output of its own to keep"
        raise refusal("save", name, rule, "Leave it out")
    if any(torch.Tag.nondeterministic_seeded in o.tags and _place(o, "dropout_p") is None for o in overloads):
        rule = "what draws random numbers has to draw them again, or those after it would be others"
        raise refusal("save", name, rule, "Leave it out")
    if any(
        overload.has_kernel_for_dispatch_key(DispatchKey.CompositeImplicitAutograd) for overload in overloads
    ):
        rule = "torch takes this op apart into others before any can be kept"
        raise refusal("save", name, rule, f"Take {' or '.join(GROUPS)}, or name the ops that it is made of")


def _place(op: OpOverload, argument: str) -> int | None:
    names = [each.name for each in op._schema.arguments]
    return names.index(argument) if argument in names else None


def refusal(field: str, value: object, rule: str, remedy: str) -> ConfigError:
    return ConfigError(f"activation_checkpointing.{field}={value!r}", rule, remedy)


# ---- Activation checkpointing: which layers are run again in the backward, and for which microbatches.
#
# A chosen layer's forward runs under torch's own checkpointing: of all that it makes only its inputs are
# held, and in the backward it runs once more. Selective checkpointing (selective.py) holds some ops'
# outputs besides:
#
#                  full           selective                                none
#     held         the inputs     and what matmul and attention gave       everything
#     run again    all of it      norms, activations, dropout, residuals   nothing
#
# The layer's `forward` is what runs again, not its `__call__`: whatever else is done when a layer is
# called stays outside and is done once (the doors of hf.py, FSDP2's hooks, a user's own).


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
