"""The section `optimizer` of a config: by which optimizer the parameters are trained, and at what rate."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from penstock.train.values import Beta, Fraction, Positive, Section

NotNegative = Annotated[float, Field(ge=0)]


class AdamWKeys(Section):
    """What AdamW takes, of all parameters or of those that Muon leaves."""

    learning_rate: Positive = 3e-4  # once warmed up
    betas: Annotated[tuple[Beta, Beta], Field(strict=False)] = (0.9, 0.95)  # of gradients, of their squares
    eps: Positive = 1e-8  # added to the divisor, lest it be zero
    weight_decay: NotNegative = 0.1  # not on norms and biases


class AdamWSection(AdamWKeys):
    """AdamW of all parameters. Every rate rises in a line and falls along a cosine to a floor."""

    name: Literal["adamw"] = "adamw"  # it may be left out
    warmup_steps: Annotated[int, Field(ge=0)] = 0  # in which the rate rises
    final_fraction: Fraction = 0.1  # of the learning rate, at the last step

    @model_validator(mode="before")
    @classmethod
    def without_muons(cls, given: Any) -> Any:
        return _without(given, MuonSection, cls, "are Muon's; set optimizer.name=muon, or leave them out")


class MuonSection(Section):
    """Muon of the matrices inside of layers (penstock.parallel.whole_matrices.matrices), AdamW of the rest:
    embeddings, head, norms, biases and routers. All rates rise and fall together.
    """

    name: Literal["muon"] = "muon"  # it has to be given
    learning_rate: Positive = 0.02  # of the matrices; with adjust: match_rms_adamw one such as AdamW's
    weight_decay: NotNegative = 0.1  # of the matrices
    momentum: Beta = 0.95  # of the gradients' running mean
    nesterov: bool = True  # step along the gradient and the mean together, not the mean alone
    ns_steps: Annotated[int, Field(ge=1, lt=100)] = 5  # of the iteration that makes a matrix orthogonal
    # By what a matrix's rate is multiplied for its shape of (rows, columns): original: the root of
    # rows / columns where that is more than 1; match_rms_adamw: 0.2 times the root of the larger one
    adjust: Literal["original", "match_rms_adamw"] = "original"
    adamw: AdamWKeys = AdamWKeys()  # of the rest
    warmup_steps: Annotated[int, Field(ge=0)] = 0  # in which the rates rise
    final_fraction: Fraction = 0.1  # of each learning rate, at the last step

    @model_validator(mode="before")
    @classmethod
    def without_adamws(cls, given: Any) -> Any:
        return _without(given, AdamWSection, cls, "are AdamW's; write them into optimizer.adamw")


def _without(given: Any, other: type[Section], own: type[Section], rule: str) -> Any:
    """Raises ValueError for keys that only the other optimizer's section has."""
    keys = given if isinstance(given, dict) else ()
    foreign = [key for key in keys if key in other.model_fields and key not in own.model_fields]
    if foreign:
        raise ValueError(f"with name={own.model_fields['name'].default} {' and '.join(foreign)} {rule}")
    return given


def _named(given: object) -> object:
    """Checked here, so that a wrong name is told of by name."""
    if isinstance(given, AdamWSection | MuonSection):
        return given
    if not isinstance(given, dict):
        raise ValueError(f"{given!r} is no section; write keys such as {{name: muon, learning_rate: 0.02}}")
    name = given.get("name", "adamw")
    if name not in ("adamw", "muon"):
        raise ValueError(f"name={name!r} is no optimizer of the trainer; write adamw or muon")
    return given


def _tag(given: Any) -> str:
    return "of " + str(given.get("name", "adamw") if isinstance(given, dict) else given.name)


OptimizerSection = Annotated[
    # tagged, so that what is wrong is told of the one that is named
    Annotated[AdamWSection, Tag("of adamw")] | Annotated[MuonSection, Tag("of muon")],
    Discriminator(_tag),
    BeforeValidator(_named),
]
