"""The section `parallel` of a config: the mesh's axes beside the pipeline's own."""

from __future__ import annotations

from typing import Any, Literal, Self

import torch
from pydantic import model_validator

from penstock.errors import ConfigError
from penstock.parallel.data import Sharded
from penstock.runtime.axes import Axes
from penstock.train.values import Section

Dtype = Literal["float32", "bfloat16", "float16"]


class ParallelSection(Section):
    """How many processes each axis has. Under torchrun one, or pipeline.ranks, may be -1: all the rest."""

    dp_replicate: int = 1  # copies of everything below, each with its part of the batch
    dp_shard: int = 1  # processes that FSDP2 spreads a stage's weights over, each with its part of the batch
    cp: int = 1  # processes that a row is cut over
    ep: int = 1  # processes that experts are spread over, of those of dp_shard x cp
    tp: int = 1  # processes that single matrices are spread over
    context: Literal["ulysses", "ring"] = (
        "ulysses"  # cp: each process some heads; or keys and values go round
    )
    sequence_parallel: bool = False  # tp: what lies between its matrices is shared out along the row as well
    # The rest is of spread weights, as FSDP2 has it:
    param_dtype: Dtype | None = None  # what weights are gathered and computed in; null: their own
    reduce_dtype: Dtype | None = None  # what gradients are summed in; null: their own
    reshard_after_forward: bool = False  # gather weights for each backward anew: less memory, more traffic
    cpu_offload: bool = False  # weights, gradients and the optimizer's state wait in host memory

    @model_validator(mode="before")
    @classmethod
    def pipeline_is_elsewhere(cls, given: Any) -> Any:
        if isinstance(given, dict) and "pp" in given:
            raise ValueError(
                f"pp={given['pp']} is the pipeline's own axis, which has a section of its own; "
                f"write pipeline.ranks={given['pp']}"
            )
        return given

    @model_validator(mode="after")
    def sizes_are_right(self) -> Self:
        try:
            axes = self.axes
        except ConfigError as error:
            raise ValueError(f"{error.value}: {error.rule}; {error.remedy}") from error
        spread = (axes.dp_replicate, axes.dp_shard, axes.cp) != (1, 1, 1)
        given = [f"{name}={value}" for name, value in self._of_sharding.items() if value]
        if given and not spread:
            raise ValueError(
                f"{' and '.join(given)} with whole weights: it is of weights that FSDP2 holds; "
                "set dp_shard to 2 or more, or leave it out"
            )
        return self

    @property
    def axes(self) -> Axes:
        """Raises ConfigError."""
        return Axes(self.dp_replicate, self.dp_shard, self.cp, self.ep, self.tp)

    @property
    def sharded(self) -> Sharded:
        param, reduce = (name and getattr(torch, name) for name in (self.param_dtype, self.reduce_dtype))
        return Sharded(param, reduce, self.reshard_after_forward, self.cpu_offload)

    @property
    def _of_sharding(self) -> dict[str, str | bool | None]:
        return {
            "param_dtype": self.param_dtype,
            "reduce_dtype": self.reduce_dtype,
            "reshard_after_forward": self.reshard_after_forward,
            "cpu_offload": self.cpu_offload,
        }


def too_few_rows(rows: int, microbatches: int, parts: int) -> tuple[str, str] | None:
    """What is wrong with a batch of so many rows, and what to do; None where there are enough."""
    needed = microbatches * parts
    if rows >= needed:
        return None
    rule = f"train.batch_size={rows} rows cannot be split into pipeline.microbatches={microbatches}"
    if parts == 1:
        return rule, "give each microbatch at least one row"
    fewer = f", or pipeline.microbatches={rows // parts} or fewer" if rows >= parts else ""
    return (
        f"{rule} for each of {parts} parts (parallel.dp_replicate x parallel.dp_shard)",
        f"give {needed} rows or more{fewer}",
    )
