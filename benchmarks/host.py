"""What a step takes over a plain loop where layers are narrow, so that the host is the limit.

A Qwen3 of 8 layers of 64, P = 4, m = 16, one thread, all ranks in one process: a step does the work of the
loop and nothing else, so every difference is penstock's. The loop is what a user writes,
``(model(**microbatch).loss / m).backward()``. Time is the processor's, in turn, a step of each.

Between the two stand the same stages called by hand in the schedule's order, with whole backwards by torch
alone. Such a step calls the model once a stage and not once, and holds the activations that the schedule
holds, where the loop uses the memory of one microbatch again and again. No bar below it can be met without
calling less of the model's own code than a user would, and that part is no work of penstock's executor.

Two numbers do not depend on the machine, and are tested (tests/test_host_cost.py): the calls of Python
functions that a step makes beyond the loop's, an op, and the runs of autograd's engine: one for each B and I,
and none for a W.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from benchmarks.report import Found, Row, measured
from benchmarks.rounds import Rounds, in_turn
from penstock import AutoPipeline, Pipeline
from penstock.batch.loss import NextToken
from penstock.schedule import Op, Schedule

RANKS, MICROBATCHES, SEQUENCE, VOCABULARY = 4, 16, 32, 256
LOOP = "plain loop"
BY_HAND = "by hand"
SCHEDULES = ("1f1b", "zb_h1", "zb_v", "interleaved_zero_bubble", "dualpipe_v")
BARS = {"1f1b": 1.05}
SPLIT_BAR = 1.15
CALLS = 100  # beyond the loop's, an op
STEPS = 3  # of each way in one round


def model() -> PreTrainedModel:
    torch.manual_seed(0)
    made: PreTrainedModel = AutoModelForCausalLM.from_config(
        Qwen3Config(
            vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=8,
            num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=128,
            tie_word_embeddings=False,
        )
    )  # fmt: skip
    return made.train()


def batch() -> dict[str, Tensor]:
    ids = torch.randint(VOCABULARY, (MICROBATCHES, SEQUENCE), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids.clone()}


def loop(whole: PreTrainedModel, rows: dict[str, Tensor]) -> None:
    for row in range(MICROBATCHES):
        microbatch = {name: value[row : row + 1] for name, value in rows.items()}
        (whole(**microbatch).loss / MICROBATCHES).backward()


def pipeline(schedule: str) -> Pipeline:
    return AutoPipeline(RANKS, schedule, microbatches=MICROBATCHES).build(model())


def in_one_order(schedule: Schedule) -> list[Op]:
    """The ops of all ranks as one process may run them: each rank as far as it can get, in turn."""
    order: dict[Op, None] = {}
    programs = [list(program) for program in schedule.programs]
    while any(programs):
        for program in programs:
            while program and order.keys() >= set(schedule.predecessors(program[0])):
                order[program.pop(0)] = None
    return list(order)


class ByHand:
    """The stages of a pipeline run by torch alone, in the order of its schedule; W does nothing."""

    def __init__(self, pipe: Pipeline, rows: dict[str, Tensor]) -> None:
        self._calls = [stage.call for stage in pipe.stages]
        self._order = in_one_order(pipe.schedule)
        self._seed = torch.tensor(1 / (MICROBATCHES * (SEQUENCE - 1)))
        self._microbatches = [{name: rows[name][at : at + 1] for name in rows} for at in range(MICROBATCHES)]

    def step(self) -> None:
        outputs: dict[tuple[int, int], Tensor] = {}
        entered: dict[tuple[int, int], Tensor] = {}
        run_backward = Variable._execution_engine.run_backward
        for stage, kind, number in self._order:
            at = stage, number
            if kind == "F":
                before = outputs.get((stage - 1, number))
                if before is not None:
                    entered[at] = before.detach().requires_grad_()
                outputs[at] = self._forward(stage, number, entered.get(at))
            elif kind in "BI":
                after = entered.pop((stage + 1, number), None)
                gradient = self._seed if after is None else after.grad
                run_backward((outputs.pop(at),), (gradient,), False, False, (), True, True)

    def _forward(self, stage: int, number: int, entering: Tensor | None) -> Tensor:
        microbatch = self._microbatches[number]
        given = self._calls[stage](() if entering is None else (entering,), microbatch)
        if stage + 1 < len(self._calls):
            hidden: Tensor = given
            return hidden
        return NextToken().total(given, microbatch)


def python_calls(run: Callable[[], object]) -> int:
    """Calls of Python functions in `run`, resumed generators among them."""
    count = 0

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(before)
    return count


def engine_runs(run: Callable[[], object]) -> int:
    """Runs of autograd's engine in `run`."""
    engine, count = Variable._execution_engine, 0

    class Counted:
        def run_backward(self, *args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            return engine.run_backward(*args, **kwargs)

    Variable._execution_engine = Counted()  # type: ignore[assignment]
    try:
        run()
    finally:
        Variable._execution_engine = engine
    return count


def ops(pipe: Pipeline) -> int:
    return sum(map(len, pipe.schedule.programs))


def measure(repeats: int) -> Found:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rows, rounds = _measured(repeats)
    finally:
        torch.set_num_threads(threads)
    return Found(
        "host", "A step over a plain loop, narrow layers", rows,
        [f"{rounds}; processor time of {STEPS} steps a round"],
        {"rounds": list(rounds.found)},
    )  # fmt: skip


def _measured(repeats: int) -> tuple[list[Row], Rounds]:
    whole, rows = model(), batch()
    pipes = {schedule: pipeline(schedule) for schedule in SCHEDULES}
    steps: dict[str, Callable[[], object]] = {name: partial(pipe.step, rows) for name, pipe in pipes.items()}
    steps |= {f"{BY_HAND} {name}": ByHand(pipe, rows).step for name, pipe in pipes.items()}
    steps[LOOP] = partial(loop, whole, rows)
    for step in steps.values():
        step()
        step()
    calls = {name: python_calls(steps[name]) for name in (LOOP, *pipes)}
    rounds = in_turn({name: partial(_seconds, step) for name, step in steps.items()}, repeats, others=None)
    found: list[Row] = []
    for name, pipe in pipes.items():
        bar = BARS.get(name, SPLIT_BAR)
        found.append(measured(name, "step / plain loop", rounds.ratio(name, LOOP), at_most=bar))
        hand = f"{BY_HAND} {name}"
        found.append(measured(name, "the stages by hand / plain loop", rounds.ratio(hand, LOOP)))
        found.append(measured(name, "step / the stages by hand", rounds.ratio(name, hand)))
        beyond = (calls[name] - calls[LOOP]) / ops(pipe)
        found.append(
            Row(
                name,
                "calls of Python an op, beyond the loop's",
                beyond,
                bar=f"at most {CALLS}",
                met=beyond <= CALLS,
            )
        )
        pipe.close()
    return found, rounds


def _seconds(step: Callable[[], object]) -> float:
    began = time.process_time()
    for _ in range(STEPS):
        step()
    return (time.process_time() - began) / STEPS
