"""The section `adapter` of a config, and PEFT's LoraConfig from it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BeforeValidator, Field

from penstock.errors import ConfigError
from penstock.options import Count, Natural, Patterns
from penstock.train.config.values import PathText, Section

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

    # the folder of an adapter of this model, as PEFT or penstock wrote it: training goes on with its values
    # and its options, and only `quantize` may stand next to it; null: a new adapter
    path: PathText | None = None
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
        if self.path is not None and (given := self._options()):
            key, value = next(iter(given.items()))
            rule = f"path={self.path} with {key}={value}: the adapter in that folder has options of its own"
            raise ValueError(f"{rule}; leave {' and '.join(given)} out")
        if self.kind == "dora" and self.target_parameters:
            raise ValueError("kind=dora with target_parameters: PEFT does not support it; take kind: lora")
        if self.layers and isinstance(self.targets, str):
            raise ValueError(f"layers with targets={self.targets!r}; give targets as a list of names")
        if self.dropout and self.target_parameters:
            rule = f"dropout={self.dropout} with target_parameters: PEFT does not support it"
            raise ValueError(f"{rule}; set dropout: 0")

    def _options(self) -> dict[str, object]:
        """The keys that describe a new adapter, where they differ from their defaults."""
        names = (name for name in type(self).model_fields if name not in ("path", "quantize"))
        values = {name: getattr(self, name) for name in names}
        return {name: value for name, value in values.items()
                if value != type(self).model_fields[name].default}  # fmt: skip

    @property
    def folder(self) -> Path | None:
        """Where the adapter's first values are; None for a new one."""
        return None if self.path is None else Path(self.path).expanduser()

    def lora_config(self, task: str | None = "CAUSAL_LM") -> LoraConfig:
        """PEFT's config with these keys, or that in `path`.

        task: PEFT's name of what the model's head is for; None for one that it has no name for

        Raises ConfigError if PEFT refuses them, or is not installed; CheckpointError for a folder that holds
        no adapter, UnfitError for one that is not LoRA.
        """
        if self.folder is not None:
            return _written(self.folder)
        from penstock.models.adapters import import_peft

        peft = import_peft()
        try:
            return peft.LoraConfig(
                task_type=task,
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


def adapter_folder(section: AdapterSection | None) -> Path | None:
    """The folder of the adapter that the run begins with; None without one."""
    return None if section is None else section.folder


def _written(folder: Path) -> LoraConfig:
    """The config of the adapter in `folder`, to train it on."""
    from penstock.models.weights.saved_adapter import config_in

    config = config_in(folder)
    kind = getattr(config.peft_type, "value", config.peft_type)
    if kind != "LORA":
        rule = f"it is of kind {kind}, and LoRA's are trained here"
        raise ConfigError(
            f"adapter.path={folder}", rule, "Give the folder of a LoRA adapter, or leave path out"
        )
    config.inference_mode, config.init_lora_weights = False, True  # the values come from the file
    return config


AdapterKey = Annotated[AdapterSection | None, BeforeValidator(_section)]
