"""The state of any optimizer, by names of parameters, in safetensors and JSON.

    optimizer-00001-of-00002.safetensors   tensors, by part and name: "exp_avg.model.norm.weight"; a part in
                                           blocks of few bits is "exp_avg:codes" and "exp_avg:scale"
    optimizer-00001-of-00002.json          groups: optimizer, lr, options, names and dtypes of parameters
                                           numbers: by name and part, the parts that are plain numbers

Each process writes such a pair, and reads what it needs from all pairs, so that parameters may move between
processes. Files without JSON, of penstock 0.3.0 and before, hold AdamW's state.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from penstock.errors import CheckpointError, UnfitError
from penstock.models.weights.files import Ties
from penstock.models.weights.folder import UNREADABLE, Hashed
from penstock.models.weights.reading import Reader, reader_for
from penstock.models.weights.tensor_file import TensorFile, widest_first, write_tensors
from penstock.reading import LARGEST_JSON, read_json
from penstock.runtime.device.copies import BackgroundCopies
from penstock.runtime.sharded_weights import full_tensor, host_copy, own_part, shard_like

Optimizers: TypeAlias = Optimizer | Sequence[Optimizer]
Number = int | float | bool | None
NamedParameters = Sequence[tuple[str, nn.Parameter]]
ParamGroup = dict[str, Any]

# options of torch's optimizers that keep one more tensor of each parameter, and its name
OPTIONAL_PARTS = {"amsgrad": "max_exp_avg_sq", "centered": "grad_avg", "momentum": "momentum_buffer"}
_LARGEST = 4 * LARGEST_JSON  # bytes: it names each parameter three times
_PIECES = ("codes", "scale")


def optimizers_of(optimizers: Optimizers) -> Sequence[Optimizer]:
    return [optimizers] if isinstance(optimizers, Optimizer) else optimizers


def _groups(
    optimizers: Optimizers, named: NamedParameters
) -> Iterator[tuple[Optimizer, ParamGroup, NamedParameters]]:
    """Every group of every optimizer, with its named parameters.

    Raises CheckpointError for a parameter without a name, or in two optimizers.
    """
    names = {id(parameter): name for name, parameter in named}
    seen: set[int] = set()
    for optimizer in optimizers_of(optimizers):
        for group in optimizer.param_groups:
            members = []
            for parameter in group["params"]:
                if parameter.numel() == 0 and id(parameter) not in names:
                    continue  # a placeholder: optimizers need a parameter, and this process may have none
                if id(parameter) not in names:
                    raise CheckpointError(
                        f"a parameter of shape {list(parameter.shape)} in the optimizer",
                        "state is kept by name, and this parameter is not the pipeline's",
                        "Make the optimizer over pipe.parameters() or pipe.named_parameters(), and keep "
                        "others yourself",
                    )
                if id(parameter) in seen:
                    raise CheckpointError(
                        f"the parameter {names[id(parameter)]} in two optimizers",
                        "state is kept by the parameter's name, once for each name",
                        "Give each parameter to one optimizer",
                    )
                seen.add(id(parameter))
                members.append((names[id(parameter)], parameter))
            yield optimizer, group, members


# ---- save


@dataclass(frozen=True)
class OptimizerState:
    """The state of one process's optimizers. tensors: by "part.name"; numbers: by name and part"""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    groups: list[ParamGroup] = field(default_factory=list)
    numbers: dict[str, dict[str, Number]] = field(default_factory=dict)

    def write(self, folder: Path, index: int, count: int) -> Hashed:
        """Write the pair of process `index` of `count`. Returns the entry of its tensors in the manifest."""
        file = folder / f"optimizer-{index + 1:05d}-of-{count:05d}.safetensors"
        entry = write_tensors(file, widest_first(self.tensors))
        described = {"groups": self.groups, "numbers": self.numbers}
        file.with_suffix(".json").write_text(json.dumps(described, indent=1) + "\n", encoding="utf-8")
        return {file.name: entry}


def state_of(
    optimizers: Optimizers, named: NamedParameters, copies: BackgroundCopies | None
) -> OptimizerState:
    """The full state that `optimizers` hold of the parameters `named`. Collective where these are sharded.

    The optimizers have passed check_state, on every process. copies: what copies it into host memory, if
    anything does
    """
    state = OptimizerState()
    for optimizer, group, members in _groups(optimizers, named):
        lr = group.get("lr")
        state.groups.append(
            {
                "optimizer": type(optimizer).__name__,
                "lr": None if lr is None else float(lr),
                "options": {option: bool(group[option]) for option in OPTIONAL_PARTS if option in group},
                "parameters": [name for name, _ in members],
                "dtypes": [str(parameter.dtype) for _, parameter in members],
            }
        )
        for name, parameter in members:
            for part, value in optimizer.state.get(parameter, {}).items():
                if not isinstance(value, Tensor):
                    state.numbers.setdefault(name, {})[part] = value
                    continue
                for piece, tensor in plain_parts(part, value).items():
                    state.tensors[f"{piece}.{name}"] = (
                        full_tensor(tensor).detach().contiguous()
                        if copies is None
                        else host_copy(tensor, copies, steady=True)
                    )
    return state


def plain_parts(part: str, value: Tensor) -> dict[str, Tensor]:
    """A part of a state as plain tensors: torchao's tensors in blocks are codes and the blocks' scales."""
    if not _is_in_blocks(value):
        return {part: value}
    return {f"{part}:{piece}": getattr(value, piece) for piece in _PIECES}


def check_state(optimizers: Optimizers, named: NamedParameters) -> None:
    """Raise CheckpointError for state that is neither a plain tensor nor a number, a parameter without a
    name, or one in two optimizers."""
    for optimizer, _, members in _groups(optimizers, named):
        for name, parameter in members:
            for part, value in optimizer.state.get(parameter, {}).items():
                if not (isinstance(part, str) and "." not in part and _is_plain(value)):
                    raise CheckpointError(
                        f"{type(optimizer).__name__} holds {part!r} of {name} as a {type(value).__name__}",
                        "a checkpoint holds plain tensors and numbers by name, and nothing that would have "
                        "to be pickled",
                        "Take another optimizer, or keep the state of this one yourself",
                    )


def _is_plain(value: object) -> bool:
    if isinstance(value, Tensor):
        if _is_in_blocks(value):
            return True
        value = value._local_tensor if type(value) is DTensor else value
        return type(value) in (Tensor, nn.Parameter) and value.layout is torch.strided
    return value is None or type(value) in (int, float, bool)


def _is_in_blocks(value: object) -> bool:
    """Whether it is a torchao tensor, which has codes and a scale for each block of them."""
    return type(value).__name__ in ("OptimState8bit", "OptimState4bit", "OptimStateFp8")


# ---- load


@dataclass
class ParameterState:
    """The stored state of one parameter.

    name: the parameter's at the save
    parts: the file of each tensor; numbers: the parts that are numbers
    optimizer, lr, options (of OPTIONAL_PARTS), dtype (the parameter's): None in an older checkpoint that does
        not have them
    """

    name: str
    optimizer: str | None = None
    lr: float | None = None
    parts: dict[str, Path] = field(default_factory=dict)
    numbers: dict[str, Number] = field(default_factory=dict)
    options: dict[str, bool] | None = None
    dtype: str | None = None

    def lacks(self, option: str, part: str) -> bool:
        """Whether there is state without the part that `option` keeps."""
        if self.options is not None:
            return not self.options.get(option, False)
        return bool(self.parts) and part not in self.parts


class StoredState:
    """The optimizer state in the checkpoint `path`. Tensors are read when they are needed.

    ties: a tied weight may be stored under another of its names
    Raises CheckpointError if there is none, or a file is damaged.
    """

    def __init__(self, path: Path, ties: Ties) -> None:
        self._path = path
        self._aliases = {name: names for names in ties for name in names}
        self._opened: dict[Path, TensorFile] = {}
        self._readers: dict[torch.device, Reader] = {}
        self._files = ExitStack()
        weakref.finalize(self, self._files.close)
        self._entries: dict[str, ParameterState] = {}
        for file in sorted(path.glob("optimizer-*-of-*.safetensors")):
            try:
                self._entries |= self._read(file)  # processes with the same weight have the same state of it
            except UNREADABLE as error:
                raise CheckpointError(
                    f"checkpoint {file}", f"it cannot be read: {error!r}", "Take another one"
                ) from error
        if not self._opened:
            raise CheckpointError(
                f"checkpoint {path}", "it holds no optimizer state", "Give one that penstock wrote"
            )

    def _read(self, file: Path) -> dict[str, ParameterState]:
        self._opened[file] = self._files.enter_context(TensorFile(file))
        description = file.with_suffix(".json")
        entries: dict[str, ParameterState] = {}
        if described := description.is_file():
            content = read_json(description, _LARGEST)
            for group in content["groups"]:
                dtypes = dict(zip(group["parameters"], group.get("dtypes", ()), strict=False))
                for name in group["parameters"]:
                    numbers = dict(content["numbers"].get(name, {}))
                    kind, options = str(group["optimizer"]), group.get("options")
                    entries[name] = ParameterState(
                        name, kind, group["lr"], {}, numbers, options, dtypes.get(name)
                    )
        for key in self._opened[file].names():
            part, _, name = key.partition(".")
            entries.setdefault(name, ParameterState(name)).parts[part] = file
        if not described:
            for entry in entries.values():
                if "exp_avg" in entry.parts:
                    entry.optimizer = "AdamW"
                if entry.parts.keys() == {"step"}:  # how 0.3.0 wrote AdamW's empty state
                    entry.parts.clear()
        return entries

    @property
    def names(self) -> frozenset[str]:
        """The names of the parameters that have stored state."""
        return frozenset(self._entries)

    def find(self, name: str) -> ParameterState | None:
        """The stored state of parameter `name`, which may be under another of its names."""
        candidates = (name, *self._aliases.get(name, ()))
        return next((self._entries[other] for other in candidates if other in self._entries), None)

    def shape(self, name: str, part: str) -> list[int] | None:
        """The shape of a stored tensor; None without one. Reads no tensor."""
        entry = self.find(name)
        if entry is None or part not in entry.parts:
            return None
        return list(self._opened[entry.parts[part]].like(f"{part}.{entry.name}").shape)

    def restorer(
        self, optimizers: Optimizers, named: NamedParameters, *, learning_rates: bool
    ) -> Callable[[], None]:
        """Check the state of `named` for `optimizers`; the result restores it. Reads no tensor.

        The options of the optimizers stay as they were made, except that with `learning_rates` each group
        gets the rate that its parameters had.
        Raises CheckpointError if state of a trained parameter is missing or another optimizer's, if it lacks
        a part that an option needs, or if parameters of one group had several learning rates.
        """
        groups = []
        for optimizer, group, members in _groups(optimizers, named):
            entries = [(p, self._fitting(optimizer, group, name, p)) for name, p in members]
            lr = self._learning_rate([entry for _, entry in entries]) if learning_rates else None
            groups.append((optimizer, group, entries, lr))

        def restore() -> None:
            for optimizer, group, entries, lr in groups:
                for parameter, entry in entries:
                    tensors = self._tensors(group, parameter, entry)
                    state = {**entry.numbers, **with_blocks(tensors, optimizer, parameter)}
                    optimizer.state.pop(parameter, None)
                    if state:
                        optimizer.state[parameter] = state
                if lr is not None and isinstance(group.get("lr"), Tensor):
                    group["lr"].fill_(lr)
                elif lr is not None:
                    group["lr"] = lr

        return restore

    def _fitting(
        self, optimizer: Optimizer, group: ParamGroup, name: str, parameter: nn.Parameter
    ) -> ParameterState:
        kind, entry = type(optimizer).__name__, self.find(name)
        if entry is None:
            if parameter.requires_grad:
                raise unfit(self._path, f"no state of {name}", "the optimizer trains this parameter")
            return ParameterState(name, kind)
        if entry.optimizer not in (None, kind):
            raise unfit(self._path, f"{name} was trained by {entry.optimizer}", f"here {kind} trains it")
        for option, part in OPTIONAL_PARTS.items():
            if group.get(option) and entry.lacks(option, part):
                rule = f"the optimizer has {option}={group[option]}, and the state lacks {part}"
                raise unfit(self._path, f"{name} was trained without {option}", rule)
        return entry

    def _learning_rate(self, entries: Sequence[ParameterState]) -> float | None:
        rates = sorted({entry.lr for entry in entries if entry.lr is not None})
        if len(rates) > 1:
            raise CheckpointError(
                f"checkpoint {self._path}: learning rates {rates}",
                "they are of parameters that are now in one group, which has one rate",
                "Group the parameters as before, or load with learning_rates=False",
            )
        return rates[0] if rates else None

    def _tensors(
        self, group: ParamGroup, parameter: nn.Parameter, entry: ParameterState
    ) -> dict[str, Tensor]:
        """The stored tensors, converted as torch's optimizers load them.

        `step` is on the CPU in its own dtype, unless the step runs on the device. The rest is on the device,
        and in the parameter's dtype if that has changed since; integers and scalar counters keep theirs, as
        do optimizers that hold float32 for weights of bfloat16.
        """
        tensors = {}
        changed = entry.dtype != str(parameter.dtype)
        for part, file in entry.parts.items():
            stored = self._opened[file].like(f"{part}.{entry.name}")
            device, dtype = parameter.device, stored.dtype
            if part == "step":
                if group.get("capturable") or group.get("fused"):
                    dtype = torch.float32
                else:
                    device = torch.device("cpu")
            elif ":" in part:  # of blocks
                pass
            elif changed and stored.is_floating_point() and (stored.ndim or not parameter.ndim):
                dtype = parameter.dtype
            own = own_part(parameter) if stored.shape == parameter.shape else None
            value = self._opened[file].read(
                f"{part}.{entry.name}", self._reader(device), own[0] if own else None
            )
            # a shard is copied, as its memory is that of the full tensor
            tensors[part] = shard_like(value, parameter).to(device, dtype, copy=own is not None)
        return tensors

    def _reader(self, device: torch.device) -> Reader:
        if device not in self._readers:
            self._readers[device] = reader_for(device)
        return self._readers[device]


def with_blocks(tensors: dict[str, Tensor], optimizer: Any, parameter: nn.Parameter) -> dict[str, Tensor]:
    """`tensors` with each part in blocks put together, in a buffer as `optimizer` makes it."""
    whole_parts = {}
    for part, value in tensors.items():
        name, _, piece = part.partition(":")
        if piece and name not in whole_parts:
            whole_parts[name] = optimizer._new_buffer(parameter.detach(), name == "exp_avg")
        if piece:
            getattr(whole_parts[name], piece).copy_(value)
        else:
            whole_parts[part] = value
    return whole_parts


def unfit(path: Path, mismatch: str, rule: str) -> UnfitError:
    remedy = "Go on with the model and the optimizer that wrote it, or load its weights alone"
    return UnfitError(f"checkpoint {path}: {mismatch}", rule, remedy)
