"""Before the first step: the split model beside the whole one, on a short batch, without sending a gradient.

Every rank steps on one row a microbatch, cut short. Process 0 runs the same through the whole model, which it
makes from where the stages have their values. What of each weight and gradient is compared is its digest
(penstock.train.digests). On a mesh every pipeline steps on the same rows, whose mean is that of one, and what
the first one holds, gathered from all, is compared.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from penstock.equivalence import (
    TOLERANCE,
    Compared,
    Place,
    Report,
    allowed,
    only_one,
    placed_parameters,
    whole_backward,
)
from penstock.errors import ConfigError
from penstock.free_memory import free_memory
from penstock.models import initial, weights
from penstock.models.source import Source
from penstock.pipeline import Pipeline
from penstock.runtime.loss import IGNORED, Loss
from penstock.runtime.packed import boundaries
from penstock.runtime.shapes import Microbatch
from penstock.runtime.stage import evaluating
from penstock.steps import Given
from penstock.summary import size
from penstock.train.digests import Digest, Digests, digests_of, received

TOKENS = 64  # of each row, at most
SHARE = 0.5  # of the free memory that the whole model may take
LARGEST = 32 * 2**30  # bytes; more takes minutes to read or to make, in which all other ranks would wait
_DIGITS = 1e-9  # equal weights have equal digests but for the order of their sums
_ROUNDS = 4.0  # how often what is narrower than the model may round, in units of that dtype's tolerance

_REMEDY = (
    "Do not train: it is a fault to be reported (see penstock check); train.check=off trains all the same"
)


@dataclass(frozen=True)
class Whole:
    """How process 0 makes the whole model, and how far the split one may be from it.

    source: the model on the meta device, and the files with its values, if any; seed: of initial values
    narrow: the narrowest that the split one rounds to beside its own dtype: activations on their way, spread
        weights and their gradients; None where it does not
    """

    source: Source
    seed: int
    loss: Loss
    narrow: torch.dtype | None = None

    def make(self, device: torch.device) -> PreTrainedModel:
        """By itself, and not by cutting: the cuts are what is to be checked."""
        model: PreTrainedModel = copy.deepcopy(self.source.model)
        ties = weights.tied_names(self.source.model)
        if self.source.files:
            weights.load(model, self.source.files, ties)
        initial.initialise(model, self.source.model, ties, self.seed)
        model.to(device)
        return model

    @property
    def bytes(self) -> int:
        """Of its weights and as many of their gradients."""
        total: int = sum(p.numel() * p.itemsize for p in self.source.model.parameters())
        return 2 * total

    @property
    def tolerance(self) -> float:
        """Relative to a gradient's norm."""
        own = TOLERANCE.get(self.source.model.dtype, 1e-5)
        if self.narrow is None or torch.finfo(self.narrow).eps <= torch.finfo(self.source.model.dtype).eps:
            return own
        return max(own, _ROUNDS * TOLERANCE[self.narrow])


def narrowest(dtypes: Iterable[torch.dtype | None]) -> torch.dtype | None:
    """The one that rounds most; None where all are."""
    return max((dtype for dtype in dtypes if dtype), key=lambda dtype: torch.finfo(dtype).eps, default=None)


Free = Callable[[torch.device], int | None]


def free_on(device: torch.device) -> int | None:
    """Bytes; None where nobody can tell."""
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else free_memory()


def check_split(
    pipe: Pipeline, whole: Whole, batch: Given, mode: Literal["auto", "always"], free: Free = free_on
) -> str:
    """Compare loss, weights and gradients of `pipe` with the whole model's; a line that tells the outcome.

    Weights, gradients and random state are left as they were. Collective.
    Raises DifferenceError where they differ; ConfigError where mode is "always" and memory is short.
    """
    began = time.perf_counter()
    short = shorten(batch, pipe.schedule.microbatches)
    microbatches = pipe.microbatches(short)
    device = microbatches[0]["input_ids"].device
    refusal = pipe.processes.gather(_short_of_memory(whole, free(device), mode))[0]
    if refusal := pipe.sums.agree(refusal if pipe.sums.first and refusal else None):
        return skipped(refusal, mode)
    if not any(bool((part["labels"][:, 1:] != IGNORED).any()) for part in short):
        return skipped(f"the first {TOKENS} tokens of its rows hold none that the loss counts", "auto")
    with torch.random.fork_rng(devices=[]):
        loss, digests = _split(pipe, short)
        everyone = pipe.processes.gather(digests)
        told: Any = None
        if pipe.processes.index == 0 and pipe.sums.first:
            told = json.dumps(_beside(whole, device, microbatches, loss, received(everyone)))
    outcome = json.loads(pipe.sums.agree(pipe.processes.gather(told)[0]) or "null")
    if isinstance(outcome, str):
        return skipped(outcome, mode)
    report = _report(outcome)
    if report.losses and not isfinite(report.losses[1]):  # the run will find the same and tell what to do
        return skipped(f"its own loss is {report.losses[1]}", "auto")
    report.raise_if_wrong(_REMEDY)
    count = sum(each.kind == "gradient" for each in report.tensors)
    largest = f"{report.largest:.1e} of a gradient's norm" if report.largest else "none"
    return (
        f"checked in {time.perf_counter() - began:.1f} s: the split model's loss and {count} gradients equal "
        f"the whole one's (largest difference: {largest}; tolerance {report.tolerance:.0e})"
    )


def shorten(batch: Given, count: int) -> list[dict[str, Any]]:
    """`count` microbatches of one row each: the first ones of `batch`, at most TOKENS long."""
    if isinstance(batch, Mapping):
        rows = [{name: value[at : at + 1] for name, value in batch.items()} for at in range(count)]
    else:
        rows = [{name: value[:1] if _by_row(value) else value for name, value in part.items()}
                for part in batch]  # fmt: skip
    return [_cut(row) for row in rows]


def _by_row(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 1


def _cut(row: Mapping[str, Any]) -> dict[str, Any]:
    short = {name: value[:, :TOKENS] for name, value in row.items() if _by_row(value)}
    if "cu_seq_lens_q" in row:  # the documents, now of the first row alone and cut short
        length = short["input_ids"].shape[1]
        ends = row["cu_seq_lens_q"]
        short |= boundaries(torch.cat([ends[ends < length], ends.new_tensor([length])]))
    return short


def _short_of_memory(whole: Whole, free: int | None, mode: str) -> str:
    """Why the whole model is not made here; empty where it is."""
    need = f"the whole model and its gradients take {size(whole.bytes)}"
    if free is not None and whole.bytes > SHARE * free:
        return f"{need}, more than half of the {size(free)} that are free to process 0"
    if mode == "auto" and whole.bytes > LARGEST:
        return f"{need}, and more than {size(LARGEST)} would hold up the start"
    return ""


def skipped(reason: str, mode: str) -> str:
    """A line that says why nothing was checked. Raises ConfigError where it was to be, always."""
    if mode == "always":
        raise ConfigError("train.check=always", reason, "Set train.check=auto, or off, or free memory")
    return f"not checked against the whole model: {reason}"


def _split(pipe: Pipeline, batch: Given) -> tuple[float, list[tuple[Place, Digests]]]:
    """Loss and digests of this process's stages; gradients are laid aside and put back."""
    aside = [(parameter, parameter.grad) for parameter in pipe.parameters()]
    pipe.zero_grad()
    try:
        with evaluating(*pipe.modules.values()):
            loss = pipe.step(batch).loss
        digests = [(place, digests_of(place[0], parameter)) for place, parameter in placed_parameters(pipe)]
    finally:
        for parameter, gradient in aside:
            parameter.grad = gradient
    return loss, digests


def _beside(
    whole: Whole,
    device: torch.device,
    microbatches: Sequence[Microbatch],
    split_loss: float,
    split: Iterable[tuple[Place, Digests]],
) -> str | dict[str, Any]:
    """On process 0: a Report as JSON holds it, or why there is none."""
    model = None
    try:
        model = whole.make(device)
        with evaluating(model):
            loss = whole_backward(model, microbatches, whole.loss)
        named = model.named_parameters(remove_duplicate=False)
        expected = {name: digests_of(name, parameter) for name, parameter in named}
    except (torch.OutOfMemoryError, MemoryError):
        return "memory ran out"
    finally:
        del model
        if device.type == "cuda":
            torch.cuda.empty_cache()
    report = compare_digests((split_loss, loss), list(split), expected, whole)
    return asdict(report)


def compare_digests(
    losses: tuple[float, float],
    split: Sequence[tuple[Place, Digests]],
    expected: Mapping[str, Digests],
    whole: Whole,
) -> Report:
    """Where weights differ they alone are told of: gradients of other weights are others."""
    found = [_weight(place, own.weight, expected.get(place[0])) for place, own in split]
    wrong = [each for each in found if each.wrong]
    if wrong:
        return Report.of(None, wrong, whole.tolerance, "norm")
    largest = max((d.gradient.norm for d in expected.values() if d.gradient is not None), default=0.0)

    def gradient(place: Place, own: Digest | None, other: Digest | None) -> Compared:
        if own is None and other is None:
            return Compared("gradient", *place, 0.0, 0.0, 0.0)
        if own is None or other is None:
            return only_one("gradient", place)
        tolerance = allowed(whole.tolerance, other.norm, whole.source.model.dtype, largest)
        return Compared("gradient", *place, own.distance(other), other.norm, tolerance)

    tensors = [gradient(place, own.gradient, expected[place[0]].gradient) for place, own in split]
    return Report.of(losses, tensors, whole.tolerance, "norm")


def _weight(place: Place, own: Digest, other: Digests | None) -> Compared:
    if other is None:
        return only_one("weight", place)
    norm = other.weight.norm
    return Compared("weight", *place, own.distance(other.weight), norm, _DIGITS * norm)


def _report(told: Mapping[str, Any]) -> Report:
    losses = told["losses"]
    return Report(
        None if losses is None else (losses[0], losses[1]),
        tuple(Compared(**each) for each in told["tensors"]),
        told["tolerance"],
        told["measure"],
    )
