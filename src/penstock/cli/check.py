"""``penstock check``: a model folder split, beside the whole model, on one batch of random tokens."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers import logging as transformers_logging

from penstock.batch.loss import IGNORED
from penstock.cli.shared import Choice
from penstock.errors import ConfigError, ModelError
from penstock.models.weights import files as weights
from penstock.models.weights import initial
from penstock.pipeline.auto_pipeline import AutoPipeline
from penstock.pipeline.build_plan import BuildPlan
from penstock.pipeline.compare import Report, compare
from penstock.pipeline.summary import size
from penstock.runtime.stage import evaluating
from penstock.schedule import simulate
from penstock.train.check.split_beside_whole import free_memory

SHOWN = 20  # tensors that differ, at most
_LENGTH = 32
_BEYOND = 8  # tokens more than a sliding window has
_LONGEST = 1024  # that is taken unasked
_SEED = 0  # of tokens, labels, and random weights


@dataclass(frozen=True)
class Asked:
    """What the command line says. None: what fits the model and the schedule."""

    folder: Path
    choice: Choice
    layout: str | None
    dtype: str
    rows: int | None
    length: int | None
    tolerance: float | None


def check(asked: Asked) -> bool:
    """Compare and print; whether all is equal. Raises what AutoPipeline raises, and ConfigError."""
    schedule = asked.choice.schedule()
    if not schedule.trains:
        raise ConfigError(f"--schedule {schedule.name}", "it holds no backward", "Take one that trains: 1f1b")
    if asked.tolerance is not None and not asked.tolerance > 0:
        rule = "it is a difference relative to a gradient's largest entry"
        raise ConfigError(f"--tolerance {asked.tolerance}", rule, "Give a number above 0, such as 1e-5")
    auto = AutoPipeline(
        schedule=schedule,
        layout=asked.layout,
        dtype=getattr(torch, asked.dtype),
        seed=_SEED,
        device="cpu",
        transport="local",
    )
    outline = auto.outline(asked.folder)
    model = outline.source.model
    shape = batch_shape(model, schedule.microbatches, asked.rows, asked.length)
    refuse_too_large(auto, outline, shape, free_memory())
    pipe = auto.build(asked.folder)
    summary = pipe.summary()  # before the step, whose time says nothing: it is the first one
    whole, batch = whole_model(asked, outline), random_batch(model, shape)
    _refuse_what_fails_whole(whole, batch, asked.dtype)
    report = compare(pipe, whole, batch, auto.loss(), asked.tolerance)
    _show(asked, outline, summary, report, shape)
    return report.passed


def whole_model(asked: Asked, outline: BuildPlan) -> PreTrainedModel:
    """As transformers itself loads it; without weights in the folder, with those that the stages have."""
    source = outline.source
    if not source.files:
        model = copy.deepcopy(source.model)
        initial.initialise(model, source.model, weights.tied_names(source.model), _SEED)
        return model
    with _without_bar():
        loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            asked.folder, dtype=source.model.dtype, local_files_only=True
        )
    return loaded


@contextmanager
def _without_bar() -> Iterator[None]:
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


@torch.no_grad()
def _refuse_what_fails_whole(model: PreTrainedModel, batch: dict[str, Tensor], dtype: str) -> None:
    """Raise ModelError where the model by itself cannot do it: experts on the CPU in float64, say."""
    try:
        with evaluating(model):
            model(input_ids=batch["input_ids"][:1], use_cache=False)
    except Exception as cause:
        raise ModelError(
            f"{type(model).__name__} in {dtype}",
            f"the whole model itself fails on the CPU: {(str(cause) or repr(cause)).splitlines()[0]}",
            "Take another --dtype, or mend its config",
        ) from cause


def batch_shape(
    model: PreTrainedModel, microbatches: int, rows: int | None = None, length: int | None = None
) -> tuple[int, int]:
    """Rows and length: unless given, one row more than microbatches, so that these are not all alike, and
    longer than a sliding window where that is short and the model takes so many. Raises ConfigError.
    """
    text = model.config.get_text_config()
    most = getattr(text, "max_position_embeddings", None)
    if length is None:
        beyond = _window(model) + _BEYOND
        length = min(beyond if _LENGTH < beyond <= _LONGEST else _LENGTH, most or _LONGEST)
    if most is not None and length > most:
        rule = f"the model takes {most} positions (max_position_embeddings)"
        raise ConfigError(f"--length {length}", rule, f"Give {most} or less")
    if length < 2:
        raise ConfigError(f"--length {length}", "the first token of a row predicts nothing", "Give 2 or more")
    if rows is not None and rows < microbatches:
        raise ConfigError(
            f"--rows {rows}",
            f"each of {microbatches} microbatches has a row at least",
            f"Give {microbatches} or more, or fewer --microbatches",
        )
    return rows or microbatches + 1, length


def _window(model: PreTrainedModel) -> int:
    """The sliding window's length; 0 where there is none."""
    text = model.config.get_text_config()
    sizes = (getattr(text, name, None) for name in ("sliding_window", "attention_chunk_size"))
    return max((each for each in sizes if isinstance(each, int)), default=0)


def random_batch(model: PreTrainedModel, shape: tuple[int, int]) -> dict[str, Tensor]:
    """Tokens, and labels of which a fifth are left out, and half of the first row besides."""
    generator = torch.Generator().manual_seed(_SEED)
    vocabulary = int(model.config.get_text_config().vocab_size)
    tokens = torch.randint(0, vocabulary, shape, generator=generator)
    left_out = torch.rand(shape, generator=generator) < 0.2
    left_out[0, : shape[1] // 2] = True
    left_out[:, -1] = False  # or a short row might have none
    return {"input_ids": tokens, "labels": tokens.masked_fill(left_out, IGNORED)}


def needed_bytes(auto: AutoPipeline, outline: BuildPlan, shape: tuple[int, int]) -> tuple[int, int | None]:
    """Of both models' weights and gradients, and of activations; the latter None where only a run can tell.

    The whole model runs one microbatch at a time.
    """
    whole = sum(parameter.nbytes for parameter in outline.source.model.parameters())
    split = sum(stage.parameter_bytes for stage in outline.stages)
    largest = max(parameter.nbytes for parameter in outline.source.model.parameters())
    fixed = 2 * (whole + split + largest)  # the largest: it is compared in copies
    microbatch = -(-shape[0] // outline.schedule.microbatches), shape[1]
    with _silent("torch._subclasses.fake_tensor"):  # which tells at length of what has no estimate
        costs = auto.memory_costs(outline, microbatch)
    if costs is None:
        return fixed, None
    assert isinstance(costs.activation, list)
    held = sum(simulate(outline.schedule, costs).peak_memory)
    return fixed, int(held + sum(costs.activation))


@contextmanager
def _silent(name: str) -> Iterator[None]:
    logger = logging.getLogger(name)
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def refuse_too_large(
    auto: AutoPipeline, outline: BuildPlan, shape: tuple[int, int], free: int | None
) -> None:
    """Raise ModelError where both models together take more than is free."""
    if free is None:
        return
    fixed, activations = needed_bytes(auto, outline, shape)
    if fixed + (activations or 0) <= free:
        return
    more = "activations besides" if activations is None else f"{size(activations)} for activations"
    raise ModelError(
        f"{type(outline.source.model).__name__} of {size(fixed / 4)} or so",
        f"whole and split it takes {size(fixed)} for weights and gradients, and {more}, and {size(free)} of "
        "memory are free",
        "Check a copy of its config.json with fewer layers, take --dtype bfloat16, or a larger machine",
    )


def _show(asked: Asked, outline: BuildPlan, summary: str, report: Report, shape: tuple[int, int]) -> None:
    kind = type(outline.source.model).__name__
    origin = "its weights" if outline.source.files else f"random weights (seed {_SEED}): the folder has none"
    print(f"{kind} in {asked.dtype}, {origin}")
    print(summary, end="\n\n")
    print(f"batch: {shape[0]} rows of {shape[1]} random tokens{_note(outline.source.model, shape[1])}")
    if report.losses is not None:
        print(f"loss: {report.losses[0]:.8g} split, {report.losses[1]:.8g} whole")
    if report.passed:
        print(f"gradients: {len(report.tensors)} compared, each entry with the whole model's")
        print(f"largest difference: {_largest(report)}")
        print("pass")
        return
    _show_wrong(report)


def _largest(report: Report) -> str:
    worst = report.tensors[0]
    if worst.excess == 0:
        return "none, all are equal bit for bit"
    share = f"{report.largest:.1e} of the gradient's largest entry (tolerance {report.tolerance:.0e})"
    return f"{share}, in {worst.name} on stage {worst.stage}"


def _note(model: PreTrainedModel, length: int) -> str:
    window = _window(model)
    if length > window:
        return "" if window == 0 else f", longer than the sliding window of {window}"
    return (
        f"; they do not reach beyond the sliding window of {window}, which --length {window + _BEYOND} would"
    )


def _show_wrong(report: Report) -> None:
    console = Console(highlight=False, width=None if Console().is_terminal else 160)
    if report.loss_differs:
        console.print("the loss differs")
    wrong = report.wrong
    if wrong:
        kinds = "weights, before any step" if wrong[0].kind == "weight" else "gradients"
        table = Table(title=f"{kinds} that differ, the worst first", title_justify="left")
        for name in ("tensor", "stage", "rank", "difference", report.measure, "tolerance"):
            table.add_column(name, justify="left" if name == "tensor" else "right", overflow="fold")
        for each in wrong[:SHOWN]:
            told = (f"{each.difference:.3g}", f"{each.size:.3g}", f"{each.tolerance:.3g}")
            if each.remark:
                told = (each.remark, "", "")
            table.add_row(each.name, str(each.stage), str(each.rank), *told)
        console.print(table)
    if len(wrong) > SHOWN:
        console.print(f"and {len(wrong) - SHOWN} more")
    rest = len(report.tensors) - len(wrong)
    equal = f", {rest} are equal" if report.losses is not None else ""
    console.print(f"fail: {len(wrong)} tensors differ{equal}")
