"""A first config for a model, data and a number of GPUs, with a word on each key: `penstock init`."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast, get_args

import yaml

from penstock.errors import ConfigError
from penstock.train.adapter import AdapterSection
from penstock.train.config.load import validated
from penstock.train.config.meanings import meanings_of
from penstock.train.config.sections import TrainConfig
from penstock.train.config.values import Section
from penstock.train.optimizers.optimizer import OPTIMIZERS

Goal = Literal["sft", "lora", "pretrain"]
GOALS: Mapping[str, str] = {
    "sft": "train all weights on chats, or on prompts with completions",
    "lora": "train an adapter on chats, in a fraction of the memory",
    "pretrain": "train all weights on text",
}
_MOST_RANKS = 8  # of a pipeline at first: one host's
_WIDTH = 110  # of a comment
_LENGTH = 2048  # tokens of a row, where the model has as many positions
_RATES: Mapping[str, float] = {"sft": 1e-5, "lora": 2e-4, "pretrain": 3e-4}


class FirstRun(NamedTuple):
    """What a first config is for.

    model: a folder or a Hub name; data: a file or a folder; gpus: how many processes train, 1 or more
    """

    model: str
    data: str
    gpus: int
    goal: Goal
    output: str = "runs/train"


def starter(run: FirstRun, name: str = "train.yaml") -> str:
    """The config as commented YAML, which `load_config` takes. name: of its file. Raises ConfigError."""
    sections = _sections(run)
    processes = f"{run.gpus} {'process' if run.gpus == 1 else 'processes'}"
    head = [
        f"# {GOALS[run.goal]}, on {processes}",
        f"#   penstock data show {name}          what the loss counts",
        f"#   penstock train {name} --dry-run    memory, stages and schedule, before anything runs",
        f"#   penstock train {name}              trains; Ctrl-C writes a checkpoint, --resume goes on",
        f"# Every other key has a default: penstock train {name} --print-config",
        "",
    ]
    return commented(head, sections)


def commented(head: Sequence[str], sections: Mapping[str, Mapping[str, Any]]) -> str:
    """A config as YAML below the lines of `head`, each key below what it means. Raises ConfigError."""
    validated(sections, "the new config")
    lines = list(head)
    for section, keys in sections.items():
        lines += [f"{section}:", *_lines(section, keys), ""]
    return "\n".join(lines).rstrip() + "\n"


def _sections(run: FirstRun) -> dict[str, dict[str, Any]]:
    """The keys that a first run needs, or that one changes first."""
    if run.goal not in get_args(Goal):
        rule = "what a run is for is sft, lora or pretrain"
        raise ConfigError(f"--goal {run.goal!r}", rule, "Take one of them")
    known = _known(run.model)
    ranks = ranks_for(run.gpus, known.get("num_hidden_layers"))
    parts = run.gpus // ranks
    chats = run.goal != "pretrain"
    positions = known.get("max_position_embeddings")
    length = min(_LENGTH, positions) if isinstance(positions, int) and positions > 1 else _LENGTH
    microbatches = 1 if ranks == 1 else 4 * ranks
    sections: dict[str, dict[str, Any]] = {
        "model": {"path": run.model},
        "data": {"path": run.data, **({"kind": "chat"} if chats else {}), "sequence_length": length},
        "pipeline": {"ranks": ranks, "schedule": "1f1b", "microbatches": microbatches},
        "train": {
            **({"epochs": 3} if chats else {"steps": 1000}),
            "batch_size": max(8, microbatches) * parts,
            "precision": "mixed",
            "checkpoint_every": 200,
        },
        "optimizer": {"learning_rate": _RATES[run.goal]},
        "output": {"folder": run.output},
    }
    if parts > 1:
        sections["parallel"] = {"dp_shard": parts}
    if run.goal == "lora":
        sections["adapter"] = {"kind": "lora", "r": 16, "targets": "all-linear"}
    return sections


def _known(model: str) -> dict[str, Any]:
    """The keys of a local folder's config.json, or of its text model; none of a Hub name."""
    path = Path(model).expanduser() / "config.json"
    try:
        keys = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(keys, dict):
        return {}
    text = keys.get("text_config")
    return {**keys, **text} if isinstance(text, dict) else keys


def ranks_for(gpus: int, layers: object) -> int:
    """The ranks of a pipeline on so many GPUs: as many as divide them, up to a host's and the layers."""
    if gpus < 1:
        raise ConfigError(f"--gpus {gpus}", "a run has at least one process", "Give 1 or more")
    most = min(_MOST_RANKS, layers) if isinstance(layers, int) and layers > 0 else _MOST_RANKS
    return max(ranks for ranks in range(1, min(gpus, most) + 1) if gpus % ranks == 0)


def _lines(section: str, keys: Mapping[str, Any]) -> list[str]:
    """The keys of a section, each below what it means."""
    unions = {"optimizer": OPTIMIZERS[keys.get("name", "adamw")].section, "adapter": AdapterSection}
    kind = unions.get(section) or cast(type[Section], TrainConfig.model_fields[section].annotation)
    meanings = meanings_of(kind)
    lines = []
    for key, value in keys.items():
        means = " ".join(meanings[key].means.split()) if key in meanings else ""
        lines += textwrap.wrap(means, _WIDTH, initial_indent="  # ", subsequent_indent="  # ")
        lines.append(f"  {yaml.safe_dump({key: value}, default_flow_style=True, width=10**6).strip()[1:-1]}")
    return lines
