"""Initial values of parameters and buffers without values, by the model's own initialisation, or PEFT's.

The random numbers of a module follow from the seed and the module's name, so its values are equal for all
splits.

A stage that is sharded over a mesh (see `write_through`) is initialised in groups: a rank has in memory its
shards plus one group at a time, usually one tensor. A run without values shows which tensors form a group:

    attention.c_proj      fills its weight        \\
    attention             fills that weight anew   }  one group: the weight is kept until both have run
    mlp.c_fc              fills its weight            another group, after the first one is sharded
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.initialization import guard_torch_init_functions

from penstock.errors import ModelError
from penstock.models.adapters import Adapter, base_weight, wrappers
from penstock.models.huggingface.boundary import ModulePlaceholder
from penstock.models.tracing.meta import Table, WriteThrough
from penstock.models.tracing.placeholder import Placeholder
from penstock.models.weights.files import Ties
from penstock.runtime.sharded_weights import full_tensor, shard_like


class TensorSlot(NamedTuple):
    """The place of a tensor: a module's table, and a name there; full: its name in the model."""

    table: Table
    name: str
    full: str


class InitCall(NamedTuple):
    """The initialisation of a module by the model that owns it. name: of the module in the stage"""

    owner: PreTrainedModel
    name: str
    module: nn.Module


@dataclass(frozen=True)
class InitGroup:
    """The ids of tensors, and the indices of the calls that read or fill them."""

    tensors: set[int]
    calls: dict[int, InitCall]


TensorSlots = dict[int, list[TensorSlot]]  # id of a tensor on the meta device -> its places


@torch.no_grad()
def initialise(stage: PreTrainedModel, whole: PreTrainedModel, ties: Ties, seed: int) -> None:
    """Give values to tensors that are still on the meta device, independently of the stage's other modules.

    Args:
        stage: on the meta device, or a `write_through` twin, which is filled one group of tensors at a time.
        whole: the unsplit model. A tied weight gets the values from the module under whose name it is saved.

    Raises ModelError if the model's own initialisation leaves a tensor without values.
    """
    empty = _all_empty(stage)
    if not empty:
        return
    fresh = {slot.full for slots in empty.values() for slot in slots}
    calls = list(_inside_out(stage, stage, ""))
    passing = stage._parameters if isinstance(stage._parameters, WriteThrough) else None
    with torch.random.fork_rng(devices=[]), _marked_as_done(stage, fresh):
        with _without_placeholders(stage), guard_torch_init_functions():  # torch's own ignore the marks
            if passing is None:
                seen, groups = set[int](), [InitGroup(set(empty), dict(enumerate(calls)))]
            else:
                seen, groups = passing.seen, _groups(calls, seed, passing.seen, set(empty))
            _initialise_groups(stage, groups, seed, seen, empty, ties)
        _initialise_tied(stage, whole, ties, seed, fresh)


@torch.no_grad()
def initialise_adapter(stage: nn.Module, adapter: Adapter, seed: int) -> None:
    """Give values to the adapter's tensors on the meta device, once the base model has values.

    As in PEFT, B is zero, so that the model computes the same as the base model. Random numbers follow from
    the seed and the module's name. `stage` may be a `write_through` twin; then the call is collective, as
    DoRA's magnitudes and fully trained modules are computed from whole weights.
    """
    kind = "gaussian" if adapter.config.init_lora_weights == "gaussian" else True
    for name, module in reversed([*wrappers(stage)]):  # inner wrappers first
        empty = {slots[0].full: slots for slots in _all_empty(module).values()}
        for full, value in _of_base(module, adapter.name) if empty else ():
            for slot, filled in _materialise([empty.pop(full)]) if full in empty else ():
                slot.table[slot.name] = filled.copy_(value)
        if empty:
            made = _materialise(empty.values())
            with torch.random.fork_rng(devices=[]):
                _seed(seed, name)
                module.reset_lora_parameters(adapter.name, kind)
            _pass_on(stage, made, ())


def _of_base(wrapper: Any, adapter: str) -> Iterator[tuple[str, Tensor]]:
    """An adapter's initial values that are computed from the base model, by their names in a wrapper."""
    if hasattr(wrapper, "modules_to_save"):
        original = wrapper.original_module
        for name, value in (*original.named_parameters(), *original.named_buffers()):
            yield f"modules_to_save.{adapter}.{name}", full_tensor(value)
    elif hasattr(wrapper, "trainable_tokens_delta"):
        rows = full_tensor(base_weight(wrapper))[wrapper.token_indices[adapter]]
        yield f"trainable_tokens_delta.{adapter}", rows
        yield f"trainable_tokens_original.{adapter}", rows
    elif adapter in getattr(wrapper, "lora_magnitude_vector", ()):
        magnitude, weight = wrapper.lora_magnitude_vector[adapter], full_tensor(base_weight(wrapper))
        norm = magnitude.get_weight_norm(weight, weight.new_zeros(()), wrapper.scaling[adapter])
        yield f"lora_magnitude_vector.{adapter}.weight", norm


def _run(call: InitCall, seed: int) -> None:
    _seed(seed, call.name)
    call.owner._init_weights(call.module)


def _seed(seed: int, name: str) -> None:
    # not torch.manual_seed, which seeds every kind of device: that took most of a deep model's build
    torch.default_generator.manual_seed(zlib.crc32(f"{seed}:{name}".encode()))


def _inside_out(owner: PreTrainedModel, module: nn.Module, name: str) -> Iterator[InitCall]:
    """All modules, inner ones first, with the innermost model around them."""
    owner = module if isinstance(module, PreTrainedModel) else owner
    for child, inner in module.named_children():
        yield from _inside_out(owner, inner, f"{name}.{child}" if name else child)
    yield InitCall(owner, name, module)


def _all_empty(module: nn.Module) -> TensorSlots:
    """The places of all tensors on the meta device."""
    slots: TensorSlots = {}
    for prefix, owner in module.named_modules():
        for table in (owner._parameters, owner._buffers):
            for name, value in table.items():
                if value is not None and value.is_meta:
                    slot = TensorSlot(table, name, f"{prefix}.{name}" if prefix else name)
                    slots.setdefault(id(value), []).append(slot)
    return slots


def _materialise(empty: Collection[list[TensorSlot]]) -> list[tuple[TensorSlot, Tensor]]:
    """Give real storage, filled with NaN, to tensors on the meta device."""
    made = []
    for slots in empty:
        meta = dict.__getitem__(slots[0].table, slots[0].name)
        filled = torch.empty(meta.shape, dtype=meta.dtype)
        filled = filled.fill_(float("nan")) if meta.is_floating_point() else filled.zero_()
        filled = nn.Parameter(filled, meta.requires_grad) if isinstance(meta, nn.Parameter) else filled
        for slot in slots:
            dict.__setitem__(slot.table, slot.name, filled)  # not copied into the stage yet
            made.append((slot, filled))
    return made


def _pass_on(stage: nn.Module, made: Sequence[tuple[TensorSlot, Tensor]], ties: Ties) -> None:
    """Put filled tensors into their slots. Raises ModelError for one that is not filled."""
    tied = {name for names in ties for name in names}  # filled later, under the name they are saved by
    for slot, value in made:
        if slot.full not in tied:
            _check_filled(stage, slot.full, value)
        slot.table[slot.name] = value


def _check_filled(stage: nn.Module, name: str, value: Tensor) -> None:
    if value.is_floating_point() and value.isnan().any():
        raise ModelError(
            f"{type(stage).__name__}: {name}",
            "the model's _init_weights gives it no value",
            "Build the pipeline from a model object that has its values, or load a checkpoint",
        )


def _initialise_groups(
    stage: nn.Module, groups: Sequence[InitGroup], seed: int, seen: set[int], empty: TensorSlots, ties: Ties
) -> None:
    order = {tensor: index for index, tensor in enumerate(empty)}
    others = set(empty)  # the tensors that no call may read, unless they are of its group

    def run(group: InitGroup) -> None:  # a function, so that it frees the group's tensors
        made = _materialise([empty[tensor] for tensor in sorted(group.tensors, key=order.__getitem__)])
        seen.clear()
        for _, call in sorted(group.calls.items()):
            _run(call, seed)
        if not seen.isdisjoint(others):
            raise ModelError(
                f"{type(stage).__name__}, whose _init_weights reads more tensors when there are values",
                "a run on the meta device shows which tensors it reads, so that few are in memory at once",
                "Build the pipeline from a model object that has its values, or load a checkpoint",
            )
        _pass_on(stage, made, ties)
        others.update(id(dict.__getitem__(slot.table, slot.name)) for slot, _ in made)

    for group in groups:
        run(group)


def _groups(calls: Sequence[InitCall], seed: int, seen: set[int], tensors: set[int]) -> list[InitGroup]:
    """Calls that read or fill a common one of `tensors` form a group.

    Each call runs without values; `seen` collects the tensors that it reads from the model's tables. These
    are more than ops on the meta device show, as some of torch's initialisations run no op there.
    """
    group_of: dict[int, InitGroup] = {}
    for index, call in enumerate(calls):
        seen.clear()
        try:
            _run(call, seed)
        except Exception:  # it needs values, and may read all its tensors; other failures will recur
            seen.update(map(id, (*call.module.parameters(), *call.module.buffers())))
        seen.update(map(id, (*call.module._parameters.values(), *call.module._buffers.values())))
        group = InitGroup(seen & tensors, {index: call})
        for other in {id(group_of[key]): group_of[key] for key in group.tensors if key in group_of}.values():
            group.tensors.update(other.tensors)
            group.calls.update(other.calls)
        group_of |= dict.fromkeys(group.tensors, group)
    return list({id(group): group for group in group_of.values()}.values())


def _initialise_tied(
    stage: PreTrainedModel, whole: PreTrainedModel, ties: Ties, seed: int, fresh: set[str]
) -> None:
    """Give a tied weight, on any stage, the values that it gets under the name by which it is saved."""
    for names in ties:
        for name in fresh.intersection(names):
            owner, _, last = names[0].rpartition(".")
            source = copy.deepcopy(whole.get_submodule(owner))
            _materialise(_all_empty(source).values())
            _run(InitCall(whole, owner, source), seed)
            value, parameter = source.get_parameter(last), stage.get_parameter(name)
            _check_filled(stage, name, value)
            parameter.copy_(shard_like(value, parameter))


@contextmanager
def _marked_as_done(stage: nn.Module, fresh: set[str]) -> Iterator[None]:
    """Mark all tensors but those named `fresh` so that transformers' initialisers leave them alone."""
    # `values` also keeps meta tensors alive, as initialise() identifies tensors by their ids
    values = [*stage.named_parameters(), *stage.named_buffers()]
    marked = [value for name, value in values if name not in fresh]
    for value in marked:
        value._is_hf_initialized = True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for value in marked:
            del value._is_hf_initialized  # type: ignore[attr-defined]


@contextmanager
def _without_placeholders(stage: nn.Module) -> Iterator[None]:
    """Hide placeholders from initialisers that access all layers of their model, or its head.

    Placeholders of layers are removed from their lists; others become their modules, without values.
    """
    changed = []
    for module in stage.modules():
        if any(isinstance(child, Placeholder | ModulePlaceholder) for child in module._modules.values()):
            changed.append((module, module._modules))
            in_list = isinstance(module, nn.ModuleList)
            module._modules = {
                name: child._module if isinstance(child, ModulePlaceholder) else child
                for name, child in module._modules.items()
                if not (in_list and isinstance(child, Placeholder))
            }
    try:
        yield
    finally:
        for module, children in changed:
            module._modules = children
