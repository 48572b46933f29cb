"""Refuse options and models that the mesh's other axes would train wrong."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from transformers import PreTrainedModel

from penstock.batch.loss import Loss, MeanOverRows
from penstock.errors import ConfigError, ModelError
from penstock.models.tracing.chain import Chain
from penstock.parallel.fsdp import Sharded
from penstock.parallel.mesh import Axes
from penstock.parallel.mesh_plan import ParallelOptions
from penstock.parallel.tensor.plan import assigned
from penstock.parallel.tensor.styles import COLUMNS
from penstock.runtime.rng import dropouts

# what models call the dropout of a block's whole output
_AFTER_BLOCK = ("resid", "hidden_dropout")


def check_options(axes: Axes, sharded: Sharded, loss: Loss) -> None:
    """Raise ConfigError for options that do not fit the axes; an axis of -1 passes until it is known."""
    if sharded != Sharded() and (axes.dp_replicate, axes.dp_shard, axes.cp) == (1, 1, 1):
        raise ConfigError(
            f"sharded={sharded} with the axes {axes}",
            "`sharded` needs dp_shard, dp_replicate or cp above 1; here no weight is sharded",
            "Set dp_shard to 2 or more, or leave sharded out",
        )
    if axes.cp > 1 and isinstance(loss, MeanOverRows):
        raise ConfigError(
            f"a loss_fn that is a function, with cp={axes.cp}",
            "it returns the mean over whole rows, and each rank of cp holds a part of each row",
            "Give an object with `weight`, of the whole microbatch, and `total`, the sum over this rank's "
            "part (penstock.batch.loss.Loss), or leave out cp",
        )


def check_fits(
    model: PreTrainedModel, chain: Chain, axes: Axes, options: ParallelOptions, *, trains: bool
) -> None:
    """Raise ModelError or ConfigError for a model that the axes cannot train.

    An axis of -1 passes until its size is known.
    trains: whether the schedule has backwards; else no dropout is drawn
    """
    if axes.tp > 1 and options.sequence_parallel:
        _check_layers(model, chain)
    if not trains or max(axes.cp, axes.tp) < 2:
        return
    for name, key, probability in _sharded_dropouts(model, axes, options):
        axis = "cp" if axes.cp > 1 else "sequence_parallel" if options.sequence_parallel else "tp"
        raise ConfigError(
            f"{key}={probability} of {name or type(model).__name__} with {axis}",
            "each rank holds a part of these values, and would draw for it as if it were all of them",
            "Set it to 0 in the model's config (model.config.to_dict() shows its name there), or leave out "
            f"{axis}",
        )


def _check_layers(model: PreTrainedModel, chain: Chain) -> None:
    """Raise ModelError unless each layer needs only its own tokens."""
    odd = not (chain.only_hidden_states or chain.more_crosses)
    if odd or chain.has_early_inputs:
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
    """Module, key and probability of each dropout of sharded values; with tp, those between its matrices."""
    if axes.cp > 1 or options.sequence_parallel:
        yield from dropouts(model)
        return
    styles = assigned(model, axes.tp)
    blocks = {name.rpartition(".")[0] for name, style in styles.items() if style == COLUMNS}
    for name, key, probability in dropouts(model):
        inside = any(name == block or name.startswith(f"{block}.") for block in blocks)
        if inside and not any(word in f"{name}.{key}" for word in _AFTER_BLOCK):
            yield name, key, probability
