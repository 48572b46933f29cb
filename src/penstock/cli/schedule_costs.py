"""The costs of a config's model for ``penstock schedule compare``, as its dry run computes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from penstock.errors import ConfigError
from penstock.models.source import sdpa_for_flash
from penstock.pipeline.auto_pipeline import AutoPipeline
from penstock.schedule import Costs
from penstock.train.config.load import load_config
from penstock.train.preflight import dry_run
from penstock.train.settings import largest_microbatch, make_auto

_DURATIONS = ("forward", "input_grad", "weight_grad", "recomputed")
_SIZES = ("activation", "held_for_weight", "buffer", "sent", "held_in_forward", "held_in_backward")
_TIME, _MEMORY = 1e-12, 2.0**-30  # multiply-adds in 10^12, bytes in GiB


class ConfigCosts(NamedTuple):
    """The costs of a model in one stage per rank.

    costs: durations in 10^12 multiply-adds, with what runs again; sizes in GiB, 0 where only a step shows
        them
    """

    costs: Costs
    ranks: int
    microbatches: int


def config_costs(config: Path, ranks: int | None, microbatches: int | None) -> ConfigCosts:
    """Plan the config's run with 1F1B, in one stage per rank. Loads no weight.

    ranks, microbatches: None takes the config's

    Raises what a dry run raises, and ConfigError where recomputation or offload depends on the schedule.
    """
    sizes = {"ranks": ranks, "microbatches": microbatches}
    overrides = [f"pipeline.{name}={size}" for name, size in sizes.items() if size is not None]
    settings = load_config(config, [*overrides, "pipeline.schedule=1f1b"])
    _check(make_auto(settings))
    with sdpa_for_flash():
        planned = dry_run(settings)
        account, shape = planned.auto.account(planned.plan), largest_microbatch(planned.config)
        costs = account.costs(shape)
        known = costs is not None
        costs = costs or account.timed(shape)
    schedule = planned.plan.schedule

    def of_ranks(name: str, factor: float) -> list[float] | None:
        if getattr(costs, name) is None:
            return None
        rows = costs.rows(name, schedule.placement, schedule.microbatches)
        return [row[0] * factor for row in rows]  # equal for all microbatches: `_check`

    keys: dict[str, Any] = {name: of_ranks(name, _TIME) for name in _DURATIONS}
    keys |= {name: of_ranks(name, _MEMORY) for name in _SIZES} if known else {"activation": 0.0}
    return ConfigCosts(Costs(**keys), schedule.ranks, schedule.microbatches)


def _check(auto: AutoPipeline) -> None:
    """Refuse costs that one schedule has and another has not."""
    checkpointing = auto.checkpointing()
    if checkpointing is not None and (checkpointing.in_flight, checkpointing.memory_limit) != (None, None):
        rule = "which microbatches it recomputes depends on the schedule, and all schedules are compared"
        remedy = "Recompute all of them, as with train.activation_checkpointing=full, or none"
        raise ConfigError("train.activation_checkpointing with in_flight or memory_limit", rule, remedy)
    if auto.offloading() is not None:
        rule = "which activations wait in host memory depends on the schedule, and all schedules are compared"
        raise ConfigError("train.activation_offloading", rule, "Leave it out")
