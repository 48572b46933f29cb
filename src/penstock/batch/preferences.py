"""Losses of preferences: pairs of rows, a chosen completion and a rejected one of the same prompt.

    row      0        1          2        3
             chosen   rejected   chosen   rejected        labels: the completion's tokens, -100 on the prompt
             `----pair 0-----'   `----pair 1-----'        a pair is never split over microbatches

log p is the sum of the log-probabilities of a row's labels, n their number, r that of the reference model.
With c for the chosen row and j for the rejected one, each loss is a mean over all pairs of the step:

    DPO     -log sigmoid(beta ((log p_c - r_c) - (log p_j - r_j)))                     arXiv 2305.18290
    IPO     ((log p_c - r_c) / n_c - (log p_j - r_j) / n_j - 1 / (2 beta)) ^ 2         arXiv 2310.12036
    ORPO    -a_c - beta log sigmoid(odds(a_c) - odds(a_j)),  a = log p / n             arXiv 2403.07691
            odds(a) = a - log(1 - exp a)
    SimPO   -log sigmoid(beta (a_c - a_j) - gamma)                                     arXiv 2405.14734
    Reward  -log sigmoid(s_c - s_j),  s the model's score of a row                     arXiv 2203.02155
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.batch.loss import check_labels, labels_of, wide
from penstock.batch.microbatches import batch_rows, check_groups
from penstock.batch.packing import PER_TOKEN
from penstock.batch.row_loss import (
    REFERENCE,
    RowLoss,
    check_positive,
    check_reference,
    counted_tokens,
    row_logps,
)
from penstock.batch.shapes import Microbatch
from penstock.errors import BatchError, ConfigError, ModelError

_HALVES = ("chosen", "rejected")
_NAMES = (*(f"rewards/{half}" for half in _HALVES), "rewards/accuracies", "rewards/margins",
          *(f"logps/{half}" for half in _HALVES))  # fmt: skip


class Half(NamedTuple):
    """The chosen rows of some pairs, or the rejected ones: tensors (pairs,).

    logps: summed over each row's labels; of a reward model, its score
    tokens: the number of these labels
    reference: the reference model's sum; None for a loss that reads none
    """

    logps: Tensor
    tokens: Tensor
    reference: Tensor | None

    @property
    def mean(self) -> Tensor:
        """The mean log-probability of a token."""
        return self.logps / self.tokens

    @property
    def ratio(self) -> Tensor:
        """The logarithm of the ratio to the reference model's probability."""
        return self.logps if self.reference is None else self.logps - self.reference


@dataclass(frozen=True)
class Preference(RowLoss):
    """A loss over pairs: rows 0 and 1, 2 and 3, and so on, each first the chosen one."""

    rows_per_group: ClassVar[int] = 2
    of_rows: ClassVar[tuple[str, ...]] = (REFERENCE,)
    reads: ClassVar[str] = "the tokens of a chosen and of a rejected row, in turn"

    @property
    def names(self) -> Sequence[str]:
        return _NAMES

    def weight(self, microbatch: Microbatch) -> int:
        """The number of pairs. Raises BatchError for rows that are no pairs."""
        labels = labels_of(microbatch, "labels", self.reads)
        pairs = check_groups("a microbatch", len(labels), self.rows_per_group)
        check_labels("labels", labels)
        counted = counted_tokens(labels)
        if not bool(counted.any(1).all()):
            row = int(counted.any(1).logical_not().nonzero()[0])
            rule = f"it is the {_HALVES[row % 2]} row of pair {row // 2}, and has no token to compare"
            raise BatchError(f"row {row} with no label", rule, "Leave the pair out, or cut its prompt")
        _check_prompts(microbatch, counted)
        if self.reads_reference:
            check_reference(self, microbatch, len(labels))
        return pairs

    def of_logits(self, logits: Tensor, microbatch: Microbatch) -> Tensor:
        chosen, rejected = self._halves(logits, microbatch)
        with torch.no_grad():
            self._record(chosen, rejected)
        return self.of_pairs(chosen, rejected).sum()

    @abstractmethod
    def of_pairs(self, chosen: Half, rejected: Half) -> Tensor:
        """The loss of each pair (pairs,)."""

    def rewards(self, half: Half) -> Tensor:
        """The rewards of rows, as TRL defines them for this loss (pairs,)."""
        return half.ratio

    def _halves(self, logits: Tensor, microbatch: Microbatch) -> tuple[Half, Half]:
        logps, tokens = row_logps(logits, microbatch["labels"])
        reference = None
        if self.reads_reference:
            reference = microbatch[REFERENCE].to(logps.device, logps.dtype)
        return _pairs(logps, tokens, reference)

    def _record(self, chosen: Half, rejected: Half) -> None:
        high, low = self.rewards(chosen), self.rewards(rejected)
        columns = (high, low, (high > low).to(high.dtype), high - low, *self._logged(chosen, rejected))
        pairs = high.new_tensor(len(high))
        self.keep([column.sum() for column in columns], [pairs] * len(columns))

    def _logged(self, chosen: Half, rejected: Half) -> tuple[Tensor, ...]:
        return chosen.logps, rejected.logps


@dataclass(frozen=True)
class DPO(Preference):
    """Direct preference optimization.

    Args:
        beta: how strongly the model is held to the reference model; for ipo it is the paper's tau.
        variant: sigmoid, or ipo: a squared distance, of means over tokens as in TRL.

    Reads the entry `reference_logps` (rows,) of a batch, which `Pipeline.logprobs` computes.
    Raises ConfigError.
    """

    beta: float = 0.1
    variant: Literal["sigmoid", "ipo"] = "sigmoid"
    reads_reference: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_positive(self, "beta")
        if self.variant not in ("sigmoid", "ipo"):
            raise ConfigError(f"variant={self.variant!r}", "DPO has two", "Take 'sigmoid' or 'ipo'")

    def of_pairs(self, chosen: Half, rejected: Half) -> Tensor:
        if self.variant == "sigmoid":
            return -F.logsigmoid(self.beta * (chosen.ratio - rejected.ratio))
        difference = chosen.ratio / chosen.tokens - rejected.ratio / rejected.tokens
        return (difference - 1 / (2 * self.beta)).square()

    def rewards(self, half: Half) -> Tensor:
        return self.beta * half.ratio


@dataclass(frozen=True)
class ORPO(Preference):
    """Odds ratio preference optimization: the chosen row's mean loss a token, and the odds of both rows.

    beta: weight of the odds, the paper's lambda. Raises ConfigError.
    """

    beta: float = 0.1

    def __post_init__(self) -> None:
        check_positive(self, "beta")

    def of_pairs(self, chosen: Half, rejected: Half) -> Tensor:
        odds = _log_odds(chosen.mean) - _log_odds(rejected.mean)
        return -chosen.mean - self.beta * F.logsigmoid(odds)

    def rewards(self, half: Half) -> Tensor:
        return self.beta * half.mean

    def _logged(self, chosen: Half, rejected: Half) -> tuple[Tensor, ...]:
        return chosen.mean, rejected.mean


@dataclass(frozen=True)
class SimPO(Preference):
    """Simple preference optimization: means over tokens, without a reference model.

    beta: scale of the difference; gamma: the margin that it is to reach. Raises ConfigError.
    """

    beta: float = 2.0
    gamma: float = 1.0

    def __post_init__(self) -> None:
        check_positive(self, "beta")

    def of_pairs(self, chosen: Half, rejected: Half) -> Tensor:
        return -F.logsigmoid(self.beta * (chosen.mean - rejected.mean) - self.gamma)

    def rewards(self, half: Half) -> Tensor:
        return self.beta * half.mean

    def _logged(self, chosen: Half, rejected: Half) -> tuple[Tensor, ...]:
        return chosen.mean, rejected.mean


@dataclass(frozen=True)
class Reward(Preference):
    """The loss of a reward model: a classifier with one class, whose logit is a row's score.

    center: factor of (s_c + s_j) ^ 2, which keeps scores around 0 (arXiv 2312.09244). Reads no labels.
    """

    center: float = 0.0

    def weight(self, microbatch: Microbatch) -> int:
        return check_groups("a microbatch", batch_rows(microbatch, {}), self.rows_per_group)

    def counted_rows(self, microbatch: Microbatch) -> Tensor:
        return torch.ones(batch_rows(microbatch, {}), dtype=torch.bool)

    def of_pairs(self, chosen: Half, rejected: Half) -> Tensor:
        loss = -F.logsigmoid(chosen.logps - rejected.logps)
        return loss + self.center * (chosen.logps + rejected.logps).square() if self.center else loss

    def _halves(self, logits: Tensor, microbatch: Microbatch) -> tuple[Half, Half]:
        if logits.dim() != PER_TOKEN or logits.shape[1] != 1:
            rule = "a reward model gives one score a row"
            remedy = "Take a model for sequence classification with num_labels=1"
            raise ModelError(f"an output of shape {list(logits.shape)}", rule, remedy)
        scores = wide(logits)[:, 0]
        return _pairs(scores, torch.ones_like(scores), None)

    def _logged(self, chosen: Half, rejected: Half) -> tuple[Tensor, ...]:
        return ()


def _pairs(logps: Tensor, tokens: Tensor, reference: Tensor | None) -> tuple[Half, Half]:
    """The halves of rows that alternate."""
    chosen, rejected = (
        Half(logps[at::2], tokens[at::2], None if reference is None else reference[at::2]) for at in (0, 1)
    )
    return chosen, rejected


def _log_odds(logps: Tensor) -> Tensor:
    """log(p / (1 - p)) of log p, with the form of log(1 - p) that does not cancel."""
    near_one = logps > -math.log(2)
    others = torch.where(near_one, -torch.ones_like(logps), logps)
    near = torch.where(near_one, logps, -torch.ones_like(logps))
    return logps - torch.where(near_one, torch.log(-torch.expm1(near)), torch.log1p(-torch.exp(others)))


# ---- What is refused


def _check_prompts(microbatch: Microbatch, counted: Tensor) -> None:
    """Raise BatchError for a pair of two prompts, as where all chosen rows come before all rejected ones."""
    ids, mask = microbatch.get("input_ids"), microbatch.get("attention_mask")
    if not isinstance(ids, Tensor) or ids.shape != counted.shape:
        return
    before = counted.cumsum(1) == 0
    if isinstance(mask, Tensor) and mask.shape == ids.shape:
        before &= mask != 0
    for row in range(0, len(ids), 2):
        first, second = (ids[at][before[at]] for at in (row, row + 1))
        count = min(len(first), len(second))  # one of them may begin with the same token as the other
        if not torch.equal(first[:count], second[:count]):
            rule = "a pair is a chosen row and the rejected one of the same prompt, next to each other"
            remedy = "Give chosen 0, rejected 0, chosen 1, rejected 1, and so on"
            raise BatchError(f"rows {row} and {row + 1}, with different prompts", rule, remedy)
