"""How transformers computes the experts of a mixture: by its own names, such as eager or grouped_mm."""

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
    """Whether it is a kernel that no CPU runs."""
    return name not in _EVERYWHERE


def choose_experts(model: PreTrainedModel, name: str, *, given: bool) -> None:
    """Have the mixtures of `model` run as `name` says. Weights and gradients stay what they are.

    given: whether the model is the caller's own object, which stays as it is
    Raises ConfigError for an unknown name, for a model without a mixture that transformers runs in several
    ways, and for an object that runs in another.
    """
    check_name(name)
    kind = type(model).__name__
    mixtures = [part for part in model.modules() if is_marked(part)]
    if not mixtures:
        rule = "none of its layers has a mixture that transformers computes in several ways"
        raise ConfigError(f"experts={name!r} for {kind}", rule, "Leave it out")
    present = mixtures[0].config._experts_implementation
    if given and present != name:
        value, rule = f"experts={name!r} for a model object with {present!r}", "it is taken as it is"
        raise ConfigError(value, rule, f"Call model.set_experts_implementation({name!r}) first")
    if not given:
        model.set_experts_implementation(name)
