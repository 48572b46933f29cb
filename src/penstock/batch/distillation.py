"""Distillation: each next token's distribution by the student approaches the teacher's.

With p the teacher's distribution and q the student's, both of logits / temperature, a token's loss is

    divergence    forward     KL(p || q)                                            covers the teacher
                  reverse     KL(q || p)                                            takes its likely tokens
    loss          (1 - mix) divergence - mix log q(label),  of that at temperature 1

and that of a step the mean over all tokens that count. As TRL's, it has no factor of the squared temperature.

    teacher_logits   (rows, sequence, vocabulary)                      or, for forward alone, the largest k:
    teacher_logits   (rows, sequence, k),  teacher_tokens (rows, sequence, k)     p is 0 for all other tokens
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.batch.deferred_logits import whole
from penstock.batch.loss import IGNORED, check_labels, labels_of, wide
from penstock.batch.placement import OnDevice, host_values
from penstock.batch.row_loss import RowLoss, check_positive, counted_tokens
from penstock.batch.shapes import Microbatch
from penstock.errors import BatchError, ConfigError, ModelError

TEACHER, TOKENS = "teacher_logits", "teacher_tokens"  # entries of a batch
_WITH_VOCABULARY = 3  # dimensions


@dataclass(frozen=True)
class Distillation(RowLoss):
    """The divergence from a teacher, and perhaps the loss of the labels.

    Args:
        divergence: forward or reverse.
        temperature: of both distributions.
        mix: the share of the labels' cross-entropy, 0 to 1.

    Reads labels, unshifted, -100 where no token counts, and `teacher_logits` at the same positions, perhaps
    with `teacher_tokens`. Raises ConfigError.
    """

    divergence: Literal["forward", "reverse"] = "forward"
    temperature: float = 1.0
    mix: float = 0.0
    reads: ClassVar[str] = "the next token"

    def __post_init__(self) -> None:
        check_positive(self, "temperature")
        if self.divergence not in ("forward", "reverse"):
            rule = "Distillation has two"
            raise ConfigError(f"divergence={self.divergence!r}", rule, "Take 'forward' or 'reverse'")
        if not 0 <= self.mix <= 1:
            raise ConfigError(f"mix={self.mix} of Distillation", "it is from 0 to 1", "Give 0.5, say")

    def weight(self, microbatch: Microbatch) -> int:
        """The number of tokens that count. Raises BatchError for entries that do not fit."""
        count, labels = self.counted(microbatch), microbatch["labels"]
        teacher = microbatch.get(TEACHER)
        remedy = f"Add {TEACHER}=teacher.evaluate(batch, outputs=True, everywhere=True).outputs, say"
        if teacher is None:
            rule = f"Distillation reads {TEACHER!r}, of each token of the rows"
            raise BatchError(f"a batch of {sorted(microbatch)}", rule, remedy)
        if not isinstance(teacher, Tensor) or not _fits(teacher, labels) or not teacher.is_floating_point():
            rule = f"they are floats of {[*labels.shape]} and a last dimension of tokens"
            raise BatchError(f"{TEACHER} given as {_shown(teacher)}", rule, remedy)
        if TOKENS in microbatch:
            self._check_tokens(microbatch[TOKENS], teacher)
        return count

    def counted(self, microbatch: Microbatch) -> int:
        """The number of tokens that count. Raises BatchError for labels that are none."""
        labels = labels_of(microbatch, "labels", self.reads)
        check_labels("labels", labels)
        return int(counted_tokens(labels).sum())

    def of_logits(self, logits: Tensor, microbatch: Microbatch) -> Tensor:
        logits = wide(whole(logits))[:, :-1]
        labels = microbatch["labels"].to(logits.device, torch.int64)[:, 1:]
        counted = labels != IGNORED
        logits, labels = logits[counted], labels[counted]  # (tokens, vocabulary)
        teacher = wide(self._teacher(microbatch, counted)).to(logits.device, logits.dtype)
        student = F.log_softmax(logits / self.temperature, -1)
        if TOKENS in microbatch:
            tokens = microbatch[TOKENS][:, :-1].to(logits.device, torch.int64)[counted]
            student = student.gather(-1, tokens)
        elif teacher.shape != logits.shape:
            raise ModelError(
                f"{TEACHER} of {teacher.shape[-1]} tokens, and a student of {logits.shape[-1]}",
                "both have one vocabulary",
                f"Give its largest logits with their {TOKENS}, or a teacher with the student's tokenizer",
            )
        total = self._apart(student, F.log_softmax(teacher / self.temperature, -1))
        if not self.mix:
            return total
        return (1 - self.mix) * total + self.mix * F.cross_entropy(logits, labels, reduction="sum")

    def _teacher(self, microbatch: Microbatch, counted: Tensor) -> Tensor:
        """The teacher's logits of the tokens that count (tokens, vocabulary)."""
        logits: Tensor = microbatch[TEACHER][:, :-1]
        return logits.to(counted.device)[counted]

    def _apart(self, student: Tensor, teacher: Tensor) -> Tensor:
        """The divergence, summed. Both: logarithms of probabilities (tokens, vocabulary)"""
        if self.divergence == "forward":
            return F.kl_div(student, teacher, reduction="sum", log_target=True)
        return F.kl_div(teacher, student, reduction="sum", log_target=True)

    def _check_tokens(self, tokens: object, teacher: Tensor) -> None:
        whole_numbers = isinstance(tokens, Tensor) and not tokens.is_floating_point()
        if not isinstance(tokens, Tensor) or not whole_numbers or tokens.shape != teacher.shape:
            rule = f"they are the ids of {TEACHER}, whole numbers of {[*teacher.shape]}"
            raise BatchError(f"{TOKENS} given as {_shown(tokens)}", rule, "Give both of torch.topk")
        if self.divergence == "reverse":
            rule = "the reverse divergence reads the teacher's probability of every token"
            remedy = "Give all logits without it, or take divergence='forward'"
            raise BatchError(f"{TOKENS} with divergence='reverse'", rule, remedy)


@dataclass(frozen=True)
class Taught(Distillation):
    """The same of a teacher that runs before each step, and leaves its logits here.

    Only the process that hosts the last stage has them, so that none are sent.
    """

    takes_number: ClassVar[bool] = True
    logits: dict[int, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    def plain(self) -> Distillation:
        """The same loss of the teacher's logits in a batch, which any process can compute."""
        return Distillation(self.divergence, self.temperature, self.mix)

    def weight(self, microbatch: Microbatch) -> int:
        return self.counted(microbatch)

    def total(self, output: Any, microbatch: Microbatch, *number: int) -> Tensor:
        """number: of the microbatch in the step"""
        entries = {**microbatch, TEACHER: self.logits[number[0]]}
        return super().total(output, OnDevice(entries, host_values(microbatch)))

    def _teacher(self, microbatch: Microbatch, counted: Tensor) -> Tensor:
        logits: Tensor = microbatch[TEACHER]
        return logits


def of_counted(logits: Tensor, labels: Tensor) -> Tensor:
    """The logits (rows, sequence, vocabulary) from which a loss predicts a label: (tokens, vocabulary)."""
    counted = labels[:, 1:] != IGNORED
    chosen: Tensor = whole(logits)[:, :-1][counted.to(logits.device)]
    return chosen


def _fits(teacher: Tensor, labels: Tensor) -> bool:
    return teacher.dim() == _WITH_VOCABULARY and teacher.shape[:2] == labels.shape


def _shown(value: object) -> str:
    return f"{[*value.shape]} of {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
