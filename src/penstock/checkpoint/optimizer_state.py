"""The optimizer state in a checkpoint, found by the names of parameters and put back.

penstock.checkpoint.optimizer_state tells how it is written. Checkpoints of 0.3.0 and before have the
tensors alone, which are AdamW's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from penstock.errors import CheckpointError
from penstock.models.weights.files import Ties
from penstock.runtime.sharded_weights import host_copy, spread_like, whole

# ---- What optimizers hold, by the names of parameters: as tensors and JSON.
#
# Each process writes a pair of files, and whoever needs something of them reads it
# (penstock.checkpoint.optimizer_state):
#
#     optimizer-00001-of-00002.safetensors   tensors by part and name: "exp_avg.model.norm.weight"
#     optimizer-00001-of-00002.json          groups: optimizer, lr, options and parameters' names;
#                                            numbers: by name and part, where a part is a plain number


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


@dataclass
class Entry:
    """What is stored of one parameter.

    optimizer, lr, options, dtype: None where an older checkpoint does not tell; parts: each tensor's file
    options: of NEEDED, whether each was on; dtype: the parameter's
    """

    optimizer: str | None = None
    lr: float | None = None
    parts: dict[str, Path] = field(default_factory=dict)
    numbers: dict[str, Number] = field(default_factory=dict)
    options: dict[str, bool] | None = None
    dtype: str | None = None

    def lacks(self, option: str, part: str) -> bool:
        """Whether there is state, and not what `option` keeps in it."""
        if self.options is not None:
            return not self.options.get(option, False)
        return bool(self.parts) and part not in self.parts


class Stored:
    """The optimizer state in the checkpoint `path`. Tensors are read when asked for."""

    def __init__(self, path: Path, ties: Ties) -> None:
        """ties: a tied weight may be stored under another of its names"""
        self._path = path
        self._others = {name: names for names in ties for name in names}
        self._opened: dict[Path, Any] = {}
        self._entries: dict[str, Entry] = {}
        for file in sorted(path.glob("optimizer-*-of-*.safetensors")):
            self._read(file)
        if not self._opened:
            raise CheckpointError(
                f"checkpoint {path}", "it holds no optimizer state", "Give one that penstock wrote"
            )

    def _read(self, file: Path) -> None:
        try:
            self._opened[file] = safe_open(file, framework="pt")
            keys = list(self._opened[file].keys())
            described = file.with_suffix(".json")
            told = json.loads(described.read_text(encoding="utf-8")) if described.is_file() else None
            entries = self._entries_of(told)
        except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"checkpoint {file}", f"it cannot be read: {error!r}", "Take another one"
            ) from error
        for key in keys:
            part, _, name = key.partition(".")
            entries.setdefault(name, Entry()).parts[part] = file
        if told is None:
            for entry in entries.values():
                if "exp_avg" in entry.parts:
                    entry.optimizer = "AdamW"
                if entry.parts.keys() == {"step"}:  # how 0.3.0 wrote that AdamW had nothing yet
                    entry.parts.clear()
        self._entries |= entries  # a weight that several processes hold is in the same state on each

    def _entries_of(self, told: Any) -> dict[str, Entry]:
        if told is None:
            return {}
        dtypes = {
            name: dtype
            for group in told["groups"]
            for name, dtype in zip(group["parameters"], group.get("dtypes", ()), strict=False)
        }
        return {
            name: Entry(
                str(group["optimizer"]),
                group["lr"],
                {},
                dict(told["numbers"].get(name, {})),
                group.get("options"),
                dtypes.get(name),
            )
            for group in told["groups"]
            for name in group["parameters"]
        }

    def find(self, name: str) -> tuple[str, Entry] | None:
        """The name under which the state of parameter `name` is stored, and what there is."""
        candidates = (name, *self._others.get(name, ()))
        return next(((other, self._entries[other]) for other in candidates if other in self._entries), None)

    def shape(self, name: str, part: str) -> list[int] | None:
        """Of a tensor that is there. No tensor is read."""
        found = self.find(name)
        if found is None or part not in found[1].parts:
            return None
        return list(self._opened[found[1].parts[part]].get_slice(f"{part}.{found[0]}").get_shape())

    @property
    def names(self) -> frozenset[str]:
        """Of the parameters of which anything is stored."""
        return frozenset(self._entries)

    def restore(self, optimizers: Optimizers, named: Named, *, learning_rates: bool) -> None:
        """Put the state of `named` into `optimizers`, and into each group its learning rate.

        Other options stay those that the optimizers were made with. Raises, as `plan` does, before anything
        is changed.
        """
        self.plan(optimizers, named, learning_rates=learning_rates)()

    def plan(self, optimizers: Optimizers, named: Named, *, learning_rates: bool) -> Callable[[], None]:
        """What `restore` does, checked and not yet done. No tensor is read.

        Raises CheckpointError where state of a trained parameter is missing or another optimizer's, where it
        lacks what an option asks for (NEEDED), or where parameters of one group had several learning rates.
        """
        found = []
        for optimizer, group, members in groups_of(optimizers, named):
            entries = [(p, *self._fitting(optimizer, group, name, p)) for name, p in members]
            lr = self._learning_rate([entry for *_, entry in entries]) if learning_rates else None
            found.append((optimizer, group, entries, lr))

        def put() -> None:
            for optimizer, group, entries, lr in found:
                for parameter, name, entry in entries:
                    self._put(optimizer, group, parameter, name, entry)
                if isinstance(group.get("lr"), Tensor) and lr is not None:
                    group["lr"].fill_(lr)
                elif lr is not None:
                    group["lr"] = lr

        return put

    def _fitting(
        self, optimizer: Optimizer, group: Mapping[str, Any], name: str, parameter: nn.Parameter
    ) -> tuple[str, Entry]:
        kind, found = type(optimizer).__name__, self.find(name)
        if found is None:
            if parameter.requires_grad:
                raise unfit(self._path, f"no state of {name}", "the optimizer trains this parameter")
            return name, Entry(kind)
        if found[1].optimizer not in (None, kind):
            raise unfit(self._path, f"{name} was trained by {found[1].optimizer}", f"here it is by {kind}")
        for option, part in NEEDED.items():
            if group.get(option) and found[1].lacks(option, part):
                rule = f"the optimizer has {option}={group[option]}, and the state lacks {part}"
                raise unfit(self._path, f"{name} was trained without {option}", rule)
        return found

    def _learning_rate(self, entries: Sequence[Entry]) -> float | None:
        rates = sorted({entry.lr for entry in entries if entry.lr is not None})
        if len(rates) > 1:
            raise CheckpointError(
                f"checkpoint {self._path}: learning rates {rates}",
                "they are of parameters that now stand in one group, which has one",
                "Group the parameters as before, or load with learning_rates=False",
            )
        return rates[0] if rates else None

    def _put(
        self, optimizer: Optimizer, group: dict[str, Any], parameter: nn.Parameter, name: str, entry: Entry
    ) -> None:
        held: dict[str, Any] = dict(entry.numbers)
        for part, file in entry.parts.items():
            value = self._opened[file].get_tensor(f"{part}.{name}")
            changed = entry.dtype != str(parameter.dtype)
            held[part] = _placed(part, value, parameter, group, changed=changed)
        optimizer.state.pop(parameter, None)
        if held:
            optimizer.state[parameter] = held


def _placed(
    part: str, value: Tensor, parameter: nn.Parameter, group: Mapping[str, Any], *, changed: bool
) -> Tensor:
    """As torch's optimizers load it: `step` on the CPU in its own dtype, unless the step runs on the device;
    all else there, in the parameter's dtype where that has `changed`, but for whole numbers and what counts
    by one number. Else it stays as it was: some optimizers keep float32 beside weights of bfloat16.

    Always a copy: what a file is read into is shared by all who read it, two copies of a tied weight too.
    """
    device, dtype = parameter.device, value.dtype
    if part == "step":
        if group.get("capturable") or group.get("fused"):
            dtype = torch.float32
        else:
            device = torch.device("cpu")
    elif changed and value.is_floating_point() and (value.ndim or not parameter.ndim):
        dtype = parameter.dtype
    return spread_like(value, parameter).to(device, dtype, copy=True)


def unfit(path: Path, found: str, rule: str) -> CheckpointError:
    remedy = "Go on with the model and the optimizer that wrote it, or load its weights alone"
    return CheckpointError(f"checkpoint {path}: {found}", rule, remedy)
