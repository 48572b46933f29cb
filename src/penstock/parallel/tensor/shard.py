"""Tensor parallelism: the ranks of a `tp` axis shard the weights of each layer.

The model's own plan says which weights, and how (plan.py). The model's forward runs unchanged. In each module
it reads this rank's shards of the weights, as plain tensors. Wrappers around the projections (styles.py)
communicate between the ranks, forward / backward:

    x (whole)  -- as it is / summed -->  columns  -- own heads -->  rows  -- summed / as it is -->  y (whole)

Every parameter becomes a DTensor on the mesh: Shard, or Replicate where all ranks have the same values. With
sequence_parallel the activations between the parts of layers are sharded along the sequence (dimension 1):

    whole -> [ norm -> (whole: attention) -> + -> norm -> (whole: MLP) -> + ] -> next layer ... -> whole

All ranks of the axis get the same batch, and must draw the same random numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from penstock.parallel.tensor.plan import TPPlan, assigned, is_token_wise, layers_of, rotary_width
from penstock.parallel.tensor.sharded_logits import sharded_head, sharded_logits
from penstock.parallel.tensor.styles import (
    COLUMNS,
    COLUMNS_GATHERED,
    COMPRESSED,
    PARTIAL,
    PARTIAL_SUMS,
    ROWS,
    ROWS_SPLIT,
    STYLES,
    VOCABULARY,
    SharedInput,
    Style,
    Wrapper,
    columns,
    compressed,
    ends,
    rows,
    vocabulary,
    whole_sequence,
)
from penstock.runtime.around import around
from penstock.runtime.split_backward.casts import marked_as_weight


def tensor_parallel(
    module: nn.Module, mesh: DeviceMesh, *, sequence_parallel: bool = False, shards_logits: bool = False
) -> None:
    """Shard the weights of `module` over `mesh`, in place; their names do not change. Collective.

    Outputs are whole and equal on every rank, but for sharded logits. After a backward every gradient is
    complete, except for Partial DTensors: the gradients of weights that work on each rank's own heads or
    tokens. These accumulate without communication, until `complete_gradients`, or FSDP2's reduction, sums
    them.

    Args:
        module: a Hugging Face model that `check` accepts (plan.py), or a stage of one, with the same values
            on every rank of the mesh. DTensors on another mesh (experts) are not changed
        mesh: the `tp` axis alone
        sequence_parallel: shard activations between the parts of layers along the sequence. The input of the
            first layer and the output of the last one stay whole
        shards_logits: return ShardedLogits (sharded_logits.py) where the plan shards the head

    The forward raises BatchError for a length that sequence_parallel cannot shard evenly.
    """
    plan = assigned(module, mesh.size())
    wrappers = _Wrappers(module, mesh, plan, sharded_head(module, mesh, plan) if shards_logits else None)
    if sequence_parallel:
        wrappers.shard_sequence()
    _shard_parameters(module, mesh, plan)
    wrappers.apply()


def complete_gradients(module: nn.Module) -> None:
    """Sum the gradients that are partial sums, once a step, after its last backward. Collective.

    They become Replicate DTensors, by one all-reduce for all gradients of a dtype. Does nothing where FSDP2
    has reduced the gradients.
    """
    partial: dict[tuple[torch.dtype, DeviceMesh], list[nn.Parameter]] = {}
    for parameter in module.parameters():
        gradient = parameter.grad
        if isinstance(gradient, DTensor) and any(p.is_partial() for p in gradient.placements):
            partial.setdefault((gradient.dtype, gradient.device_mesh), []).append(parameter)
    for (_, mesh), parameters in partial.items():
        pieces = [p.grad.to_local() for p in parameters]  # type: ignore[union-attr]
        flat = torch.cat([piece.flatten() for piece in pieces])
        dist.all_reduce(flat, group=mesh.get_group())
        sums = torch.split(flat, [piece.numel() for piece in pieces])
        for parameter, piece, total in zip(parameters, pieces, sums, strict=True):
            parameter.grad = DTensor.from_local(total.view_as(piece), mesh, (Replicate(),), run_check=False)


def _shard_parameters(module: nn.Module, mesh: DeviceMesh, plan: TPPlan) -> None:
    """Replace all parameters by DTensors. A parameter with several names stays one parameter."""
    made: dict[int, nn.Parameter] = {}
    for name, owner in module.named_modules():
        for key, parameter in owner._parameters.items():
            if parameter is None or isinstance(parameter, DTensor):
                continue
            if id(parameter) not in made:
                style = STYLES.get(plan.get(_full(name, key), plan.get(name, "")), Style())
                made[id(parameter)] = _sharded(parameter, mesh, style.dimension)
            owner._parameters[key] = made[id(parameter)]


def _sharded(parameter: nn.Parameter, mesh: DeviceMesh, dimension: int | None) -> nn.Parameter:
    """This rank's shard along `dimension`; whole if that is None, or not a dimension of the parameter."""
    placement: Placement = Replicate()
    local = parameter.detach()
    if dimension is not None and dimension < parameter.ndim:
        placement = Shard(dimension)
        piece = local.chunk(mesh.size(), dimension)[mesh.get_local_rank()]
        local = piece.clone(memory_format=torch.contiguous_format)  # so that the whole can be freed
    tensor = DTensor.from_local(local, mesh, (placement,), run_check=False)
    made = nn.Parameter(tensor, requires_grad=parameter.requires_grad)
    made.__dict__.update(parameter.__dict__)
    return made


def _full(module: str, key: str) -> str:
    return f"{module}.{key}" if module else key


# ---- the modules


class _Running:
    """Number of nested forwards of one model's modules that run now.

    in_layers: the forwards among them inside layers, where activations may be this rank's part
    """

    count = in_layers = 0


def _inside_wrappers(plain: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a module, inside its `tp_wrappers`, of which the first is innermost."""

    def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
        call: Callable[..., Any] = partial(plain, module)
        for wrapper in module.tp_wrappers:
            call = partial(wrapper, module, call)
        attributes, running = vars(module), module.tp_running
        attributes["tp_depth"] += 1
        running.count += 1
        running.in_layers += module.tp_in_layer
        try:
            return call(*args, **kwargs)
        finally:  # however it ends: a pipeline's stage leaves its forward by an exception
            attributes["tp_depth"] -= 1
            running.count -= 1
            running.in_layers -= module.tp_in_layer

    return forward


def _plain_tensors(plain: Callable[..., Any]) -> Callable[..., Any]:
    """A module's parameters, as attributes: this rank's shards while the module's own forward runs.

    Other modules may read a whole parameter in their forward, where a shard would be wrong. Such a read of an
    embedding, outside of the layers, gets the gathered weight; any other read gets the DTensor, which torch
    refuses to mix with plain tensors.
    """

    def getattr_(module: Any, name: str) -> Any:
        value = plain(module, name)
        if not isinstance(value, DTensor):
            return value
        is_whole = all(placement.is_replicate() for placement in value.placements)
        running = module.tp_running
        if not (module.tp_depth or (is_whole and running.count)):
            # read in another module's forward outside of layers, in which activations may be parts
            elsewhere = running.count > running.in_layers == 0
            return value.full_tensor() if elsewhere and module.tp_embeds else value
        is_partial = is_whole and name in module.tp_partial
        return marked_as_weight(value.to_local(grad_placements=(PARTIAL_SUMS,) if is_partial else None))

    return getattr_


class _Wrappers:
    """The wrappers for the modules of a model, by name."""

    def __init__(self, module: nn.Module, mesh: DeviceMesh, plan: TPPlan, head: str | None) -> None:
        """head: the name of the head whose logits stay sharded; None for none"""
        self._module, self._mesh, self._plan, self._head = module, mesh, plan, head
        self._wrappers: dict[str, list[Wrapper]] = {}
        self._partial: dict[str, set[str]] = {}
        self._inputs: dict[str, SharedInput] = {}
        for name, part in module.named_modules():
            plain = {key: p for key, p in part._parameters.items() if not isinstance(p, DTensor)}
            full = {key: _full(name, key) for key, p in plain.items() if p is not None}
            if full:
                style = plan.get(name)
                self._wrappers[name] = self._for_style(name, style)
                self._partial[name] = {key for key in full if plan.get(full[key], style) == PARTIAL}
                self._wrappers.setdefault(name.rpartition(".")[0], [])  # the parent module may read them
        for name, shared in self._inputs.items():
            self._wrappers[name].append(shared)
        self._wrappers.setdefault("", [])  # so that `tp_running` counts the model's forward

    def _for_style(self, name: str, style: str | None) -> list[Wrapper]:
        if style in (COLUMNS, COLUMNS_GATHERED):
            shared = self._inputs.setdefault(name.rpartition(".")[0], SharedInput(self._mesh))
            if name == self._head:
                return [partial(sharded_logits, self._mesh, shared)]
            return [partial(columns, self._mesh, shared, style == COLUMNS_GATHERED)]
        if style in (ROWS, ROWS_SPLIT):
            return [partial(rows, self._mesh, style == ROWS_SPLIT)]
        if style == VOCABULARY:
            return [partial(vocabulary, self._mesh)]
        if style == COMPRESSED:
            return [partial(compressed, self._mesh, rotary_width(self._module))]
        return []

    def shard_sequence(self) -> None:
        layers = layers_of(self._module)
        for index, (path, layer) in enumerate(layers.items()):
            # a layer's own parameters work on its own tokens
            self._partial.setdefault(path, set()).update(layer._parameters)
            for child, part in layer.named_children():
                name = f"{path}.{child}"
                if is_token_wise(part):
                    self._partial.setdefault(name, set()).update(part._parameters)
                else:
                    whole = partial(whole_sequence, self._mesh, self._inputs.get(name))
                    self._wrappers.setdefault(name, []).append(whole)
            at_ends = partial(ends, self._mesh, index == 0, index == len(layers) - 1)
            self._wrappers.setdefault(path, []).append(at_ends)

    def apply(self) -> None:
        running = _Running()
        for name, wrappers in self._wrappers.items():
            module = self._module.get_submodule(name)
            around(module, forward=_inside_wrappers, __getattr__=_plain_tensors)
            vars(module).update(
                tp_wrappers=tuple(wrappers),
                tp_depth=0,  # forwards of the module that run now
                tp_running=running,
                # parameters that work on this rank's own heads or tokens
                tp_partial=frozenset(self._partial.get(name, ())),
                tp_in_layer=any(part.isdecimal() for part in name.split(".")),
                tp_embeds=self._plan.get(name) == VOCABULARY,
            )
