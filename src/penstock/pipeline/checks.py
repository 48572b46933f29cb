"""Whether a model and its options can be trained beside other axes: by what its layers take, what it draws at
random, and what the options are of.
"""

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


def check_options(axes: Axes, sharded: Sharded, loss: Loss) -> None:
    """Raises ConfigError. An axis of -1 is looked at once its size is known."""
    if sharded != Sharded() and (axes.dp_replicate, axes.dp_shard, axes.cp) == (1, 1, 1):
        raise ConfigError(
            f"sharded={sharded} with the axes {axes}",
            "it is of weights that FSDP2 holds, and these are whole: it would change nothing",
            "Set dp_shard to 2 or more, or leave sharded out",
        )
    if axes.cp > 1 and isinstance(loss, MeanOverRows):
        raise ConfigError(
            f"a loss_fn that is a function, with cp={axes.cp}",
            "it returns the mean over whole rows, and each rank of cp has a part of each row",
            "Give an object with `weight`, of the whole microbatch, and `total`, the sum over this rank's "
            "part (penstock.batch.loss.Loss), or leave out cp",
        )


def check_fits(
    model: PreTrainedModel, chain: Chain, axes: Axes, ways: ParallelOptions, *, trains: bool
) -> None:
    """Raises ModelError, ConfigError. An axis of -1 is looked at once its size is known.

    trains: whether there are backwards; else nothing is drawn
    """
    if axes.tp > 1 and ways.sequence_parallel:
        _check_layers(model, chain)
    if not trains or max(axes.cp, axes.tp) < 2:
        return
    for name, key, chance in _in_parts(model, axes, ways):
        axis = "cp" if axes.cp > 1 else "sequence_parallel" if ways.sequence_parallel else "tp"
        raise ConfigError(
            f"{key}={chance} of {name or type(model).__name__} with {axis}",
            "each rank has a part of these values, and draws for it as if it were all of them",
            "Set it to 0 in the model's config (model.config.to_dict() tells its name there), or leave out "
            f"{axis}",
        )


def _check_layers(model: PreTrainedModel, chain: Chain) -> None:
    """Whether layers can be given their own tokens alone."""
    odd = not (chain.plain or any(chain.given) or chain.hands or chain.shares or chain.records)
    if odd or any(chain.given):
        raise ModelError(
            f"{type(model).__name__} with sequence_parallel",
            "its hidden states are no (rows, tokens, width)"
            if odd
            else "its layers take values of all tokens beside hidden states that are shared out",
            "Set sequence_parallel to False for this model",
        )


def _in_parts(model: nn.Module, axes: Axes, ways: ParallelOptions) -> Iterator[tuple[str, str, float]]:
    """The dropouts of values of which each rank has a part: with tp, those between its matrices."""
    if axes.cp > 1 or ways.sequence_parallel:
        yield from dropouts(model)
        return
    styles = assigned(model, axes.tp)
    owners = {name.rpartition(".")[0] for name, style in styles.items() if style == COLUMNS}
    for name, key, chance in dropouts(model):
        inside = any(name == owner or name.startswith(f"{owner}.") for owner in owners)
        if inside and not any(word in f"{name}.{key}" for word in _AFTER):
            yield name, key, chance


_AFTER = ("resid", "hidden_dropout")  # what models call dropout of a part's whole output
