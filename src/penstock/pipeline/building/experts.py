"""Choose how transformers computes the experts of a mixture, by its names, such as eager or grouped_mm."""

from __future__ import annotations

import difflib

import transformers
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from penstock.errors import ConfigError
from penstock.parallel.expert.experts import is_marked

_EVERYWHERE = ("eager", "batched_mm", "grouped_mm")  # the others are kernels for GPUs


def known_experts() -> list[str]:
    """The names that the installed transformers knows."""
    return ["eager", *sorted(ALL_EXPERTS_FUNCTIONS)]


def check_name(name: str) -> None:
    """Raise ConfigError for a name that the installed transformers does not know."""
    if name in (known := known_experts()):
        return
    near = difflib.get_close_matches(name, known, n=1)
    raise ConfigError(
        f"experts={name!r}",
        f"transformers {transformers.__version__} knows {', '.join(known)}",
        f"Did you mean {near[0]!r}?" if near else "Take one of these",
    )


def needs_gpu(name: str) -> bool:
    """Whether the implementation is a kernel that does not run on a CPU."""
    return name not in _EVERYWHERE


def choose_experts(model: PreTrainedModel, name: str, *, given: bool) -> None:
    """Set the implementation of the mixtures of `model`. Weights and gradients do not change.

    given: whether the model is the caller's own object, which is not changed
    Raises ConfigError for an unknown name, for a model without a mixture that has several implementations,
    and for an object with another implementation.
    """
    check_name(name)
    kind = type(model).__name__
    mixtures = [part for part in model.modules() if is_marked(part)]
    if not mixtures:
        rule = "none of its layers has a mixture for which transformers has several implementations"
        raise ConfigError(f"experts={name!r} for {kind}", rule, "Leave it out")
    present = mixtures[0].config._experts_implementation
    if given and present != name:
        value, rule = f"experts={name!r} for a model object with {present!r}", "it is not changed"
        raise ConfigError(value, rule, f"Call model.set_experts_implementation({name!r}) first")
    if not given:
        model.set_experts_implementation(name)
