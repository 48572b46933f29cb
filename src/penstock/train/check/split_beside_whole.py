"""Before the first step: the split model beside the whole one, on a short batch, without sending a gradient.

Every rank steps on one row a microbatch, cut short. Process 0 runs the same through the whole model, which it
makes from where the stages have their values. What of each weight and gradient is compared is its digest
(penstock.train.check.differences), of which there is no second model to be held. On a mesh every pipeline
steps on the
same rows, whose mean is that of one, and what the first one holds, gathered from all, is compared. Where axes
add up in another order than one process does, how far that may carry is measured
(penstock.train.check.differences)."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor

from penstock.batch.loss import IGNORED
from penstock.batch.packing import boundaries
from penstock.batch.shapes import Microbatch
from penstock.errors import ConfigError
from penstock.pipeline.compare import (
    Compared,
    Place,
    Report,
    allowed,
    only_one,
    placed_parameters,
    whole_backward,
)
from penstock.pipeline.pipeline import Pipeline
from penstock.pipeline.split_batch import BatchLike
from penstock.pipeline.summary import size
from penstock.runtime.stage import evaluating, gradients_aside
from penstock.train.check.differences import (
    ROUNDS,
    Digest,
    Digests,
    Scores,
    digest,
    digests_of,
    near_ties,
    nudge,
    received,
)
from penstock.train.check.router_flips import explained
from penstock.train.check.whole import TOKENS, Whole

# ---- How much memory is there to be had, in bytes.


MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")  # version 2; a container sees its own limits here


def free_memory() -> int | None:
    """What a process can still take without the machine, or its container, running short.

    None where only Linux could tell.
    """
    found = [free for free in (_of_machine(), _of_container()) if free is not None]
    return min(found, default=None)


def _of_machine() -> int | None:
    with suppress(OSError, ValueError):
        for line in MEMINFO.read_text().splitlines():
            name, _, amount = line.partition(":")
            if name == "MemAvailable":
                return int(amount.split()[0]) * 1024
    return None


def _of_container() -> int | None:
    """None where no limit is set."""
    with suppress(OSError, ValueError):
        limit, used = ((CGROUP / name).read_text().strip() for name in ("memory.max", "memory.current"))
        counts = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
        # files read and not used lately count as used, and go as soon as somebody needs the room
        return max(0, int(limit) - int(used) + int(counts.get("inactive_file", 0)))
    return None


SHARE = 0.5  # of the free memory that the whole model may take
LARGEST = 32 * 2**30  # bytes; more takes minutes to read or to make, in which all other ranks would wait
_TURNS = 2  # how often rounding is looked at: a bias of a few entries may hardly move by chance
_MOST = 0.5  # of a gradient that rounding may be: one that is none, or another, is found whatever rounds
_DIGITS = 1e-9  # equal weights have equal digests but for the order of their sums

_REMEDY = (
    "Do not train: it is a fault to be reported (see penstock check); train.check=off trains all the same"
)


Free = Callable[[torch.device], int | None]


def free_on(device: torch.device) -> int | None:
    """Bytes; None where nobody can tell."""
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else free_memory()


def check_split(
    pipe: Pipeline, whole: Whole, batch: BatchLike, mode: Literal["auto", "always"], free: Free = free_on
) -> str:
    """Compare loss, weights and gradients of `pipe` with the whole model's; a line that tells the outcome.

    Weights, gradients and random state are left as they were. Collective.
    Raises DifferenceError where they differ; ConfigError where mode is "always" and memory is short.
    """
    began = time.perf_counter()
    short = shorten(batch, pipe.schedule.microbatches, whole.tokens)
    microbatches = pipe.microbatches(short)
    device = microbatches[0]["input_ids"].device
    refusal = pipe.processes.gather(_short_of_memory(whole, free(device), mode))[0]
    if refusal := pipe.reductions.first_problem(refusal if pipe.reductions.is_first and refusal else None):
        return skipped(refusal, mode)
    if not any(bool((part["labels"][:, 1:] != IGNORED).any()) for part in short):
        return skipped(f"the first {whole.tokens} tokens of its rows hold none that the loss counts", "auto")
    with torch.random.fork_rng(devices=[]):
        loss, digests = _split(pipe, short)
        everyone = pipe.processes.gather(digests)
        told: Any = None
        if pipe.processes.index == 0 and pipe.reductions.is_first:
            told = json.dumps(_beside(whole, device, microbatches, loss, received(everyone)))
    outcome = json.loads(pipe.reductions.first_problem(pipe.processes.gather(told)[0]) or "null")
    if isinstance(outcome, str):
        return skipped(outcome, mode)
    report, near, tokens = _report(outcome["report"]), outcome["near"], outcome["tokens"]
    if report.losses and not isfinite(report.losses[1]):  # the run will find the same and tell what to do
        return skipped(f"its own loss is {report.losses[1]}", "auto")
    if not report.passed and explained(report, near, tokens):
        return skipped(
            f"what {whole.axes} round otherwise may turn {near} choices of its routers, nearly tied on this "
            f"batch; the split model's differ by more than rounding: {report.problems()[0]}",
            mode,
        )
    report.raise_if_wrong(_REMEDY)
    return f"checked in {time.perf_counter() - began:.1f} s: {_passed(report)}"


def _passed(report: Report) -> str:
    gradients = [each for each in report.tensors if each.kind == "gradient"]
    shares = [each.difference / each.size for each in gradients if each.size]
    close = max((share for share in shares if share <= report.tolerance), default=0.0)
    largest = f"{close:.1e} of a gradient's norm" if close else "none"
    wider = [share for share in shares if share > report.tolerance]
    rest = f"; {len(wider)} by up to {max(wider):.1e}, no more than rounding" if wider else ""
    return (
        f"the split model's loss and {len(gradients)} gradients equal the whole one's (largest difference: "
        f"{largest}; tolerance {report.tolerance:.0e}{rest})"
    )


def shorten(batch: BatchLike, count: int, length: int = TOKENS) -> list[dict[str, Any]]:
    """`count` microbatches of one row each: the first ones of `batch`, at most `length` tokens long."""
    if isinstance(batch, Mapping):
        rows = [{name: value[at : at + 1] for name, value in batch.items()} for at in range(count)]
    else:
        rows = [{name: value[:1] if _by_row(value) else value for name, value in part.items()}
                for part in batch]  # fmt: skip
    return [_cut(row, length) for row in rows]


def _by_row(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 1


def _cut(row: Mapping[str, Any], most: int) -> dict[str, Any]:
    short = {name: value[:, :most] for name, value in row.items() if _by_row(value)}
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
        remedy = "Set train.check=auto, or off" + (", or free memory" if "memory" in reason else "")
        raise ConfigError("train.check=always", reason, remedy)
    return f"not checked against the whole model: {reason}"


def _split(pipe: Pipeline, batch: BatchLike) -> tuple[float, list[tuple[Place, Digests]]]:
    """Loss and digests of this process's stages; gradients are laid aside and put back."""
    with gradients_aside(pipe.parameters()):
        with evaluating(*pipe.modules.values()):
            loss = pipe.step(batch).loss
        return loss, [
            (place, digests_of(place[0], parameter)) for place, parameter in placed_parameters(pipe)
        ]


def _beside(
    whole: Whole,
    device: torch.device,
    microbatches: Sequence[Microbatch],
    split_loss: float,
    split: Iterable[tuple[Place, Digests]],
) -> str | dict[str, Any]:
    """On process 0: a Report as JSON holds it, how many choices are near ties and of how many tokens, or why
    there is none.
    """
    told = None
    try:
        told = _expected(whole, device, microbatches)
    except (torch.OutOfMemoryError, MemoryError):
        pass
    except RuntimeError as error:  # of the host's allocator, which has no kind of its own
        if "DefaultCPUAllocator" not in str(error):
            raise
    if device.type == "cuda":
        torch.cuda.empty_cache()  # only here has all that held the model been let go of
    if told is None:
        return "memory ran out"
    loss, expected, moved, near = told
    report = compare_digests((split_loss, loss), list(split), expected, whole, moved)
    tokens = sum(part["input_ids"].numel() for part in microbatches)
    return {"report": asdict(report), "near": near, "tokens": tokens}


def _expected(
    whole: Whole, device: torch.device, microbatches: Sequence[Microbatch]
) -> tuple[float, dict[str, Digests], dict[str, float], int]:
    """Of the whole model, made for this alone: loss, digests, how far rounding moves them, near ties."""
    moved, near = dict[str, float](), 0
    model = whole.make(device)
    with evaluating(model), Scores() as scores:
        loss = whole_backward(model, microbatches, whole.loss)
    named = list(model.named_parameters(remove_duplicate=False))
    expected = {name: digests_of(name, parameter) for name, parameter in named}
    for turn in range(_TURNS if whole.reorders else 0):
        nudge(model, turn)
        model.zero_grad()
        with evaluating(model), Scores() as others:
            whole_backward(model, microbatches, whole.loss)
        near = max(near, near_ties(scores, others))
        for name, parameter in named:
            moved[name] = max(moved.get(name, 0.0), _distance(name, expected[name], parameter.grad))
    return loss, expected, moved, near


def _distance(name: str, of: Digests, gradient: Tensor | None) -> float:
    """0 where one of the two has no gradient: that is no rounding."""
    return 0.0 if of.gradient is None or gradient is None else of.gradient.distance(digest(name, gradient))


def compare_digests(
    losses: tuple[float, float],
    split: Sequence[tuple[Place, Digests]],
    expected: Mapping[str, Digests],
    whole: Whole,
    moved: Mapping[str, float] = MappingProxyType({}),
) -> Report:
    """Where weights differ they alone are told of: gradients of other weights are others.

    moved: how far the whole model's go where its weights' last digits are others; of none where that is empty
    """
    found = [_weight(place, own.weight, expected.get(place[0])) for place, own in split]
    wrong = [each for each in found if each.wrong]
    if wrong:
        return Report.of(None, wrong, whole.tolerance, "norm")
    largest = max((d.gradient.norm for d in expected.values() if d.gradient is not None), default=0.0)
    dtype = whole.source.model.dtype

    def gradient(place: Place, own: Digest | None, other: Digest | None) -> Compared:
        if own is None and other is None:
            return Compared("gradient", *place, 0.0, 0.0, 0.0)
        if own is None or other is None:
            return only_one("gradient", place)
        tolerance = allowed(whole.tolerance, other.norm, dtype, largest)
        most = max(_MOST * other.norm, ROUNDS * torch.finfo(dtype).eps * largest)
        tolerance = max(tolerance, min(ROUNDS * moved.get(place[0], 0.0), most))
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
