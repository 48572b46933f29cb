"""Before the first step: compare the split model with the reference model, the same model in one process.

1. Every rank cuts the batch to one row a microbatch and at most 64 tokens, and steps the pipeline on it. On a
   mesh every pipeline has the same rows, so that the mean over them is that of one pipeline.
2. Every rank takes a digest of each weight and gradient (digests.py).
3. Process 0 builds the reference model, runs the same microbatches through it and compares loss and digests.
4. If ranks sum in another order (cp, ep, tp), process 0 measures how far rounding alone moves the gradients,
   and how many router choices it may flip (rounding.py).
5. Every rank raises the same DifferenceError, or process 0 shows one line.

Only digests are kept, so only process 0 holds more than its stages. Weights, gradients and random state are
the same after the check.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import isfinite
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from penstock.batch.loss import Loss, counted_rows, rows_per_group
from penstock.batch.microbatches import PIXELS
from penstock.batch.packing import boundaries
from penstock.batch.row_loss import REFERENCE
from penstock.batch.shapes import Microbatch
from penstock.errors import ConfigError
from penstock.models.adapters import names_in_file
from penstock.models.source import Source
from penstock.models.weights.files import tied_names
from penstock.models.weights.reading import ran_out_of_memory
from penstock.models.weights.saved_adapter import load_adapter
from penstock.parallel.axes import Axes
from penstock.pipeline.compare import (
    TOLERANCE,
    Compared,
    ParameterPlace,
    Report,
    not_own,
    placed_parameters,
    whole_backward,
)
from penstock.pipeline.pipeline import Pipeline
from penstock.pipeline.steps.split_batch import BatchLike
from penstock.pipeline.summary import size
from penstock.runtime.device.free_memory import free_on
from penstock.runtime.stage import evaluating, without_gradients
from penstock.train.check.digests import Digests, compare_digests, digest, digests_of, distance
from penstock.train.check.rounding import Scores, explained_by_flips, near_ties, nudge

TOKENS = 64  # of each row
SHARE = 0.5  # of the free memory that the reference model may take
LARGEST = 32 * 2**30  # bytes; a larger model takes minutes to load, while all other ranks wait
_NUDGES = 2  # in a single one, a bias with few entries may hardly move
_NARROW_ROUNDS = 4.0  # how often a narrower dtype may round, in units of its tolerance
_REMEDY = "Do not train; report it as a bug (see penstock check). train.check=off trains all the same"


@dataclass(frozen=True)
class Reference:
    """How process 0 builds the reference model, and how close the split model must be to it.

    Attributes:
        source: the model on the meta device, and the files with its values, if any
        seed: of initial values
        loss: the run's loss
        dtypes: in which the split model sends, gathers and reduces; None for the model's dtype
        axes: the mesh's axes other than the pipeline's, without -1
        trained: the folder of the adapter's values; None to initialise them
        autocast: the dtype of torch.autocast in forwards; None for none
        beside: the entries that the loss reads here, and in the pipeline not, of each microbatch. Collective
    """

    source: Source
    seed: int
    loss: Loss
    dtypes: tuple[torch.dtype | None, ...] = ()
    axes: Axes = field(default_factory=Axes)
    trained: Path | None = None
    autocast: torch.dtype | None = None
    beside: Callable[[Sequence[Microbatch]], Sequence[Microbatch]] | None = None

    def build(self, device: torch.device) -> PreTrainedModel:
        """The model with its values. It does not use the code that splits a model, which the check tests."""
        whole, adapter = self.source.model, self.source.adapter
        model: PreTrainedModel = copy.deepcopy(whole)
        self.source.fill(model, self.seed)
        if adapter is not None and self.trained is not None:
            names = names_in_file(whole, adapter)
            load_adapter(model, self.trained, names, tied_names(whole))
        model.to(device)
        return model

    @property
    def bytes(self) -> int:
        """Bytes of its weights and their gradients."""
        total: int = sum(p.numel() * p.itemsize for p in self.source.model.parameters())
        return 2 * total

    @property
    def reorders(self) -> bool:
        """Whether the split model sums in another order."""
        return (self.axes.cp, self.axes.ep, self.axes.tp) != (1, 1, 1)

    @property
    def tokens(self) -> int:
        """The most tokens of a row, a number that the ranks of cp and tp divide evenly."""
        shared = 2 * self.axes.cp * self.axes.tp
        return max(TOKENS // shared, 1) * shared

    @property
    def tolerance(self) -> float:
        """Relative to a gradient's norm."""
        dtype = self.source.model.dtype
        eps = torch.finfo(dtype).eps
        # under autocast the same products round alike, unless their sums are in another order
        dtypes = (*self.dtypes, self.autocast if self.reorders else None)
        narrower = [other for other in dtypes if other and torch.finfo(other).eps > eps]
        return max([TOLERANCE.get(dtype, 1e-5), *(_NARROW_ROUNDS * TOLERANCE[other] for other in narrower)])


def check_split(
    pipe: Pipeline,
    reference: Reference,
    batch: BatchLike,
    mode: Literal["auto", "always"],
    free: Callable[[torch.device], int | None] = free_on,
) -> str:
    """Compare loss, weights and gradients of `pipe` with the reference model's. Collective.

    Args:
        batch: the same on every rank
        mode: with "auto" the check is skipped if memory is short
        free: free bytes of a device; None if unknown

    Returns: a line on the check, or on why it was skipped.
    Raises: DifferenceError if they differ; ConfigError if mode is "always" and the check is impossible.
    """
    began = time.perf_counter()
    group, of_rows = rows_per_group(reference.loss), getattr(reference.loss, "of_rows", ())
    short = shorten(batch, pipe.schedule.microbatches, reference.tokens, group, of_rows)
    microbatches = pipe.microbatches(short)
    device = microbatches[0]["input_ids"].device
    if reason := _from_first(pipe, _out_of_memory(reference, free(device), mode)):
        return skipped(reason, mode)
    if not _counts(reference.loss, short):
        return skipped(
            f"the first {reference.tokens} tokens of its rows hold none that the loss counts", "auto"
        )
    if reference.beside is not None:
        more = reference.beside(short)
        microbatches = [{**one, **other} for one, other in zip(microbatches, more, strict=True)]
    result = _from_first(pipe, _compared(pipe, reference, short, microbatches))
    if isinstance(result, str):
        return skipped(result, mode)
    report, near = _report(result["report"]), result["near"]
    if report.losses and not isfinite(report.losses[1]):  # the first step raises an error with a remedy
        return skipped(f"its own loss is {report.losses[1]}", "auto")
    if not report.passed and explained_by_flips(report, near, result["tokens"]):
        return skipped(
            f"rounding by {reference.axes} may flip {near} router choices, nearly tied on this batch; the "
            f"split model differs by more than rounding: {report.problems()[0]}",
            mode,
        )
    report.raise_if_wrong(_REMEDY)
    return f"checked in {time.perf_counter() - began:.1f} s: {_passed(report)}"


def _counts(loss: Loss, microbatches: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the loss counts a row; of rows that stay together, each one."""
    counted = [counted_rows(loss, part) for part in microbatches]
    return all(map(all, counted)) if rows_per_group(loss) > 1 else any(map(any, counted))


def _compared(
    pipe: Pipeline, reference: Reference, batch: list[dict[str, Any]], microbatches: Sequence[Microbatch]
) -> str | dict[str, Any] | None:
    """On process 0 what `compare_with_reference` returns, else None. Collective."""
    # both sides run eagerly: compiled code rounds in another order, and the check is for the split alone
    with torch.random.fork_rng(devices=[]), torch.compiler.set_stance("force_eager"):
        with without_gradients(pipe.parameters()):
            with evaluating(*pipe.modules.values()):
                loss = pipe.step(batch).loss
            digests = [(where, digests_of(where[0], p)) for where, p in placed_parameters(pipe)]
        everyone = pipe.processes.gather(digests)
        if pipe.processes.index != 0 or not pipe.reductions.is_first:
            return None
        split = [(tuple(where), Digests(*pair)) for process in everyone for where, pair in process]
        device = microbatches[0]["input_ids"].device
        return compare_with_reference(reference, device, microbatches, loss, split)


def _from_first(pipe: Pipeline, value: Any) -> Any:
    """The value (JSON must hold it) of process 0 of the mesh's first pipeline, on every rank. Collective."""
    values = pipe.ranks.gather([value] if pipe.processes.index == 0 and pipe.files.written_here else None)
    return next(filter(None, values))[0]


def skipped(reason: str, mode: str) -> str:
    """A line that says why the check was skipped. Raises ConfigError with train.check=always."""
    if mode == "always":
        remedy = "Set train.check=auto, or off" + (", or free memory" if "memory" in reason else "")
        raise ConfigError("train.check=always", reason, remedy)
    return f"not checked against the whole model: {reason}"


def _out_of_memory(reference: Reference, free: int | None, mode: str) -> str:
    """Why the reference model is not built; empty if it is."""
    need = f"the whole model and its gradients take {size(reference.bytes)}"
    if free is not None and reference.bytes > SHARE * free:
        return f"{need}, more than half of the {size(free)} that are free to process 0"
    if mode == "auto" and reference.bytes > LARGEST:
        return f"{need}, and more than {size(LARGEST)} would delay the start"
    return ""


def shorten(
    batch: BatchLike,
    count: int,
    length: int = TOKENS,
    group: int = 1,
    of_rows: Collection[str] = (REFERENCE,),
) -> list[dict[str, Any]]:
    """`count` microbatches of one row each: the first rows of `batch`, at most `length` tokens long.

    group: rows that stay together, which each has in place of one
    of_rows: names of entries that have something for each row, and not for each token

    Microbatches with images stay whole: some of their entries have images, or patches of them, and no rows.
    """
    if isinstance(batch, Mapping):
        starts = range(0, count * group, group)
        rows = [{name: value[at : at + group] for name, value in batch.items()} for at in starts]
        return [_cut(row, length, of_rows) for row in rows]
    return [
        dict(one) if _has_images(one) else _cut(_first_rows(one, group, of_rows), length, of_rows)
        for one in batch
    ]


def _first_rows(microbatch: Mapping[str, Any], count: int, of_rows: Collection[str]) -> dict[str, Any]:
    by_row = {name for name, value in microbatch.items() if _has_rows(value)} | {*of_rows}
    return {name: value[:count] if name in by_row else value for name, value in microbatch.items()}


def _has_images(microbatch: Mapping[str, Any]) -> bool:
    return any(name in microbatch for names in PIXELS.values() for name in names)


def _has_rows(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 1


def _cut(row: Mapping[str, Any], length: int, of_rows: Collection[str]) -> dict[str, Any]:
    short = {name: value[:, :length] for name, value in row.items() if _has_rows(value)}
    short |= {name: value for name, value in row.items() if name in of_rows or isinstance(value, float)}
    if "cu_seq_lens_q" in row:  # the bounds of the documents that remain
        length = short["input_ids"].shape[1]
        ends = row["cu_seq_lens_q"]
        short |= boundaries(torch.cat([ends[ends < length], ends.new_tensor([length])]))
    return short


def compare_with_reference(
    reference: Reference,
    device: torch.device,
    microbatches: Sequence[Microbatch],
    split_loss: float,
    split: Sequence[tuple[ParameterPlace, Digests]],
) -> str | dict[str, Any]:
    """On process 0: a Report for JSON, and the numbers of near ties and of tokens; or why there is none."""
    reference_run = None
    try:
        reference_run = _run_reference(reference, device, microbatches)
    except (MemoryError, RuntimeError) as error:
        if not ran_out_of_memory(error):
            raise
    if device.type == "cuda":
        torch.cuda.empty_cache()  # here, as nothing refers to the model any more
    if reference_run is None:
        return "memory ran out"
    loss, expected, rounding, near = reference_run
    dtype = reference.source.model.dtype
    report = compare_digests((split_loss, loss), split, expected, reference.tolerance, dtype, rounding)
    report = replace(report, note=not_own(reference.loss, microbatches))
    tokens = sum(microbatch["input_ids"].numel() for microbatch in microbatches)
    return {"report": asdict(report), "near": near, "tokens": tokens}


def _run_reference(
    reference: Reference, device: torch.device, microbatches: Sequence[Microbatch]
) -> tuple[float, dict[str, Digests], dict[str, float], int]:
    """Loss, digests, how far rounding moves each gradient, and near ties of routers."""
    rounding, near = dict[str, float](), 0
    model = reference.build(device)
    with evaluating(model), Scores() as scores:
        loss = whole_backward(model, microbatches, reference.loss, autocast=reference.autocast)
    named = list(model.named_parameters(remove_duplicate=False))
    expected = {name: digests_of(name, parameter) for name, parameter in named}
    for turn in range(_NUDGES if reference.reorders else 0):
        nudge(model, turn)
        model.zero_grad()
        with evaluating(model), Scores() as nudged:
            whole_backward(model, microbatches, reference.loss, autocast=reference.autocast)
        near = max(near, near_ties(scores, nudged))
        for name, parameter in named:
            before = expected[name].gradient
            if before is not None and parameter.grad is not None:
                moved = distance(before, digest(name, parameter.grad))
                rounding[name] = max(rounding.get(name, 0.0), moved)
    return loss, expected, rounding, near


def _report(fields: dict[str, Any]) -> Report:
    losses, tensors = fields["losses"], tuple(Compared(**tensor) for tensor in fields["tensors"])
    return Report(**{**fields, "losses": None if losses is None else tuple(losses), "tensors": tensors})


def _passed(report: Report) -> str:
    gradients = [tensor for tensor in report.tensors if tensor.kind == "gradient"]
    shares = [gradient.difference / gradient.size for gradient in gradients if gradient.size]
    close = max((share for share in shares if share <= report.tolerance), default=0.0)
    largest = f"{close:.1e} of a gradient's norm" if close else "none"
    wider = [share for share in shares if share > report.tolerance]
    rest = f"; {len(wider)} by up to {max(wider):.1e}, no more than rounding" if wider else ""
    rest += f"; {report.note}" if report.note else ""
    return (
        f"the split model's loss and {len(gradients)} gradients equal the whole one's (largest difference: "
        f"{largest}; tolerance {report.tolerance:.0e}{rest})"
    )
