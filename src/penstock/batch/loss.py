"""Losses: a step minimises the mean over all valid items of the whole batch.

A loss gives the weight of a microbatch (its valid items) and the sum over them. All weights are known
before the first backward, so each microbatch's sum is divided by the step's weight before it is
differentiated. The gradients need no second pass, also if microbatches differ in their valid items.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping
from inspect import Parameter, signature
from typing import Any, Literal, Protocol, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.batch.deferred_logits import DeferredLogits
from penstock.batch.hits import Hits, NoHits, TokenHits
from penstock.batch.logit_sums import Penalties
from penstock.batch.microbatches import INNER, Sharding, batch_rows
from penstock.batch.packing import PER_TOKEN
from penstock.batch.placement import host_values
from penstock.batch.shapes import Microbatch, logits_in
from penstock.errors import BatchError, ConfigError, ModelError

IGNORED = -100  # the label that transformers leaves out of the loss
VALID_ITEMS = f"{INNER}valid_items"  # the entry of a context shard: the weight of the whole microbatch


class Loss(Protocol):
    """A loss that is summed over items, such as tokens or rows.

    If it has a true attribute `takes_number`, `total` gets a third argument: the number of the microbatch in
    the step, from 0 on. If it has a number `rows_per_group`, so many rows next to each other stay in one
    microbatch, as the two of a pair; a function may have it too. `facts` is text that all ranks have alike.
    """

    def weight(self, microbatch: Microbatch) -> int:
        """How many items of the microbatch count."""

    def total(self, output: Any, microbatch: Microbatch) -> Tensor:
        """The loss summed over those items, a tensor without dimensions.

        output: what the last stage returned
        """


class HostLoss(Loss):
    """A loss of penstock: it counts on the host, so as not to wait for a GPU, and says which rows count."""

    @abstractmethod
    def counted_rows(self, microbatch: Microbatch) -> Tensor:
        """Whether the loss counts something of each row (rows,)."""


class OwnLoss(HostLoss):
    """A loss that transformers' own models compute from the labels of a batch.

    of_model: whether it is the loss of the model itself, so that `model(**batch).loss` is its reference
    entries: names of the entries that may hold the labels; the first one in the batch is read
    of_rows: names of the entries that have a label for each row, and not for each token
    """

    of_model = False
    hits: Hits = NoHits()
    of_rows: tuple[str, ...] = ()
    entries: tuple[str, ...] = ("labels",)

    def as_own(self) -> Self:
        """A copy with `of_model` set."""
        other = copy.copy(self)
        other.of_model = True
        return other

    def check(self, batch: Microbatch, head: int | None) -> None:
        """Raise BatchError for labels that it does not take. head: how many tokens the model's head has"""
        if "shift_labels" in batch and "shift_labels" not in self.entries:
            rule = "the model's own loss is not that of next tokens, and reads 'labels'"
            raise BatchError("shift_labels in a batch", rule, "Take them out")

    @abstractmethod
    def labels_for(self, ids: Tensor, generator: torch.Generator) -> Tensor:
        """Random labels for random tokens (rows, sequence)."""

    def counting(self) -> Self:
        """A copy that counts hits, if these are defined for its labels."""
        other = copy.copy(self)
        other.hits = TokenHits()
        return other


class TokenLabels(OwnLoss):
    """Cross-entropy of each token's label, -100 ignored: token classification, masked language modelling.

    Args:
        classes: the number of labels; None takes that of the model's head.
    """

    reads = "the label of each token"
    penalties = Penalties(0.0, 0.0)

    def __init__(self, classes: int | None = None) -> None:
        self.classes = classes
        self._of_whole_logits: Callable[[Tensor, Tensor, Penalties], Tensor] = _of_whole_logits

    @property
    def facts(self) -> str:
        """Its options, which all ranks have alike."""
        return f"{self.penalties}, accuracy={self.hits.wanted}"

    def compiled(self, **options: Any) -> Self:
        """The same loss, with that of whole logits compiled. options: of torch.compile"""
        other = copy.copy(self)
        other._of_whole_logits = torch.compile(_of_whole_logits, **options)
        return other

    def counted_rows(self, microbatch: Microbatch) -> Tensor:
        name = self._name(microbatch)
        return (self._counted(microbatch[name], name) != IGNORED).any(1)

    def labels_for(self, ids: Tensor, generator: torch.Generator) -> Tensor:
        """Random labels of random tokens (rows, sequence); a fifth, and half of the first row's, ignored."""
        ignored = torch.rand(ids.shape, generator=generator) < 0.2
        ignored[0, : ids.shape[1] // 2] = True
        ignored[:, -1] = False  # or a short row might have none
        labels = ids if self.classes is None else ids % self.classes
        return labels.masked_fill(ignored, IGNORED)

    def check(self, batch: Microbatch, head: int | None) -> None:
        super().check(batch, head)
        count = self.classes or head
        for name in (name for name in self.entries if name in batch):
            check_labels(name, batch[name])
            if count is not None:
                check_tokens(name, batch[name], count, "the model's head has")

    def weight(self, microbatch: Microbatch) -> int:
        name = self._name(microbatch)
        labels = labels_of(microbatch, name, self.reads)
        check_labels(name, labels)
        ids = microbatch.get("input_ids")
        most = None if ids is None or ids.dim() != PER_TOKEN else ids.shape
        # some models take fewer (git reads images first), or several for each token (musicgen)
        if labels.dim() < PER_TOKEN or (most and (len(labels) != most[0] or labels.shape[1] > most[1])):
            rule = f"{self.reads} is read, from a tensor of {list(most) if most else '(rows, tokens)'}"
            remedy = "Give as many as input_ids, with -100 where no loss is wanted, or give a loss_fn"
            raise BatchError(f"{name} of shape {list(labels.shape)}", rule, remedy)
        return int((self._counted(labels, name) != IGNORED).sum())

    def total(self, output: Any, microbatch: Microbatch) -> Tensor:
        """The cross-entropy summed over the valid tokens. Half precision is summed in float32.

        Args:
            output: logits (rows, sequence, vocabulary), or a mapping with "logits" and perhaps
                "auxiliary_loss", a mean that counts for as many items as the microbatch has.
            microbatch: with context shards it has the entry VALID_ITEMS: the number of items that the
                auxiliary loss, or this shard's part of it, counts for.
        """
        outputs = output if isinstance(output, Mapping) else {"logits": output}
        logits, name = outputs["logits"], self._name(microbatch)
        labels = microbatch[name]
        if logits.shape[:2] != labels.shape[:2]:
            rule = f"the loss compares each with its label, and those are {list(labels.shape)}"
            remedy = "Give a loss_fn that knows which belongs to which"
            raise ModelError(f"logits of (rows, sequence) {list(logits.shape[:2])}", rule, remedy)
        labels = labels.to(logits.device, torch.int64)
        seen = self._counted(host_values(microbatch)[name], name)
        if type(seen) is Tensor and seen.is_cpu and seen.numel():  # on a GPU, this would wait for it
            check_tokens("labels", seen, logits.shape[-1], "the model gives a logit for each of")
        total = self._compared(logits, labels, outputs, microbatch)
        if "auxiliary_loss" in outputs:
            counted = microbatch.get(VALID_ITEMS)
            items = self.weight(host_values(microbatch)) if counted is None else counted
            total = total + outputs["auxiliary_loss"].to(total.device) * items
        return total

    def _name(self, microbatch: Microbatch) -> str:
        """The entry that has the labels."""
        return next((name for name in self.entries if name in microbatch), "labels")

    def _counted(self, labels: Tensor, name: str) -> Tensor:
        """The labels that a logit is compared with."""
        return labels

    def _compared(
        self, logits: Tensor, labels: Tensor, outputs: Mapping[str, Any], microbatch: Microbatch
    ) -> Tensor:
        return self._summed(logits, labels, self.hits)

    def _summed(self, logits: Tensor, labels: Tensor, hits: Hits) -> Tensor:
        """labels: of the same rows and sequence; hits: shown the logits"""
        if isinstance(logits, DeferredLogits):
            if not logits.is_whole:
                return logits.cross_entropy(labels, IGNORED, self.penalties, hits)
            logits = logits.whole()  # which a forward may have changed in place
        hits.add_whole(logits, labels, IGNORED)
        return self._of_whole_logits(logits, labels, self.penalties)


class NextToken(TokenLabels):
    """Cross-entropy of each next token: labels as transformers takes them, unshifted, -100 ignored.

    As there, `shift_labels`, the next token of each token, is read before `labels`. An output may also have
    "mtp_logits", a tuple of the prediction layers' logits, with "mtp_loss_scaling_factor", which the mean of
    their losses is multiplied by.

    Args:
        label_smoothing: share of the target, 0 to 1, that all tokens of the vocabulary have in equal parts,
            as in torch.nn.functional.cross_entropy.
        z_loss: factor of the squared log-sum-exp of the logits, added for each token (PaLM, arXiv
            2204.02311).
        accuracy: whether steps and evaluations have `accuracy` in their result.

    Raises ConfigError.
    """

    reads = "the next token"
    entries = ("shift_labels", "labels")

    def __init__(self, label_smoothing: float = 0.0, z_loss: float = 0.0, accuracy: bool = False) -> None:
        super().__init__()
        if not 0 <= label_smoothing <= 1:
            raise ConfigError(f"label_smoothing={label_smoothing}", "it is from 0 to 1", "Give 0.1, say")
        if not z_loss >= 0:
            raise ConfigError(f"z_loss={z_loss}", "it is 0 or more", "Give 1e-4, say")
        self.penalties = Penalties(label_smoothing, z_loss)
        self.hits = TokenHits() if accuracy else NoHits()

    def _counted(self, labels: Tensor, name: str) -> Tensor:
        return labels if name == "shift_labels" else labels[:, 1:]

    def _compared(
        self, logits: Tensor, labels: Tensor, outputs: Mapping[str, Any], microbatch: Microbatch
    ) -> Tensor:
        shifted = "shift_labels" in microbatch
        following = labels if shifted else ahead(labels, 1, IGNORED)
        if not shifted:
            logits, labels = logits[:, :-1], labels[:, 1:]
        total = self._summed(logits, labels, self.hits)
        predicted = outputs.get("mtp_logits", ())
        for depth, more in enumerate(predicted, 1):
            labels = prediction_labels(following, depth, microbatch.get("position_ids"))
            total = total + outputs["mtp_loss_scaling_factor"] / len(predicted) * self._summed(
                more, labels, NoHits()
            )
        return total


ProblemType = Literal["regression", "single_label_classification", "multi_label_classification"]


class RowLabels(OwnLoss):
    """The loss of labels for whole rows: sequence classification and regression, as transformers has them.

    A mean over rows: cross-entropy of one class (-100 ignored), or over rows and classes: squared
    differences (regression) and binary cross-entropy of several labels.

    Args:
        classes: entries of a row's logits.
        problem: `problem_type` of the model's config; None chooses as transformers does, by the number of
            classes and the dtype of the labels.
        proven: the problems in which this is the model's own loss; others are refused.
        one_row: why the model takes no batch of several rows; empty where it does.
    """

    of_rows = ("labels",)

    def __init__(
        self, classes: int, problem: ProblemType | None, proven: Collection[ProblemType], one_row: str = ""
    ) -> None:
        self._classes, self._problem, self._proven, self._one_row = classes, problem, proven, one_row

    def check(self, batch: Microbatch, head: int | None) -> None:
        super().check(batch, head)
        ids, labels = batch.get("input_ids"), batch.get("labels")
        rows = len(ids) if isinstance(ids, Tensor) and ids.dim() else None
        if self._one_row and rows is not None and rows > 1:
            remedy = "Set pad_token_id in the model's config, or give a list of microbatches of one row"
            raise BatchError(f"a batch of {rows} rows", self._one_row.rstrip("."), remedy)
        if labels is None:
            return
        if not isinstance(labels, Tensor) or not labels.dim():
            raise BatchError(f"labels given as {type(labels).__name__}", "they are a tensor", "Give one")
        rows = len(labels) if rows is None else rows
        problem = self._problem_of(labels)
        if problem not in self._proven:
            rule = f"they ask for {problem}, which the model's own loss does not compute"
            raise BatchError(f"labels of {labels.dtype}", rule, f"Give those of {' or '.join(self._proven)}")
        single = problem == "single_label_classification"
        one = single or (problem == "regression" and self._classes == 1)
        wanted = (rows,) if one else (rows, self._classes)
        column = labels.shape == (*wanted, 1) and len(wanted) == 1
        if labels.is_floating_point() == single or not (column or labels.shape == wanted):
            rule = f"{problem} reads {'int64' if single else 'floats'} of shape {list(wanted)}"
            remedy = "Give such labels, or set problem_type in the model's config"
            raise BatchError(f"labels of {labels.dtype} and shape {list(labels.shape)}", rule, remedy)
        if single:
            check_labels("labels", labels)
            if labels.numel() and int(labels.max()) >= self._classes:
                rule = f"the model's head has {self._classes} classes, from 0 on"
                raise BatchError(
                    f"labels with {int(labels.max())}", rule, "Set num_labels in the model's config"
                )

    def counted_rows(self, microbatch: Microbatch) -> Tensor:
        return self._counted(microbatch["labels"]).flatten(1).any(1)

    def labels_for(self, ids: Tensor, generator: torch.Generator) -> Tensor:
        """Random labels of the rows of `ids`."""
        problem, rows = next(iter(self._proven)), len(ids)
        if problem == "single_label_classification":
            return torch.randint(0, self._classes, (rows,), generator=generator)
        labels = torch.rand((rows, self._classes), generator=generator)
        return labels if problem == "regression" else labels.round()

    def _problem_of(self, labels: Tensor) -> ProblemType:
        if self._problem is not None:
            return self._problem
        if self._classes == 1:
            return "regression"
        whole = labels.dtype in (torch.int64, torch.int32)
        return "single_label_classification" if whole else "multi_label_classification"

    def weight(self, microbatch: Microbatch) -> int:
        labels = labels_of(microbatch, "labels", "the label of each row")
        return int(self._counted(labels).sum())

    def _counted(self, labels: Tensor) -> Tensor:
        """Whether the loss counts each number of the labels (rows, numbers)."""
        labels = labels.reshape(len(labels), -1)
        return labels != IGNORED if self._is_single(labels) else torch.ones_like(labels, dtype=torch.bool)

    def _is_single(self, labels: Tensor) -> bool:
        return self._problem_of(labels) == "single_label_classification"

    def total(self, output: Any, microbatch: Microbatch) -> Tensor:
        """output: logits (rows, classes), or a mapping with them"""
        logits = wide(logits_in(output))
        labels = microbatch["labels"].to(logits.device)
        problem = self._problem_of(labels)
        if problem == "single_label_classification":
            labels = labels.reshape(-1).to(torch.int64)
            self.hits.add_whole(logits, labels, IGNORED)
            return F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
        labels = labels.to(logits.dtype).reshape(logits.shape)
        if problem == "regression":
            self.hits.miss()  # no number is right or wrong
            return F.mse_loss(logits, labels, reduction="sum")
        self.hits.add_signs(logits, labels)
        return F.binary_cross_entropy_with_logits(logits, labels, reduction="sum")


def labels_of(microbatch: Microbatch, name: str, reads: str) -> Tensor:
    """The labels of a microbatch. Raises BatchError without them. reads: what they are"""
    labels = microbatch.get(name)
    if labels is None:
        remedy = "Add labels (of tokens with -100 where no loss is wanted), or give a loss_fn"
        raise BatchError(f"a batch of {sorted(microbatch)}", f"the loss reads 'labels': {reads}", remedy)
    return labels  # type: ignore[no-any-return]


def prediction_labels(following: Tensor, depth: int, positions: Tensor | None = None) -> Tensor:
    """The token that the prediction layer of `depth`, from 1 on, predicts for each token.

    Args:
        following: the next token of each token (rows, sequence), IGNORED where there is none.
        positions: of the tokens, (rows, sequence) or (1, sequence), where a row may hold several documents:
            no token of another document is predicted.
    """
    labels = ahead(following, depth, IGNORED)
    if positions is None or positions.dim() != PER_TOKEN:
        return labels
    begins = F.pad(positions.to(labels.device).diff() != 1, (1, 0))
    documents = begins.cumsum(-1)
    reached = ahead(documents, depth + 1, -1)
    return torch.where(documents == reached, labels, IGNORED)


def wide(logits: Tensor) -> Tensor:
    """The logits in float32, if they are of half precision."""
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits


def ahead(tokens: Tensor, places: int, past_end: int) -> Tensor:
    """The token `places` after each token (rows, sequence); `past_end` beyond the end of the row."""
    return F.pad(tokens, (0, places), value=past_end)[:, places:].contiguous()


def _of_whole_logits(logits: Tensor, labels: Tensor, penalties: Penalties) -> Tensor:
    logits, labels = wide(logits).reshape(-1, logits.shape[-1]), labels.reshape(-1)
    total = F.cross_entropy(
        logits, labels, ignore_index=IGNORED, reduction="sum", label_smoothing=penalties.smoothing
    )
    if penalties.z:
        total = total + penalties.z * torch.where(labels == IGNORED, 0, logits.logsumexp(-1).square()).sum()
    return total


def check_labels(name: str, labels: Any) -> None:
    """Raise BatchError for labels that are no token ids."""
    if not isinstance(labels, Tensor) or labels.dtype.is_floating_point or labels.dtype == torch.bool:
        shown = f"of {labels.dtype}" if isinstance(labels, Tensor) else f"given as {type(labels).__name__}"
        rule = "they are token ids, a tensor of int64"
        raise BatchError(f"{name} {shown}", rule, "Give whole numbers, with -100 where no loss is wanted")
    wrong = (labels < 0) & (labels != IGNORED)
    if bool(wrong.any()):
        raise BatchError(
            f"{name} with {int(labels[wrong][0])}, at {wrong.nonzero()[0].tolist()}",
            f"a label is a token id, from 0 on, or {IGNORED}, which the loss ignores",
            f"Put {IGNORED} where no loss is wanted",
        )


def check_tokens(name: str, tokens: Tensor, count: int, rule: str) -> None:
    """Raise BatchError for token ids of `count` or more. rule: the words before `count` in the error"""
    wrong = tokens >= count
    if bool(wrong.any()):
        raise BatchError(
            f"{name} with {int(tokens[wrong][0])}, at {wrong.nonzero()[0].tolist()}",
            f"{rule} {count} tokens, from 0 on",
            "Check that tokenizer and model belong together, or resize the model's embeddings",
        )


class MeanOverRows(HostLoss):
    """A plain function of (output, microbatch) that returns the mean over the microbatch's rows.

    A function of (output, microbatch, number) also gets the microbatch's number in the step, from 0 on.
    """

    def __init__(self, function: Callable[..., Tensor], rows: Callable[[Microbatch], int]):
        self._function, self._rows = function, rows
        self.rows_per_group = rows_per_group(function)
        try:
            parameters = list(signature(function).parameters.values())
        except ValueError:  # some builtins have no signature
            parameters = []
        positional = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
        required = [of for of in parameters if of.kind in positional and of.default is Parameter.empty]
        self.takes_number = len(required) == _WITH_NUMBER

    def weight(self, microbatch: Microbatch) -> int:
        return self._rows(microbatch)

    def counted_rows(self, microbatch: Microbatch) -> Tensor:
        return torch.ones(self._rows(microbatch), dtype=torch.bool)

    def total(self, output: Any, microbatch: Microbatch, *index: int) -> Tensor:
        mean = self._function(output, microbatch, *index)
        if mean.dim() != 0:
            rule = "loss_fn returns one number, the mean over the microbatch's rows"
            remedy = "Reduce it, or pass an object with `weight` and `total` (penstock.batch.loss.Loss)"
            raise ModelError(f"a loss of shape {list(mean.shape)}", rule, remedy)
        return mean * self._rows(microbatch)


_WITH_NUMBER = 3  # output, microbatch and number

# an entry of a padded microbatch, for a loss that would count padding: an Unpadding (batch/padding.py)
UNPAD = f"{INNER}unpad"


def weight_of(loss: Loss, microbatch: Microbatch) -> int:
    """The loss's weight of a microbatch, without padding."""
    unpad = microbatch.get(UNPAD)
    return loss.weight(microbatch if unpad is None else unpad.entries(microbatch))


def counted_rows(loss: Loss, microbatch: Microbatch) -> Tensor:
    """Whether the loss counts something of each row (rows,); one that does not say so counts every row."""
    if isinstance(loss, HostLoss):
        return loss.counted_rows(microbatch)
    return torch.ones(batch_rows(microbatch, {}), dtype=torch.bool)


def hits_of(loss: object) -> Hits:
    """What counts the loss's hits."""
    hits: Hits = getattr(loss, "hits", NoHits())
    return hits


def rows_per_group(loss: object) -> int:
    """The number of rows that the loss compares with each other; 1 if it takes each row by itself."""
    return getattr(loss, "rows_per_group", 1)


def total_of(loss: Loss, output: Any, microbatch: Microbatch, index: int) -> Tensor:
    """The loss's total of a microbatch, without padding. index: passed on where the loss `takes_number`"""
    more = (index,) if getattr(loss, "takes_number", False) else ()
    unpad = microbatch.get(UNPAD)
    if unpad is not None:
        output, microbatch = unpad.output(output), unpad.entries(microbatch)
    return loss.total(output, microbatch, *more)


LossLike = Loss | Callable[[Any, Microbatch], Tensor] | Callable[[Any, Microbatch, int], Tensor] | None


def as_loss(loss_fn: LossLike, sharding: Sharding) -> Loss:
    """`loss_fn` as a Loss; None is NextToken."""
    if loss_fn is None:
        return NextToken()
    if hasattr(loss_fn, "weight") and hasattr(loss_fn, "total"):
        return loss_fn

    def rows(microbatch: Microbatch) -> int:
        """Rows of its tokens, if it has any, as images have no rows."""
        ids, dim = microbatch.get("input_ids"), sharding.get("input_ids", 0)
        if isinstance(ids, Tensor) and ids.dim() and isinstance(dim, int):
            return ids.shape[dim]
        return batch_rows(microbatch, sharding)

    return MeanOverRows(loss_fn, rows)
