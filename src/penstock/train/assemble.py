"""The one file where a run's parts are wired together.

`preflight` finds everything that can be refused without a weight; it runs in the command before any rank is
started, and again in each rank. `run` then builds the pipeline and trains.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from penstock.auto import AutoPipeline, Outline
from penstock.commit import check_folder
from penstock.errors import CheckpointError, ConfigError, WorldSizeError
from penstock.launch import under_torchrun
from penstock.models.source import ModelLike
from penstock.models.weights import tied_names
from penstock.train.checkpoint import check_fits, load_checkpoint, newest, read_state
from penstock.train.config import TrainConfig
from penstock.train.data import Rows, load_rows
from penstock.train.display import make_display
from penstock.train.loop import Run, train
from penstock.train.metrics import Metrics
from penstock.train.model import named_model
from penstock.train.optim import make_optimizer
from penstock.train.outcome import tell
from penstock.train.tokenizer import Tokenizer, open_tokenizer

NEWEST = "newest"  # in place of a checkpoint's path


@dataclass(frozen=True)
class Prepared:
    """A run that nothing is known against. notes: lines to show before it starts."""

    config: TrainConfig
    auto: AutoPipeline
    model: ModelLike
    outline: Outline
    tokenizer: Tokenizer
    rows: Rows
    checkpoint: Path | None = None
    done: int = 0
    notes: tuple[str, ...] = ()


def preflight(config: TrainConfig, resume: str | None = None) -> Prepared:
    """Everything that `run` needs and that takes no weight and no other process.

    resume: a checkpoint's path, NEWEST for the newest whole one of the output folder, None for a fresh start.
    Raises ConfigError, WorldSizeError, ModelError, PartitionError, CheckpointError, DataError.
    """
    _check_world(config.pipeline.ranks)
    _check_output(Path(config.output.folder).expanduser())
    model, auto = named_model(config.model), make_auto(config)
    outline = auto.outline(model)
    if not outline.schedule.trains:
        raise ConfigError(
            f"pipeline.schedule={outline.schedule.name}", "it holds no backward", "Take one that trains: 1f1b"
        )
    vocabulary = _check_model(config, outline)
    checkpoint, done, notes = _find_checkpoint(config, outline, resume)
    tokenizer = open_tokenizer(config.data.tokenizer or str(config.model.path))
    rows = load_rows(config, tokenizer, vocabulary)
    return Prepared(config, auto, model, outline, tokenizer, rows, checkpoint, done, notes)


def run(prepared: Prepared) -> None:
    """Train. Collective: every rank calls it with what its own preflight found."""
    config = prepared.config
    pipe = prepared.auto.build(prepared.model)
    first = pipe.processes.index == 0
    optimizer = make_optimizer(config.optimizer, pipe.parameters())
    if prepared.checkpoint is not None:
        ties = tied_names(prepared.outline.source.model)
        load_checkpoint(prepared.checkpoint, pipe, optimizer, ties)
    output = Path(config.output.folder).expanduser()
    output.mkdir(parents=True, exist_ok=True)
    metrics = Metrics(output / "metrics.jsonl", prepared.done or None) if first else None
    display = make_display(pipe.processes.index, config.train.steps, prepared.done, config.train.log_every)
    with display:
        for note in prepared.notes:
            display.say(note)
        outcome = train(
            Run(config, pipe, prepared.rows, optimizer, prepared.tokenizer, display, metrics, prepared.done)
        )
    if metrics:
        tell(outcome, pipe.schedule, config, output)
    pipe.processes.gather(None)  # nobody leaves while process 0 still writes
    if dist.is_initialized():
        dist.destroy_process_group()


def make_auto(config: TrainConfig) -> AutoPipeline:
    """The pipeline's settings, as the library takes them."""
    pipeline, model, section = config.pipeline, config.model, config.train
    if section.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("train.device=cuda", "torch sees no GPU here", "Set train.device=cpu or auto")
    return AutoPipeline(
        ranks=pipeline.ranks,
        schedule=pipeline.schedule,
        microbatches=pipeline.microbatches,
        embedding_weight=pipeline.embedding_weight,
        head_weight=pipeline.head_weight,
        layout=pipeline.layout,
        layers_per_stage=pipeline.layers_per_stage,
        first_stage_layers=pipeline.first_stage_layers,
        last_stage_layers=pipeline.last_stage_layers,
        modules_per_stage=pipeline.modules_per_stage,
        seed=model.seed,
        dtype=getattr(torch, model.dtype),
        attention=model.attention,
        device="cpu" if section.device == "cpu" else None,
        timeout=pipeline.timeout_seconds,
        activation_checkpointing=section.activation_checkpointing,
    )


def _check_world(ranks: int) -> None:
    if under_torchrun() and (world := int(os.environ["WORLD_SIZE"])) != ranks:
        raise WorldSizeError(
            f"pipeline.ranks={ranks}",
            f"each rank is one process and torchrun started {world}",
            f"Start it with {ranks} processes, or set pipeline.ranks={world}",
        )


def _check_output(output: Path) -> None:
    """Found now, and not when the first checkpoint is due."""
    standing = next(folder for folder in (output, *output.absolute().parents) if folder.exists())
    if not standing.is_dir() or not os.access(standing, os.W_OK | os.X_OK):
        rule = "nothing can be written there" if standing.is_dir() else f"{standing} is no folder"
        raise ConfigError(f"output.folder={output}", rule, "Name a folder that you may write")


def _check_model(config: TrainConfig, outline: Outline) -> int:
    """The model's vocabulary; raises ConfigError where a row has more positions than the model."""
    text = outline.source.model.config.get_text_config()
    longest = getattr(text, "max_position_embeddings", None)
    if longest is not None and config.data.sequence_length > longest:
        raise ConfigError(
            f"data.sequence_length={config.data.sequence_length}",
            f"the model takes {longest} positions (max_position_embeddings)",
            f"Give {longest} or less, or a model with more",
        )
    return int(text.vocab_size)


def _find_checkpoint(
    config: TrainConfig, outline: Outline, resume: str | None
) -> tuple[Path | None, int, tuple[str, ...]]:
    """Path, its step and lines to show; the path is None for a fresh start."""
    if resume is None:
        return None, 0, ()
    notes: tuple[str, ...] = ()
    if resume == NEWEST:
        output = Path(config.output.folder).expanduser()
        found = newest(output)
        notes = tuple(f"penstock: warning: passed over {torn}" for torn in found.torn)
        if found.path is None:
            passed = "".join(f"\n  passed over {torn}" for torn in found.torn)
            raise CheckpointError(
                f"--resume with output.folder={output}",
                f"it holds no whole checkpoint{passed}",
                "Start without --resume, or give the path of a checkpoint",
            )
        path = found.path
    else:
        path = Path(resume).expanduser()
        check_folder(path)
    state = read_state(path)
    check_fits(path, outline.source.model, tied_names(outline.source.model))
    if state["step"] >= config.train.steps:
        raise ConfigError(
            f"train.steps={config.train.steps}",
            f"the checkpoint {path} is of step {state['step']}, so nothing is left to do",
            f"Set train.steps above {state['step']}, or start without --resume",
        )
    changed = _changes(state["config"], config.model_dump(mode="json"))
    notes += (f"going on from {path}", *(f"changed since then: {change}" for change in changed))
    return path, state["step"], notes


def _changes(before: object, now: object, name: str = "") -> list[str]:
    """Keys whose values differ, with both."""
    if isinstance(before, dict) and isinstance(now, dict):
        keys = [*now, *(key for key in before if key not in now)]
        parts = (_changes(before.get(key), now.get(key), f"{name}.{key}".lstrip(".")) for key in keys)
        return [change for part in parts for change in part]
    return [] if before == now else [f"{name}={now} (was {before})"]
