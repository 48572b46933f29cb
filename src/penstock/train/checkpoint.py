"""Checkpoints of a run: what they hold, which one is whole, and going on from one bit for bit.

``<output>/checkpoints/step-00000100/`` is a folder that `from_pretrained` opens, with the tokenizer, and
beside them the optimizer's state (safetensors, one file a process, read by whoever needs it) and state.json.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import AdamW
from transformers import AutoConfig, PreTrainedModel

from penstock.commit import check_folder, write_folder
from penstock.errors import CheckpointError
from penstock.models.weights import Ties
from penstock.pipeline import Pipeline
from penstock.train.config import TrainConfig
from penstock.train.tokenizer import Tokenizer

STATE = "state.json"
_PARTS = ("step", "exp_avg", "exp_avg_sq")  # of AdamW's state
_INCIDENTAL = {"transformers_version", "_name_or_path", "architectures", "dtype", "use_cache"}


@dataclass(frozen=True)
class Found:
    """path: the newest whole checkpoint, if any; torn: what was passed over, in words"""

    path: Path | None
    torn: tuple[str, ...]


def checkpoint_folder(output: Path, step: int) -> Path:
    return output / "checkpoints" / f"step-{step:08d}"


def save_checkpoint(
    path: Path, step: int, pipe: Pipeline, optimizer: AdamW, tokenizer: Tokenizer, config: TrainConfig
) -> None:
    """Write the checkpoint after `step`, whole or not at all. Collective."""
    processes = pipe.processes

    def write(folder: Path) -> None:
        pipe.write_weights(folder)
        save_file(
            _optimizer_tensors(pipe, optimizer), folder / _optimizer_file(processes.index, processes.count)
        )
        if processes.index == 0:
            tokenizer.save(folder)
            versions = {"penstock": version("penstock"), "torch": torch.__version__}
            state = {"step": step, "config": config.model_dump(mode="json"), "versions": versions}
            (folder / STATE).write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")

    write_folder(path, write, processes)


def newest(output: Path) -> Found:
    """The checkpoint of the highest step under `output` that is whole."""
    folder = output / "checkpoints"
    torn = [f"{path} was never finished" for path in sorted(folder.glob(".step-*"), reverse=True)]
    for path in sorted(folder.glob("step-*"), reverse=True):
        try:
            check_folder(path)
        except CheckpointError as error:
            torn.append(str(error))
        else:
            return Found(path, tuple(torn))
    return Found(None, tuple(torn))


def read_state(path: Path) -> dict[str, Any]:
    """state.json of a whole checkpoint: step, config, versions. Raises CheckpointError."""
    try:
        state = json.loads((path / STATE).read_text(encoding="utf-8"))
        return {"step": int(state["step"]), "config": dict(state["config"]), "versions": state["versions"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"checkpoint {path}: {STATE}",
            "a run goes on from its step and config, and they cannot be read",
            "Give a checkpoint that penstock train wrote",
        ) from error


def check_fits(path: Path, model: PreTrainedModel, ties: Ties) -> None:
    """Raise CheckpointError unless the checkpoint is one of `model`: same config, same parameters.

    model: the whole model, on the meta device. Headers are read and no tensor.
    """
    theirs = AutoConfig.from_pretrained(path, local_files_only=True).to_dict()
    for key, ours in model.config.to_dict().items():
        if key not in _INCIDENTAL and theirs.get(key) != ours:
            raise _unfit(path, f"model config {key}={theirs.get(key)}", f"the model has {ours}")
    shapes = {key: shape for file in _optimizer_files(path) for key, shape in _shapes(file)}
    names = _Names(ties)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and names.find("step", name, shapes) is None:
            raise _unfit(path, f"no state of {name}", "the model trains this parameter")
        moment = names.find("exp_avg", name, shapes)
        if moment is not None and shapes[moment] != list(parameter.shape):
            raise _unfit(path, f"{name} of shape {shapes[moment]}", f"the model's is {list(parameter.shape)}")


def load_checkpoint(path: Path, pipe: Pipeline, optimizer: AdamW, ties: Ties) -> None:
    """Put weights and optimizer state of this process back, in place. Collective."""
    pipe.load_weights(path)
    names = _Names(ties)
    wanted: dict[str, list[nn.Parameter]] = {}  # several where this process holds copies of the same slice
    for name, parameter in pipe.named_parameters():
        if parameter.requires_grad:
            wanted.setdefault(name, []).append(parameter)
    for file in _optimizer_files(path):
        with safe_open(file, framework="pt") as opened:
            held = set(opened.keys())
            for name in [name for name in wanted if names.find("step", name, held)]:
                copies = wanted.pop(name)
                keys = {part: key for part in _PARTS if (key := names.find(part, name, held))}
                if len(keys) < len(_PARTS):  # a parameter that never had a gradient has no moments
                    continue
                for parameter in copies:
                    optimizer.state[parameter] = {
                        part: _placed(part, opened.get_tensor(key), parameter) for part, key in keys.items()
                    }
    if wanted:
        raise _unfit(path, f"no state of {next(iter(wanted))}", "the model trains this parameter")


class _Names:
    """A tied weight may be stored under another of its names."""

    def __init__(self, ties: Ties) -> None:
        self._others = {name: names for names in ties for name in names}

    def find(self, part: str, name: str, held: Collection[str]) -> str | None:
        candidates = (f"{part}.{other}" for other in (name, *self._others.get(name, ())))
        return next((key for key in candidates if key in held), None)


def _unfit(path: Path, found: str, rule: str) -> CheckpointError:
    return CheckpointError(
        f"checkpoint {path}: {found}",
        rule,
        f"Resume with the model that wrote it, whose config stands in its {STATE}",
    )


def _placed(part: str, value: Tensor, parameter: nn.Parameter) -> Tensor:
    """As AdamW keeps it: counters on the CPU, moments where the parameter is.

    Always a copy: what a file is read into is shared by all who read it, two copies of a tied weight too.
    """
    return value.clone() if part == "step" else value.to(parameter.device, copy=True)


def _optimizer_tensors(pipe: Pipeline, optimizer: AdamW) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name, parameter in pipe.named_parameters():
        if parameter.requires_grad:
            state = optimizer.state.get(parameter) or {"step": torch.zeros(())}
            tensors |= {f"{part}.{name}": value.detach().contiguous() for part, value in state.items()}
    return tensors


def _optimizer_file(index: int, count: int) -> str:
    return f"optimizer-{index + 1:05d}-of-{count:05d}.safetensors"


def _optimizer_files(path: Path) -> list[Path]:
    files = sorted(path.glob("optimizer-*-of-*.safetensors"))
    if not files:
        raise CheckpointError(
            f"checkpoint {path}", "it holds no optimizer state", "Give one that penstock train wrote"
        )
    return files


def _shapes(file: Path) -> Iterator[tuple[str, list[int]]]:
    try:
        with safe_open(file, framework="pt") as opened:
            for key in opened.keys():  # noqa: SIM118 - not a dict
                yield key, opened.get_slice(key).get_shape()
    except SafetensorError as error:
        raise CheckpointError(
            f"checkpoint {file}", f"it cannot be read: {error}", "Take another one"
        ) from error
