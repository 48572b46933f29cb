"""Group relative policy optimization: rows that the model wrote, better or worse than their group's mean.

    prompt       x0   x0   x0   x1   x1   x1        a group of 3 rows for each prompt
    reward       1    0    0    0    1    1
    advantage   +1.2 -0.6 -0.6 -1.2 +0.6 +0.6       (reward - mean of the group) / its standard deviation

With q the ratio exp(log p - old log p) of a token, a the advantage of its row, and d the estimate
exp(r - log p) - (r - log p) - 1 of its divergence from the reference model r, a token's loss is

    -min(q a, clip(q, 1 - epsilon, 1 + epsilon_high) a) + beta d

and the loss of a step, over all its rows and tokens, whatever the microbatches:

    grpo       the mean over rows of each row's mean over tokens     arXiv 2402.03300
    dapo       the mean over tokens                                  arXiv 2503.14476
    dr_grpo    the sum over tokens, by rows times longest            arXiv 2503.20783
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from penstock.batch.loss import check_labels, labels_of
from penstock.batch.microbatches import check_groups
from penstock.batch.row_loss import REFERENCE, RowLoss, check_floats, counted_tokens, token_logps
from penstock.batch.shapes import Microbatch
from penstock.errors import BatchError, ConfigError

ADVANTAGES, OLD = "advantages", "old_logps"  # entries of a batch: floats (rows,) and (rows, sequence)
_KINDS = ("grpo", "dapo", "dr_grpo")
_NAMES = ("clip_ratio/region_mean", "kl")


@dataclass(frozen=True)
class GRPO(RowLoss):
    """The clipped loss of rows with advantages.

    Args:
        epsilon, epsilon_high: how far the ratio may move below 1 and above; None takes epsilon for both.
        beta: factor of the divergence from the reference model; with 0 there is none.
        kind: how tokens are averaged.
        longest: for dr_grpo, the most tokens of a completion.

    Reads these entries of a batch: labels, -100 on prompts; `advantages` (rows,); `old_logps` (rows,
    sequence), of each token when it was sampled, or none for rows of the present weights; and with beta
    `reference_logps` (rows, sequence). `Pipeline.logprobs(batch, by_token=True)` computes both. Raises
    ConfigError.
    """

    epsilon: float = 0.2
    epsilon_high: float | None = None
    beta: float = 0.0
    kind: Literal["grpo", "dapo", "dr_grpo"] = "dapo"
    longest: int | None = None

    def __post_init__(self) -> None:
        for name in ("epsilon", "epsilon_high", "beta"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise ConfigError(f"{name}={value} of GRPO", "it is 0 or more", "Give 0.2, say")
        if self.kind not in _KINDS:
            remedy = "Take one of them; bnpo, a mean over tokens, is dapo here"
            raise ConfigError(f"kind={self.kind!r}", f"GRPO has {', '.join(_KINDS)}", remedy)
        if (self.longest is None) == (self.kind == "dr_grpo") or (self.longest or 1) < 1:
            rule = "dr_grpo, and no other kind, divides by the most tokens of a completion"
            remedy = "Give dr_grpo longest=max_new_tokens, and the others none"
            raise ConfigError(f"longest={self.longest} with kind={self.kind!r}", rule, remedy)

    @property
    def names(self) -> Sequence[str]:
        return _NAMES if self.beta else _NAMES[:1]

    def weight(self, microbatch: Microbatch) -> int:
        """The number of rows; of dapo, of tokens. Raises BatchError for entries that do not fit."""
        labels = labels_of(microbatch, "labels", self.reads)
        check_labels("labels", labels)
        rule = f"GRPO reads {ADVANTAGES!r}: how much better than its group each row is"
        remedy = f"Add {ADVANTAGES}=group_advantages(rewards, group)"
        check_floats(microbatch, ADVANTAGES, labels.shape[:1], rule, remedy)
        if OLD in microbatch:
            remedy = f"Add {OLD}=pipe.logprobs(batch, by_token=True), or leave it out"
            check_floats(microbatch, OLD, labels.shape, "", remedy)
        if self.beta:
            rule = f"GRPO with beta={self.beta} reads {REFERENCE!r}, of each token"
            remedy = f"Add {REFERENCE}=pipe.logprobs(batch, adapters=False, by_token=True), or set beta=0"
            check_floats(microbatch, REFERENCE, labels.shape, rule, remedy)
        return int(counted_tokens(labels).sum()) if self.kind == "dapo" else len(labels)

    def of_logits(self, logits: Tensor, microbatch: Microbatch) -> Tensor:
        logps, counted = token_logps(logits, microbatch["labels"])
        advantages = microbatch[ADVANTAGES].to(logps.device, logps.dtype)[:, None]
        old = microbatch[OLD].to(logps.device, logps.dtype) if OLD in microbatch else logps.detach()
        ratio = torch.exp(torch.where(counted, logps - old, 0))
        high = self.epsilon if self.epsilon_high is None else self.epsilon_high
        clipped = ratio.clamp(1 - self.epsilon, 1 + high)
        of_tokens = -torch.min(ratio * advantages, clipped * advantages)
        outside = (ratio * advantages > clipped * advantages) & counted
        means = [outside.sum().to(logps.dtype)]
        if self.beta:
            apart = torch.where(counted, microbatch[REFERENCE].to(logps.device, logps.dtype) - logps, 0)
            divergence = torch.expm1(apart) - apart
            of_tokens = of_tokens + self.beta * divergence
            means.append(divergence.detach().sum())
        self.keep(means, [counted.sum().to(logps.dtype)] * len(means))
        return self._summed(torch.where(counted, of_tokens, 0), counted)

    def _summed(self, of_tokens: Tensor, counted: Tensor) -> Tensor:
        if self.kind == "grpo":
            return (of_tokens.sum(1) / counted.sum(1).clamp(min=1)).sum()
        return of_tokens.sum() / (self.longest or 1)


def group_advantages(rewards: Tensor, group: int, *, scaled: bool = True) -> Tensor:
    """How much better than its group each row is, as TRL computes it: (rows,).

    rewards: (rows,), the rows of a group next to each other
    scaled: whether to divide by the standard deviation of the group (plus 1e-4)

    Raises BatchError for a part of a group, or for a reward that is not finite.
    """
    if not bool(rewards.isfinite().all()):
        row = int(rewards.isfinite().logical_not().nonzero()[0])
        rule = "the mean of its group would not be finite either"
        raise BatchError(f"a reward of {float(rewards[row])} for row {row}", rule, "Give every row a number")
    groups = rewards.view(check_groups("rewards", len(rewards), group), group)
    apart = groups - groups.mean(1, keepdim=True)
    if scaled and group > 1:
        apart = apart / (groups.std(1, keepdim=True) + 1e-4)
    return apart.flatten()
