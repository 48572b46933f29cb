"""What a model costs, for any candidate: its work by parts, its traffic and its memory, each measured once.

Microbatches of two and of three rows are run without values. Ops of a part grow evenly with the rows, so
these say what any number of rows takes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from transformers import PretrainedConfig

from penstock.batch.head_logits import are_large
from penstock.batch.liger import Chunked
from penstock.errors import ConfigError, ModelError
from penstock.models.source import Source, open_without_flash
from penstock.models.split.balanced_split import ranges
from penstock.models.tracing.chain import Chain, built_alike, find_chain, under_autocast
from penstock.models.tracing.probe import layer_kind
from penstock.parallel.axes import Axes
from penstock.parallel.mesh_plan import check_model
from penstock.parallel.tensor.plan import assigned, logits_plan
from penstock.pipeline.building.build_plan import BuildPlan, plan_stages
from penstock.planner.candidate import COMPUTED, DTYPES, Candidate, Precision, Recomputed
from penstock.planner.tracing import Measurement, measured_work, own_head, selective_work, with_own_head
from penstock.planner.traffic import Traffic, traffic
from penstock.planner.weights import PartMemory
from penstock.planner.work import ModelWork, OpWork, PartBytes, PartWork
from penstock.planner.workers import forked
from penstock.schedule import Schedule, build, verify

_ROWS = (2, 3)  # of the microbatches that are run: ops on one row may leave out copies
_RECOMPUTED: tuple[Recomputed, ...] = ("full", "selective")  # which differ in what is run
_CHUNKS: tuple[Chunked, ...] = (True, False, "liger")
_REMEMBERED = 4096  # runs, of a few kB each
_runs: dict[Hashable, Any] = {}  # that all workloads of this process have measured


@dataclass
class Workload:
    """A model, from its config alone, and what is known of its costs. Loads no weight.

    attention: as transformers names it; None takes the config's
    """

    config: PretrainedConfig
    precision: Precision = "mixed"
    attention: str | None = None
    _known: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    @cached_property
    def source(self) -> Source:
        """On the meta device."""
        opened, _ = open_without_flash(self.config, self.attention, dtype=DTYPES[self.precision])
        return opened

    @cached_property
    def chain(self) -> Chain:
        chain = find_chain(self.source.model)
        return (
            under_autocast(self.source.model, chain, torch.bfloat16) if self.precision == "mixed" else chain
        )

    @property
    def layers(self) -> int:
        return self.chain.count

    @cached_property
    def kinds(self) -> tuple[int, ...]:
        """For each layer the index of its kind."""
        of_layers = [
            layer_kind(layer) for layer in self.source.model.get_submodule(self.chain.layers).children()
        ]
        order = list(dict.fromkeys(of_layers))
        return tuple(map(order.index, of_layers))

    @cached_property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.source.model.parameters())

    @property
    def computed(self) -> str:
        """The dtype of products, as torch names it."""
        return str(COMPUTED[self.precision]).removeprefix("torch.")

    def takes(self, candidate: Candidate) -> str:
        """Why the axes of `candidate` would train the model wrongly; empty where they are exact."""
        axes = candidate.axes
        if axes.ep == 1:  # how many ranks shard weights makes no difference
            axes = replace(axes, dp_replicate=1, dp_shard=1 + (axes.dp_shard > 1 or axes.dp_replicate > 1))
        key = "takes", axes, candidate.context, candidate.sequence_parallel
        if key not in self._known:
            self._known[key] = self._refusal(axes, candidate)
        refusal: str = self._known[key]
        return refusal

    def _refusal(self, axes: Axes, candidate: Candidate) -> str:
        try:
            for one in ({"dp_shard": axes.dp_shard, "ep": axes.ep}, {"cp": axes.cp, "tp": axes.tp}):
                self._check(Axes(**one), candidate)
        except (ConfigError, ModelError) as error:
            return f"{error.value}: {error.rule}"
        return ""

    def _check(self, axes: Axes, candidate: Candidate) -> None:
        key = "checked", axes, candidate.context, candidate.sequence_parallel
        if key not in self._known:
            check_model(self.source.model, axes, candidate.parallel_options())
            self._known[key] = True

    @cached_property
    def shards_sequence(self) -> bool:
        """Whether tp may shard the model's activations between its matrices."""
        return not self.takes(Candidate(axes=Axes(tp=2), sequence_parallel=True))

    def work(self, candidate: Candidate) -> ModelWork:
        """The ops and bytes of each part, for a microbatch of `candidate` on one process."""
        return self.measured(candidate).work

    def measured(self, candidate: Candidate) -> Measurement:
        """The same, with the bytes that all layers of a stage share."""
        if candidate.chunks is True and not self._is_large(candidate):  # small logits are never in chunks
            return self.measured(replace(candidate, chunked_loss=False))
        key = "work", candidate.rows, _shape_key(candidate), candidate.recomputed == "selective"
        if key not in self._known:
            few, more = (self._measured(replace(candidate, rows=rows)) for rows in _ROWS)
            work = _with_rows(few.work, more.work, candidate.rows)
            if candidate.chunks is True and not self._is_large(replace(candidate, rows=_ROWS[0])):
                work = replace(work, head=own_head(self._any_plan, candidate))  # of few rows it is another
            shared = round(_grown(few.shared, more.shared, candidate.rows))
            self._known[key] = Measurement(work, shared)
        measured: Measurement = self._known[key]
        return measured

    def _is_large(self, candidate: Candidate) -> bool:
        """Whether logits of a microbatch on one process are large enough for chunks."""
        model, (rows, length) = self.source.model, candidate.axes.local_shape(candidate.shape)
        head = model.get_output_embeddings()
        if head is None:
            return False
        key, tp = ("sharded head", candidate.axes.tp), candidate.axes.tp
        if key not in self._known:
            self._known[key] = tp > 1 and logits_plan(model, assigned(model, tp)).head is not None
        vocabulary = int(head.weight.shape[0])
        return are_large(rows * length, vocabulary // tp if self._known[key] else vocabulary)

    def measure(self, candidates: Iterable[Candidate], processes: int) -> None:
        """Run what all of these need without values, at once and in so many processes."""
        assert self._any_plan  # made before the forks
        alike = defaultdict[Hashable, dict[Hashable, Candidate]](dict)
        for run in (replace(one, rows=rows) for one in candidates for rows in _ROWS):
            if not self._is_measured(run):
                alike[run.rows, _layers_key(run)][_run_key(run)] = run
        with forked(self._measured_alike, min(processes, len(alike))) as each_in_turn:
            for measured in each_in_turn([list(runs.values()) for runs in alike.values()]):
                for form, one in measured:
                    self._remember(form, one)

    def _is_measured(self, candidate: Candidate) -> bool:
        """In all ways to recompute."""
        return all(self._key(replace(candidate, recomputed=what)) in self._runs for what in _RECOMPUTED)

    def _measured_alike(self, runs: Sequence[Candidate]) -> list[tuple[Candidate, Measurement]]:
        """Of runs with the same layers, so that these are run once."""
        forms = [replace(run, recomputed=what) for run in runs for what in _RECOMPUTED]
        return [(form, self._measured(form)) for form in forms]

    def _measured(self, candidate: Candidate) -> Measurement:
        """On so many rows as the candidate has."""
        key = self._key(candidate)
        if key not in self._runs:
            return self._remember(candidate, self._run(candidate))
        measured: Measurement = self._runs[key]
        return measured

    def _remember(self, candidate: Candidate, measured: Measurement) -> Measurement:
        if len(self._runs) >= _REMEMBERED:
            self._runs.pop(next(iter(self._runs)))
        self._runs[self._key(candidate)] = measured
        return measured

    @property
    def _runs(self) -> dict[Hashable, Any]:
        """What was measured of all models that are built as this one; of this workload alone for a user's."""
        return self._known if self._kind is None else _runs

    def _key(self, candidate: Candidate, chunks: Chunked | None = None) -> Hashable:
        return self._kind, self.precision, candidate.precision, _run_key(candidate, chunks)

    @cached_property
    def _kind(self) -> Hashable | None:
        return built_alike(self.source.model)

    def _run(self, candidate: Candidate) -> Measurement:
        plan = self._any_plan
        keys = (self._key(candidate, chunks) for chunks in _CHUNKS)
        alike: Measurement | None = next((self._runs[key] for key in keys if key in self._runs), None)
        if candidate.recomputed != "selective":
            return measured_work(plan, candidate) if alike is None else with_own_head(plan, candidate, alike)
        whole = self._measured(replace(candidate, recomputed="full"))
        if alike is None:
            return selective_work(plan, candidate, whole)
        return whole._replace(work=replace(whole.work, kinds=alike.work.kinds))

    @cached_property
    def _any_plan(self) -> BuildPlan:
        return self.plan(build("gpipe", ranks=1, microbatches=1), (self.layers,))

    def losses(self, candidate: Candidate) -> tuple[Candidate, ...]:
        """The candidate with whole logits, and in chunks where these are another computation."""
        whole = replace(candidate, chunked_loss=False)
        same = candidate.chunks == whole.chunks or self.work(candidate).head == self.work(whole).head
        return (candidate,) if same else (whole, candidate)

    def traffic(self, candidate: Candidate) -> Traffic:
        """The collectives of tp, cp and ep within each part."""
        key = "traffic", _shape_key(candidate), candidate.practice
        if key not in self._known:
            firsts = [self.kinds.index(kind) for kind in sorted(set(self.kinds))]
            self._known[key] = traffic(self.source.model, self.chain, firsts, replace(candidate, rows=1))
        of_a_row: Traffic = self._known[key]
        return of_a_row.times(candidate.rows)

    def memory(self, candidate: Candidate) -> PartMemory:
        """The bytes of weights, gradients and optimizer's states of each part."""
        axes = candidate.axes
        copies = min(axes.dp_replicate, 2) if axes.shards == axes.ep else 1  # how many make no difference
        axes = replace(axes, dp_replicate=copies, dp_shard=axes.shards, cp=1)
        key = "memory", axes
        if key not in self._known:
            options = replace(candidate, reshard=False).parallel_options()
            self._known[key] = PartMemory.of(self.source, self.chain, self.kinds, axes, options)
        memory: PartMemory = self._known[key]
        return memory

    def tied(self, candidate: Candidate) -> int:
        """Bytes on one process of the gradients of weights that the embedding and the head share."""
        if not self.source.model.config.get_text_config().tie_word_embeddings:
            return 0
        memory = self.memory(candidate)
        apart = memory.embedding.gradients + memory.head.gradients
        return apart + sum(memory.kinds[kind].gradients for kind in memory.layers) - memory.whole.gradients

    def plan(self, schedule: Schedule, split: tuple[int, ...]) -> BuildPlan:
        """The build plan of a schedule and a split, as AutoPipeline would make it."""
        stages = plan_stages(self.source.model, self.chain, schedule, ranges(split))
        return BuildPlan(schedule, verify(schedule), stages, self.source, self.chain)

    def flops(self, length: int) -> float:
        """FLOPs of the model for one row: three times its forward's, whatever is recomputed."""
        whole = self.work(Candidate(axes=Axes(dp_shard=2), length=length, precision=self.precision))
        parts = (whole.embedding, *(whole.kinds[kind] for kind in whole.layers), whole.head)
        return 3 * sum(op.flops * op.calls for part in parts for op in part.forward if op.kind != "other")


def _layers_key(candidate: Candidate) -> tuple[Hashable, ...]:
    """Equal for candidates whose parts but for the head do the same work for a row."""
    axes = candidate.axes
    return candidate.length, axes.tp, axes.cp, axes.ep, candidate.context, candidate.sequence_parallel


def _shape_key(candidate: Candidate, chunks: Chunked | None = None) -> tuple[Hashable, ...]:
    """Equal for candidates whose parts do the same work for a row. chunks: in place of the candidate's own"""
    return *_layers_key(candidate), candidate.chunks if chunks is None else chunks


def _run_key(candidate: Candidate, chunks: Chunked | None = None) -> tuple[Hashable, ...]:
    """Equal for candidates for which the same is run."""
    return "runs", candidate.rows, _shape_key(candidate, chunks), candidate.recomputed == "selective"


def _grown(few: float, more: float, rows: int) -> float:
    """few, more: for the numbers of rows in `_ROWS`"""
    return few + (rows - _ROWS[0]) / (_ROWS[1] - _ROWS[0]) * (more - few)


def _with_rows(few: ModelWork, more: ModelWork, rows: int) -> ModelWork:
    """The work of `rows` rows, from that of the numbers in `_ROWS`."""

    def grown(a: float, b: float) -> float:
        return _grown(a, b, rows)

    def ops(first: tuple[OpWork, ...], second: tuple[OpWork, ...]) -> tuple[OpWork, ...]:
        if [op[:2] for op in first] != [op[:2] for op in second]:  # a chunked head has more chunks
            first, second = _means(first, second)
        return tuple(
            a._replace(
                flops=grown(a.flops, b.flops),
                nbytes=grown(a.nbytes, b.nbytes),
                calls=grown(a.calls, b.calls),
            )
            for a, b in zip(first, second, strict=True)
        )

    def part(a: PartWork, b: PartWork) -> PartWork:
        work = {name: ops(getattr(a, name), getattr(b, name)) for name in PartWork._fields[:-1]}
        nbytes = PartBytes(*(round(grown(*pair)) for pair in zip(a.nbytes, b.nbytes, strict=True)))
        return a._replace(nbytes=nbytes, **work)

    kinds = tuple(part(*pair) for pair in zip(few.kinds, more.kinds, strict=True))
    ends = part(few.embedding, more.embedding), part(few.head, more.head)
    return ModelWork(kinds, few.layers, *ends)


def _means(*works: tuple[OpWork, ...]) -> Iterator[tuple[OpWork, ...]]:
    """For each of `works` an op of mean size for each kind and dtype that any of them has."""
    for ops in works:
        means = []
        for kind, dtype in dict.fromkeys(op[:2] for work in works for op in work):
            alike = [op for op in ops if op[:2] == (kind, dtype)]
            calls = sum(op.calls for op in alike)
            sums = (sum(op.calls * size for op, size in zip(alike, sizes, strict=True))
                    for sizes in ([op.flops for op in alike], [op.nbytes for op in alike]))  # fmt: skip
            flops, nbytes = (total / (calls or 1) for total in sums)
            means.append(OpWork(kind, dtype, flops, nbytes, calls))
        yield tuple(means)
