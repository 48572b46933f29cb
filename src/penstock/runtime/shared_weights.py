"""Shared weights: copies of one weight on several stages, as of a tied embedding or in a second model copy.

All copies begin with the same values. After each step every copy gets the sum of all their gradients, so
they stay equal under any optimizer. The norm and checkpoints take the first copy only.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from penstock.errors import ModelError
from penstock.schedule import Placement


@dataclass(frozen=True)
class SharedWeights:
    """Weights whose copies are on the same ranks, and whose gradients are summed together.

    ranks: the ranks with copies, in order
    copies: for each weight, the copies of this process by `copy_name`, in stage order
    """

    ranks: tuple[int, ...]
    copies: tuple[Mapping[str, nn.Parameter], ...]


def copy_name(name: str, stage: int) -> str:
    """A copy in words, such as "lm_head.weight of stage 1"."""
    return f"{name} of stage {stage}"


def shared_by_replicas(
    placement: Placement, modules: Mapping[int, nn.Module], leave_out: frozenset[str] = frozenset()
) -> Iterator[SharedWeights]:
    """The weights that the copies of each stage share, where the placement holds the model more than once.

    Args:
        modules: those of this process, by stage.
        leave_out: names of parameters that are shared in another way.
    """
    for first in range(placement.depth if placement.replicas > 1 else 0):
        stages = range(first, placement.stages, placement.depth)
        parameters = {stage: dict(modules[stage].named_parameters()) for stage in stages if stage in modules}
        names = [name for name in next(iter(parameters.values()), {}) if name not in leave_out]
        ranks = sorted({placement.rank_of[stage] for stage in stages})
        copies = [
            {copy_name(name, stage): weights[name] for stage, weights in parameters.items()} for name in names
        ]
        yield SharedWeights(tuple(ranks), tuple(copies))


def shared_by_stages(
    placement: Placement, modules: Mapping[int, nn.Module], names: Collection[str]
) -> SharedWeights:
    """The weights of these names, with a copy on every stage. modules: those of this process, by stage"""
    ranks = tuple(sorted(set(placement.rank_of)))
    copies = [{copy_name(name, at): copy_of(modules[at], name) for at in sorted(modules)} for name in names]
    return SharedWeights(ranks, tuple(copies))


def copy_of(module: nn.Module, name: str) -> nn.Parameter:
    """A stage's copy of a weight. Raises ModelError where parallelize_fn renamed it."""
    try:
        return module.get_parameter(name)
    except AttributeError as cause:
        raise ModelError(
            f"parallelize_fn, after which there is no {name}",
            "another stage holds a copy of this weight, and their gradients are summed",
            "Leave its module as it is, or untie the model's weights",
        ) from cause
