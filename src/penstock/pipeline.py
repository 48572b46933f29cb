"""Pipeline: a model cut into stages, a proven schedule, and the step that runs it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from penstock.commit import write_folder
from penstock.errors import ConfigError, ModelError, PeerError
from penstock.models.checkpointing import Checkpointing, checkpointing, install
from penstock.models.edges import provided_edges
from penstock.models.protocol import ProvidedCall, Provider, StageInfo, own_layers
from penstock.models.saved import SavedModel
from penstock.runtime import report
from penstock.runtime.executor import Collect
from penstock.runtime.handshake import named
from penstock.runtime.loss import Loss, LossLike, as_loss
from penstock.runtime.memory import Held, Sizes
from penstock.runtime.microbatch import Sharding, batch_rows, with_entries
from penstock.runtime.network import Network
from penstock.runtime.padding import Padding
from penstock.runtime.processes import Processes
from penstock.runtime.shapes import EdgeShapes, Microbatch
from penstock.runtime.shared import SharedGradients, SharedWeights, of_replicas
from penstock.runtime.stage import Stage, evaluating
from penstock.runtime.world import Link, World, open_world
from penstock.schedule import Costs, Proof, Schedule, Timeline, verify
from penstock.schedule.builders.inference import forwards
from penstock.schedule.config import ScheduleLike, chosen_schedule
from penstock.schedule.exchanges import exchanges
from penstock.schedule.recompute import Places, first_in_flight
from penstock.steps import Cutter, Given, Lowered, StepResult, Steps, Told

# "inferred": from the stages themselves, before anything is sent; "exchanged": told ahead of the tensors;
# "padded", or a Padding: all microbatches of a step are made equal in length, and then inferred
Shapes = str | Padding


class Pipeline:
    """Stages of one model, and the schedule that they run.

    Made by AutoPipeline.build or Pipeline.from_provider. All its methods but the properties are to be called
    on every rank.
    """

    def __init__(
        self,
        schedule: Schedule,
        world: World,
        stages: Sequence[Stage],
        edges: EdgeShapes | None,
        loss: Loss,
        *,
        shared: Sequence[SharedWeights] = (),
        saved: SavedModel | None = None,
        cutter: Cutter | None = None,
        recomputed: Places = frozenset(),
        trace_folder: str | Path | None = None,
    ) -> None:
        """edges: None where what crosses an edge tells itself what it is

        recomputed: the (stage, microbatch) whose layers run again in the backward
        trace_folder: where each process writes the timeline so far when a step fails
        """
        self.schedule, self._world, self._loss = schedule, world, loss
        self._stages = {stage.index: stage for stage in stages}
        self._shared = SharedGradients(shared, world.transport)
        self._saved, self._cutter = saved, cutter or Cutter({})
        traces = None if trace_folder is None else Path(trace_folder)
        self._steps = Steps(world, self._stages, edges, loss, self._cutter, traces)
        self._proof = verify(schedule)
        self._training = self._steps.lower(self._proof, recomputed if schedule.trains else frozenset())
        self._evaluations: dict[int, Lowered] = {}  # by number of microbatches
        self._last: Told | None = None

    @classmethod
    def from_provider(
        cls,
        provider: Provider,
        *,
        schedule: ScheduleLike,
        ranks: int | None = None,
        microbatches: int | None = None,
        loss_fn: LossLike = None,
        mesh: DeviceMesh | None = None,
        device: torch.device | str | None = None,
        timeout: float = 300.0,
        transport: str | None = None,
        exchange: str = "channels",
        wire_dtype: torch.dtype | None = None,
        network: Network | None = None,
        sharding: Sharding | None = None,
        shapes: Shapes = "inferred",
        activation_checkpointing: bool | str | Checkpointing = False,
        trace_folder: str | Path | None = None,
    ) -> Pipeline:
        """A pipeline of modules of one's own: `provider` builds the module of one stage.

        It is called for this process's stages, and where they do not declare their shapes
        (penstock.models.protocol.DeclaresShapes) once for each on the meta device, to learn what goes over
        the edges: a tensor, or any nest of tuples, lists and dicts with tensors in it. A stage's forward gets
        what came over the edge (a mapping by name, a tuple by position), and by name each entry of the
        microbatch that it has a parameter for. loss_fn takes what the last stage returns and the microbatch,
        and returns the mean over its rows; or it is an object with `weight` and `total`
        (penstock.runtime.loss.Loss); None: next-token cross-entropy.

        timeout: seconds that a rank waits for another
        sharding: how entries of a batch are cut into microbatches, by name: along a dimension (0 for those
            not named), not at all (None), or by a function of (entry, number of microbatches)
        shapes, transport, exchange, wire_dtype, network: as AutoPipeline has them
        activation_checkpointing: as AutoPipeline has it, for the layers in the module lists of each stage
        trace_folder: where each process writes a trace for Perfetto of the step so far when one fails
        """
        chosen = chosen_schedule(schedule, ranks, microbatches)
        given, how = sharding or {}, checkpointing(activation_checkpointing)
        if how is not None and how.memory_limit is not None:
            rule = "what a module of one's own holds cannot be told before it runs"
            raise ConfigError(
                "memory_limit with from_provider", rule, "Give in_flight; Pipeline.memory tells"
            )
        padding = as_padding(shapes)
        if exchange == "batched":
            check_batched(chosen, shapes)
        facts = {"loss": named(loss_fn), "shapes": str(shapes), "wire_dtype": str(wire_dtype),
                 "activation_checkpointing": str(how), "provider": named(provider)}  # fmt: skip
        link = Link(mesh, device, timeout, transport, wire_dtype, exchange, network)
        world = open_world(chosen, link, facts)
        depth = chosen.placement.depth
        stages = []
        for index in own_stages(chosen, world):
            module = provider(StageInfo(index % depth, depth)).to(world.device)
            switch = None if how is None else install(own_layers(module), how)
            stages.append(Stage(index, module, ProvidedCall(module), switch))
        modules = {stage.index: stage.module for stage in stages}
        _refuse_shared_modules(modules)
        pipe = cls(
            chosen,
            world,
            stages,
            None if shapes == "exchanged" else provided_edges(provider, modules, depth, world.processes),
            as_loss(loss_fn, given),
            shared=list(of_replicas(chosen.placement, modules)),
            cutter=Cutter(given, padding),
            recomputed=recomputed_places(chosen, how),
            trace_folder=trace_folder,
        )
        pipe._shared.make_alike([parameter for _, parameter in pipe.owned_parameters()])
        return pipe

    def step(self, batch: Given, **entries: Any) -> StepResult:
        """Forward and backward of one batch: every parameter's gradient is added to its `.grad`.

        batch: tensors by name, e.g. input_ids and labels of shape (rows, sequence), the same on every rank;
            or a list of as many microbatches as the schedule has, which may differ in rows and in length
        entries: more of the batch, by name; what is no tensor goes to every microbatch as it is
        After an error gradients may be partial: clear them before the next step.
        Raises BatchError where it cannot be split or differs between ranks, ShapeError where a stage gives
        another shape than it should, PeerLostError or StalledPeerError where another rank fails.
        """
        if not self.schedule.trains:
            raise ConfigError(
                f"step() with schedule {self.schedule.name!r}", "it holds no backward", "Call evaluate()"
            )
        self._shared.begin_step()
        try:
            with torch.enable_grad():
                result, self._last = self._steps.run(self._training, self._with(batch, entries))
            self._shared.end_step()
        except BaseException as error:
            if isinstance(error, PeerError):  # perhaps in the sum over shared weights
                self._steps.tell_of(error, self._training)
                self._steps.fail()
            self._shared.restore()
            raise
        return result

    def _with(self, batch: Given, entries: Mapping[str, Any]) -> Given:
        return with_entries(batch, entries, self._cutter.sharding)

    def evaluate(self, batch: Given, **entries: Any) -> StepResult:
        """Loss of one batch of any number of rows, in evaluation mode, without gradients."""
        given = self._with(batch, entries)
        with evaluating(*self.modules.values()):
            return self._steps.run(self._evaluation(given), given)[0]

    def infer(self, batch: Given, collect: Collect | None = None, **entries: Any) -> dict[int, Any]:
        """Run the forward alone, in evaluation mode, and keep what comes out of it.

        collect: called with what the last stage returned and the microbatch's number as soon as it is there,
            on the rank of the last stage; None keeps the output itself
        Returns what `collect` returned by microbatch, on the rank of the last stage; nothing on others.
        """
        given = self._with(batch, entries)
        lowered = self._evaluation(given)
        with evaluating(*self.modules.values()):
            self._steps.run(lowered, given, collect or (lambda output, number: output))
        found: dict[int, Any] = {}
        for executor in lowered.executors:
            found |= executor.results
            executor.results = {}
        return dict(sorted(found.items()))

    def _evaluation(self, given: Given) -> Lowered:
        """The forwards of as many microbatches as an evaluation makes of it."""
        if isinstance(given, Mapping):
            count = min(self.schedule.microbatches, batch_rows(given, self._cutter.sharding))
        else:
            count = len(given)
        count = max(count, 1)
        if count not in self._evaluations:
            proof = verify(forwards(self.schedule.placement, count))
            self._evaluations[count] = self._steps.lower(proof)
        return self._evaluations[count]

    def microbatches(self, batch: Given, count: int | None = None) -> list[Microbatch]:
        """`batch` on this process's device, as a step sees it, or split into `count`. Raises BatchError.

        Collective where they are padded to the longest.
        """
        return self._cutter.cut(batch, count or self.schedule.microbatches, self._world)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> float:
        """Scale all gradients so that their global norm is at most `max_norm`; returns the norm before.

        One norm over all stages, a shared weight counted once; the same number on every rank.
        """
        counted = [parameter.grad for _, parameter in self.owned_parameters() if parameter.grad is not None]
        norms = torch._foreach_norm(counted) if counted else []
        mine = sum((norm.double().square().to(self._world.device) for norm in norms), start=torch.zeros(
            (), dtype=torch.float64, device=self._world.device))  # fmt: skip
        vectors = [mine.reshape(1) if i == 0 else torch.zeros_like(mine.reshape(1))
                   for i in range(len(self._world.ranks))]  # fmt: skip
        norm = float(torch.stack(self._world.transport.exchange(vectors)).sum().sqrt())
        scale = max_norm / (norm + 1e-6)  # as torch.nn.utils.clip_grad_norm_
        grads = [p.grad for p in self.parameters() if p.grad is not None]
        if scale < 1 and grads:
            torch._foreach_mul_(grads, scale)
        return norm

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This process's parameters under the whole model's names.

        Where the schedule keeps two copies of the model, a process that holds both copies of a stage gives
        each name twice.
        """
        for stage in self._stages.values():
            yield from stage.module.named_parameters()

    def parameters(self) -> Iterator[nn.Parameter]:
        """This process's parameters, for an optimizer."""
        return (parameter for _, parameter in self.named_parameters())

    def owned_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This process's parameters without further copies of shared ones: each is owned once over all."""
        copies = self._saved.copies if self._saved else frozenset()
        return ((name, parameter) for name, parameter in self._first_copies() if name not in copies)

    def _first_copies(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Those of the first copy of the model."""
        for index, stage in self._stages.items():
            if index < self.schedule.placement.depth:
                yield from stage.module.named_parameters()

    def zero_grad(self) -> None:
        for parameter in self.parameters():
            parameter.grad = None

    @property
    def modules(self) -> Mapping[int, nn.Module]:
        """This process's modules by stage."""
        return {index: stage.module for index, stage in self._stages.items()}

    @property
    def config(self) -> Any:
        """The Hugging Face config of the whole model."""
        return self._needs_saved().config

    @property
    def proof(self) -> Proof:
        """What was proven of the schedule before anything ran."""
        return self._proof

    @property
    def processes(self) -> Processes:
        return self._world.processes

    @property
    def timeline(self) -> Timeline:
        """What the last step really did, on all ranks; known on every rank, so nothing is sent."""
        if self._last is None:
            raise ConfigError("timeline before the first step", "it shows the last step", "Call step() first")
        return report.measured(*self._last)

    @property
    def memory(self) -> tuple[Held, ...]:
        """By rank, the bytes that it held when the last step held most: activations, buffers, and for W."""
        return report.peak_held(self._last[1]) if self._last else (Held(),) * self.schedule.ranks

    def costs(self) -> Costs:
        """What the last step took and held, to simulate other schedules with: seconds and bytes.

        The median time of each stage's ops; the bytes of each stage and microbatch. Collective.
        """
        if self._last is None:
            raise ConfigError("costs before the first step", "they are measured in one", "Call step() first")
        mine = [[*place, *sizes] for executor in self._training.executors
                for place, sizes in executor.ledger.sizes.items()]  # fmt: skip
        known = {(stage, number): Sizes(*sizes) for told in self.processes.gather(mine)
                 for stage, number, *sizes in told}  # fmt: skip
        none = Sizes(0, 0, 0, 0)  # of a copy of the model that the microbatch does not go through
        of = [[known.get((stage, number), none) for number in range(self.schedule.microbatches)]
              for stage in range(self.schedule.stages)]  # fmt: skip
        return replace(
            Costs.measured(self.timeline),
            activation=[[sizes.activation for sizes in row] for row in of],
            sent=[[sizes.sent for sizes in row] for row in of],
            buffer=[[sizes.buffer for sizes in row] for row in of],
            bytes=[[sizes.buffer for sizes in row] for row in of],
            held_for_weight=[[sizes.held_for_weight for sizes in row] for row in of],
        )

    @property
    def deferred_bytes(self) -> tuple[int, ...]:
        """By rank, the most that the last step held between I and W; 0 where no backward is split."""
        return report.deferred_bytes(self._last[1]) if self._last else (0,) * self.schedule.ranks

    def write_weights(self, folder: Path) -> None:
        """Every process writes its weights into `folder`, process 0 index and configs besides."""
        depth = self.schedule.placement.depth
        first = {index: stage for index, stage in self._stages.items() if index < depth}
        self._needs_saved().write(folder, first, self.processes)

    def load_weights(self, folder: str | Path) -> None:
        """Read this process's weights back from a folder that write_weights or save_pretrained wrote."""
        self._needs_saved().load(folder, self._stages)

    def save_pretrained(self, path: str | Path) -> None:
        """Write a folder that `from_pretrained` opens, complete or not at all."""
        write_folder(Path(path), self.write_weights, self.processes)

    def verify_against(self, model: nn.Module, batch: Given) -> None:
        """Compare loss and every gradient of one batch with the whole `model`'s; `.grad` is left as it was.

        In evaluation mode, so that dropout does not count.

        Raises EquivalenceError that names what differs where.
        """
        from penstock.equivalence import compare

        compare(self, model, batch, self._loss)

    def close(self) -> None:
        """Let go of the pipeline's thread and process groups; the modules stay usable."""
        self._world.transport.close()

    def _needs_saved(self) -> SavedModel:
        if self._saved is None:
            raise ModelError(
                "a pipeline made by from_provider",
                "only its provider knows its files",
                "Save `modules` yourself",
            )
        return self._saved


def _refuse_shared_modules(modules: Mapping[int, nn.Module]) -> None:
    """A weight of two stages would be stepped, clipped and counted twice."""
    seen: dict[int, int] = {}
    for stage, module in modules.items():
        for name, parameter in module.named_parameters():
            if (other := seen.setdefault(id(parameter), stage)) != stage:
                raise ModelError(
                    f"the parameter {name} of stage {stage}",
                    f"it is the very one that stage {other} holds",
                    "Let the provider make modules of their own for each call",
                )


def own_stages(schedule: Schedule, world: World) -> list[int]:
    """The stages that this process hosts."""
    return [stage for rank in world.ranks for stage in schedule.placement.stages_of(rank)]


def as_padding(shapes: Shapes) -> Padding | None:
    """What `shapes` says of padding. Raises ConfigError."""
    if isinstance(shapes, Padding):
        return shapes
    if shapes not in ("inferred", "exchanged", "padded"):
        raise ConfigError(
            f"shapes={shapes!r}",
            "what comes over an edge is 'inferred', 'exchanged' or 'padded'",
            "Take 'inferred', unless shapes depend on the data's values ('exchanged')",
        )
    return Padding() if shapes == "padded" else None


def check_batched(schedule: Schedule, shapes: Shapes) -> None:
    """Whether messages can go in exchanges. Raises ConfigError."""
    if shapes == "exchanged":
        raise ConfigError(
            "exchange='batched' with shapes='exchanged'",
            "what is exchanged begins at once, and a message that tells itself comes in two parts",
            "Take exchange='channels', or shapes='inferred' where they do not depend on values",
        )
    exchanges(schedule)


def recomputed_places(schedule: Schedule, how: Checkpointing | None) -> Places:
    """The (stage, microbatch) that activation checkpointing applies to."""
    if how is None or not schedule.trains:
        return frozenset()
    return first_in_flight(schedule, how.in_flight)
