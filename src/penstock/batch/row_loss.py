"""The base of losses that read whole rows: of preferences, of rewards, of a teacher.

log p of a row is a sum over its tokens. A loss adds up what it sees of a step, and `metrics` has the means:

    microbatch 0    totals 3.0  counts 4 |
    microbatch 1    totals 1.0  counts 4 |  mean (3 + 1) / (4 + 4), over all ranks
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.batch.deferred_logits import whole
from penstock.batch.loss import IGNORED, HostLoss, Loss, ahead, labels_of, wide
from penstock.batch.placement import host_values
from penstock.batch.shapes import Microbatch
from penstock.errors import BatchError, ConfigError, ModelError

REFERENCE = "reference_logps"  # log-probabilities by the reference model: (rows,), or of each token


@dataclass(frozen=True)
class RowLoss(HostLoss):
    """A loss that no split of a row (cp) computes."""

    reads: ClassVar[str] = "the tokens of each row's completion"  # what its labels are
    reads_reference: ClassVar[bool] = False
    _sums: list[Tensor] = field(default_factory=list, init=False, repr=False, compare=False)

    @property
    def facts(self) -> str:
        """Its options, which all ranks have alike."""
        return repr(self)

    @property
    def names(self) -> Sequence[str]:
        """The names of its means, by TRL."""
        return ()

    def counted_rows(self, microbatch: Microbatch) -> Tensor:
        """Whether each row has a label that counts (rows,)."""
        return counted_tokens(labels_of(microbatch, "labels", self.reads)).any(1)

    def total(self, output: Any, microbatch: Microbatch) -> Tensor:
        """The loss summed over the items that `weight` counts.

        output: logits (rows, sequence, vocabulary), or a mapping with "logits" and perhaps "auxiliary_loss",
            a mean that counts for as many items as the microbatch has
        """
        outputs = output if isinstance(output, Mapping) else {"logits": output}
        if "mtp_logits" in outputs:
            rule = f"their losses are of next tokens, and {type(self).__name__} is another loss"
            raise ModelError("prediction layers (mtp)", rule, "Leave mtp_loss_scaling_factor out")
        total = self.of_logits(outputs["logits"], microbatch)
        if "auxiliary_loss" in outputs:
            items = self.weight(host_values(microbatch))
            total = total + outputs["auxiliary_loss"].to(total.device) * items
        return total

    @abstractmethod
    def of_logits(self, logits: Tensor, microbatch: Microbatch) -> Tensor:
        """The loss summed over the items, of what the last stage returned."""

    def metrics(self, gather: Callable[[Any], Sequence[Any]] = lambda own: [own]) -> dict[str, float]:
        """Means over all items since the last call, by TRL's names; empty if there were none.

        Only ranks with a last stage have sums. gather: collects a value of all ranks, as `pipe.ranks.gather`
            does; the call is then collective
        """
        own = self._sums.pop().tolist() if self._sums else None
        ranks = [sums for sums in gather(own) if sums]
        totals, counts = ([sum(column) for column in zip(*rows, strict=True)] for rows in
                          ([sums[at] for sums in ranks] for at in (0, 1)))  # fmt: skip
        columns = zip(self.names, totals, counts, strict=False)
        return {name: total / count for name, total, count in columns if count}

    def keep(self, totals: Sequence[Tensor], counts: Sequence[Tensor]) -> None:
        """Add to the sums of the means. Both: numbers by name, as tensors without dimensions"""
        sums = torch.stack([torch.stack([*totals]), torch.stack([*counts])])
        self._sums[:] = [self._sums[0] + sums] if self._sums else [sums]


def row_logps(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The summed log-probability of each row's labels, -100 ignored, and their number: two tensors (rows,).

    Arguments as for `token_logps`.
    """
    of_tokens, counted = _of_following(logits, labels)
    return of_tokens.sum(1), counted.sum(1)


def token_logps(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The log-probability that the model gave each token before it came, and whether it counts.

    logits: (rows, sequence, vocabulary); half precision is computed in float32
    labels: unshifted (rows, sequence); those of -100, and the first of a row, have 0
    Returns two tensors (rows, sequence), of the labels' positions.
    """
    of_tokens, counted = _of_following(logits, labels)
    return of_tokens.roll(1, 1), counted.roll(1, 1)  # nothing follows the last one


def _of_following(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """As `token_logps`, at the position before each label. Sums of these do not depend on the padding."""
    logits = wide(whole(logits))
    following = ahead(labels.to(logits.device, torch.int64), 1, IGNORED)
    of_tokens = -F.cross_entropy(
        logits.flatten(0, 1), following.flatten(), ignore_index=IGNORED, reduction="none"
    ).view(following.shape)
    return of_tokens, following != IGNORED


def counted_tokens(labels: Tensor) -> Tensor:
    """Which labels (rows, sequence) a loss counts: nothing predicts the first one."""
    counted = labels != IGNORED
    counted[:, 0] = False  # of a new tensor
    return counted


# ---- What is refused


def check_positive(loss: object, name: str) -> None:
    """Raise ConfigError for an option of 0 or less."""
    value = getattr(loss, name)
    if not value > 0:
        raise ConfigError(f"{name}={value} of {type(loss).__name__}", "it is above 0", "Give 0.1, say")


def check_reference(loss: Loss, microbatch: Microbatch, rows: int) -> None:
    """Raise BatchError unless the microbatch has the reference log-probability of each row."""
    rule = f"{type(loss).__name__} reads {REFERENCE!r}: each row's log-probability by the reference model"
    remedy = f"Add {REFERENCE}=pipe.logprobs(batch, adapters=False), computed before the first step"
    check_floats(microbatch, REFERENCE, (rows,), rule, remedy)


def check_floats(microbatch: Microbatch, name: str, shape: Sequence[int], rule: str, remedy: str) -> None:
    """Raise BatchError unless the microbatch has floats of this shape. rule: what reads them, and as what"""
    value = microbatch.get(name)
    if value is None:
        raise BatchError(f"a batch of {sorted(microbatch)}", rule, remedy)
    if not isinstance(value, Tensor) or value.shape != (*shape,) or not value.is_floating_point():
        is_tensor = isinstance(value, Tensor)
        shown = f"{list(value.shape)} of {value.dtype}" if is_tensor else type(value).__name__
        raise BatchError(f"{name} given as {shown}", f"it is a tensor of floats of {list(shape)}", remedy)
