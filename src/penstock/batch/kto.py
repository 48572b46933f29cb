"""Kahneman-Tversky optimization: rows of one completion, each desirable or not (arXiv 2402.01306).

    row          0     1     2               labels: the completion's tokens, -100 on the prompt
    prompt       x0    x1    x2
    completion   y0    y1    y2              desirable: yes, no, yes
    mismatched   y2    y0    y1              log p of these gives the KL term of the step

With r the log-ratio to the reference model, and kl the mean of r over the mismatched rows, at least 0:

    desirable        w (1 - sigmoid(beta (r - kl)))
    undesirable      v (1 - sigmoid(beta (kl - r)))

The loss is the mean over all rows of the step. It needs kl before the first backward, so a pass of its own
computes it, without a gradient, as TRL's does. Hence no split into microbatches changes it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.batch.loss import IGNORED, check_labels, labels_of
from penstock.batch.row_loss import (
    REFERENCE,
    RowLoss,
    check_positive,
    check_reference,
    counted_tokens,
    row_logps,
)
from penstock.batch.shapes import Microbatch
from penstock.errors import BatchError

DESIRABLE, KL = "desirable", "kl"  # entries of a batch: booleans (rows,), and a number
_NAMES = (*(f"{of}/{half}" for of in ("rewards", "logps") for half in ("chosen", "rejected")), "kl")


@dataclass(frozen=True)
class KTO(RowLoss):
    """The loss of rows that are desirable or not.

    Args:
        beta: how strongly the model is held to the reference model.
        desirable_weight, undesirable_weight: factors of the rows' losses, w and v.

    Reads these entries of a batch: `desirable`, booleans (rows,); `reference_logps` (rows,), which
    `Pipeline.logprobs` computes; `kl`, a number, from `divergence`. Raises ConfigError.
    """

    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    reads_reference: ClassVar[bool] = True
    of_rows: ClassVar[tuple[str, ...]] = (REFERENCE, DESIRABLE)

    def __post_init__(self) -> None:
        for name in ("beta", "desirable_weight", "undesirable_weight"):
            check_positive(self, name)

    @property
    def names(self) -> Sequence[str]:
        return _NAMES

    def weight(self, microbatch: Microbatch) -> int:
        """The number of rows. Raises BatchError for rows that cannot be compared."""
        labels = labels_of(microbatch, "labels", self.reads)
        check_labels("labels", labels)
        empty = counted_tokens(labels).any(1).logical_not()
        if bool(empty.any()):
            raise _empty(int(empty.nonzero()[0]))
        _check_desirable(microbatch.get(DESIRABLE), len(labels))
        check_reference(self, microbatch, len(labels))
        _check_kl(microbatch.get(KL))
        return len(labels)

    def of_logits(self, logits: Tensor, microbatch: Microbatch) -> Tensor:
        logps = row_logps(logits, microbatch["labels"])[0]
        ratio = logps - microbatch[REFERENCE].to(logps.device, logps.dtype)
        desirable, kl = microbatch[DESIRABLE].to(logps.device), float(microbatch[KL])
        with torch.no_grad():
            self._record(logps, ratio, desirable, kl)
        above = torch.where(desirable, ratio - kl, kl - ratio)
        # tensors, as torch.where makes float32 of two numbers
        good, bad = (logps.new_full((), of) for of in (self.desirable_weight, self.undesirable_weight))
        weights = torch.where(desirable, good, bad)
        return (weights * (1 - F.sigmoid(self.beta * above))).sum()

    def metrics(self, gather: Callable[[Any], Sequence[Any]] = lambda own: [own]) -> dict[str, float]:
        """As for any loss of rows, and rewards/margins: the difference of the two means."""
        means = super().metrics(gather)
        halves = [means.get(name) for name in _NAMES[:2]]
        if None not in halves:
            means["rewards/margins"] = means[_NAMES[0]] - means[_NAMES[1]]
        return means

    def _record(self, logps: Tensor, ratio: Tensor, desirable: Tensor, kl: float) -> None:
        halves = (desirable.to(logps.dtype), desirable.logical_not().to(logps.dtype))
        of_halves = [(values * half).sum() for values in (self.beta * ratio, logps) for half in halves]
        rows = logps.new_tensor(len(logps))
        self.keep([*of_halves, kl * rows], [*[half.sum() for half in halves] * 2, rows])


def mismatched(batch: Microbatch) -> dict[str, Tensor]:
    """Each row's prompt with the completion of the row before, as TRL makes the rows of the KL term.

    batch: input_ids and labels (rows, sequence), perhaps attention_mask
    Returns these entries, padded on the right. Raises BatchError.
    """
    ids, labels = batch["input_ids"], labels_of(batch, "labels", KTO.reads)
    hidden = batch.get("attention_mask", torch.ones_like(ids)) == 0
    prompts, completions = list[Tensor](), list[Tensor]()
    for row, row_hidden, of_row in zip(ids, hidden, labels, strict=True):
        said = completion(of_row)
        if said is None:
            raise _empty(len(prompts))
        prompts.append(row[: said.start][~row_hidden[: said.start]])
        completions.append(row[said])
    pairs = [*zip(prompts, [completions[-1], *completions[:-1]], strict=True)]
    rows = {
        "input_ids": [torch.cat(pair) for pair in pairs],
        "labels": [torch.cat([torch.full_like(prompt, IGNORED), other]) for prompt, other in pairs],
        "attention_mask": [torch.ones_like(torch.cat(pair)) for pair in pairs],
    }
    padding = {"labels": IGNORED}
    return {
        name: torch.nn.utils.rnn.pad_sequence(of_rows, True, padding.get(name, 0))
        for name, of_rows in rows.items()
        if name in batch
    }


def completion(labels: Tensor) -> slice | None:
    """Where a row's completion is: from its first label (tokens,) that is not -100 to the last one.

    None for a row without such a label.
    """
    at = (labels != IGNORED).nonzero()
    return slice(int(at[0]), int(at[-1]) + 1) if len(at) else None


def divergence(
    logps: Tensor, reference: Tensor, gather: Callable[[Any], Sequence[Any]] = lambda own: [own]
) -> float:
    """The KL term of a step, the same on every rank: the mean log-ratio of mismatched rows, at least 0.

    logps, reference: (rows,), those of `mismatched(batch)` by the model and by the reference model
    gather: `pipe.ranks.gather`, where parts of the batch are on other ranks; the call is then collective
    """
    parts = gather([float((logps - reference.to(logps.device)).sum()), len(logps)])
    total, rows = map(sum, zip(*parts, strict=True))
    return max(0.0, total / rows)


# ---- What is refused


def _empty(row: int) -> BatchError:
    remedy = "Leave the row out, or cut its prompt"
    return BatchError(f"row {row} with no label", "its completion has no token", remedy)


def _check_desirable(desirable: object, rows: int) -> None:
    rule = f"KTO reads {DESIRABLE!r}: a boolean for each of {rows} rows, whether its completion is desirable"
    remedy = "Give a torch.bool tensor of (rows,), TRL's 'label'"
    if desirable is None:
        raise BatchError(f"a batch without {DESIRABLE!r}", rule, remedy)
    if not isinstance(desirable, Tensor):
        raise BatchError(f"{DESIRABLE} given as {type(desirable).__name__}", rule, remedy)
    if desirable.shape != (rows,) or desirable.dtype != torch.bool:
        raise BatchError(f"{DESIRABLE} given as {list(desirable.shape)} of {desirable.dtype}", rule, remedy)


def _check_kl(kl: object) -> None:
    if not isinstance(kl, int | float) or not 0 <= kl < math.inf:
        shown = "a batch without 'kl'" if kl is None else f"kl={kl!r}"
        rule = (
            "KTO reads 'kl': a number of 0 or more, the mean log-ratio of mismatched rows of the whole step"
        )
        remedy = "Add kl=divergence(pipe.logprobs(other), reference_of_other), with other = mismatched(batch)"
        raise BatchError(shown, rule, remedy)
