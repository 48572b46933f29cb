"""What a router's turned choice explains of a difference, and what it does not.

Of two experts that are nearly tied either may be chosen, with nearly the same weight. Where rounding turns
such a choice, one token gets another expert's output in one layer: what the mixtures' own weights are told of
it may be all another, or nothing. All else is told of it as one token among many, and the loss as their mean.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import isfinite, sqrt

from penstock.pipeline.compare import Report

LOSS = 0.05  # of the loss: with each last choice of each token turned, those of small models moved by 0.034
_UNEVEN = 10.0  # how much more than its share one token may have in a gradient: of small models up to 8.4


def explained(report: Report, near: int, tokens: int) -> bool:
    """Whether all that differs may come from `near` turned choices of the routers for `tokens` tokens."""
    if not near or report.losses is None:
        return False
    split, whole = report.losses
    if not abs(split - whole) <= LOSS * max(1.0, abs(whole)):  # so that what is no number is too far off
        return False
    inside = mixtures(each.name for each in report.tensors)
    # as of random summands: each of so many goes, and another comes
    share = _UNEVEN * sqrt(2 * near / tokens)
    for each in report.wrong:
        if each.remark:  # only one of the two has it, as of an expert to which no token came
            fine = _of_experts(each.name)
        else:
            within = each.name in inside or each.difference <= share * each.size
            fine = within and isfinite(each.difference)
        if not fine:
            return False
    return True


def mixtures(names: Iterable[str]) -> frozenset[str]:
    """Those of weights of mixtures: of experts, and of routers and shared experts that stand beside them.

    All else that stands there is none: in a layer that holds its experts itself (gemma4) it is attention.
    """
    split = {name: name.split(".") for name in names}
    homes = {
        tuple(parts[:at]) for parts in split.values() for at, part in enumerate(parts) if _is_experts(part)
    }
    return frozenset(
        name
        for name, parts in split.items()
        if any(tuple(parts[:at]) in homes and _is_inside(part) for at, part in enumerate(parts))
    )


def _of_experts(name: str) -> bool:
    return any(_is_experts(part) for part in name.split("."))


def _is_experts(part: str) -> bool:
    return "expert" in part and "shared" not in part


def _is_inside(part: str) -> bool:
    return "expert" in part or "router" in part or part == "gate"
