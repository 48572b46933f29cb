"""Refuse models that the options of a pipeline do not support, before any weight is read."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from transformers import PreTrainedModel

from penstock.batch.loss import NextToken
from penstock.errors import ConfigError, ModelError
from penstock.models.adapters import wrappers
from penstock.models.auto_class import check_language_model
from penstock.models.huggingface.padded import effect_of_padding
from penstock.models.huggingface.references import reaching_out
from penstock.models.huggingface.stages import refuse_unsupported_options
from penstock.models.source import Source
from penstock.models.tracing.chain import Chain
from penstock.parallel.axes import Axes
from penstock.parallel.context.check import check_padded
from penstock.parallel.mesh_plan import ParallelOptions, check_model
from penstock.parallel.tensor.plan import assigned
from penstock.parallel.tensor.styles import COLUMNS
from penstock.pipeline.options import Options
from penstock.runtime.rng import dropouts


def check_source(source: Source, options: Options) -> None:
    """Raise ConfigError, ModelError for a model that the options do not support."""
    refuse_unsupported_options(source.model, own_loss=options.own_loss)
    if isinstance(options.loss_fn, NextToken):
        check_language_model(source.model)
    if (padding := options.padding()) is not None:
        effect_of_padding(source.model, padding)
        check_padded(source.model)
    if options.axes is not None:
        check_on_axes(source, options.axes, options.parallel_options())


def check_on_axes(source: Source, axes: Axes, options: ParallelOptions) -> None:
    """Raise ConfigError, ModelError for a model, or its adapter, that the axes would train wrongly."""
    check_adapter(source, axes)
    check_model(source.model, axes, options)


# what models call the dropout of a block's whole output
_AFTER_BLOCK = ("resid", "hidden_dropout")


def check_adapter(source: Source, axes: Axes) -> None:
    """Raise ConfigError for axes that would shard matrices that an adapter needs whole."""
    if source.quantize is not None and axes.ranks_per_stage != 1:
        rule = "the other axes shard weights, and weights in 4 bits cannot be sharded"
        raise ConfigError(f"quantize={source.quantize!r} with {axes}", rule, "Leave out one of the two")
    for name, wrapper in wrappers(source.model) if max(axes.tp, axes.ep) > 1 else ():
        if axes.tp > 1:
            raise ConfigError(
                f"tp={axes.tp} for a model with an adapter (on {name})",
                "PEFT's layers compute with whole matrices, and tp gives each rank a part of them",
                "Use dp_shard instead",
            )
        inside = [f"{name}.{inner}" for inner, _ in wrapper.named_modules()]
        if any("experts" in path.split(".") for path in inside):
            raise ConfigError(
                f"ep={axes.ep} for an adapter on {name}",
                "ep gives each rank some of the experts, and the adapter's matrices are of all of them",
                "Target other modules, such as q_proj, or leave out ep",
            )


def check_fits(
    model: PreTrainedModel, chain: Chain, axes: Axes, options: ParallelOptions, *, trains: bool
) -> None:
    """Raise ModelError or ConfigError for a model that the axes cannot train.

    An axis of -1 passes until its size is known.
    trains: whether the schedule has backwards; else no dropout is drawn
    """
    if chain.prediction_layers and max(axes.tp, axes.cp) > 1:
        raise ConfigError(
            f"mtp_loss_scaling_factor with {axes}",
            "tp and cp shard tokens or matrices, and prediction layers use whole ones",
            "Leave out tp and cp, or mtp_loss_scaling_factor",
        )
    if axes.tp > 1 and options.sequence_parallel:
        _check_layers(model, chain)
    if axes.ranks_per_stage != 1 and (reference := next(reaching_out(model), None)):
        raise ModelError(
            f"{reference[0]}, which uses {reference[1]}, on {axes}",
            "the other axes shard weights, which are gathered for the forward of their own module only",
            "Let the function use its own module only, or leave out the other axes",
        )
    if not trains or max(axes.cp, axes.tp) < 2:
        return
    for name, key, probability in _sharded_dropouts(model, axes, options):
        axis = "cp" if axes.cp > 1 else "sequence_parallel" if options.sequence_parallel else "tp"
        raise ConfigError(
            f"{key}={probability} of {name or type(model).__name__} with {axis}",
            "each rank has a part of these values, and would draw random numbers as if it had all of them",
            "Set it to 0 in the model's config (model.config.to_dict() shows its name there), or leave out "
            f"{axis}",
        )


def _check_layers(model: PreTrainedModel, chain: Chain) -> None:
    """Raise ModelError unless each layer needs only its own tokens."""
    odd = not (chain.only_hidden_states or chain.more_crosses)
    if odd or chain.has_early_inputs or chain.features:
        raise ModelError(
            f"{type(model).__name__} with sequence_parallel",
            "its hidden states are not (rows, tokens, width)"
            if odd
            else "its layers take values of all tokens in addition to sharded hidden states",
            "Set sequence_parallel to False for this model",
        )


def _sharded_dropouts(
    model: nn.Module, axes: Axes, options: ParallelOptions
) -> Iterator[tuple[str, str, float]]:
    """Module, key and probability of each dropout on sharded values; with tp, those between its matrices."""
    if axes.cp > 1 or options.sequence_parallel:
        yield from dropouts(model)
        return
    styles = assigned(model, axes.tp)
    blocks = {name.rpartition(".")[0] for name, style in styles.items() if style == COLUMNS}
    for name, key, probability in dropouts(model):
        inside = any(name == block or name.startswith(f"{block}.") for block in blocks)
        if inside and not any(word in f"{name}.{key}" for word in _AFTER_BLOCK):
            yield name, key, probability
