"""The keys of train.loss: a loss that compares rows, or of a teacher, in place of that of next tokens.

To add one, write the class of its keys with what a run must know of it, and its name in AnyLoss.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, get_args

from pydantic import Field

from penstock.options import NotNegative
from penstock.train.config.values import OneOf, PathText, Positive, Section

if TYPE_CHECKING:
    from penstock.batch.loss import Loss

# the values that keys of a config must have, and the error for another value: of {key}, {value} and {loss}
RequiredKeys = tuple[Mapping[str, Collection[object]], str]


class RowHead(NamedTuple):
    """The head over rows that a loss reads.

    gives: its outputs for a row, in words
    size: of a model that has one, the key of its config with its value
    one: whether it has one output
    """

    gives: str
    size: str
    one: bool


def _starts_later(what: str) -> RequiredKeys:
    """For a loss that steps before the run cannot compute, as it does not have `what` yet."""
    return (
        {"pipeline.balance": (None,)},
        f"{{key}}={{value}} runs steps before {{loss}} has {what}; leave balance out, or write "
        "layers_per_stage",
    )


class LossKeys(Section):
    """The keys of a loss, and what a run must know of it. The defaults are those of a loss of pairs."""

    reads: ClassVar[str | None] = "preference"  # the kind of its data; None: all with labels of next tokens
    rows: ClassVar[str] = "chosen and rejected rows"
    item: ClassVar[str] = "pair"  # what its mean is over
    metrics: ClassVar[tuple[str, ...]] = ("rewards/accuracies", "rewards/margins")  # the higher, the better
    refers: ClassVar[bool] = False  # whether it reads a reference model
    head: ClassVar[RowHead | None] = None  # that it reads; None: logits of tokens
    least_rows: ClassVar[int] = 1  # of a step, and of an evaluation
    few: ClassVar[str] = ""  # why fewer rows are too few
    limits: ClassVar[tuple[RequiredKeys, ...]] = ()

    @property
    def keys(self) -> dict[str, Any]:
        """The options of the loss."""
        return {key: value for key, value in self.model_dump().items() if key != "kind"}

    @abstractmethod
    def make(self) -> Loss:
        """The loss with these keys. It imports torch, which a config with an error does not need."""


class DPOSection(LossKeys):
    """Direct preference optimization. The reference is the starting weights, without a new adapter."""

    kind: Literal["dpo"] = "dpo"  # the name alone means all defaults
    beta: Positive = 0.1  # how strongly the model is held to the reference; of ipo, the paper's tau
    variant: Literal["sigmoid", "ipo"] = "sigmoid"  # ipo: a squared distance, of means over tokens
    refers: ClassVar[bool] = True
    limits: ClassVar[tuple[RequiredKeys, ...]] = (_starts_later("its reference"),)

    def make(self) -> Loss:
        from penstock.batch.preferences import DPO

        return DPO(**self.keys)


class ORPOSection(LossKeys):
    """Odds ratio preference optimization: the chosen completion's mean loss a token, and odds of both."""

    kind: Literal["orpo"] = "orpo"  # likewise
    beta: Positive = 0.1  # weight of the odds, the paper's lambda

    def make(self) -> Loss:
        from penstock.batch.preferences import ORPO

        return ORPO(**self.keys)


class SimPOSection(LossKeys):
    """Simple preference optimization: means over tokens, without a reference."""

    kind: Literal["simpo"] = "simpo"  # likewise
    beta: Positive = 2.0  # scale of the difference
    gamma: Annotated[float, Field(ge=0)] = 1.0  # the margin that it is to reach

    def make(self) -> Loss:
        from penstock.batch.preferences import SimPO

        return SimPO(**self.keys)


class RewardSection(LossKeys):
    """A reward model's loss (Bradley-Terry): the chosen row's score is to be above the rejected one's."""

    kind: Literal["reward"] = "reward"  # likewise; the model is a classifier with num_labels: 1
    center: NotNegative = 0.0  # weight of the squared sum of both scores, which keeps them around 0
    head: ClassVar[RowHead | None] = RowHead("one score", "num_labels: 1", one=True)

    def make(self) -> Loss:
        from penstock.batch.preferences import Reward

        return Reward(**self.keys)


class KTOSection(LossKeys):
    """Kahneman-Tversky optimization, of single completions. The reference is that of dpo."""

    kind: Literal["kto"] = "kto"  # likewise
    beta: Positive = 0.1  # how strongly the model is held to the reference
    desirable_weight: Positive = 1.0  # factor of the loss of desirable rows
    undesirable_weight: Positive = 1.0  # that of the others; raise the factor of the rarer kind
    reads: ClassVar[str | None] = "unpaired"
    rows: ClassVar[str] = "desirable and undesirable rows"
    item: ClassVar[str] = "row"
    metrics: ClassVar[tuple[str, ...]] = ("rewards/margins",)
    refers: ClassVar[bool] = True
    least_rows: ClassVar[int] = 2
    few: ClassVar[str] = "the KL term of KTO pairs each prompt with the completion of another row"
    limits: ClassVar[tuple[RequiredKeys, ...]] = (_starts_later("its reference"),)

    def make(self) -> Loss:
        from penstock.batch.kto import KTO

        return KTO(**self.keys)


class ContrastiveSection(LossKeys):
    """An embeddings model's loss: an anchor's positive against all other positives of the step (InfoNCE)."""

    kind: Literal["contrastive"] = "contrastive"  # likewise; a classifier, whose num_labels is the width
    temperature: Positive = 0.05  # cosines are divided by it
    reads: ClassVar[str | None] = "pair"
    rows: ClassVar[str] = "anchors and positives"
    metrics: ClassVar[tuple[str, ...]] = ("accuracy",)
    head: ClassVar[RowHead | None] = RowHead("a vector", "num_labels: 64, say, the vector's width", one=False)
    limits: ClassVar[tuple[RequiredKeys, ...]] = ((
        {"train.accumulate": (1,), "pipeline.balance": (None,), "parallel.dp_replicate": (1,),
         "parallel.dp_shard": (1,)},
        "{key}={value} steps on a part of the rows, and {loss} compares all of a step; leave it out, and "
        "give more pipeline.microbatches or pipeline.ranks",
    ),)  # fmt: skip

    def make(self) -> Loss:
        from penstock.batch.contrastive import Contrastive
        from penstock.pipeline.whole_step import WholeStepLoss

        return WholeStepLoss(Contrastive(**self.keys))


class DistillationSection(LossKeys):
    """Each next token's distribution approaches a teacher's, which runs over the same ranks."""

    kind: Literal["distillation"] = "distillation"  # required
    teacher: PathText  # a local Hugging Face folder with weights; its vocabulary is the model's
    divergence: Literal["forward", "reverse"] = "forward"  # KL(teacher || model), or the other way round
    temperature: Positive = 1.0  # of both distributions
    mix: Annotated[float, Field(ge=0, le=1)] = 0.0  # the share of the labels' cross-entropy
    reads: ClassVar[str | None] = None
    rows: ClassVar[str] = "next tokens"
    item: ClassVar[str] = "token"
    metrics: ClassVar[tuple[str, ...]] = ()
    limits: ClassVar[tuple[RequiredKeys, ...]] = (
        (
            {"data.images": (None,), "pipeline.shapes": ("inferred", "exchanged"),
             "parallel.cp": (1,), "parallel.ep": (1,), "parallel.tp": (1,)},
            "{key}={value} is not for {loss}; leave it out",
        ),
        _starts_later("its teacher"),
    )  # fmt: skip

    def make(self) -> Loss:
        from penstock.batch.distillation import Taught

        return Taught(self.divergence, self.temperature, self.mix)


AnyLoss = (
    DPOSection | ORPOSection | SimPOSection | RewardSection | KTOSection | ContrastiveSection
    | DistillationSection
)  # fmt: skip
LOSSES: dict[str, type[AnyLoss]] = {kind.model_fields["kind"].default: kind for kind in get_args(AnyLoss)}
_IS_NONE = f"is no loss; write {', '.join(LOSSES)}, or a mapping such as {{kind: dpo, beta: 0.1}}"
LossValue = Annotated[AnyLoss | None, OneOf("kind", LOSSES, _IS_NONE)]
