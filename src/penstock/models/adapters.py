"""PEFT's adapters in a model: LoRA, and modules or rows of an embedding that are trained with it.

PEFT replaces modules by wrappers, so that a model with an adapter named "default" has

    layers.0.self_attn.q_proj                           peft's lora.Linear
    layers.0.self_attn.q_proj.base_layer.weight         frozen: the base model's q_proj.weight
    layers.0.self_attn.q_proj.lora_A.default.weight     trained

A stage keeps its wrappers, so its forward is PEFT's. This file has the rest: refusals of adapters, the base
model inside the wrappers (files have its names), the names in an adapter's file, and merging. PEFT is
optional: it is imported where a model has an adapter or is to get one.
"""

from __future__ import annotations

import copy
import json
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from penstock.errors import ConfigError, ModelError
from penstock.models.name_patterns import check_patterns

LoraConfig: TypeAlias = Any  # peft's
PREFIX = "base_model.model."  # of every name in an adapter's file: the base model's path in PeftModel
_PLACES = ("base_model_name_or_path", "revision")  # options that locate the base model
_WITH_HEAD, _HEADS = ("SEQ_CLS", "TOKEN_CLS"), ("classifier", "score")  # tasks that train a head, its names
_NAMED = 12  # modules that an error lists


class Adapter(NamedTuple):
    """The adapter that a model trains: its name in PEFT, and its LoraConfig."""

    name: str
    config: LoraConfig

    @property
    def facts(self) -> dict[str, Any]:
        """The options of the adapter, as JSON, without those that locate its base model."""
        options: dict[str, Any] = json.loads(json.dumps(self.config.to_dict(), default=sorted))
        return {key: value for key, value in options.items() if key not in _PLACES}


def import_peft() -> Any:
    """The module peft. Raises ConfigError where it is not installed."""
    try:
        import peft
    except ImportError as cause:
        remedy = "Install it: pip install 'penstock[adapters]'"
        raise ConfigError("an adapter", "it needs PEFT, which is not installed", remedy) from cause
    return peft


def is_wrapper(module: nn.Module | None) -> bool:
    """Whether `module` is a wrapper of PEFT."""
    if "peft" not in sys.modules:
        return False
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    return isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper)


def wrappers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """PEFT's wrappers in `model` by name, outer ones before those within them."""
    return ((name, module) for name, module in model.named_modules() if is_wrapper(module))


# ---- A model object with adapters


def unwrap(model: Any) -> Any:
    """The transformers model inside a PeftModel; any other object unchanged.

    Raises ModelError for prompts in place of adapters: they change the model's inputs.
    """
    peft = sys.modules.get("peft")
    if peft is None or not isinstance(model, peft.PeftModel):
        return model
    for config in model.peft_config.values():
        if config.is_prompt_learning:
            raise _refused(f"{config.peft_type.value}", "its prompt is put before the tokens of each row")
    return model.get_base_model()


def adapter_of(model: nn.Module) -> Adapter | None:
    """The adapter that `model` trains; None for one without.

    Raises ModelError for adapters that would not be exact.
    """
    configs: Mapping[str, Any] | None = getattr(model, "peft_config", None)
    if not configs:
        return None
    _check_final_norm(model)
    modules = [module for _, module in wrappers(model)]
    active = list(dict.fromkeys(name for module in modules for name in module.active_adapters))
    if len(active) > 1:
        raise _refused(f"active adapters {', '.join(active)}", "one is trained and saved at a time",
                       "Activate one: model.set_adapter(name)")  # fmt: skip
    if len(configs) > 1 and any(parameter.is_meta for parameter in model.parameters()):
        names, rule = ", ".join(configs), "only one gets initial values"
        remedy = "Keep one (model.delete_adapter(name)), or give the model with its values"
        raise _refused(f"adapters {names} on the meta device", rule, remedy)
    name = active[0] if active else next(iter(configs))
    config = configs[name]
    if config.peft_type.value != "LORA":
        raise _refused(f"a {config.peft_type.value} adapter", "it is not known to be exact in stages")
    if getattr(config, "target_modules_to_tie", None):
        raise _refused(
            "ensure_weight_tying of LoRA on tied embeddings", "both ends of the model would train one tensor",
            "Train rows of the embedding (trainable_token_indices), or leave ensure_weight_tying out",
        )  # fmt: skip
    for module in modules:
        if getattr(module, "merged_adapters", None):
            raise _refused("a merged adapter", "its weights are frozen inside the base model's",
                           "Call model.unmerge_adapter()")  # fmt: skip
        copies = getattr(module, "modules_to_save", {})
        if other := next((key for key in copies if any(map(is_wrapper, copies[key].modules()))), None):
            remedy = f"Call model.delete_adapter({other!r}), or leave that module out of the targets"
            rule = "they would update a copy that another adapter trains, and be in no file"
            raise _refused(f"updates inside adapter {other}'s modules_to_save", rule, remedy)
        variant = getattr(module, "lora_variant", {}).get(name)
        if variant is not None and not type(variant).__name__.startswith("Dora"):
            raise _refused(
                f"{type(variant).__name__} of PEFT",
                "of LoRA's variants only plain LoRA, rsLoRA and DoRA are known to be exact in stages",
            )
    return Adapter(name, config)


def _check_final_norm(model: nn.Module) -> None:
    """Raise ModelError if the first prediction layer, which applies the final norm, would train a copy."""
    ties: Mapping[str, str] = getattr(model, "_prediction_ties", {})
    norms = {name for pair in ties.items() if ".final_norm." in pair[0] for name in pair}
    for name, _ in wrappers(model):
        if f"{name}.weight" in norms:
            raise _refused(
                f"modules_to_save of {name} and prediction layers (mtp)",
                "the first prediction layer applies the final norm, and a trained copy would be in no file",
                "Name only norms of layers, or leave out mtp_loss_scaling_factor",
            )


def _refused(value: str, rule: str, remedy: str = "Take LoRA, rsLoRA or DoRA") -> ModelError:
    return ModelError(f"a model with {value}", rule, remedy)


# ---- A new adapter


def add_adapter(
    model: PreTrainedModel, config: LoraConfig, base: str | None = None, revision: str | None = None
) -> None:
    """Put the wrappers of a new adapter into `model`, which is on the meta device and stays there.

    base: the folder of the base model, or its Hub name, which the adapter's files name
    revision: of a Hub name
    Raises ConfigError for targets that match nothing, and for settings that PEFT refuses.
    """
    peft = import_peft()
    config = copy.deepcopy(config)
    if config.init_lora_weights not in (True, "gaussian"):
        raise ConfigError(
            f"init_lora_weights={config.init_lora_weights!r}",
            "it is computed from values of the whole model, which no rank has",
            "Take True or 'gaussian', or use PEFT itself: build(get_peft_model(...)), merge_and_unload()",
        )
    config.base_model_name_or_path = None  # PEFT sets the model's name, and warns about another
    if config.task_type in _WITH_HEAD:  # an adapter's file has the names that PEFT adds each time
        given = config.modules_to_save or ()
        config.modules_to_save = [name for name in given if name not in _HEADS] or None
        if config.target_modules == "all-linear":  # PEFT leaves a head out of it for the first task alone
            config.exclude_modules = [*(config.exclude_modules or ()), *_HEADS]
    try:
        check_patterns(vars(config), [name for name, _ in model.named_modules()])
        _check_names(model, config)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # from transformers, and meant for PEFT
            peft.get_peft_model(model, config, low_cpu_mem_usage=True)
    except ConfigError:
        raise
    except Exception as cause:  # PEFT checks some keys, and fails on others in many ways
        said = " ".join(str(cause).split()).rstrip(".")
        raise ConfigError("the adapter's settings", f"PEFT refuses them: {said}", "Change them") from cause
    _widen(model)
    if base is not None:
        config.base_model_name_or_path, config.revision = base, revision


def _widen(model: nn.Module) -> None:
    """Cast updates of float64 weights to float64, as PEFT does only off the meta device."""
    for _, module in wrappers(model):
        if hasattr(module, "lora_A") and base_weight(module).dtype == torch.float64:
            for name in module.adapter_layer_names:
                getattr(module, name).to(torch.float64)


def _check_names(model: PreTrainedModel, config: LoraConfig) -> None:
    """Raise ConfigError for a name of the config that no module or parameter of the model has."""
    modules = {name: module for name, module in model.named_modules() if name}
    layers = [name for name, module in modules.items() if isinstance(module, nn.Embedding)
              or getattr(module, "weight", torch.empty(0)).ndim == 2]  # fmt: skip
    parameters = [name for name, parameter in model.named_parameters() if parameter.ndim == 3]
    tokens = config.trainable_token_indices
    asked: dict[str, tuple[Any, Iterable[str], Sequence[str]]] = {
        "target_modules": (config.target_modules, modules, layers),
        "modules_to_save": (config.modules_to_save, modules, layers),
        "target_parameters": (config.target_parameters, dict(model.named_parameters()), parameters),
        "trainable_token_indices": (list(tokens) if isinstance(tokens, dict) else None, modules, layers),
    }
    for key, (wanted, names, some) in asked.items():
        if isinstance(wanted, str):  # PEFT refuses a pattern that matches nothing
            continue
        for target in sorted(wanted or ()):
            if not any(f".{name}".endswith(f".{target}") for name in names):
                last = sorted({name.rpartition(".")[2] for name in some})
                raise ConfigError(
                    f"{target!r} in the adapter's {key}",
                    f"nothing in {type(model).__name__} has such a name",
                    f"Take some of {', '.join(last[:_NAMED])}" if last else "Leave it out",
                )
    rows = len(model.get_input_embeddings().weight)
    indices = [n for ns in tokens.values() for n in ns] if isinstance(tokens, dict) else tokens or ()
    if wrong := [index for index in indices if not 0 <= index < rows]:
        raise ConfigError(
            f"{wrong[0]} in the adapter's trainable_token_indices",
            f"the model's embedding has rows 0 to {rows - 1}",
            "Give token ids",
        )


# ---- The base model inside the wrappers


@contextmanager
def without_adapters(*models: nn.Module) -> Iterator[None]:
    """Inside the block, the models are as before PEFT wrapped their modules, with the same names."""
    parents = [module for model in models for module in model.modules()]
    replaced = [
        (parent._modules, name, child, _base_of(child))
        for parent in parents
        for name, child in parent._modules.items()
        if is_wrapper(child)
    ]
    for table, name, _, plain in replaced:
        table[name] = plain
    try:
        yield
    finally:
        for table, name, wrapper, _ in replaced:
            table[name] = wrapper


def _base_of(module: Any) -> Any:
    while is_wrapper(module):
        module = module.base_layer if hasattr(module, "base_layer") else module.original_module
    return module


def forget_tied_tokens(stage: nn.Module) -> None:
    """Remove the reference from a tied head's trained rows to the embedding's, which may be on another stage.

    PEFT needs the reference only to add adapters and to save.
    """
    for _, module in wrappers(stage):
        if getattr(module, "_tied_adapter", None):
            module._tied_adapter = []


def base_weight(wrapper: Any) -> Tensor:
    """The base model's weight in a wrapper, perhaps inside further wrappers."""
    weight: Tensor = _base_of(wrapper)._parameters[getattr(wrapper, "parameter_name", "weight")]
    return weight


# ---- Names in an adapter's file


def names_in_file(model: nn.Module, adapter: Adapter) -> dict[str, str]:
    """For each parameter of the whole `model` that is saved in adapter_model.safetensors, its name there."""
    from peft.utils import get_peft_model_state_dict

    names = {name: name for name in model.state_dict()}  # PEFT reads only names
    kept = get_peft_model_state_dict(
        model, state_dict=names, adapter_name=adapter.name, save_embedding_layers=False
    )
    return {name: f"{PREFIX}{key}" for key, name in kept.items()}


# ---- Merging


def merge(stage: nn.Module, adapter: Adapter) -> None:
    """Add the adapter's updates to the base weights, in place, and remove the wrappers. Raises ModelError."""
    for parent in [module for module in stage.modules() if not is_wrapper(module)]:
        for key, child in parent._modules.items():
            if is_wrapper(child):
                parent._modules[key] = _merged(key, child, adapter.name)
    del stage.peft_config


def _merged(key: str, wrapped: Any, adapter: str) -> nn.Module:
    """`wrapped` as a plain module that computes the same. Inner wrappers are merged first.

    A tied head with an update and trained rows has two wrappers: PEFT's own merge leaves the rows out.
    """
    if is_wrapper(inner := getattr(wrapped, "base_layer", None)):
        wrapped.base_layer = _merged(key, inner, adapter)
    options = {"safe_merge": True, "adapter_names": [adapter]}
    try:
        if hasattr(wrapped, "unload_and_optionally_merge_module"):
            plain: nn.Module = wrapped.unload_and_optionally_merge_module(merge=True, **options)
        else:
            wrapped.merge(**options)
            plain = wrapped.get_base_layer()
    except (ValueError, NotImplementedError, RuntimeError) as cause:
        raise ModelError(f"merging {key}", f"PEFT refuses it: {cause}", "Keep the adapter") from cause
    return plain


def merged_ties(model: nn.Module, ties: Sequence[tuple[str, ...]]) -> tuple[tuple[str, ...], ...]:
    """The groups of the base model's tied weights that are still one weight after `merge`.

    An adapter on one of two tied modules makes their weights differ.
    """
    values = {name: _values_after_merge(model, name) for names in ties for name in names}
    return tuple(names for names in ties if len({values[name] for name in names}) == 1)


def _values_after_merge(model: nn.Module, name: str) -> frozenset[int]:
    """The updates merged into weight `name` of the base model: equal for weights that stay equal."""
    path, _, key = name.rpartition(".")
    module = model.get_submodule(path)
    base = _base_of(module)
    added = {*map(id, module.parameters())}.difference(map(id, base.parameters()))
    return frozenset({*added, id(base._parameters[key])})
