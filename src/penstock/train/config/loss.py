"""The keys of train.loss: a loss of preferences, in place of that of next tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from penstock.options import NotNegative
from penstock.train.config.values import Positive, Section, by_name, tag, tag_by

if TYPE_CHECKING:
    from penstock.batch.row_loss import RowLoss


class PairsSection(Section):
    """A loss that compares the two rows of each pair."""

    reads: ClassVar[str] = "preference"  # the kind of its data
    rows: ClassVar[str] = "chosen and rejected rows"
    item: ClassVar[str] = "pair"  # what its mean is over
    metrics: ClassVar[tuple[str, ...]] = ("rewards/accuracies", "rewards/margins")  # the higher, the better
    refers: ClassVar[bool] = False  # whether it reads a reference model


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
    reads: ClassVar[str] = "unpaired"
    rows: ClassVar[str] = "desirable and undesirable rows"
    item: ClassVar[str] = "row"
    metrics: ClassVar[tuple[str, ...]] = ("rewards/margins",)
    refers: ClassVar[bool] = True


AnyLoss = DPOSection | ORPOSection | SimPOSection | RewardSection | KTOSection
LOSSES: dict[str, type[AnyLoss]] = {
    "dpo": DPOSection, "orpo": ORPOSection, "simpo": SimPOSection, "reward": RewardSection, "kto": KTOSection
}  # fmt: skip


def make_loss(section: AnyLoss) -> RowLoss:
    """The loss with the keys of a section."""
    from penstock.batch import kto, preferences  # a config with an error is refused without torch

    kinds: dict[str, type[RowLoss]] = {
        "dpo": preferences.DPO, "orpo": preferences.ORPO, "simpo": preferences.SimPO,
        "reward": preferences.Reward, "kto": kto.KTO,
    }  # fmt: skip
    keys = section.model_dump()
    return kinds[keys.pop("kind")](**keys)


_IS_NONE = f"is no loss; write {', '.join(LOSSES)}, or a mapping such as {{kind: dpo, beta: 0.1}}"
_read = by_name("kind", LOSSES, _IS_NONE)

LossSection = Annotated[
    Annotated[DPOSection, Tag(tag("dpo"))]
    | Annotated[ORPOSection, Tag(tag("orpo"))]
    | Annotated[SimPOSection, Tag(tag("simpo"))]
    | Annotated[RewardSection, Tag(tag("reward"))]
    | Annotated[KTOSection, Tag(tag("kto"))],
    Discriminator(tag_by("kind")),
]
LossValue = Annotated[
    LossSection | None,
    BeforeValidator(
        lambda value: None if value is None else _read(value),
        json_schema_input_type=AnyLoss | Literal[tuple(LOSSES)] | None,
    ),
]
