"""AutoPipeline: a Hugging Face model, unchanged, as a pipeline.

build_plan    options and model -> schedule, proof, stages          no weight is read, nothing is sent
open_world    this process becomes one rank, or hosts all ranks     all ranks agree on the facts
StagesBuild   each stage: its model, its values, its shards         each rank reads its stages only
Pipeline      the stages, ready to step
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from penstock.models.source import ModelLike
from penstock.options import described
from penstock.parallel.world import close_on_error, open_world
from penstock.pipeline.building.auto_options import AutoOptions
from penstock.pipeline.building.build_plan import BuildPlan
from penstock.pipeline.building.build_stages import StagesBuild
from penstock.pipeline.building.planning import plan_build
from penstock.pipeline.pipeline import Pipeline
from penstock.schedule import Costs
from penstock.schedule.collector import collector_paused


@described
@dataclass(frozen=True)
class AutoPipeline(AutoOptions):
    """Options to build a pipeline from a Hugging Face model: those of `AutoOptions`."""

    @collector_paused()
    def build_plan(self, model: ModelLike) -> BuildPlan:
        """Plan the build, without weights or other processes, and raise the errors that `build` would raise.

        Args:
            model: as for `build`

        Raises ConfigError, ScheduleError, ModelError, PartitionError, CheckpointError, HubError.
        """
        return plan_build(self, model)

    def build(self, model: ModelLike) -> Pipeline:
        """Build the pipeline of `model`. Collective under torchrun.

        Under torchrun this process becomes one rank; otherwise it hosts all ranks.

        Args:
            model: a transformers model, which is not changed and whose values are copied stage by stage, or
                a PeftModel of one, with LoRA; a local folder, from which each rank reads its stages'
                weights; a Hub name such as Qwen/Qwen3-8B, whose files one process of each host fetches into
                the cache; or a config. A config or a folder without weights gets initial values from `seed`.
                The pipeline is in training mode, even if the model is in evaluation mode, as after
                from_pretrained.

        Raises the errors of `build_plan`, WorldSizeError and HandshakeError.
        """
        plan = self.build_plan(model)
        has_values = plan.source.model.device != torch.device("meta")
        without = "a folder's" if plan.source.files else f"seed {self.seed}"
        values = "the model's own" if has_values else "; ".join((without, *plan.source.new))
        facts = {**plan.facts, "values": values, "load": self.load}
        facts["replay_routing"] = str(self.replay_routing)
        options = replace(self.world_options(), exchange=exchange_of(self, plan))
        world = open_world(plan.schedule, options, {**self.facts(), **facts})
        with close_on_error(world.transport):
            return Pipeline(StagesBuild(self, plan, world).run())

    def memory_costs(self, plan: BuildPlan, shape: tuple[int, int]) -> Costs | None:
        """Bytes that microbatches of `shape` (rows, sequence) will hold, for `simulate`.

        Durations are those of Costs(). None where only a step can measure the bytes. Not for axes of -1.
        """
        return self.account(plan).costs(shape)


def exchange_of(auto: AutoPipeline, plan: BuildPlan) -> str:
    """The exchange for the messages of `plan`: messages that carry their shapes go one by one."""
    carry_shapes = auto.shapes == "exchanged" or not plan.chain.only_hidden_states
    return "channels" if auto.exchange == "auto" and carry_shapes else auto.exchange
