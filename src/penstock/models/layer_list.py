"""Which module list of a Hugging Face model holds its layers, and what stands beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import nn
from transformers import PreTrainedModel

from penstock.errors import ModelError

Rule = Callable[[PreTrainedModel], str]
_RULES: dict[type[PreTrainedModel], Rule] = {}


def register_chain(model: type[PreTrainedModel], rule: Rule) -> None:
    """For models of this class, `rule` names the module list of the layers, e.g. "model.blocks".

    Only where it is not the outermost list with as many entries as the config names layers. Everything else
    is still told by the model's own forward, and refused where that shows no chain.
    """
    _RULES[model] = rule


def no_chain(model: PreTrainedModel, rule: str) -> ModelError:
    return ModelError(
        type(model).__name__,
        rule,
        "Use a decoder-only model, or build the stages yourself with Pipeline.from_provider",
    )


def layer_list(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """The module list of the layers: by the model's rule, or the outermost with as many entries as the config
    names layers, or the outermost that holds most. Raises ModelError.
    """
    for kind in type(model).__mro__:
        if kind in _RULES:
            name = _RULES[kind](model)
            found = dict(model.named_modules()).get(name)
            if isinstance(found, nn.ModuleList):
                return name, found
            raise no_chain(model, f"its rule names {name!r} for the list of its layers, and that is none")
    if getattr(model.config, "is_encoder_decoder", False):
        raise no_chain(model, "a pipeline cuts one list of layers, and this model has two")
    wanted = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", None)
    lists = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    fitting = [found for found in lists if len(found[1]) == wanted] or [
        found for found in lists if len(found[1])
    ]
    if not fitting:
        raise no_chain(model, "a pipeline cuts one list of layers, and this model has none")
    return min(
        fitting, key=lambda found: (found[0].count("."), -sum(p.numel() for p in found[1].parameters()))
    )


def siblings(model: nn.Module, layers: str) -> Iterator[tuple[str, nn.Module]]:
    """The modules that stand beside the layer list and beside each module around it."""
    around: nn.Module = model
    prefix = ""
    for part in layers.split("."):
        for child, module in around.named_children():
            if child != part:
                yield prefix + child, module
        around = around.get_submodule(part)
        prefix += part + "."
