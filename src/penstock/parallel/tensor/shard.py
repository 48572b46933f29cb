"""Tensor parallelism: the ranks of a `tp` axis share out the weights of each layer.

Which weights, and how, is the model's own plan (tensor_plan.py). The model's forward runs as it is. In each
module it meets this rank's piece of the weights, as plain tensors, and around the projections stand what
brings the ranks together, forward / backward:

    x (whole)  -- as it is / summed -->  columns  -- own heads -->  rows  -- summed / as it is -->  y (whole)

Every parameter becomes a DTensor on the mesh: Shard where it is shared out, Replicate where every rank has
the same. With sequence_parallel the activations between the parts of the layers are shared out along the
sequence (dimension 1):

    whole -> [ norm -> (whole: attention) -> + -> norm -> (whole: MLP) -> + ] -> next layer ... -> whole

All ranks of the axis get the same batch, and must draw the same random numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from penstock.errors import ConfigError, ModelError
from penstock.parallel.tensor import plan as tensor_plan
from penstock.parallel.tensor.plan import COLUMNS, COLUMNS_GATHERED, PARTIAL, ROWS, ROWS_SPLIT, Plan, check
from penstock.parallel.tensor.styles import (
    SUMMANDS,
    Columns,
    Compressed,
    Ends,
    Entered,
    Rows,
    Vocabulary,
    Way,
    WholeSequence,
)

__all__ = ["check", "complete_gradients", "tensor_parallel"]


def tensor_parallel(module: nn.Module, mesh: DeviceMesh, *, sequence_parallel: bool = False) -> None:
    """Share the weights of `module` out over `mesh`, in place. Names stay as they are.

    module: a Hugging Face model, or a stage of one, with the same values on every rank of the mesh. Weights
        that are shared out over another mesh already (experts) are left as they are.
    mesh: the `tp` axis alone
    sequence_parallel: share out what is between the parts of layers along the sequence. What enters the first
        layer of the module, and what leaves the last one, stays whole.

    Outputs are whole and the same on every rank. After a backward every gradient is complete, but for the
    few that are Partial DTensors: those of weights that work on each rank's own heads or tokens. They
    accumulate without communication, until `complete_gradients`, or FSDP2's reduction, sums them up.
    Raises what `check` does, and BatchError in the forward where sequence_parallel meets a length that the
    ranks cannot share out evenly.
    """
    if mesh.ndim != 1:
        rule = "the ranks that share out weights lie along one axis"
        raise ConfigError(f"a mesh with the axes {mesh.mesh_dim_names}", rule, "Give mesh['tp']")
    if any(isinstance(p, DTensor) and p.device_mesh == mesh for p in module.parameters()):
        rule = "tensor parallelism comes before all else that shares out weights"
        raise ModelError("a module of DTensors", rule, "Call tensor_parallel once, before fully_shard")
    check(module, mesh.size(), sequence_parallel=sequence_parallel)
    if mesh.size() == 1:
        return
    plan = tensor_plan.assigned(module, mesh.size())
    around = _Around(module, mesh, plan)
    if sequence_parallel:
        around.share_sequence()
    _share_out(module, mesh, plan)
    around.put()


def complete_gradients(module: nn.Module) -> None:
    """Sum up the gradients of which each rank has a part. Once a step, after its last backward; collective.

    After that each is a Replicate DTensor. One all-reduce for all gradients of a dtype. Where FSDP2 has
    reduced the gradients there is nothing left to do, and nothing is done.
    """
    parts: dict[tuple[torch.dtype, DeviceMesh], list[nn.Parameter]] = {}
    for parameter in module.parameters():
        gradient = parameter.grad
        if isinstance(gradient, DTensor) and any(p.is_partial() for p in gradient.placements):
            parts.setdefault((gradient.dtype, gradient.device_mesh), []).append(parameter)
    for (_, mesh), parameters in parts.items():
        pieces = [p.grad.to_local() for p in parameters]  # type: ignore[union-attr]
        flat = torch.cat([piece.flatten() for piece in pieces])
        dist.all_reduce(flat, group=mesh.get_group())
        sums = torch.split(flat, [piece.numel() for piece in pieces])
        for parameter, piece, total in zip(parameters, pieces, sums, strict=True):
            parameter.grad = DTensor.from_local(total.view_as(piece), mesh, (Replicate(),), run_check=False)


# ---- the parameters


def _share_out(module: nn.Module, mesh: DeviceMesh, plan: Plan) -> None:
    """Put DTensors in the place of all parameters. One of several names stays one."""
    made: dict[int, nn.Parameter] = {}
    for name, owner in module.named_modules():
        for own, parameter in owner._parameters.items():
            if parameter is None or isinstance(parameter, DTensor):
                continue
            if id(parameter) not in made:
                style = plan.get(_full(name, own), plan.get(name, ""))
                made[id(parameter)] = _shared(parameter, mesh, tensor_plan.DIMENSION.get(style))
            owner._parameters[own] = made[id(parameter)]


def _shared(parameter: nn.Parameter, mesh: DeviceMesh, dimension: int | None) -> nn.Parameter:
    """This rank's piece along `dimension`; whole where there is none, or it has no such dimension."""
    placement: Placement = Replicate()
    local = parameter.detach()
    if dimension is not None and dimension < parameter.ndim:
        placement = Shard(dimension)
        piece = local.chunk(mesh.size(), dimension)[mesh.get_local_rank()]
        local = piece.clone(memory_format=torch.contiguous_format)  # so that the whole can go
    tensor = DTensor.from_local(local, mesh, (placement,), run_check=False)
    made = nn.Parameter(tensor, requires_grad=parameter.requires_grad)
    made.__dict__.update(parameter.__dict__)
    return made


# ---- the modules


class _Running:
    """How many forwards of the modules of one `tensor_parallel` are under way, one within the other.

    inside: of those in layers, where activations may be this rank's part
    """

    count = inside = 0


class _Parallel(nn.Module):
    """Mixed into the class of a module: it runs inside of its ways, and reads parameters as plain tensors.

    While its own forward runs it reads this rank's pieces. What is whole it gives to other modules as well,
    which read it in their forward. A piece would be wrong there. Of an embedding such a read, outside of the
    layers, gets the whole, gathered for it; any other gets the DTensor, which torch does not mix with plain
    tensors.
    """

    tp_ways: tuple[Way, ...]  # the first one innermost
    tp_partial: frozenset[str]  # parameters that work on this rank's own heads or tokens
    tp_running: _Running
    tp_inside: bool  # whether it is a layer or in one

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        call: Callable[..., Any] = super().forward
        for way in self.tp_ways:
            call = functools.partial(way, self, call)
        own, running = vars(self), self.tp_running
        own["tp_depth"] = own.get("tp_depth", 0) + 1
        running.count += 1
        running.inside += self.tp_inside
        try:
            return call(*args, **kwargs)
        finally:  # however it ends: a pipeline's stage leaves its forward by an exception
            own["tp_depth"] -= 1
            running.count -= 1
            running.inside -= self.tp_inside

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        if not isinstance(value, DTensor):
            return value
        is_whole = all(placement.is_replicate() for placement in value.placements)
        if not (vars(self).get("tp_depth") or (is_whole and self.tp_running.count)):
            return value.full_tensor() if self._is_read_outside() else value
        is_partial = is_whole and name in self.tp_partial
        return value.to_local(grad_placements=(SUMMANDS,) if is_partial else None)

    def _is_read_outside(self) -> bool:
        """Of an embedding: whether another module's forward runs, and none of a layer, where the values that
        are to meet it may be a part of themselves.
        """
        running = self.tp_running
        return running.count > running.inside == 0 and any(isinstance(w, Vocabulary) for w in self.tp_ways)


class _Around:
    """What is to be put around the modules of a model, by name."""

    def __init__(self, module: nn.Module, mesh: DeviceMesh, plan: Plan) -> None:
        self._module, self._mesh = module, mesh
        self._ways: dict[str, list[Way]] = {}
        self._partial: dict[str, set[str]] = {}
        self._entered: dict[str, Entered] = {}
        for name, part in module.named_modules():
            plain = {own: p for own, p in part._parameters.items() if not isinstance(p, DTensor)}
            owned = {own: _full(name, own) for own, p in plain.items() if p is not None}
            if owned:
                style = plan.get(name)
                self._ways[name] = self._of_style(name, style)
                self._partial[name] = {own for own, full in owned.items() if plan.get(full, style) == PARTIAL}
                self._ways.setdefault(name.rpartition(".")[0], [])  # which may read them
        for name, entered in self._entered.items():
            self._ways[name].append(entered)
        self._ways.setdefault("", [])  # so that it is known when a forward runs

    def _of_style(self, name: str, style: str | None) -> list[Way]:
        if style in (COLUMNS, COLUMNS_GATHERED):
            entered = self._entered.setdefault(name.rpartition(".")[0], Entered(self._mesh))
            return [Columns(self._mesh, entered, gathered=style == COLUMNS_GATHERED)]
        if style in (ROWS, ROWS_SPLIT):
            return [Rows(self._mesh, split=style == ROWS_SPLIT)]
        if style == tensor_plan.VOCABULARY:
            return [Vocabulary(self._mesh)]
        if style == tensor_plan.COMPRESSED:
            return [Compressed(self._mesh, tensor_plan.rotary_width(self._module))]
        return []

    def share_sequence(self) -> None:
        layers = tensor_plan.layers_of(self._module)
        for number, (path, layer) in enumerate(layers.items()):
            # what a layer does by itself it does with its own tokens
            self._partial.setdefault(path, set()).update(layer._parameters)
            for name, part in layer.named_children():
                if tensor_plan.is_token_wise(part):
                    self._partial.setdefault(f"{path}.{name}", set()).update(part._parameters)
                else:
                    own = self._ways.setdefault(f"{path}.{name}", [])
                    own.append(WholeSequence(self._mesh, self._entered.get(f"{path}.{name}")))
            ends = Ends(self._mesh, first=number == 0, last=number == len(layers) - 1)
            self._ways.setdefault(path, []).append(ends)

    def put(self) -> None:
        kinds: dict[type[nn.Module], type[nn.Module]] = {}  # one for all of a kind, as compilers like it
        running = _Running()
        for name, ways in self._ways.items():
            module = self._module.get_submodule(name)
            own = type(module)
            if own not in kinds:
                kinds[own] = type(own.__name__, (_Parallel, own), {"__module__": own.__module__})
            module.__class__ = kinds[own]
            partial = frozenset(self._partial.get(name, ()))
            inside = any(part.isdecimal() for part in name.split("."))
            vars(module).update(tp_ways=tuple(ways), tp_partial=partial, tp_running=running, tp_inside=inside)


def _full(module: str, own: str) -> str:
    return f"{module}.{own}" if module else own
