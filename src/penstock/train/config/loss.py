"""The keys of train.loss: a loss of preferences, in place of that of next tokens."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from penstock.batch.preferences import DPO, ORPO, Preference, SimPO
from penstock.train.config.values import Positive, Section


class DPOSection(Section):
    """Direct preference optimization. The reference is the starting weights, without a new adapter."""

    kind: Literal["dpo"] = "dpo"  # the name alone means all defaults
    beta: Positive = 0.1  # how strongly the model is held to the reference; of ipo, the paper's tau
    variant: Literal["sigmoid", "ipo"] = "sigmoid"  # ipo: a squared distance, of means over tokens


class ORPOSection(Section):
    """Odds ratio preference optimization: the chosen completion's mean loss a token, and odds of both."""

    kind: Literal["orpo"] = "orpo"  # likewise
    beta: Positive = 0.1  # weight of the odds, the paper's lambda


class SimPOSection(Section):
    """Simple preference optimization: means over tokens, without a reference."""

    kind: Literal["simpo"] = "simpo"  # likewise
    beta: Positive = 2.0  # scale of the difference
    gamma: Annotated[float, Field(ge=0)] = 1.0  # the margin that it is to reach


AnyLoss = DPOSection | ORPOSection | SimPOSection
LOSSES: dict[str, tuple[type[AnyLoss], type[Preference]]] = {
    "dpo": (DPOSection, DPO),
    "orpo": (ORPOSection, ORPO),
    "simpo": (SimPOSection, SimPO),
}


def make_loss(section: AnyLoss) -> Preference:
    """The loss with the keys of a section."""
    keys = section.model_dump()
    return LOSSES[keys.pop("kind")][1](**keys)


def _check_section(value: object) -> object:
    """Read a name as a mapping. Refuse other values here, as pydantic's words for a union are unclear."""
    section = {"kind": value} if isinstance(value, str) else value
    if isinstance(section, Section) or (isinstance(section, dict) and section.get("kind") in list(LOSSES)):
        return section
    raise ValueError(
        f"{value!r} is no loss; write {', '.join(LOSSES)}, or a mapping such as {{kind: dpo, beta: 0.1}}"
    )


def _tag(section: Any) -> str:
    return str(section["kind"] if isinstance(section, dict) else section.kind)


LossSection = Annotated[
    Annotated[DPOSection, Tag("dpo")]
    | Annotated[ORPOSection, Tag("orpo")]
    | Annotated[SimPOSection, Tag("simpo")],
    Discriminator(_tag),
]
LossValue = Annotated[LossSection | None, BeforeValidator(lambda value: value and _check_section(value))]
