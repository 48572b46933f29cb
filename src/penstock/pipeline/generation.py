"""Generate tokens over the stages, each with a cache of its own layers.

The rows are split into microbatches, which follow each other around the ranks. Of P = 3 ranks, each computes
the next token of one microbatch while the others compute those of the other two:

    rank 0 | 0  1  2  0' 1' 2' 0" 1" 2"
    rank 1 | .  0  1  2  0' 1' 2' 0" 1" 2"
    rank 2 | .  .  0  1  2  0' 1' 2' 0" 1" 2"          0' after 0: the last rank has sent the tokens to all

A round is a step without backwards, of one token for each row: first of the prompts, then of one token. No
rank waits for the others between two rounds, but for the tokens of the microbatch that it computes next. So a
rank may begin a round before it knows which rows have ended in the last one. A microbatch without unfinished
rows leaves the rounds one later than it could.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.batch.microbatches import Batch, StepInput, batch_rows
from penstock.batch.placement import placed
from penstock.batch.shapes import Microbatch, logits_in
from penstock.errors import BatchError, ConfigError, ModelError
from penstock.models.huggingface.generation import (
    ROWS,
    Generating,
    GeneratingCall,
    check_new_tokens,
    check_prompts,
    refuse_model,
    split_options,
)
from penstock.pipeline.building.stages import BuiltStages
from penstock.pipeline.steps.runner import StepRunner
from penstock.pipeline.steps.schedules import LoweredSchedule
from penstock.pipeline.steps.split_batch import RefusedBatch
from penstock.pipeline.steps.step import Step, StepPart
from penstock.runtime.executor import Executor, run_together
from penstock.runtime.stage import Stage, evaluating
from penstock.runtime.transport.one_to_all import OneToAll
from penstock.schedule.ops import check_size


class GeneratedRows:
    """The rows of one microbatch: their prompts, and the tokens generated so far.

    Attributes:
        index: of the microbatch
        ids: (rows, tokens)
        round: the number of new tokens that the next forward needs
        ended: the number of new tokens with which the last row ended; None before
    """

    def __init__(self, index: int, prompts: Tensor, tokens: OneToAll) -> None:
        self.index, self.ids, self._tokens = index, prompts, tokens
        self._prompt, self.round = prompts.shape[1], 0
        self.ended: int | None = None

    @property
    def new(self) -> int:
        """The number of new tokens of each row."""
        return self.ids.shape[1] - self._prompt

    def so_far(self) -> Tensor:
        """Prompts and `round` new tokens, or fewer if all rows have ended, (rows, tokens). Waits for them."""
        while self.new < self.round and self.ended is None:
            *tokens, ended = self._tokens.receive(len(self.ids) + 1).tolist()
            self.add(torch.tensor(tokens), bool(ended))
        return self.ids

    def choose(self, generating: Generating, logits: Tensor, generator: torch.Generator) -> None:
        """Add the next tokens, and send them to all ranks. On the last stage."""
        if self.ended is not None:
            return
        tokens, ended = generating.choose(self.ids, logits, generator)
        self.add(tokens, ended)
        self._tokens.send(torch.cat([tokens.cpu(), torch.tensor([int(ended)])]))

    def add(self, tokens: Tensor, ended: bool) -> None:
        self.ids = torch.cat([self.ids, tokens.to(self.ids.device)[:, None]], dim=-1)
        self.ended = self.new if ended else None

    def microbatch(self) -> Microbatch:
        """The input of the next round: it has the shape of the ids, and refers to these rows."""
        length = self._prompt if self.round == 0 else 1
        return {"input_ids": self.ids.new_empty((len(self.ids), length)), ROWS: self}


class Prompts(StepPart):
    """Prepares the generation of a batch's rows on each stage of this process.

    Attributes:
        most: the most new tokens of a row
        rows: by microbatch
        generating: by microbatch, on this process's last stage
    """

    def __init__(
        self,
        calls: Sequence[GeneratingCall],
        options: Mapping[str, Any],
        tokens: OneToAll,
        device: torch.device,
    ) -> None:
        self._calls, self._options, self._tokens, self._device = calls, options, tokens, device
        self.facts = ", generate " + ", ".join(
            f"{n}={v}" for n, v in options.items() if isinstance(v, _PLAIN)
        )
        self.most: int = options["max_new_tokens"]
        self.rows: list[GeneratedRows] = []
        self.generating: list[Generating] = []

    def check(self, microbatches: Sequence[Microbatch]) -> None:
        """Raise ConfigError, ModelError for options or a model that cannot generate."""
        for index, entries in enumerate(placed(microbatches, self._device)):
            prepared = [call.prepare(index, entries, self._options) for call in self._calls]
            self.generating.append(prepared[-1])
            self.rows.append(GeneratedRows(index, entries["input_ids"], self._tokens))

    def joined(self) -> Tensor:
        """All rows, padded to the longest: (rows, tokens)."""
        longest, token = max(rows.new for rows in self.rows), self.generating[0].pad_token
        return torch.cat([F.pad(rows.ids, (0, longest - rows.new), value=token) for rows in self.rows])


_PLAIN = bool | int | float | str  # options whose texts are equal on all ranks


class Generations:
    """Generates tokens over a pipeline's stages. Its method is collective."""

    def __init__(self, built: BuiltStages, steps: StepRunner) -> None:
        self._built, self._steps, self._world = built, steps, built.world
        self._tokens: OneToAll | None = None

    def run(self, input_ids: Tensor, count: int | None, seed: int, options: Mapping[str, Any]) -> Tensor:
        """Generate tokens after `input_ids`, in `count` microbatches. See Pipeline.generate."""
        self._refuse()
        check_new_tokens(options["max_new_tokens"])
        entries, options = split_options(options)
        batch = _checked({"input_ids": input_ids, **entries})
        stages, calls = self._stages()
        prompts = Prompts(calls, options, self._open(), self._world.device)
        executors = _Executors(self._built, self._steps, stages)
        modules = [stage.module for stage in stages.values()]
        lowered = executors.lowered(self._count(batch, count))
        generator = torch.Generator(self._world.device).manual_seed(seed)
        running = self._steps.running(lowered, batch, [prompts], scored=False)
        with evaluating(*modules), running as step:
            self._rounds(step, prompts, executors, generator)
        return prompts.joined().to(input_ids.device)

    def _refuse(self) -> None:
        """Raise ModelError, ConfigError for pipelines that cannot generate."""
        built = self._built
        if built.weights.saved is None:
            rule = "only models of transformers have a cache that penstock knows"
            raise ModelError("generate() of a user's own modules", rule, "Call infer() in your own loop")
        for stage in built.stages:
            refuse_model(stage.module)
        if built.schedule.placement.replicas > 1:
            raise ConfigError(
                f"generate() with schedule {built.schedule.name!r}",
                "two copies of the model run, each with a last stage of its own",
                "Build the pipeline with another schedule, such as 1f1b",
            )
        if built.mesh_plan is not None and built.mesh_plan.axes.cp > 1:
            rule = "a cache has whole sequences, and cp gives each rank a part of them"
            raise ConfigError(f"generate() with {built.mesh_plan.axes}", rule, "Build the pipeline with cp=1")
        if built.splitter.padding is not None:
            rule = "it pads rows on the right, where the next token goes"
            raise ConfigError("generate() with shapes='padded'", rule, "Take shapes='inferred'")

    def _stages(self) -> tuple[dict[int, Stage], list[GeneratingCall]]:
        """This process's stages for a generation, and their calls, in the order of the model."""
        stages, calls = dict[int, Stage](), list[GeneratingCall]()
        for plain in sorted(self._built.stages, key=lambda stage: stage.index):
            call = GeneratingCall(plain.module, plain.call, is_first=plain.index == 0)
            stages[plain.index] = plain.with_call(call)
            calls.append(call)
        return stages, calls

    def _open(self) -> OneToAll:
        """The way of the new tokens from the last stage's process to all. Collective at first."""
        if self._tokens is None:
            self._tokens = self._world.processes.one_to_all(self._source)
        return self._tokens

    @property
    def _source(self) -> int:
        """The process with the last stage."""
        return self._built.schedule.placement.rank_of[-1] if self._world.processes.count > 1 else 0

    def _count(self, batch: Batch, count: int | None) -> int:
        """The number of microbatches, equal on all ranks. Collective on a mesh."""
        ranks = self._built.schedule.ranks
        if count is not None:
            check_size(ranks, count)
            return count
        try:
            rows = batch_rows(batch, self._built.splitter.sharding)
        except BatchError:  # splitting the batch raises it again, on all ranks
            rows = 1
        return self._world.reductions.min(max(1, min(ranks, rows)))

    def _rounds(
        self, step: Step, prompts: Prompts, executors: _Executors, generator: torch.Generator
    ) -> None:
        """Run rounds until all rows have ended."""
        for turn in range(prompts.most):
            active = self._active(prompts.rows, turn)
            if not active:
                break
            for rows in active:
                rows.round = turn
            step.lowered = executors.lowered(len(active))  # the step's report is that of its last round
            collect = partial(_choose, prompts, active, generator)
            microbatches = [rows.microbatch() for rows in active]
            run_together(step.lowered.executors, StepInput(microbatches, 1, collect, scored=False))
            self._world.transport.messages.end_step()
        for rows in prompts.rows:
            rows.round = prompts.most
            rows.so_far()
        self._open().finish()

    def _active(self, all_rows: Sequence[GeneratedRows], turn: int) -> Sequence[GeneratedRows]:
        """The microbatches of round `turn`, the same on all ranks. Collective on a mesh."""
        late = 1 if self._world.processes.count > 1 and len(all_rows) > 1 else 0
        for rows in all_rows:
            rows.round = turn - late
            rows.so_far()
        active = [rows for rows in all_rows if rows.ended is None or rows.ended > turn - late]
        if self._world.reductions.batch_part[1] > 1:  # other pipelines may share the weights of these stages
            return all_rows if self._world.reductions.max(len(active)) else []
        return active


def _choose(
    prompts: Prompts, active: Sequence[GeneratedRows], generator: torch.Generator, output: Any, index: int
) -> None:
    """Choose the next tokens of a round's microbatch `index`. output: of the last stage"""
    rows = active[index]
    rows.choose(prompts.generating[rows.index], logits_in(output), generator)


def _checked(batch: Batch) -> Batch:
    """The batch, or a RefusedBatch, which raises when the ranks agree."""
    try:
        check_prompts(batch)
    except BatchError as error:
        return RefusedBatch(error)
    return batch


class _Executors:
    """The executors of rounds, by their number of microbatches."""

    def __init__(self, built: BuiltStages, steps: StepRunner, stages: Mapping[int, Stage]) -> None:
        self._built, self._steps, self._stages = built, steps, stages
        self._made: dict[int, LoweredSchedule] = {}

    def lowered(self, count: int) -> LoweredSchedule:
        if count not in self._made:
            plain = self._steps.schedules.forwards(count)
            executors = [self._with_stages(executor) for executor in plain.executors]
            self._made[count] = plain._replace(executors=executors)
        return self._made[count]

    def _with_stages(self, plain: Executor) -> Executor:
        stages = {index: self._stages[index] for index in plain.stages}
        built = self._built
        return Executor(plain.plan, stages, built.edges, built.loss, plain.transport, plain.recorder)
