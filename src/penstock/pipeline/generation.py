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
from typing import Any

import torch
from torch import Tensor

from penstock.batch.microbatches import StepInput, batch_rows
from penstock.batch.placement import placed
from penstock.batch.shapes import Microbatch
from penstock.errors import BatchError, ConfigError, ModelError
from penstock.models.huggingface.generation import ROWS, Generating, GeneratingCall, check_prompts, refuse_model, split_options
from penstock.pipeline.building.stages import BuiltStages
from penstock.pipeline.steps.runner import StepRunner
from penstock.pipeline.steps.schedules import LoweredSchedule
from penstock.pipeline.steps.split_batch import BatchLike, RefusedBatch
from penstock.pipeline.steps.step import Step, StepPart
from penstock.runtime.executor import Executor, run_together
from penstock.runtime.stage import Stage, evaluating
from penstock.runtime.transport.one_to_all import OneToAll
from penstock.schedule.ops import check_size


class Rows:
    """The rows of one microbatch: their prompts, and the tokens generated so far.

    Attributes:
        number: of the microbatch
        ids: (rows, tokens)
        round: the number of new tokens that the next forward needs
        ended: the number of new tokens with which the last row ended; None before
    """

    def __init__(self, number: int, prompts: Tensor, tokens: OneToAll) -> None:
        self.number, self.ids, self._tokens = number, prompts, tokens
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
        plain = {name: value for name, value in options.items() if not callable(value)}
        self.facts = f", generate {sorted(plain.items())}"
        self.most: int = options["max_new_tokens"]
        self.rows: list[Rows] = []
        self.generating: list[Generating] = []

    def check(self, microbatches: Sequence[Microbatch]) -> None:
        for number, entries in enumerate(placed(microbatches, self._device)):
            prepared = [call.prepare(number, entries, self._options) for call in self._calls]
            self.generating.append(prepared[-1])
            self.rows.append(Rows(number, entries["input_ids"], self._tokens))

    def joined(self) -> Tensor:
        """All rows, padded to the longest: (rows, tokens)."""
        longest = max(rows.ids.shape[1] for rows in self.rows)
        pad = self.generating[0].config._pad_token_tensor
        value = 0 if pad is None else int(pad)
        pad_to = torch.nn.functional.pad
        return torch.cat([pad_to(r.ids, (0, longest - r.ids.shape[1]), value=value) for r in self.rows])


class Generations:
    """Generates tokens over a pipeline's stages. Its method is collective."""

    def __init__(self, built: BuiltStages, steps: StepRunner) -> None:
        self._built, self._steps, self._world = built, steps, built.world
        self._tokens: OneToAll | None = None

    def run(self, input_ids: Tensor, count: int | None, seed: int, options: Mapping[str, Any]) -> Tensor:
        """See Pipeline.generate."""
        self._refuse()
        entries, options = split_options(options)
        batch = _checked({"input_ids": input_ids, **entries})
        stages, calls = self._stages()
        prompts = Prompts(calls, options, self._open(), self._world.device)
        executors = _Executors(self._built, self._steps, stages)
        modules = [stage.module for stage in stages.values()]
        lowered = executors.lowered(self._count(batch, count))
        generator = torch.Generator(self._world.device).manual_seed(seed)
        with (
            evaluating(*modules),
            self._steps.running(lowered, batch, [prompts], scored=False) as step,
        ):
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
            stage = plain.with_call(
                lambda call, plain=plain: GeneratingCall(plain.module, call, is_first=plain.index == 0)
            )
            stages[plain.index] = stage
            calls.append(stage.call)
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

    def _count(self, batch: BatchLike, count: int | None) -> int:
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
        most = prompts.most
        for number in range(most):
            active = self._active(prompts.rows, number)
            if not active:
                break
            for rows in active:
                rows.round = number

            def choose(output: Any, index: int, active: Sequence[Rows] = active) -> None:
                rows = active[index]
                logits = output["logits"] if isinstance(output, Mapping) else output
                rows.choose(prompts.generating[rows.number], logits, generator)

            microbatches = [rows.microbatch() for rows in active]
            step.lowered = executors.lowered(len(active))  # the step's report is that of its last round
            run_together(step.lowered.executors, StepInput(microbatches, 1, choose, False))
            self._world.transport.messages.end_step()
        for rows in prompts.rows:
            rows.round = most
            rows.so_far()
        self._open().finish()

    def _active(self, all_rows: Sequence[Rows], number: int) -> Sequence[Rows]:
        """The microbatches of round `number`, the same on all ranks. Collective on a mesh."""
        late = 1 if self._world.processes.count > 1 and len(all_rows) > 1 else 0
        for rows in all_rows:
            rows.round = number - late
            rows.so_far()
        active = [rows for rows in all_rows if rows.ended is None or rows.ended > number - late]
        if self._world.reductions.batch_part[1] > 1:  # other pipelines share the weights of these stages
            return all_rows if self._world.reductions.max(len(active)) else []
        return active


def _checked(batch: Mapping[str, Any]) -> BatchLike:
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
