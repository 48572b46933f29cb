"""What a step pays for knowing what it did, and what a pipeline pays for knowing that all ranks agree.

Recording is the marks of each op, the notes of each wait, the ledger of bytes and their exchange at the end
of a step. The same pipeline runs steps with all that and, in turn with them, steps in which the recorder does
nothing, the ledger is off and ranks tell each other their share of the loss and no more.

A Qwen3 model of 4 layers, each rank with one thread; in process, where the time is the processor's, so that
other programs count less, and on two processes, where it is the clock's.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from statistics import median
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config

from benchmarks.pool import Pool, Rank
from benchmarks.report import Found, Row, measured
from benchmarks.rounds import Numbers, Rounds, interval, rounds_of, summary
from penstock import AutoPipeline, Pipeline
from penstock.batch.microbatches import fingerprint
from penstock.batch.padding import Padding
from penstock.runtime import step_memory
from penstock.runtime import step_report as report
from penstock.runtime.device.memory import Held, PeakMemory
from penstock.runtime.executor import Executor
from penstock.runtime.health.agreement import facts_of_process, facts_of_schedule, flat
from penstock.runtime.recorder import Recorder
from penstock.runtime.transport.channels import Channels
from penstock.schedule import Schedule

RANKS, MICROBATCHES, ROWS, SEQUENCE = 2, 8, 16, 64
BAR = 1.0  # percent
ROUNDS = 15  # of a step with and one without, in one repeat
CALLS = 30  # of each agreement, in one repeat
CONFIG = Qwen3Config(
    vocab_size=256, hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=64, max_position_embeddings=SEQUENCE, tie_word_embeddings=False,
)  # fmt: skip


class Off:
    """In place of a ledger."""

    peak, peak_deferred = Held(), 0
    sizes: Mapping[object, object] = MappingProxyType({})

    def nothing(self, *_: object) -> None:
        """Counts nothing."""

    receive = take = forward = backward = weight_backward = sample = nothing


def _nothing(*_: object) -> None:
    """Records nothing."""


def _only_loss(executor: Executor, *_: object) -> Tensor:
    loss = float(torch.stack(executor.loss_shares).double().sum()) if executor.loss_shares else 0.0
    return torch.tensor([loss], dtype=torch.float64)


def _only_losses(_: Schedule, vectors: Sequence[Tensor]) -> report.Reports:
    none = math.nan, 0, 0, Held(), False, PeakMemory(), 0, report.OpSeconds(), math.nan, (), (), ()
    return [report.StepReport(float(vector), *none) for vector in vectors]


@contextmanager
def unrecorded(pipe: Pipeline) -> Iterator[None]:
    recorders = [of.recorder for of in pipe._training.executors]
    with ExitStack() as stack:
        for recorder in recorders:
            stack.enter_context(patch.object(recorder, "now", lambda: 0.0))
        for owner, name, other in (
            (Recorder, "add", _nothing),
            (Recorder, "waited", _nothing),
            (step_memory, "Ledger", Off),
            (Channels, "buffer_bytes", 0),
            (report, "pack", _only_loss),
            (report, "unpack", _only_losses),
            (report, "shares", lambda *_: (0.0, None)),
        ):
            stack.enter_context(patch.object(owner, name, other))
        yield


def built(**how: Any) -> tuple[Pipeline, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG)
    pipe = AutoPipeline(
        ranks=RANKS, schedule="1f1b", microbatches=MICROBATCHES, device="cpu", timeout=60, **how
    ).build(model)
    ids = torch.randint(CONFIG.vocab_size, (ROWS, SEQUENCE))
    return pipe, {"input_ids": ids, "labels": ids}


def prepare(rank: Rank) -> None:
    rank.kept["pipe"], rank.kept["batch"] = built()
    for _ in range(3):
        rank.kept["pipe"].step(rank.kept["batch"])


def steps(rank: Rank, joined: bool) -> list[tuple[float, float]]:
    """Seconds of a step with recording and of one without, in turn, the first of a pair by turns too."""
    pipe, batch = rank.kept["pipe"], rank.kept["batch"]
    clock = time.perf_counter if joined else time.thread_time
    pairs = []
    for number in range(ROUNDS):
        taken = {}
        for recorded in (True, False) if number % 2 else (False, True):
            with nullcontext() if recorded else unrecorded(pipe):
                if joined:
                    dist.barrier()
                start = clock()
                pipe.step(batch)
                taken[recorded] = clock() - start
        pairs.append((taken[True], taken[False]))
    return pairs


def handshake(rank: Rank) -> list[float]:
    """Seconds of each handshake: facts of a model's config and of a schedule of as many ranks."""
    pipe = rank.kept["pipe of all"]
    facts = {**facts_of_process(), **facts_of_schedule(pipe.schedule), **flat("config", CONFIG.to_dict())}
    return _each(lambda: pipe.processes.same("build()", facts))


def prepare_handshake(rank: Rank) -> None:
    model = AutoModelForCausalLM.from_config(CONFIG)
    auto = AutoPipeline(ranks=rank.count, schedule="1f1b", microbatches=MICROBATCHES, device="cpu")
    rank.kept["pipe of all"] = auto.build(model)


def agreement(rank: Rank) -> tuple[list[float], list[float]]:
    """Seconds of a batch's fingerprint, and of agreeing on one, read at once and not beside the first op."""
    pipe, batch = rank.kept["pipe"], rank.kept["batch"]
    transport = pipe._world.transport
    told = fingerprint([batch], MICROBATCHES, 0)

    def agree() -> None:
        transport.agree(*told)
        transport.settle()

    return _each(lambda: fingerprint([batch], MICROBATCHES, 0), joined=False), _each(agree)


def prepare_padding(rank: Rank) -> None:
    for name, shapes in (("none", "inferred"), ("fixed", Padding(length=SEQUENCE)), ("longest", Padding())):
        rank.kept[name] = built(shapes=shapes)[0]
    lengths = torch.linspace(SEQUENCE // 4, SEQUENCE - 1, MICROBATCHES).int().tolist()
    ids = [torch.randint(CONFIG.vocab_size, (2, length)) for length in lengths]
    rank.kept["ragged"] = [{"input_ids": each, "labels": each} for each in ids]


def padding(rank: Rank) -> dict[str, list[float]]:
    """Seconds in which a ragged list becomes microbatches, by how it is padded."""
    return {name: _each(lambda name=name: rank.kept[name].microbatches(rank.kept["ragged"]))  # type: ignore[misc]
            for name in ("none", "fixed", "longest")}  # fmt: skip


def _each(call: Callable[[], object], joined: bool = True) -> list[float]:
    times = []
    for _ in range(CALLS):
        if joined:
            dist.barrier()
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return times


def measure(repeats: int) -> Found:
    raw: dict[str, list[Any]] = {}
    recorded = {}
    with Pool(1, join=False) as pool:
        pool.run(prepare)
        recorded["in process"] = rounds_of(partial(_pairs, pool, False), repeats, warm_up=0)
    with Pool(RANKS) as pool:
        pool.run(prepare)
        recorded["two processes"] = rounds_of(partial(_pairs, pool, True), repeats, warm_up=0)
        for _ in range(repeats):
            prints, agreements = zip(*pool.run(agreement), strict=True)
            raw.setdefault("fingerprint", []).extend(_slowest(prints))
            raw.setdefault("agreement", []).extend(_slowest(agreements))
    with Pool(RANKS) as pool:
        pool.run(prepare_padding)
        for _ in range(repeats):
            told = pool.run(padding)
            for name in told[0]:
                raw.setdefault(f"padding {name}", []).extend(_slowest([ranks[name] for ranks in told]))
    for ranks in (2, 4):
        with Pool(ranks) as pool:
            pool.run(prepare_handshake)
            for _ in range(repeats):
                raw.setdefault(f"handshake {ranks}", []).extend(_slowest(pool.run(handshake)))
    rows = [row for case, rounds in recorded.items() for row in _recording(case, rounds)]
    rows += _agreements(raw, recorded["two processes"]["recorded"].middle)
    notes = [
        f"Qwen3, {CONFIG.num_hidden_layers} layers of {CONFIG.hidden_size}, {ROWS} rows of {SEQUENCE} "
        f"tokens, 1f1b, P={RANKS}, m={MICROBATCHES}; {repeats * ROUNDS} pairs of a step with and one without",
        "recording: what the step with it took longer, median over the pairs of a round, as a share of the "
        f"median step without; {summary(list(recorded.values()))}",
        "in process: processor time of both ranks in one thread; two processes: the clock of the slower",
        "without: Recorder.now, add and waited do nothing, no ledger, no bytes of buffers summed, and one "
        "number a rank is exchanged at the step's end in place of the report",
        "handshake, agreement, negotiation: of the slower rank after a barrier; a step hides its agreement "
        "behind what it does before its first message",
        f"padding: a list of {MICROBATCHES} ragged microbatches made ready; to the longest asks all ranks",
    ]
    raw |= {case: list(rounds.found) for case, rounds in recorded.items()}
    return Found("recording", "Cost of recording and of the handshake", rows, notes, raw)


def _slowest(times: Any) -> list[float]:
    """times: by rank"""
    return [max(each) for each in zip(*times, strict=True)]


def _pairs(pool: Pool, joined: bool, _: int) -> Numbers:
    """Medians over the pairs of a round: seconds of a step with recording, without, and what it took
    longer."""
    pairs = [[max(each) for each in zip(*of_ranks, strict=True)]
             for of_ranks in zip(*pool.run(steps, joined), strict=True)]  # fmt: skip
    recorded, plain = (median(column) for column in zip(*pairs, strict=True))
    return {"recorded": recorded, "plain": plain, "more": median(full - bare for full, bare in pairs)}


def _recording(case: str, rounds: Rounds) -> list[Row]:
    ops = 2 * MICROBATCHES * (RANKS if case == "in process" else 1)
    return [
        measured(case, "step without recording", rounds["plain"].scaled(1e3), "ms"),
        measured(case, "recording, of the step", rounds.ratio("more", "plain").scaled(100), "%", at_most=BAR,
                 quiet=rounds.quiet),
        measured(case, "recording, per op of a rank" if case == "two processes" else "recording, per op",
                 rounds["more"].scaled(1e6 / ops), "µs"),
    ]  # fmt: skip


def _agreements(raw: dict[str, list[Any]], step: float) -> list[Row]:
    found = {name: interval(times) for name, times in raw.items()}
    each, ragged = "each step, P=2", "ragged step, P=2"
    share = (found["fingerprint"].middle + found["agreement"].middle) / step
    negotiated = (found["padding longest"].middle - found["padding fixed"].middle) / step
    return [
        *(measured(f"P={ranks}", "handshake, once a pipeline", found[f"handshake {ranks}"].scaled(1e3), "ms")
          for ranks in (2, 4)),
        measured(each, "fingerprint of the batch", found["fingerprint"].scaled(1e6), "µs"),
        measured(each, "agreement, if waited for at once", found["agreement"].scaled(1e6), "µs"),
        Row(each, "both, of the step, by their medians", share * 100, "%"),
        measured(ragged, "microbatches made ready, unpadded", found["padding none"].scaled(1e6), "µs"),
        measured(ragged, "padded to a fixed length", found["padding fixed"].scaled(1e6), "µs"),
        measured(ragged, "padded to the longest of all ranks", found["padding longest"].scaled(1e6), "µs"),
        Row(ragged, "negotiation, of the step, by medians", negotiated * 100, "%"),
    ]  # fmt: skip
