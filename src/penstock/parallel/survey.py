"""The mixtures of a whole model, and how their routers choose, found by a forward without values.

What routing replay would find out in a stage's first forward, on the rank of that stage alone, is found here
by all ranks alike, before anything is sent.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from penstock.errors import ConfigError, PenstockError
from penstock.parallel.choice import Choosing, Seat, What, not_top_k
from penstock.parallel.expert import mixtures
from penstock.parallel.expert_view import count_of
from penstock.parallel.routing import one_too_many

_log = logging.getLogger(__name__)
_NOTHING = What(None, None)


class Mixture(NamedTuple):
    """experts: how many there are; top_k: how many a token chooses, None where only a real forward tells"""

    experts: int
    top_k: int | None


def survey(shadow: PreTrainedModel) -> dict[str, Mixture]:
    """The modules of experts by name, in the order of the layers.

    shadow: a copy of the model for this alone, of fake tensors (torch's FakeTensorMode is on)
    Raises ConfigError where there are none, ModelError where routers choose in a way that is not replayed.
    """
    counts = {name: count_of(part) for name, part in mixtures(shadow).items()}
    if not counts:
        said, rule = f"routing replay of {type(shadow).__name__}", "it has no experts to choose among"
        raise ConfigError(said, rule, "Leave replay_routing out")
    blocks: set[str] = set()
    for name in counts:
        block = name.rpartition(".")[0]
        if block in blocks:
            raise one_too_many(name, f"a second mixture in {block}")
        blocks.add(block)
    chosen = _chosen(shadow.eval(), list(counts))
    return {name: Mixture(count, chosen.get(name)) for name, count in counts.items()}


def _chosen(shadow: PreTrainedModel, names: list[str]) -> dict[str, int]:
    """By mixture that the forward has come to, how many experts a token chooses."""
    found: dict[str, int] = {}
    for name in names:
        block = shadow.get_submodule(name.rpartition(".")[0])
        _watch(name, block, shadow.get_submodule(name), found)
    try:
        with torch.no_grad():
            shadow(input_ids=torch.zeros(1, 2, dtype=torch.int64), use_cache=False)
    except PenstockError:
        raise
    except Exception as error:  # for want of values
        _log.debug("a forward of %s without values ended in %r", type(shadow).__name__, error)
    return found


def _watch(name: str, block: nn.Module, experts: nn.Module, found: dict[str, int]) -> None:
    """Look, in the forward of `block`, for the top-k whose result `experts` are called with."""
    plain: Callable[..., Any] = block.forward
    running: list[Choosing] = []

    def in_block(*args: Any, **kwargs: Any) -> Any:
        running.append(Choosing(Seat(name, lambda *_: None), _NOTHING))
        try:
            with running[-1]:
                return plain(*args, **kwargs)
        finally:
            running.pop()

    def in_place_of_experts(hidden: Tensor, chosen: Tensor, *_: Any) -> Tensor:
        if name in found:
            raise one_too_many(name, "called twice in one forward")
        if not running or not running[-1].candidates(chosen):
            raise not_top_k(name)
        found[name] = chosen.shape[-1]
        return hidden.clone()

    block.forward = in_block
    experts.forward = in_place_of_experts
