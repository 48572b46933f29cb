"""Activation checkpointing: which layers run again in the backward, and which of their activations are kept.

The forward of a chosen layer runs under torch's own checkpointing: only its inputs are kept, and in the
backward it runs once more. Selective checkpointing also keeps the outputs of some ops:

                 full          selective                                none
    kept         the inputs    and the outputs of matmul and attention  everything
    run again    all of it     norms, activations, dropout, residuals   nothing

The layer's `forward` runs again, not its `__call__`: hooks (FSDP2's, a user's) and the stage's boundary stay
outside and run once. Hooks within the layer run again, as in torch. Buffers and counters change once: the
recomputation starts from the values that its forward had.
"""

from __future__ import annotations

import difflib
import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from penstock.batch.shapes import Microbatch
from penstock.errors import ConfigError, ModelError
from penstock.options import CheckpointingOptions
from penstock.private import (
    UNSAFE_VIEW,
    DispatchKey,
    OpOverload,
    SetExcludeDispatchKeyGuard,
    TorchDispatchMode,
    dispatch_get_all_op_names,
    tree_leaves,
    tree_map,
)
from penstock.runtime.around import around
from penstock.runtime.split_backward.recording import recording_again
from penstock.runtime.stage_part import Forward, StagePart
from penstock.runtime.unseen import LayerState, unrecorded


@dataclass(frozen=True)
class Checkpointing(CheckpointingOptions):
    """Which activations are kept for the backward: `CheckpointingOptions`. Raises ConfigError.

    Args:
        shape: rows and sequence of the largest microbatch; needed with `memory_limit`
    """

    shape: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        for name in ("in_flight", "save"):
            if isinstance(value := getattr(self, name), list):
                object.__setattr__(self, name, tuple(value))
        counts = self.in_flight if isinstance(self.in_flight, tuple) else (self.in_flight or 0,)
        limited = self.memory_limit is not None
        for field, wrong, rule, remedy in (
            ("save", type(self.save) is not tuple,
             "it lists names of ops or of groups", f"Write save=({self.save!r},)"),
            ("every", self.every < 1, "every k-th layer is checkpointed, and k is 1 or more", "Take 1"),
            ("in_flight", min(counts, default=0) < 0,
             "a number of microbatches is 0 or more", "Take 0 for a rank that checkpoints none"),
            ("in_flight", limited and self.in_flight is not None,
             "memory_limit chooses how many microbatches in flight are checkpointed",
             "Give in_flight or memory_limit, not both"),
            ("memory_limit", limited and self.shape is None,
             "a microbatch's memory depends on its rows and sequence",
             "Give shape=(rows, sequence) as well"),
        ):  # fmt: skip
            if wrong:
                raise refusal(field, getattr(self, field), rule, remedy)
        SavePolicy(self.save)  # raises for unknown ops


def checkpointing(option: bool | str | Checkpointing | None) -> Checkpointing | None:
    """The option `activation_checkpointing` in any of its forms, as Checkpointing. Raises ConfigError."""
    if isinstance(option, Checkpointing):
        return option
    if option is None or option is False or option == "none":
        return None
    if option is True or option == "full":
        return Checkpointing()
    if option == "selective":
        return Checkpointing(save=tuple(GROUPS))
    raise ConfigError(
        f"activation_checkpointing={option!r}",
        "it is true or false, 'full', 'selective' or 'none', or a Checkpointing",
        "Take 'full' for the least memory, 'selective' for the least recomputation",
    )


def refusal(field: str, value: object, rule: str, remedy: str) -> ConfigError:
    return ConfigError(f"activation_checkpointing.{field}={value!r}", rule, remedy)


class Switch(StagePart):
    """Turns the checkpointing of the installed layers on or off for the forwards that follow.

    A backward recomputes what its own forward did not keep, whatever the switch's state is then.
    """

    def __init__(self, on: bool = True) -> None:
        self.on = on

    def before_forward(self, number: int, microbatch: Microbatch, how: Forward) -> None:
        self.on = how.recompute


def install(layers: Iterable[tuple[int, nn.Module]], options: Checkpointing) -> Switch:
    """Make every `options.every`-th layer checkpoint its forward while the switch is on.

    Only in training mode and where gradients are enabled. A layer's parameters, buffers and submodules keep
    their names.

    layers: each with its index in the whole model
    Raises ModelError for a layer whose instance has a forward of its own.
    """
    switch, policy = Switch(), SavePolicy(options.save)
    for index, layer in layers:
        if index % options.every:
            continue
        if "forward" in vars(layer):
            raise ModelError(
                f"layer {index}, a {type(layer).__name__} with a forward of its own",
                "checkpointing replaces the forward of the layer's class, which this layer does not call",
                "Set the layer's forward after the pipeline has been built",
            )
        around(layer, forward=_checkpointed)
        how = switch, options.save, policy if options.save else None
        vars(layer).update(_checkpointing=how, is_checkpointed=True)
    return switch


def _checkpointed(plain: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a layer, which may be checkpointed."""

    def forward(layer: Any, *args: Any, **kwargs: Any) -> Any:
        switch, save, policy = layer._checkpointing
        if not (switch.on and layer.training and torch.is_grad_enabled()):
            return plain(layer, *args, **kwargs)
        names = tuple(kwargs)

        def run(*values: Any) -> Any:
            return plain(layer, *values[: len(args)], **dict(zip(names, values[len(args) :], strict=True)))

        # all by position, so that an argument modified before the backward is an error, not a wrong gradient
        values = (*args, *kwargs.values())
        if not torch.compiler.is_dynamo_compiling():
            contexts = functools.partial(_contexts, layer, policy)
        elif save:  # the compiler accepts a function and constants only
            contexts = functools.partial(_contexts_for_compiler, save)
        else:
            return checkpoint(run, *values, use_reentrant=False)
        return checkpoint(run, *values, use_reentrant=False, context_fn=contexts)

    return forward


# ---- Selective checkpointing
#
# Like torch's `create_selective_checkpoint_contexts`, except that
# - an op that is not saved may run more or fewer times than in the forward (autocast's casts do),
# - an output that an in-place op has overwritten is computed again,
# - a retained graph may be run twice,
# - attention with dropout runs again, so that later random draws stay the same.

# Ops of all devices: torch chooses the op of a call, and ops of other devices never occur.
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


class SavePolicy:
    """Which ops' outputs are saved. names: of groups and ops. Raises ConfigError."""

    def __init__(self, names: Sequence[str]) -> None:
        # as users write them: aten.mm
        known = {op.split(".")[0].replace("::", ".", 1) for op in dispatch_get_all_op_names()}
        named = {name for name in names if name not in GROUPS}
        for name in named:
            _check_op(name, known)
        grouped = {op for name in names for op in GROUPS.get(name, ()) if op in known}
        self._ops = {op: _dropout_index(op) for name in grouped | named for op in _overloads(name)}
        self._only_small = {op for name in grouped.intersection(_BATCHED) - named for op in _overloads(name)}

    def covers(self, op: object) -> bool:
        return op in self._ops

    def saves(self, op: OpOverload, result: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        index = self._ops[op]
        if index is not None and kwargs.get("dropout_p", args[index] if index < len(args) else 0):
            return False  # it draws random numbers, and later draws must stay the same
        if op not in self._only_small:
            return True
        # such as attention scores, which are cheap to compute again and quadratic in the sequence
        factors = [arg for arg in args if isinstance(arg, Tensor)][-2:]
        return bool(result.numel() <= sum(tensor.numel() for tensor in factors))

    def for_compiler(self, op: object) -> CheckpointPolicy:
        """`saves` for a compiler, which may not know sizes but preserves random draws."""
        saved = op in self._ops and op not in self._only_small
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


def _contexts(
    layer: nn.Module, policy: SavePolicy | None
) -> tuple[AbstractContextManager[object], AbstractContextManager[object]]:
    """The contexts for one forward of a layer and for its recomputation. policy: None saves nothing"""
    state, recording = LayerState(layer), recording_again()
    first: list[Callable[[], AbstractContextManager[object]]] = [state.forward]
    again: list[Callable[[], AbstractContextManager[object]]] = [state.again, unrecorded, lambda: recording]
    if policy is not None:
        saved: dict[tuple[OpOverload, int], _Saved] = {}
        first.append(lambda: _SelectiveMode(policy, saved, replay=False))
        again.append(lambda: _SelectiveMode(policy, saved, replay=True))
    return _All(first), _All(again)


class _All:
    """Enters contexts, made anew each time, as a retained graph may recompute a layer twice."""

    def __init__(self, contexts: Sequence[Callable[[], AbstractContextManager[object]]]) -> None:
        self._contexts, self._entered = contexts, ExitStack()

    def __enter__(self) -> None:
        for context in self._contexts:
            self._entered.enter_context(context())

    def __exit__(self, *error: object) -> None:
        self._entered.close()


def _contexts_for_compiler(save: tuple[str, ...]) -> Any:
    """The contexts for a layer compiled with its checkpointing: torch's own, which mark the graph."""
    policy = SavePolicy(save)
    return create_selective_checkpoint_contexts(  # type: ignore[no-untyped-call]
        lambda _, op, *args, **kwargs: policy.for_compiler(op)
    )


class _Saved(NamedTuple):
    """The outputs of one op, and all tensors on their storage with their versions at that time."""

    outputs: Any
    versions: list[tuple[Tensor, int]]

    @property
    def is_unchanged(self) -> bool:
        return all(tensor._version == version for tensor, version in self.versions)


class _SelectiveMode(TorchDispatchMode):
    """Saves outputs in the forward; returns each of them once when the forward is replayed.

    A call is identified by its op and its index among the calls of that op. Ops that the policy does not
    cover are not counted: autocast caches some casts, so these may run more or less often.
    """

    supports_higher_order_operators = True  # passed on as they are

    def __init__(
        self, policy: SavePolicy, saved: dict[tuple[OpOverload, int], _Saved], *, replay: bool
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._policy, self._saved, self._replay = policy, saved, replay
        self._calls: Counter[object] = Counter()
        self._by_storage: dict[int, _Saved] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # else compiled parts of a layer would not run compiled

    def __enter__(self) -> _SelectiveMode:
        self._calls.clear()  # a retained graph may replay the layer twice
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        self._by_storage.clear()  # or outputs that the replay has returned would stay alive
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self._policy.covers(func):
            result = func(*args, **kwargs)
            # a product of three dimensions is one of two and this view, with a version counter of its own
            if func is UNSAFE_VIEW:
                saved = self._by_storage.get(result.untyped_storage()._cdata)
                if saved is not None:
                    saved.versions.append((_detached(result), result._version))
            return result
        self._calls[func] += 1
        call = func, self._calls[func]
        if self._replay:
            saved = self._saved.pop(call, None)
            return saved.outputs if saved is not None and saved.is_unchanged else func(*args, **kwargs)
        result = func(*args, **kwargs)
        if self._policy.saves(func, result, args, kwargs):
            self._save(call, result)
        return result

    def _save(self, call: tuple[OpOverload, int], result: Any) -> None:
        outputs = tree_map(_detached, result)
        tensors = [value for value in tree_leaves(outputs) if isinstance(value, Tensor)]
        saved = self._saved[call] = _Saved(outputs, [(tensor, tensor._version) for tensor in tensors])
        self._by_storage.update((tensor.untyped_storage()._cdata, saved) for tensor in tensors)


def _detached(value: Any) -> Any:
    """A tensor with the same memory and version counter, without the graph, also below autograd."""
    if not isinstance(value, Tensor):
        return value
    with SetExcludeDispatchKeyGuard(DispatchKey.ADInplaceOrView, False):
        return value.detach()


def _overloads(name: str) -> list[OpOverload]:
    """The overloads of an op whose results are new tensors, and so can be saved."""
    namespace, _, op = name.partition(".")
    packet = getattr(getattr(torch.ops, namespace), op)
    overloads = [getattr(packet, overload) for overload in packet.overloads()]
    return [overload for overload in overloads if not (overload._schema.is_mutable or overload.is_view)]


def _check_op(name: str, known: Collection[str]) -> None:
    """Refuse an op that cannot be saved, or whose name would have no effect."""
    if name not in known:
        near = difflib.get_close_matches(name, [*GROUPS, *sorted(known)], n=3)
        near = near or difflib.get_close_matches(f"aten.{name}", sorted(known), n=3)
        remedy = f"Did you mean {' or '.join(near)}?" if near else f"Take {' or '.join(GROUPS)}"
        rule = f"an entry is a group ({', '.join(GROUPS)}) or an op that torch knows, such as aten.mm"
        raise refusal("save", name, rule, remedy)
    overloads = _overloads(name)
    remedy = "Leave it out"
    if not overloads:
        rule = "an op that works in place or returns a view has no output of its own to keep"
    elif any(torch.Tag.nondeterministic_seeded in op.tags and _dropout_index(op) is None for op in overloads):
        rule = "an op that draws random numbers must run again, or later draws would differ"
    elif any(op.has_kernel_for_dispatch_key(DispatchKey.CompositeImplicitAutograd) for op in overloads):
        rule = "torch decomposes this op into others before its output can be kept"
        remedy = f"Take {' or '.join(GROUPS)}, or name the ops into which it decomposes"
    else:
        return
    raise refusal("save", name, rule, remedy)


def _dropout_index(op: OpOverload) -> int | None:
    """The index of the argument for the probability of dropout; None where the op has none."""
    names = [argument.name for argument in op._schema.arguments]
    return names.index("dropout_p") if "dropout_p" in names else None
