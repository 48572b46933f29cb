"""The keys of train.loss: a loss that compares rows, or of a teacher, in place of that of next tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from penstock.options import NotNegative
from penstock.train.config.values import PathText, Positive, Section, by_name, tag, tag_by

if TYPE_CHECKING:
    from penstock.batch.loss import Loss
    from penstock.batch.row_loss import RowLoss


class PairsSection(Section):
    """A loss that compares the two rows of each pair."""

    reads: ClassVar[str | None] = "preference"  # the kind of its data
    rows: ClassVar[str] = "chosen and rejected rows"
    item: ClassVar[str] = "pair"  # what its mean is over
    metrics: ClassVar[tuple[str, ...]] = ("rewards/accuracies", "rewards/margins")  # the higher, the better
    refers: ClassVar[bool] = False  # whether it reads a reference model
    needs: ClassVar[str] = "its reference"  # what steps before the run's own do not have


class DPOSection(PairsSection):
    """Direct preference optimization. The reference is the starting weights, without a new adapter."""

    kind: Literal["dpo"] = "dpo"  # the name alone means all defaults
    beta: Positive = 0.1  # how strongly the model is held to the reference; of ipo, the paper's tau
    variant: Literal["sigmoid", "ipo"] = "sigmoid"  # ipo: a squared distance, of means over tokens
    refers: ClassVar[bool] = True


class ORPOSection(PairsSection):
    """Odds ratio preference optimization: the chosen completion's mean loss a token, and odds of both."""

    kind: Literal["orpo"] = "orpo"  # likewise
    beta: Positive = 0.1  # weight of the odds, the paper's lambda


class SimPOSection(PairsSection):
    """Simple preference optimization: means over tokens, without a reference."""

    kind: Literal["simpo"] = "simpo"  # likewise
    beta: Positive = 2.0  # scale of the difference
    gamma: Annotated[float, Field(ge=0)] = 1.0  # the margin that it is to reach


class RewardSection(PairsSection):
    """A reward model's loss (Bradley-Terry): the chosen row's score is to be above the rejected one's."""

    kind: Literal["reward"] = "reward"  # likewise; the model is a classifier with num_labels: 1
    center: NotNegative = 0.0  # weight of the squared sum of both scores, which keeps them around 0


class KTOSection(Section):
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
    needs: ClassVar[str] = "its reference"


class ContrastiveSection(PairsSection):
    """An embeddings model's loss: an anchor's positive against all other positives of the step (InfoNCE)."""

    kind: Literal["contrastive"] = "contrastive"  # likewise; a classifier, whose num_labels is the width
    temperature: Positive = 0.05  # cosines are divided by it
    reads: ClassVar[str | None] = "pair"
    rows: ClassVar[str] = "anchors and positives"
    metrics: ClassVar[tuple[str, ...]] = ("accuracy",)


class DistillationSection(Section):
    """Each next token's distribution approaches a teacher's, which runs over the same ranks."""

    kind: Literal["distillation"] = "distillation"  # required
    teacher: PathText  # a local Hugging Face folder with weights; its vocabulary is the model's
    divergence: Literal["forward", "reverse"] = "forward"  # KL(teacher || model), or the other way round
    temperature: Positive = 1.0  # of both distributions
    mix: Annotated[float, Field(ge=0, le=1)] = 0.0  # the share of the labels' cross-entropy
    reads: ClassVar[str | None] = None  # all data with labels of next tokens
    rows: ClassVar[str] = "next tokens"
    item: ClassVar[str] = "token"
    metrics: ClassVar[tuple[str, ...]] = ()
    refers: ClassVar[bool] = False
    needs: ClassVar[str] = "its teacher"


AnyLoss = (
    DPOSection | ORPOSection | SimPOSection | RewardSection | KTOSection | ContrastiveSection
    | DistillationSection
)  # fmt: skip
LOSSES: dict[str, type[AnyLoss]] = {
    "dpo": DPOSection, "orpo": ORPOSection, "simpo": SimPOSection, "reward": RewardSection,
    "kto": KTOSection, "contrastive": ContrastiveSection, "distillation": DistillationSection,
}  # fmt: skip


def make_loss(section: AnyLoss) -> Loss:
    """The loss with the keys of a section."""
    # a config with an error is refused without torch
    from penstock.batch import distillation, kto, preferences
    from penstock.batch.contrastive import Contrastive
    from penstock.pipeline.whole_step import WholeStepLoss

    if isinstance(section, ContrastiveSection):
        return WholeStepLoss(Contrastive(section.temperature))
    kinds: dict[str, type[RowLoss]] = {
        "dpo": preferences.DPO, "orpo": preferences.ORPO, "simpo": preferences.SimPO,
        "reward": preferences.Reward, "kto": kto.KTO, "distillation": distillation.Taught,
    }  # fmt: skip
    keys = section.model_dump()
    keys.pop("teacher", None)  # which runs beside the loss
    return kinds[keys.pop("kind")](**keys)


_IS_NONE = f"is no loss; write {', '.join(LOSSES)}, or a mapping such as {{kind: dpo, beta: 0.1}}"
_read = by_name("kind", LOSSES, _IS_NONE)

LossSection = Annotated[
    Annotated[DPOSection, Tag(tag("dpo"))]
    | Annotated[ORPOSection, Tag(tag("orpo"))]
    | Annotated[SimPOSection, Tag(tag("simpo"))]
    | Annotated[RewardSection, Tag(tag("reward"))]
    | Annotated[KTOSection, Tag(tag("kto"))]
    | Annotated[ContrastiveSection, Tag(tag("contrastive"))]
    | Annotated[DistillationSection, Tag(tag("distillation"))],
    Discriminator(tag_by("kind")),
]
LossValue = Annotated[
    LossSection | None,
    BeforeValidator(
        lambda value: None if value is None else _read(value),
        json_schema_input_type=AnyLoss | Literal[tuple(LOSSES)] | None,
    ),
]
