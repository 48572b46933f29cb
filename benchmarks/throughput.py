"""Real compute: a whole training step of a Qwen3 by each way that two cores offer.

Every way trains the same decoder on the same batch: forward, backward, AdamW. Ways that run in two processes
have a thread each. All ways take turns, a round holds one step of each, and ratios are those within a round.

- one process: with one thread or both, its batch in microbatches or as a whole
- two processes apart: each does the work of one rank of the pipeline at the same time as the other, and
  waits for nothing. Less the schedule's bubble it is the limit of a pipeline on this machine
- DDP and FSDP2: each process has half of the microbatches
- torch.distributed.pipelining and penstock: the same modules as stages

The grid varies one factor at a time around a centre: 8 layers of 256, microbatches of 2 rows, m = 8. At the
centre all ways run: every builder but dualpipe, which holds the model twice, and a searched schedule. At the
side points those that users choose between. Peak memory is that of processes of their own, one way in each,
at three points.

The steps of one way differ by more, from round to round, than the ways do; and so do those of one pair of
processes from those of the next. So at the centre, and with m = 16, the three that the project's bars compare
take turns in several fresh pairs of processes. The bars are on the medians of the pairs. At the other points
there is no time for as many.

Ways that train the same stages begin with the same loss, or the benchmark stops.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from statistics import mean
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.nn.parallel import DistributedDataParallel
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RMSNorm, Qwen3RotaryEmbedding

from benchmarks.memory import peak_rss, rss
from benchmarks.pool import Pool, Rank
from benchmarks.report import Found, Row, measured
from benchmarks.rivals import TORCH, DecoderStage, Mean, placement
from benchmarks.rounds import Numbers, Rounds, in_turn, interval, median_interval, rounds_of, summary
from penstock import Pipeline
from penstock.schedule import Costs, Schedule, build, simulate
from penstock.schedule.choose import ScheduleLike, chosen_schedule

RANKS, CORES, SEQUENCE, VOCABULARY = 2, 2, 128, 256
LIMIT = 0.97


class Case(NamedTuple):
    """hidden: size of the model; layers: that it has; rows: of a microbatch"""

    hidden: int
    layers: int
    rows: int
    microbatches: int

    def __str__(self) -> str:
        return (
            f"{self.layers} layers of {self.hidden}, {self.rows} x {SEQUENCE} tokens, m={self.microbatches}"
        )

    @property
    def tokens(self) -> int:
        return self.rows * self.microbatches * SEQUENCE


CENTRE = Case(256, 8, 2, 8)
SIDES = (
    *(CENTRE._replace(microbatches=count) for count in (4, 16, 32)),
    *(CENTRE._replace(rows=rows) for rows in (1, 4)),
    CENTRE._replace(hidden=512, layers=4),
)
MEMORY = (CENTRE, CENTRE._replace(microbatches=32), CENTRE._replace(hidden=512, layers=4))
TWO_THREADS = "one process, two threads, whole batch"
PARTS = "one process, two threads, microbatches"
WHOLE = "one process, one thread, whole batch"
ALONE = "one process, one thread, microbatches"
APART = "two processes apart"
THEIRS = {f"torch, {name}": name for name in ("1f1b", "interleaved_1f1b")}
OURS: Mapping[str, ScheduleLike] = {
    f"penstock, {name}": name for name in (
        "1f1b", "interleaved_1f1b", "zb_h1", "gpipe", "looped_bfs", "interleaved_zero_bubble", "zb_h2",
        "zb_v", "v_half", "v_min", "dualpipe_v", "hanayo",
    )
} | {"penstock, searched": {"schedule": "searched", "memory_limit": 2, "seconds": 5}}  # fmt: skip
GLOO = "penstock, 1f1b over gloo"
MINE = ("penstock, 1f1b", "penstock, interleaved_1f1b")  # those of the side points
FEW = (ALONE, APART, "DDP", *THEIRS, *MINE)
DUEL = (APART, "torch, 1f1b", "penstock, 1f1b")
DUELS = tuple(CENTRE._replace(microbatches=count) for count in (8, 16))
DUEL_POOLS = 9  # fresh processes, each with as many rounds as the other points
ALL = (ALONE, WHOLE, TWO_THREADS, PARTS, APART, "DDP", "FSDP2", *THEIRS, *OURS, GLOO)
MORE_OF_MEMORY = ("FSDP2", "penstock, zb_h1", "penstock, zb_v", "penstock, searched")
PAIRS = (*THEIRS, "DDP", "FSDP2", TWO_THREADS, PARTS)  # whom ours is compared with
PEAKS = 2  # measurements of each peak
SIMULATED = (2, 4, 8, 16, 32)  # ranks


class Part(DecoderStage):
    """Stage `stage` of `stages` of the decoder."""

    def __init__(self, case: Case, stage: int, stages: int) -> None:
        super().__init__()
        config = Qwen3Config(
            vocab_size=VOCABULARY, hidden_size=case.hidden, intermediate_size=3 * case.hidden,
            num_hidden_layers=case.layers, num_attention_heads=case.hidden // 64,
            num_key_value_heads=case.hidden // 128, head_dim=64, max_position_embeddings=SEQUENCE,
            attn_implementation="sdpa",
        )  # fmt: skip
        own = case.layers // stages
        torch.manual_seed(stage)
        self.embedding = nn.Embedding(VOCABULARY, case.hidden) if stage == 0 else None
        self.layers = nn.ModuleList(Qwen3DecoderLayer(config, stage * own + at) for at in range(own))
        self.rotary = Qwen3RotaryEmbedding(config)
        last = stage == stages - 1
        self.norm = Qwen3RMSNorm(case.hidden) if last else None
        self.head = nn.Linear(case.hidden, VOCABULARY, bias=False) if last else None


def loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


Losses = Sequence[Tensor | float]  # those that a rank knows of, of equal weight
Step = Callable[[], Losses]


def optimized(modules: Sequence[nn.Module], gradients: Step) -> Step:
    """A step of training: `gradients` runs forward and backward."""
    optimizer = torch.optim.AdamW([p for module in modules for p in module.parameters()], lr=1e-4)

    def step() -> Losses:
        losses = gradients()
        optimizer.step()
        optimizer.zero_grad()
        return losses

    return step


def backward(module: nn.Module, parts: Sequence[Tensor]) -> Losses:
    """Forward and backward of the mean over `parts`."""
    losses = []
    for part in parts:
        losses.append(loss(module(part), part) / len(parts))
        losses[-1].backward()  # type: ignore[no-untyped-call]
    return [each.detach() * len(parts) for each in losses]


def ids_of(case: Case) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(VOCABULARY, (case.rows * case.microbatches, SEQUENCE), generator=generator)


def alone(case: Case, ids: Tensor, microbatches: int, threads: int = 1) -> Step:
    model = Part(case, 0, 1)

    def gradients() -> Losses:
        torch.set_num_threads(threads)
        losses = backward(model, ids.chunk(microbatches))
        torch.set_num_threads(1)
        return losses

    return optimized([model], gradients)


def apart(case: Case, rank: Rank) -> Step:
    """The work of one rank of the pipeline, with inputs and gradients of its own."""
    module, first, last = Part(case, rank.index, rank.count), rank.is_first, rank.is_last
    gradient = torch.full((case.rows, SEQUENCE, case.hidden), 1e-3)

    def gradients() -> Losses:
        for part in ids_of(case).chunk(case.microbatches):
            output = module(part if first else gradient.clone().requires_grad_())
            if last:
                (loss(output, part) / case.microbatches).backward()  # type: ignore[no-untyped-call]
            else:
                output.backward(gradient)
        return []

    return optimized([module], gradients)


def data_parallel(case: Case, rank: Rank, sharded: bool) -> Step:
    model: Any = Part(case, 0, 1)
    if sharded:
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
    else:
        model = DistributedDataParallel(model)
    own = ids_of(case).chunk(rank.count)[rank.index].chunk(case.microbatches // rank.count)

    def gradients() -> Losses:
        losses = []
        for number, part in enumerate(own):
            last = number == len(own) - 1
            if sharded:
                model.set_requires_gradient_sync(last)
            with nullcontext() if sharded or last else model.no_sync():
                losses.append(loss(model(part), part) / len(own))
                losses[-1].backward()  # type: ignore[no-untyped-call]
        return [each.detach() * len(own) for each in losses]

    return optimized([model], gradients)


def torch_pipeline(case: Case, rank: Rank, schedule: str) -> Step:
    placed, ids = placement(schedule, rank.count), ids_of(case)
    row = ids[: case.rows]
    hidden = torch.empty(case.rows, SEQUENCE, case.hidden, requires_grad=True)
    logits = torch.empty(case.rows, SEQUENCE, VOCABULARY, requires_grad=True)
    stages = [
        PipelineStage(
            Part(case, stage, placed.stages), stage, placed.stages, torch.device("cpu"),
            input_args=hidden if stage else row,
            output_args=logits if stage == placed.stages - 1 else hidden,
        )
        for stage in placed.stages_of(rank.index)
    ]  # fmt: skip
    of_rank: Any = stages if len(stages) > 1 else stages[0]
    runner = TORCH[schedule](of_rank, case.microbatches, loss_fn=loss)
    inputs = (ids,) if placed.rank_of[0] == rank.index else ()
    target = ids if placed.rank_of[-1] == rank.index else None

    def gradients() -> Losses:
        losses: list[Tensor] = []
        runner.step(*inputs, target=target, losses=losses, return_outputs=False)
        return [each.detach() for each in losses]

    return optimized([stage.submod for stage in stages], gradients)


def penstock_pipeline(case: Case, rank: Rank, schedule: Schedule, transport: str | None = None) -> Step:
    ids = ids_of(case)
    pipe = Pipeline.from_provider(
        lambda info: Part(case, info.stage, info.stages), schedule=schedule, ranks=rank.count,
        microbatches=case.microbatches, loss_fn=Mean(loss), device="cpu", timeout=60, transport=transport,
    )  # fmt: skip
    batch = {"x": ids, "target": ids}
    return optimized(list(pipe.modules.values()), lambda: [pipe.step(batch).loss])


def made(case: Case, rank: Rank, way: str, schedule: Schedule | None) -> Step:
    ids, count = ids_of(case), case.microbatches
    if schedule is not None:
        return penstock_pipeline(case, rank, schedule, "gloo" if way == GLOO else None)
    if way in THEIRS:
        return torch_pipeline(case, rank, THEIRS[way])
    if way in ("DDP", "FSDP2"):
        return data_parallel(case, rank, sharded=way == "FSDP2")
    if way == APART:
        return apart(case, rank)
    return alone(
        case, ids, count if way in (ALONE, PARTS) else 1, CORES if way in (TWO_THREADS, PARTS) else 1
    )


def schedules(case: Case, ways: Sequence[str]) -> dict[str, Schedule | None]:
    """penstock's, built once for all ranks; None for a way that has none of ours."""
    forms: dict[str, ScheduleLike] = {**OURS, GLOO: "1f1b"}
    return {
        way: chosen_schedule(forms[way], RANKS, case.microbatches) if way in forms else None for way in ways
    }


def prepare(rank: Rank, case: Case, ways: dict[str, Schedule | None]) -> None:
    for way, schedule in ways.items():
        rank.kept[way] = made(case, rank, way, schedule)


def losses(rank: Rank, way: str) -> list[float]:
    """Run one step; the losses that this rank knows of."""
    return [float(each) for each in rank.kept[way]()]


def check_equal(pool: Pool, ways: dict[str, Schedule | None]) -> None:
    """Run two steps of each way: the second loss tells that the first has trained.

    Raises ValueError where ways with the same stages have different losses.
    """
    first: dict[int, tuple[str, list[float]]] = {}
    for way, schedule in ways.items():
        if way == APART:
            continue
        theirs = placement(THEIRS[way], RANKS).stages if way in THEIRS else 1
        stages = theirs if schedule is None else schedule.stages
        steps = [pool.run(losses, way, on=ranks_of(way), timeout=180) for _ in range(2)]
        found = [mean(each for rank in ranks for each in rank) for ranks in steps]
        other, expected = first.setdefault(stages, (way, found))
        if not all(math.isclose(*pair, rel_tol=1e-4) for pair in zip(found, expected, strict=True)):
            raise ValueError(f"{way} begins with losses of {found}, and {other} of {expected}")


def timed(rank: Rank, way: str, together: bool) -> tuple[float, float]:
    """Start and end of one step."""
    if together:
        dist.barrier()
    start = time.perf_counter()
    rank.kept[way]()
    return start, time.perf_counter()


def ranks_of(way: str) -> list[int] | None:
    """None: all."""
    return [0] if way.startswith("one process") else None


def seconds(pool: Pool, way: str) -> float:
    """Of one step."""
    ranks = ranks_of(way)
    ran: list[tuple[float, float]] = pool.run(timed, way, ranks is None, on=ranks, timeout=180)
    return max(end for _, end in ran) - min(start for start, _ in ran)


def peak(rank: Rank, case: Case, way: str, schedule: Schedule | None) -> tuple[float, float]:
    """MiB that a process has held at most over three steps, and what it held before, of its imports."""
    before, step = rss(), made(case, rank, way, schedule)
    for _ in range(3):
        step()
    return peak_rss(), before


def measure(repeats: int) -> Found:
    rows: list[Row] = []
    raw: dict[str, Any] = {}
    counted = []
    for case in (CENTRE, *SIDES):
        names = ALL if case == CENTRE else FEW
        with Pool(RANKS) as pool:
            built = schedules(case, names)
            pool.run(prepare, case, built, timeout=180)
            check_equal(pool, built)
            rounds = in_turn({way: partial(seconds, pool, way) for way in names}, repeats)
            raw[str(case)] = rounds.found
            counted.append(f"{case}: {rounds}")
            rows += _rows(case, rounds)
        if case in DUELS:
            duels = [duel(case, repeats, number) for number in range(DUEL_POOLS)]
            raw[f"{case}, the bars"] = [each.found for each in duels]
            counted.append(f"{case}, the bars: {summary(duels)}")
            rows += _judged(case, duels)
        if case == CENTRE:
            rows += _simulated()
    for case in MEMORY:
        built = schedules(case, (*FEW, *MORE_OF_MEMORY) if case == CENTRE else FEW)
        # memory does not depend on what else runs
        held = rounds_of(partial(held_by, case, built), PEAKS, warm_up=0, others=None)
        raw[f"peak RSS, {case}"] = held.found
        rows += _memory(case, list(built), held)
    notes = [
        f"grid: around {CENTRE}, one factor at a time: m = 4, 8, 16, 32; 1, 2, 4 rows of {SEQUENCE} tokens a "
        "microbatch; and 4 layers of 512. Every way at the centre, some at the side points",
        "fp32, AdamW; one thread a process, or two where the row says so; medians, in brackets the quartiles",
        *counted,
        f"{' and '.join(map(str, DUELS))}: the bars are those of the project, so that {DUEL_POOLS} fresh "
        f"pairs of processes run {', '.join(DUEL)} alone, in {repeats} rounds each; a pair has the median of "
        "its rounds, and judged is the median of the pairs, by the 95 % interval of their order statistics",
        "ways with the same stages: their first two steps had the same losses, to 1e-4",
        f"limit: {APART}, each with the work of one rank, less 1f1b's bubble with ops of equal length",
        "peak RSS: VmHWM of processes of their own after three steps, less what they held before, with what "
        "they had imported; sum and most over the processes; "
        f"{PEAKS} measurements",
        "by simulation: speed over one rank, messages not counted, m = 4 P",
    ]
    return Found("throughput", "Real compute: a training step on two cores", rows, notes, raw)


def duel(case: Case, repeats: int, number: int) -> Rounds:
    """Rounds of the ways that the bars compare, in fresh processes. number: says which way begins"""
    start = number % len(DUEL)
    ways = (*DUEL[start:], *DUEL[:start])
    with Pool(RANKS) as pool:
        built = schedules(case, ways)
        pool.run(prepare, case, built, timeout=180)
        check_equal(pool, built)
        return in_turn({way: partial(seconds, pool, way) for way in ways}, repeats)


def held_by(case: Case, built: dict[str, Schedule | None], _: int) -> Numbers:
    """MiB at the peak of each way, summed over its processes, and the most of one."""
    found: dict[str, float] = {}
    for way, schedule in built.items():
        with Pool(RANKS) as pool:
            ranks = pool.run(peak, case, way, schedule, on=ranks_of(way), timeout=180)
        above = [most - before for most, before in ranks]
        found |= {f"{way}: sum": sum(above), f"{way}: most of a process": max(above)}
    return found


def _rows(case: Case, rounds: Rounds) -> list[Row]:
    ours, theirs = "penstock, 1f1b", "torch, 1f1b"
    names = list(rounds.found[0])
    rows = [
        measured(f"{case}: {way}", "tokens per second", rounds.of(lambda r, way=way: case.tokens / r[way]))  # type: ignore[misc]
        for way in names
    ]
    mine = [way for way in names if way in OURS]
    best = min(mine, key=lambda way: rounds[way].middle)

    def ratio(way: str, other: str, at_least: float | None = None, rival: str = "") -> Row:
        return measured(
            f"{case}: {way} / {other}", "times as fast", rounds.ratio(other, way), at_least=at_least,
            rival=rival, quiet=rounds.quiet,
        )  # fmt: skip

    judged = case not in DUELS  # else in rounds of its own
    limit = measured(
        f"{case}: {ours} / limit", "times as fast", rounds.of(partial(of_limit, case)),
        at_least=LIMIT if judged else None, quiet=rounds.quiet,
    )  # fmt: skip
    against_torch = ratio(ours, theirs, 1.0, theirs) if judged else ratio(ours, theirs)
    rows += [against_torch, limit, ratio(best, ALONE)]
    rows += [
        replace(ratio(best, other, rival=other), better="high")
        for other in PAIRS
        if other in names and (best, other) != (ours, theirs)
    ]
    return rows if GLOO not in names else [*rows, ratio(ours, GLOO)]


def of_limit(case: Case, numbers: Numbers) -> float:
    """The speed of our 1F1B, as a share of what two processes reach apart, less the bubble."""
    bubble = simulate(build("1f1b", ranks=RANKS, microbatches=case.microbatches)).bubble
    return numbers[APART] / (1 - bubble) / numbers[DUEL[-1]]


def _judged(case: Case, duels: Sequence[Rounds]) -> list[Row]:
    """Our 1F1B beside torch's and beside the limit.

    Quartiles over all rounds; and over the pairs of processes the median, which has the bars.
    """
    _, theirs, ours = DUEL

    def faster(numbers: Numbers) -> float:
        return numbers[theirs] / numbers[ours]

    rows = []
    for name, function, bar, rival in (
        (f"{case}: {ours} / {theirs}", faster, 1.0, theirs),
        (f"{case}: {ours} / limit", partial(of_limit, case), LIMIT, ""),
    ):
        rows += [
            measured(
                name, "times as fast: quartiles of all rounds",
                interval([function(numbers) for each in duels for numbers in each.found]),
            ),
            measured(
                name, "times as fast: the median and its 95 % interval",
                median_interval([each.of(function).middle for each in duels]),
                at_least=bar, rival=rival, quiet=all(each.quiet for each in duels),
            ),
        ]  # fmt: skip
    return rows


def _simulated() -> list[Row]:
    """How the speed grows with the ranks: forwards a third of a step, and each of I and W."""
    costs = Costs(1, 1, 1)
    return [
        Row(f"by simulation: {name}, P={ranks}, m={4 * ranks}", "times one rank",
            ranks * (1 - simulate(build(name, ranks=ranks, microbatches=4 * ranks), costs).bubble))
        for ranks in SIMULATED for name in ("1f1b", "interleaved_1f1b", "zb_v")
    ]  # fmt: skip


def _memory(case: Case, ways: Sequence[str], held: Rounds) -> list[Row]:
    rows = []
    for way in ways:
        rival = way.replace("penstock", "torch")
        for what in ("sum", "most of a process"):
            mine, other = f"{way}: {what}", f"{rival}: {what}"
            if way in OURS and rival in ways:
                found, ours, theirs = held.ratio(mine, other), held[mine].middle, held[other].middle
                row = measured(f"{case}: {way}", f"peak RSS, {what}", found, "MiB", ours=ours, torch=theirs)
            else:
                row = measured(f"{case}: {way}", f"peak RSS, {what}", held[mine], "MiB")
            rows.append(row)
    return rows
