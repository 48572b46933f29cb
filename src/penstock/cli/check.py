"""``penstock check``: compare a split model with the whole one on one batch of random tokens."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers import logging as transformers_logging

from penstock.batch.loss import OwnLoss
from penstock.batch.microbatches import PIXELS
from penstock.cli.shared import echo, table
from penstock.errors import ConfigError, ModelError
from penstock.models.auto_class import auto_class
from penstock.parallel.nccl import describe
from penstock.pipeline.auto_pipeline import AutoPipeline, exchange_of
from penstock.pipeline.building.build_plan import BuildPlan
from penstock.pipeline.compare import Report
from penstock.pipeline.summary import size
from penstock.runtime.device.free_memory import free_memory
from penstock.runtime.stage import evaluating
from penstock.schedule import Schedule, simulate
from penstock.train.check.before_training import Reference
from penstock.train.model import positions

SHOWN = 20  # tensors that differ, at most
_LENGTH = 32
_BEYOND = 8  # tokens more than a sliding window has
_LONGEST = 1024  # tokens, unless --length is larger
_SEED = 0  # of tokens, labels and random weights


def check(
    folder: Path,
    schedule: Schedule,
    *,
    layout: str | None,
    dtype: str,
    rows: int | None,
    length: int | None,
    tolerance: float | None,
    trusted: bool = False,
) -> bool:
    """Compare the split model with the whole one, and print the result.

    The options are those of the command; None chooses by the model and the schedule.

    trusted: whether Python code in the folder may run

    Returns: whether all is equal.
    Raises: ConfigError, and what AutoPipeline raises.
    """
    _check_options(schedule, tolerance)
    auto = AutoPipeline(
        schedule=schedule,
        layout=layout,
        dtype=getattr(torch, dtype),
        seed=_SEED,
        device="cpu",
        transport="local",
        trust_remote_code=trusted,
    )
    plan = auto.build_plan(folder)
    model = plan.source.model
    shape = batch_shape(model, schedule.microbatches, rows, length)
    refuse_too_large(auto, plan, shape, free_memory())
    pipe = auto.build(folder)
    summary = pipe.summary()  # before the step: the time of a first step means nothing
    loss = auto.loss_of(model)
    assert isinstance(loss, OwnLoss)
    whole, batch = whole_model(folder, auto, plan), random_batch(model, shape, loss)
    _refuse_what_fails_whole(whole, batch, dtype)
    report = pipe.compare(whole, batch, tolerance)
    origin = "its weights" if plan.source.files else f"random weights (seed {_SEED}): the folder has none"
    print(f"{type(model).__name__} in {dtype}, {origin}\n{summary}\n")
    if schedule.ranks > 1:
        print(f"NCCL: {describe(schedule, exchange_of(auto, plan))}")
    print(f"batch: {shape[0]} rows of {shape[1]} random tokens{_window_note(model, shape[1])}")
    _show(report)
    return report.passed


def _check_options(schedule: Schedule, tolerance: float | None) -> None:
    """Raises ConfigError."""
    if not schedule.trains:
        raise ConfigError(f"--schedule {schedule.name}", "it holds no backward", "Take one that trains: 1f1b")
    if tolerance is not None and not tolerance > 0:
        rule = "it is a difference relative to a gradient's largest entry"
        raise ConfigError(f"--tolerance {tolerance}", rule, "Give a number above 0, such as 1e-5")


def whole_model(folder: Path, auto: AutoPipeline, plan: BuildPlan) -> PreTrainedModel:
    """The folder's model as transformers loads it; with the stages' initial values if it has no weights."""
    if not plan.source.files:
        return Reference(plan.source, auto.seed, auto.loss_of(plan.source.model)).build(torch.device("cpu"))
    bar = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        loaded: PreTrainedModel = auto_class(plan.source.model.config).from_pretrained(
            folder,
            dtype=plan.source.model.dtype,
            local_files_only=True,
            trust_remote_code=auto.trust_remote_code,
        )
    finally:
        if bar:
            transformers_logging.enable_progress_bar()
    return loaded


@torch.no_grad()
def _refuse_what_fails_whole(model: PreTrainedModel, batch: dict[str, Tensor], dtype: str) -> None:
    """Raise ModelError if the whole model itself cannot run, such as experts on the CPU in float64."""
    try:
        with evaluating(model):
            model(input_ids=batch["input_ids"][:1], use_cache=False)
    except Exception as cause:
        rule = f"the whole model itself fails on the CPU: {(str(cause) or repr(cause)).splitlines()[0]}"
        remedy = "Take another --dtype, or fix its config"
        raise ModelError(f"{type(model).__name__} in {dtype}", rule, remedy) from cause


def batch_shape(
    model: PreTrainedModel, microbatches: int, rows: int | None = None, length: int | None = None
) -> tuple[int, int]:
    """Rows and tokens a row.

    The default is one row more than microbatches, so that these differ in size. Rows are longer than the
    sliding window, if that is short and the model has enough positions. Raises ConfigError.
    """
    most = positions(model.config)
    if length is None:
        beyond = _window(model) + _BEYOND
        length = min(beyond if _LENGTH < beyond <= _LONGEST else _LENGTH, most or _LONGEST)
    if most is not None and length > most:
        rule = f"the model takes {most} positions (max_position_embeddings)"
        raise ConfigError(f"--length {length}", rule, f"Give {most} or less")
    if length < 2:
        raise ConfigError(f"--length {length}", "the first token of a row predicts nothing", "Give 2 or more")
    if rows is not None and rows < microbatches:
        rule = f"each of {microbatches} microbatches needs a row"
        raise ConfigError(f"--rows {rows}", rule, f"Give {microbatches} or more, or fewer --microbatches")
    return rows or microbatches + 1, length


def _window(model: PreTrainedModel) -> int:
    """Tokens of the sliding window; 0 without one."""
    text = model.config.get_text_config()
    sizes = (getattr(text, name, None) for name in ("sliding_window", "attention_chunk_size"))
    return max((tokens for tokens in sizes if isinstance(tokens, int)), default=0)


def random_batch(model: PreTrainedModel, shape: tuple[int, int], loss: OwnLoss) -> dict[str, Tensor]:
    """Tokens, and the labels that `loss` reads."""
    generator = torch.Generator().manual_seed(_SEED)
    vocabulary = int(model.config.get_text_config().vocab_size)
    tokens = torch.randint(0, vocabulary, shape, generator=generator)
    for kind in PIXELS:  # image tokens would need images
        tokens = tokens.masked_fill(tokens == getattr(model.config, f"{kind}_token_id", -1), 0)
    return {"input_ids": tokens, "labels": loss.labels_for(tokens, generator)}


def needed_bytes(auto: AutoPipeline, plan: BuildPlan, shape: tuple[int, int]) -> tuple[int, int | None]:
    """Bytes of both models' weights and gradients, and of activations (None if only a run can show them).

    The whole model runs one microbatch at a time.
    """
    whole = sum(parameter.nbytes for parameter in plan.source.model.parameters())
    split = sum(stage.parameter_bytes for stage in plan.stages)
    largest = max(parameter.nbytes for parameter in plan.source.model.parameters())
    fixed = 2 * (whole + split + largest)  # the largest one once more, for the copies that are compared
    costs = auto.memory_costs(plan, (-(-shape[0] // plan.schedule.microbatches), shape[1]))
    if costs is None:
        return fixed, None
    assert isinstance(costs.activation, list)
    live = sum(simulate(plan.schedule, costs).peak_memory)
    return fixed, int(live + sum(costs.activation))


def refuse_too_large(auto: AutoPipeline, plan: BuildPlan, shape: tuple[int, int], free: int | None) -> None:
    """Raise ModelError if both models together take more than the `free` bytes."""
    if free is None:
        return
    fixed, activations = needed_bytes(auto, plan, shape)
    if fixed + (activations or 0) <= free:
        return
    more = "activations" if activations is None else f"{size(activations)} for activations"
    raise ModelError(
        f"{type(plan.source.model).__name__} of {size(fixed / 4)} or so",
        f"the whole and the split model take {size(fixed)} for weights and gradients, and {more}, and "
        f"{size(free)} of memory are free",
        "Check a copy of its config.json with fewer layers, take --dtype bfloat16, or a larger machine",
    )


def _window_note(model: PreTrainedModel, length: int) -> str:
    window = _window(model)
    if window == 0:
        return ""
    if length > window:
        return f", longer than the sliding window of {window}"
    beyond = f"which --length {window + _BEYOND} would"
    return f"; they do not reach beyond the sliding window of {window}, {beyond}"


def _show(report: Report) -> None:
    if report.losses is not None:
        print(f"loss: {report.losses[0]:.8g} split, {report.losses[1]:.8g} whole")
    if report.note:
        print(f"note: {report.note}")
    if report.passed:
        _show_passed(report)
    else:
        _show_wrong(report)


def _show_passed(report: Report) -> None:
    worst = report.tensors[0]
    largest = "none, all are equal bit for bit"
    if worst.excess:
        share = f"{report.largest:.1e} of the gradient's largest entry (tolerance {report.tolerance:.0e})"
        largest = f"{share}, in {worst.name} on stage {worst.stage}"
    print(f"gradients: {len(report.tensors)} compared, each entry with the whole model's")
    print(f"largest difference: {largest}")
    print("pass")


def _show_wrong(report: Report) -> None:
    if report.loss_differs:
        print("the loss differs")
    wrong = report.wrong
    if wrong:
        kinds = "weights, before any step" if wrong[0].kind == "weight" else "gradients"
        heads = ("tensor", "stage", "rank", "difference", report.measure, "tolerance")
        rows = []
        for tensor in wrong[:SHOWN]:
            numbers = (f"{tensor.difference:.3g}", f"{tensor.size:.3g}", f"{tensor.tolerance:.3g}")
            cells = (tensor.remark, "", "") if tensor.remark else numbers
            rows.append((tensor.name, tensor.stage, tensor.rank, *cells))
        echo(f"{kinds} that differ, the worst first", table(heads, rows, left=["tensor"]))
    if len(wrong) > SHOWN:
        print(f"and {len(wrong) - SHOWN} more")
    equal = f", {len(report.tensors) - len(wrong)} are equal" if report.losses is not None else ""
    print(f"fail: {len(wrong)} tensors differ{equal}")
