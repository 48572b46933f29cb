"""C: what a step costs over a plain loop, in time, in memory and in waits of the host.

All ranks are in one process, so that a step does the work of the plain loop and nothing else. The loop is
what a user writes: `(model(**microbatch).loss / m).backward()`, on the same microbatches with the same
attention. Time is taken in turns, a step of each, until the GPU is done.

- step: its time over the loop's
- (I + W) / B: seconds of the GPU for both halves of a backward, in zb_h1, over those of whole ones, in 1f1b.
  Both have the same stages.
- memory: the peak of a step that adds to gradients, less what `AutoPipeline.account` predicts for it: its
  weights, gradients and live activations. What F and W need while they run is the rest. On a CPU the peak is
  counted by live storages, with the kernel of attention that the account knows.
- the timeline's busy time over the profiler's: how long the GPU computed, without its waits for the host,
  which the step before has measured (`Pipeline.measuring_device`). Both of one step, recorded without the
  host's calls. The timeline counts the microsecond or so between two kernels that are queued together.
- host: with layers of next to no width the GPU waits for the host. A step less a loop, over the ops. Next to
  torch.distributed.pipelining the stages multiply by a parameter, and messages of torch are left out.
- synchronisations: calls of CUDA in which the host waits for the GPU, within a step; those of an op are what
  twice the microbatches add. Once with the batch in host memory, and once on the GPU.
- compiled layers: the step over the loop, both compiled; recompilations after the second step
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any, NamedTuple, TypeVar

import torch
from torch.nn.attention import SDPBackend
from transformers import PreTrainedModel

from benchmarks.gpu.exactness import SCHEDULES
from benchmarks.gpu.models import (
    Batch,
    Size,
    attention,
    batch_of,
    compile_layers,
    copy_on,
    gradients_made,
    graphs_compiled,
    microbatches_of,
    model_of,
    peak_of_storages,
    predicted_live,
    qwen3,
    seconds,
    wait_for,
)
from benchmarks.gpu.part import Part
from benchmarks.gpu.profiles import profiled
from benchmarks.rounds import in_turn
from penstock import AutoPipeline, Pipeline
from penstock.schedule import DeviceTime, Timeline

T = TypeVar("T")
STEP: Mapping[str, float] = {"1f1b": 1.03, "zb_v": 1.05}
HALVES, EXCESS, BUSY, COMPILED = 1.05, 0.02, 0.02, 1.03
HOST = 60.0  # µs an op
SYNCHRONISATIONS = 3
PLAIN = "plain loop"


class Sizes(NamedTuple):
    """Sizes of this part.

    narrow: for the host's cost and its waits, which do not depend on widths
    empty: ranks and microbatches of the stages that multiply by a parameter
    rounds: steps of each that count; backend: of torch.compile
    """

    model: Size
    narrow: Size
    empty: tuple[int, int]
    schedules: tuple[str, ...]
    rounds: int
    backend: str


FULL = Sizes(
    Size(24, 2048, 6144, 16, 8, 128, 8192, 2, 2048, 16, 4),
    Size(8, 64, 128, 2, 1, 32, 64, 1, 64, 16, 4),
    (4, 64), SCHEDULES, 4, "inductor",
)  # fmt: skip
_SMALL = Size(4, 32, 48, 4, 2, 8, 64, 1, 12, 4, 2)
TINY = Sizes(_SMALL, _SMALL, (2, 4), ("1f1b", "zb_h1"), 1, "eager")


class Bench(NamedTuple):
    """A model, a batch, and the plain loop over both.

    The kernel of attention is chosen for steps and loops alone: a build runs the model without values, where
    it may not exist.
    """

    part: Part
    size: Size
    model: PreTrainedModel
    batch: Batch

    @classmethod
    def of(cls, part: Part, size: Size) -> Bench:
        """With the model on the part's device; pipelines copy it from there."""
        model = model_of(qwen3(size), torch.bfloat16, part.device)
        return cls(part, size, model, batch_of(size, part.device))

    @property
    def kernel(self) -> SDPBackend:
        return SDPBackend.FLASH_ATTENTION if self.part.on_gpu else SDPBackend.MATH

    def loop(self, model: PreTrainedModel) -> None:
        with attention(self.kernel):
            for microbatch in microbatches_of(self.batch, self.size.microbatches):
                (model(**microbatch, use_cache=False).loss / self.size.microbatches).backward()

    def step(self, pipe: Pipeline) -> None:
        with attention(self.kernel):
            pipe.step(self.batch)

    def pipeline(self, schedule: str, *, backend: str = "") -> Pipeline:
        return self.options(schedule, backend=backend).build(self.model)

    def options(self, schedule: str, *, backend: str = "") -> AutoPipeline:
        """backend: of torch.compile for the layers; empty for layers as they are"""
        return AutoPipeline(
            ranks=self.size.ranks, schedule=schedule, microbatches=self.size.microbatches,
            device=self.part.device, parallelize_fn=compile_layers(backend) if backend else None,
        )  # fmt: skip

    def time_of_loop(self, model: PreTrainedModel) -> float:
        model.zero_grad()
        return seconds(self.part.device, partial(self.loop, model))

    def time_of_step(self, pipe: Pipeline) -> float:
        pipe.zero_grad()
        return seconds(self.part.device, partial(self.step, pipe))


Durations = dict[str, dict[int, float]]  # the median seconds of an op, by its kind and stage


def run(part: Part, sizes: Sizes) -> None:
    part.notes += [
        str(sizes.model), f"the host's cost and synchronisations: {sizes.narrow}",
        "flash attention, bfloat16, the batch on the GPU; medians, in brackets the quartiles",
    ]  # fmt: skip
    durations: dict[str, Durations | None] = {}
    part.measure("the profiler", 60, partial(warm_profiler, part))
    narrow = made(part, "the narrow model", sizes.narrow)
    # what has bars on time comes first: on a slow host the rest may not fit in
    for schedule in STEP:
        _of(narrow, f"host: {schedule}", 60, _host, sizes, schedule)
    part.measure("host: next to torch.distributed.pipelining", 60, partial(_next_to_torch, part, sizes))
    model = made(part, "the model", sizes.model)
    barred = [schedule for schedule in sizes.schedules if schedule in STEP]
    others = [schedule for schedule in sizes.schedules if schedule not in STEP]
    for schedule in barred:
        durations[schedule] = _of(model, schedule, 90, _schedule, sizes, schedule)
    _of(model, "compiled layers", 200, _compiled, sizes)
    for schedule in barred:
        _of(narrow, f"synchronisations: {schedule}", 60, _synchronisations, schedule)
    for schedule in others:
        durations[schedule] = _of(model, schedule, 90, _schedule, sizes, schedule)
    part.measure("(I + W) / B", 10, partial(_halves, part, durations))
    for schedule in others:
        _of(narrow, f"synchronisations: {schedule}", 60, _synchronisations, schedule)


def _of(bench: Bench | None, case: str, seconds: float, run: Callable[..., T], *more: Any) -> T | None:
    """Measure a model, if it could be made."""
    return None if bench is None else bench.part.measure(case, seconds, partial(run, bench, *more))


def made(part: Part, case: str, size: Size) -> Bench | None:
    """None where it could not be made; a row says why."""

    def make() -> Bench:
        bench = Bench.of(part, size)
        bench.time_of_loop(bench.model)
        part.raw[f"parameters of {case}"] = sum(parameter.numel() for parameter in bench.model.parameters())
        return bench

    return part.measure(case, 60, make)


def warm_profiler(part: Part) -> None:
    """Let what it does once not fall into a measurement."""
    file = part.scratch / "first.json.gz"
    profiled(part.device, lambda: torch.ones(8, device=part.device).sum(), file)
    file.unlink()


# ---- one schedule


def _schedule(bench: Bench, sizes: Sizes, schedule: str) -> Durations:
    part = bench.part
    bench.model.zero_grad()  # of the loop: they are no part of the pipeline's peak
    part.free()
    before = torch.cuda.memory_allocated(part.device) if part.on_gpu else 0
    pipe = bench.pipeline(schedule)
    for _ in range(2):
        bench.time_of_step(pipe)
    _memory(bench, pipe, schedule, before)
    timelines: list[Timeline] = []

    def step() -> float:
        took = bench.time_of_step(pipe)
        timelines.append(pipe.timeline)
        return took

    count = sizes.rounds if schedule in STEP else 1  # the minutes of a part go to what has a bar
    rounds = in_turn({PLAIN: lambda: bench.time_of_loop(bench.model), schedule: step}, count, others=None)
    found = rounds.ratio(schedule, PLAIN)
    part.raw[f"step: {schedule}"] = rounds.found
    part.add(
        schedule, "step / plain loop", found.middle, at_most=STEP.get(schedule), timing=True, quartiles=found
    )
    part.add(schedule, "step", rounds[schedule].middle, "s", other=rounds[PLAIN].middle)
    _profile(bench, pipe, schedule)
    device = pipe.timeline.device
    pipe.close()
    return durations_of(timelines, device)


def _memory(bench: Bench, pipe: Pipeline, schedule: str, before: int) -> None:
    """before: bytes on the GPU before the pipeline was built"""
    part, what = bench.part, "peak less weights, gradients and predicted live / peak"
    options = bench.options(schedule)
    account = replace(options.account(options.build_plan(bench.model)), accumulates=True)
    costs = account.costs(bench.size.shape)
    assert costs is not None
    fixed = sum(rank.fixed for rank in account.ranks(None, lambda *_: 0))
    wait_for(part.device)
    if part.on_gpu:
        torch.cuda.reset_peak_memory_stats(part.device)
        bench.step(pipe)  # without zero_grad: gradients are there from its beginning
        wait_for(part.device)
        peak = torch.cuda.max_memory_allocated(part.device) - before
    else:
        peak = peak_of_storages(pipe, partial(pipe.step, bench.batch))
    live = predicted_live(pipe.timeline, pipe.schedule, costs, gradients_made(pipe))
    part.raw[f"memory: {schedule}"] = {"predicted live": live, "weights and gradients": fixed, "peak": peak}
    part.add(schedule, what, abs(peak - fixed - live) / peak, at_most=EXCESS)


def _profile(bench: Bench, pipe: Pipeline, schedule: str) -> None:
    part = bench.part
    pipe.zero_grad()
    what = "timeline's busy time / profiler's, less 1"
    if part.on_gpu:
        with pipe.measuring_device():
            bench.step(pipe)
        file = part.scratch / "busy.json.gz"
        seen = profiled(part.device, partial(bench.step, pipe), file, host=False)
        file.unlink()
        timeline = pipe.timeline
        known = seen.busy and timeline.host_bound
        difference = abs(sum(timeline.device_busy) / seen.busy - 1) if known else math.nan
        part.add(schedule, what, difference, at_most=BUSY)
        part.add(
            schedule,
            "the host is the limit, share of the step",
            sum(timeline.rank_host_share) / timeline.ranks,
        )
    else:
        part.not_run(schedule, what, "without a GPU there is nothing to compare", f"at most {BUSY:g}")
    trace = part.scratch / f"step-{schedule}.json.gz"
    seen = profiled(part.device, partial(bench.step, pipe), trace)
    ops = {str(op) for program in pipe.schedule.programs for op in program}
    part.raw[f"trace: {schedule}"] = {"file": trace.name, "synchronisations": seen.synchronisations}
    part.add(schedule, f"ops without a name in {trace.name}", len(ops - seen.ops), at_most=0)


def durations_of(timelines: list[Timeline], device: Iterable[DeviceTime] = ()) -> Durations:
    """The medians over all timelines; what the GPU takes, where that is known."""
    found: dict[tuple[str, int], list[float]] = defaultdict(list)
    for timeline in timelines:
        for span in timeline.spans:
            found[span.op.kind, span.op.stage].append(span.end - span.start)
    durations: Durations = defaultdict(dict)
    for (kind, stage), times in sorted(found.items()):
        durations[kind][stage] = median(times)
    for stage, kind, known in device:
        durations[kind][stage] = min(known, durations[kind][stage])
    return dict(durations)


def _halves(part: Part, durations: Mapping[str, Durations | None]) -> None:
    part.raw["seconds of an op, by stage"] = durations
    split, unsplit = durations.get("zb_h1"), durations.get("1f1b")
    if split is None or unsplit is None:
        part.not_run("zb_h1 / 1f1b", "(I + W) / B", "one of them was not measured", f"at most {HALVES:g}")
        return
    whole = unsplit["B"]
    stages = whole.keys() & split["I"].keys() & split["W"].keys()
    halves = sum(split["I"][stage] + split["W"][stage] for stage in stages)
    ratio = halves / sum(whole[stage] for stage in stages)
    part.add(f"zb_h1 / 1f1b, {len(stages)} stages", "(I + W) / B", ratio, at_most=HALVES, timing=True)


def _compiled(bench: Bench, sizes: Sizes) -> None:
    part, case = bench.part, "1f1b, compiled layers"
    torch._dynamo.utils.counters.clear()
    plain = copy_on(bench.model, part.device)
    compile_layers(sizes.backend)(plain)
    pipe = bench.pipeline("1f1b", backend=sizes.backend)
    for _ in range(2):
        bench.time_of_loop(plain)
        bench.time_of_step(pipe)
    before = graphs_compiled()
    rounds = in_turn(
        {PLAIN: lambda: bench.time_of_loop(plain), case: lambda: bench.time_of_step(pipe)},
        sizes.rounds, others=None,
    )  # fmt: skip
    found = rounds.ratio(case, PLAIN)
    part.raw[case] = rounds.found
    part.add(case, "step / compiled plain loop", found.middle, at_most=COMPILED, timing=True, quartiles=found)
    part.add(case, "graphs compiled in two steps", before, at_least=1)
    part.add(case, "recompilations after step 2", graphs_compiled() - before, at_most=0)
    pipe.close()
    torch._dynamo.reset()


# ---- the host


def _host(bench: Bench, sizes: Sizes, schedule: str) -> None:
    part, case = bench.part, f"host: {schedule}"
    pipe = bench.pipeline(schedule)
    ops = sum(map(len, pipe.schedule.programs))
    rounds = in_turn(
        {PLAIN: lambda: bench.time_of_loop(bench.model), case: lambda: bench.time_of_step(pipe)},
        3 * sizes.rounds, warm_up=2, others=None,
    )  # fmt: skip
    found = rounds.of(lambda numbers: (numbers[case] - numbers[PLAIN]) / ops * 1e6)
    part.raw[case] = rounds.found
    part.add(
        case, "an op over the plain loop", found.middle, "µs", at_most=HOST, timing=True, quartiles=found
    )
    pipe.close()


def _next_to_torch(part: Part, sizes: Sizes) -> None:
    # here, as a torch without one of these schedules must not fail the rest
    from benchmarks.overhead import cost_per_op

    case = "host: 1f1b, next to no compute"
    taken = [cost_per_op("1f1b", *sizes.empty, part.device) for _ in range(sizes.rounds)]
    part.raw[case] = taken
    mine, theirs = (median(each[name] for each in taken) * 1e6 for name in ("penstock", "torch"))
    part.add(case, "an op over the plain loop", mine, "µs", at_most=HOST, timing=True)
    ratio = median(each["penstock"] / each["torch"] for each in taken)
    part.add(case, "the same / torch.distributed.pipelining's", ratio, at_most=1.0, timing=True)
    part.add(case, "torch's, an op over the plain loop", theirs, "µs")


def _synchronisations(bench: Bench, schedule: str) -> None:
    part, what = bench.part, "waits of the host for the GPU, a step"
    if not part.on_gpu:
        for place in ("in host memory", "on the GPU"):
            part.not_run(f"{schedule}, batch {place}", what, "there is no GPU", f"at most {SYNCHRONISATIONS}")
        return
    half = bench._replace(size=bench.size._replace(microbatches=bench.size.microbatches // 2))
    for place, device in (("in host memory", torch.device("cpu")), ("on the GPU", part.device)):
        counts = []
        for each in (half, bench):
            here = each._replace(batch=batch_of(each.size, device))
            counts.append(_waits_and_ops(here, schedule))
        (few, fewer_ops), (waits, ops) = counts
        case = f"{schedule}, batch {place}"
        part.add(case, what, waits, at_most=SYNCHRONISATIONS)
        part.add(case, "the same, an op", (waits - few) / (ops - fewer_ops), at_most=0)


def _waits_and_ops(bench: Bench, schedule: str) -> tuple[int, int]:
    """Of one step, when its shapes have been seen."""
    pipe = bench.pipeline(schedule)
    for _ in range(2):
        bench.step(pipe)
    file = bench.part.scratch / "waits.json.gz"
    seen = profiled(bench.part.device, partial(bench.step, pipe), file)
    file.unlink()
    pipe.close()
    return seen.synchronisations, sum(map(len, pipe.schedule.programs))
