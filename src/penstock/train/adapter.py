"""The section `adapter` of a config, and PEFT's LoraConfig from it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BeforeValidator, Field

from penstock.errors import ConfigError
from penstock.options import Count, Natural, Patterns
from penstock.train.config.values import Section

if TYPE_CHECKING:  # a config is read without torch, so that an error in it is raised at once
    from penstock.models.adapters import LoraConfig

ALL = "all-linear"


def _targets(value: object) -> object:
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list | tuple) and value and all(isinstance(name, str) for name in value):
        return tuple(value)
    raise ValueError(f"{value!r} names no modules; write {ALL}, or a list of names such as [q_proj, v_proj]")


def _section(value: object) -> object:
    if isinstance(value, str):  # as in other trainers
        raise ValueError(f"{value!r} is no section; write adapter: {{kind: {value.lower()}}}")
    return value


Naturals = Annotated[tuple[Natural, ...], Field(strict=False)]


class AdapterSection(Section):
    """A few weights that are trained while the model is frozen. It needs PEFT: `penstock[adapters]`."""

    kind: Literal["lora", "dora", "rslora"] = "lora"  # dora trains each row's length too
    r: Count = 16  # the rank of each update
    alpha: Count = 32  # an update counts alpha / r; with rslora alpha / sqrt(r)
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0  # of what enters an update
    # the modules with an update: all-linear (all but the head), a list of their last names, or a regular
    # expression for whole names
    targets: Annotated[str | tuple[str, ...], BeforeValidator(_targets)] = ALL
    exclude: Patterns = ()  # of these, modules to leave out
    layers: Naturals = ()  # only these, from 0; none: all
    target_parameters: Patterns = ()  # weights that are no module's own, such as mlp.experts.gate_up_proj
    ranks: dict[str, Count] = Field({})  # modules with another r, by regular expressions
    alphas: dict[str, Count] = Field({})  # and with another alpha
    bias: Literal["none", "lora_only", "all"] = "none"  # biases that are trained too: of targets, of all
    modules_to_save: Patterns = ()  # modules that are trained whole, such as lm_head
    # nf4: the matrices under the adapter in 4 bits (QLoRA, `penstock[low-bits]`); not with other axes
    quantize: Literal["nf4"] | None = None
    trained_tokens: Naturals = ()  # rows of the embedding that are trained, such as those of new tokens

    def check_keys(self) -> None:
        if self.kind == "dora" and self.target_parameters:
            raise ValueError("kind=dora with target_parameters: PEFT does not support it; take kind: lora")
        if self.layers and isinstance(self.targets, str):
            raise ValueError(f"layers with targets={self.targets!r}; give targets as a list of names")
        if self.dropout and self.target_parameters:
            rule = f"dropout={self.dropout} with target_parameters: PEFT does not support it"
            raise ValueError(f"{rule}; set dropout: 0")

    def lora_config(self) -> LoraConfig:
        """PEFT's config with these keys. Raises ConfigError if PEFT refuses them, or is not installed."""
        from penstock.models.adapters import import_peft

        peft = import_peft()
        try:
            return peft.LoraConfig(
                task_type="CAUSAL_LM",
                r=self.r,
                lora_alpha=self.alpha,
                lora_dropout=self.dropout,
                use_dora=self.kind == "dora",
                use_rslora=self.kind == "rslora",
                bias=self.bias,
                rank_pattern=dict(self.ranks),
                alpha_pattern=dict(self.alphas),
                target_modules=self.targets if isinstance(self.targets, str) else list(self.targets),
                exclude_modules=list(self.exclude) or None,
                layers_to_transform=list(self.layers) or None,
                target_parameters=list(self.target_parameters) or None,
                modules_to_save=list(self.modules_to_save) or None,
                trainable_token_indices=list(self.trained_tokens) or None,
            )
        except ValueError as cause:
            raise ConfigError("adapter", f"PEFT refuses its keys: {cause}", "Change them") from cause


AdapterKey = Annotated[AdapterSection | None, BeforeValidator(_section)]
