"""What optimizers hold, by the names of parameters: as tensors and JSON.

Each process writes a pair of files, and whoever needs something of them reads it (penstock.stored_optimizer):

    optimizer-00001-of-00002.safetensors   tensors by part and name: "exp_avg.model.norm.weight"
    optimizer-00001-of-00002.json          groups: optimizer, lr, options and parameters' names;
                                           numbers: by name and part, where a part is a plain number
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from penstock.errors import CheckpointError
from penstock.runtime.spread import host_copy, whole

Optimizers = Optimizer | Sequence[Optimizer]
Number = int | float | bool | None
Named = Sequence[tuple[str, nn.Parameter]]

# options of torch's optimizers that keep a tensor more of each parameter, and what it is called
NEEDED = {"amsgrad": "max_exp_avg_sq", "centered": "grad_avg", "momentum": "momentum_buffer"}


def as_list(optimizers: Optimizers) -> list[Optimizer]:
    return [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)


@dataclass(frozen=True)
class OptimizerState:
    """What one process's optimizers hold. tensors: by "part.name"; numbers: by name and part"""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    numbers: dict[str, dict[str, Number]] = field(default_factory=dict)

    def write(self, folder: Path, index: int, count: int) -> None:
        file = folder / f"optimizer-{index + 1:05d}-of-{count:05d}.safetensors"
        save_file(self.tensors, file)
        described = {"groups": self.groups, "numbers": self.numbers}
        file.with_suffix(".json").write_text(json.dumps(described, indent=1) + "\n", encoding="utf-8")


def state_of(optimizers: Optimizers, named: Named, *, copied: bool) -> OptimizerState:
    """What `optimizers` hold of the parameters `named`, whole: collective where they are spread over ranks.

    copied: in host memory that is nobody else's
    Raises what check_state does, before anything is gathered.
    """
    check_state(optimizers, named)
    state = OptimizerState()
    for optimizer, group, members in groups_of(optimizers, named):
        lr = group.get("lr")
        state.groups.append(
            {
                "optimizer": type(optimizer).__name__,
                "lr": None if lr is None else float(lr),
                "options": {option: bool(group[option]) for option in NEEDED if option in group},
                "parameters": [name for name, _ in members],
                "dtypes": [str(parameter.dtype) for _, parameter in members],
            }
        )
        for name, parameter in members:
            for part, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    state.tensors[f"{part}.{name}"] = host_copy(value) if copied else _plain(value)
                else:
                    state.numbers.setdefault(name, {})[part] = value
    return state


def check_state(optimizers: Optimizers, named: Named) -> None:
    """Raise CheckpointError where a parameter bears no name or belongs to two optimizers, or where a state is
    neither a plain tensor nor a number."""
    for optimizer, _, members in groups_of(optimizers, named):
        for name, parameter in members:
            for part, value in optimizer.state.get(parameter, {}).items():
                _check_part(optimizer, name, part, value)


def _plain(value: Tensor) -> Tensor:
    return whole(value).detach().contiguous()


def groups_of(
    optimizers: Optimizers, named: Named
) -> Iterator[tuple[Optimizer, dict[str, Any], list[tuple[str, nn.Parameter]]]]:
    """Every group of every optimizer, with its parameters and their names."""
    names = {id(parameter): name for name, parameter in named}
    seen: set[int] = set()
    for optimizer in as_list(optimizers):
        for group in optimizer.param_groups:
            members = []
            for parameter in group["params"]:
                if parameter.numel() == 0 and id(parameter) not in names:
                    continue  # what stands in where a process holds no parameter, as optimizers ask for one
                members.append((_name(parameter, names, seen), parameter))
            yield optimizer, group, members


def _name(parameter: nn.Parameter, names: Mapping[int, str], seen: set[int]) -> str:
    if id(parameter) not in names:
        raise CheckpointError(
            f"a parameter of shape {list(parameter.shape)} in the optimizer",
            "state is kept by name, and this is none of the pipeline's parameters",
            "Make the optimizer over pipe.parameters() or pipe.named_parameters(), and keep others yourself",
        )
    if id(parameter) in seen:
        raise CheckpointError(
            f"the parameter {names[id(parameter)]} in two optimizers",
            "state is kept by the parameter's name, and there is one for each",
            "Give each parameter to one optimizer",
        )
    seen.add(id(parameter))
    return names[id(parameter)]


def _check_part(optimizer: Optimizer, name: str, part: object, value: object) -> None:
    tensor = isinstance(value, Tensor)
    plain = type(value) in (Tensor, nn.Parameter, DTensor) and value.layout is torch.strided  # type: ignore[attr-defined]
    if (plain if tensor else value is None or type(value) in (int, float, bool)) and (
        isinstance(part, str) and "." not in part
    ):
        return
    raise CheckpointError(
        f"{type(optimizer).__name__} holds {part!r} of {name} as a {type(value).__name__}",
        "a checkpoint holds plain tensors and numbers by name, and nothing that would have to be pickled",
        "Take another optimizer, or keep the state of this one yourself",
    )
