"""Checkpoints of `penstock train`: where they lie, which one is whole, whether it fits, and which are kept.

``<output>/checkpoints/step-00000100/`` is one of penstock.checkpoint.save_load, with the tokenizer beside
the weights, and step, config and versions as its state.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from penstock.checkpoint.contents import STATE
from penstock.checkpoint.optimizer_state import Stored, unfit
from penstock.checkpoint.save_load import check_config
from penstock.errors import CheckpointError
from penstock.models.weights.files import Ties
from penstock.models.weights.folder import (
    check_folder,
    displaced,
    leftovers,
    looks_whole,
    remove_folder,
    remove_hidden,
    target_of,
    unfinished,
)
from penstock.train.config.sections import KeepSection, TrainConfig


@dataclass(frozen=True)
class Found:
    """path: the newest whole checkpoint, if any; torn: what was passed over, in words"""

    path: Path | None
    torn: tuple[str, ...]


def checkpoint_folder(output: Path, step: int) -> Path:
    return output / "checkpoints" / f"step-{step:08d}"


def state_after(step: int, config: TrainConfig, skipped: int = 0) -> dict[str, Any]:
    """What read_state reads. The place in the data and random numbers follow from the step, the learning rate
    from the step less those that were skipped.
    """
    versions = {"penstock": version("penstock"), "torch": torch.__version__}
    return {
        "step": step, "skipped": skipped, "config": config.model_dump(mode="json"), "versions": versions
    }  # fmt: skip


def newest(output: Path) -> Found:
    """The checkpoint of the highest step under `output` that is whole."""
    folder = output / "checkpoints"
    torn = [f"{path} was never finished" for path in reversed(unfinished(folder, "step-*"))]
    torn += [
        f"{target_of(path)} was being replaced: {path} holds the older one"
        for path in reversed(displaced(folder, "step-*"))
    ]
    for path in sorted(folder.glob("step-*"), reverse=True):
        try:
            check_folder(path)
        except CheckpointError as error:
            torn.append(str(error))
        else:
            return Found(path, tuple(torn))
    return Found(None, tuple(torn))


def prune(written: Path, keep: KeepSection) -> None:
    """Remove those older than `written`, the checkpoint that was just published, that no rule keeps.

    Left alone, and not counted: later steps, which another run wrote, and what is not whole. A checkpoint
    into which somebody put files of their own stays. To be called on one process, while nothing is written
    to the folder. Cut short it leaves hidden folders, which the next call removes, as it does those of runs
    that were killed in a write; but not an older checkpoint that was about to be replaced and never was.
    """
    if keep.last is None:
        return
    for path in (*leftovers(written.parent, "step-*"), *unfinished(written.parent, "step-*")):
        remove_hidden(path)
    last = int(written.name.removeprefix("step-"))
    older = sorted(((step, path) for step, path in _standing(written.parent) if step < last), reverse=True)
    for step, path in older[keep.last - 1 :]:
        if keep.every is None or step % keep.every:
            with suppress(CheckpointError):
                remove_folder(path)


def _standing(folder: Path) -> Iterator[tuple[int, Path]]:
    """Step and path of each checkpoint of ours that is whole, as far as can be told without reading it."""
    for path in folder.glob("step-*"):
        named = re.fullmatch(r"step-(\d{8,})", path.name)
        if named is None or path.is_symlink() or not (path / STATE).is_file():
            continue
        if looks_whole(path):
            yield int(named[1]), path


def read_state(path: Path) -> dict[str, Any]:
    """state.json of a whole checkpoint: step, skipped, config, versions. Raises CheckpointError."""
    try:
        state = json.loads((path / STATE).read_text(encoding="utf-8"))
        return {
            "step": int(state["step"]),
            "skipped": int(state.get("skipped", 0)),  # none could be, up to 0.4.0
            "config": dict(state["config"]),
            "versions": state["versions"],
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"checkpoint {path}: {STATE}",
            "a run goes on from its step and config, and they cannot be read",
            "Give a checkpoint that penstock train wrote",
        ) from error


def check_fits(path: Path, model: PreTrainedModel, ties: Ties, muons: Collection[str] = ()) -> None:
    """Raise CheckpointError unless the checkpoint is one of `model`: same config, same parameters, trained by
    the same optimizers.

    model: the whole model, on the meta device; muons: names of the parameters that Muon trains. Headers are
    read and no tensor.
    """
    check_config(path, model.config)
    stored = Stored(path, ties)
    for name, parameter in model.named_parameters():
        kind, part = ("Muon", "momentum_buffer") if name in muons else ("AdamW", "exp_avg")
        found = stored.find(name)
        if parameter.requires_grad and found is None:
            raise unfit(path, f"no state of {name}", "the model trains this parameter")
        if found is not None and found[1].optimizer not in (None, kind):
            raise unfit(path, f"{name} was trained by {found[1].optimizer}", f"here it is by {kind}")
        shape = stored.shape(name, part)
        if shape is not None and shape != list(parameter.shape):
            raise unfit(path, f"{name} of shape {shape}", f"the model's is {list(parameter.shape)}")
