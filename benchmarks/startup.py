"""How long it takes until the first step of a deep model is done.

Layers of next to no width, so that what is counted is the library's own: imports, the search for the chain,
the cut with a place for each layer in each stage, and initial values. All four ranks run in one process, one
after the other, and transformers builds the whole model. On a machine with a process for each rank the four
cuts happen at once.

Cold: a fresh interpreter, from its start to the end of its first step, for each library. Warm: the same again
in that process, where everything is imported and every cache is filled. `python -m benchmarks.startup WHO
LAYERS` is one such process.

With a process for each rank, and all imported: beside torch.distributed.pipelining, see `by_hand`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

from benchmarks.report import Found, Row, measured
from benchmarks.rounds import Numbers, Rounds, rounds_of, summary

LAYERS, RANKS = (50, 200), 4
CUTS = 3  # rounds, of half a minute with the start of eight processes
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4,
         "vocab_size": 128}  # fmt: skip
STEPS = ("first step", "second step")


def config(layers: int) -> Any:
    from transformers import LlamaConfig  # as late as a user's own script does: imports are measured

    return LlamaConfig(**SIZES, num_hidden_layers=layers)


def batch() -> dict[str, Any]:
    import torch

    ids = torch.arange(8 * 16).reshape(8, 16) % 128
    return {"input_ids": ids, "labels": ids}


def penstock(layers: int) -> Callable[[], object]:
    """Build a pipeline; returns its step."""
    from penstock import AutoPipeline

    pipe = AutoPipeline(ranks=RANKS, microbatches=RANKS).build(config(layers))
    return lambda: pipe.step(batch())


def transformers(layers: int) -> Callable[[], object]:
    """Build the model; returns forward and backward of the same microbatches."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config(layers))

    def step() -> None:
        for first in range(0, 8, 8 // RANKS):
            rows = {name: value[first : first + 8 // RANKS] for name, value in batch().items()}
            model(**rows, use_cache=False).loss.backward()

    return step


def stamps(build: Callable[[int], Callable[[], object]], layers: int) -> list[float]:
    """When building began and ended, and when each of two steps did; on the clock that processes share."""
    times = [time.time()]
    step = build(layers)
    for _ in range(2):
        times.append(time.time())
        step()
    times.append(time.time())
    return times


def fresh(layers: int, who: str) -> dict[str, float]:
    """The numbers of a fresh process, named by what they are."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.startup", who, str(layers)]
    start = time.time()
    ran = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300, env=environment)
    found = json.loads(ran.stdout.splitlines()[-1])
    numbers = {"cold: from the start of the process to the end of its first step": found["cold"][2] - start}
    for state, times in found.items():
        first = "imports and build" if state == "cold" else "build"
        for phase, (begin, end) in zip((first, *STEPS), pairwise(times), strict=True):
            numbers[f"{state}: {phase}"] = end - begin
    return numbers | {"warm: build and first step": found["warm"][2] - found["warm"][0]}


def round_of(layers: int, number: int) -> Numbers:
    who = ("penstock", "transformers")[:: 1 if number % 2 else -1]
    return {f"{name} {what}": took for name in who for what, took in fresh(layers, name).items()}


def measure(repeats: int) -> Found:
    rows: list[Row] = []
    raw: dict[str, Any] = {}
    counted: list[Rounds] = []
    for layers in LAYERS:
        rounds = rounds_of(partial(round_of, layers), repeats)
        raw[f"{layers} layers"] = rounds.found
        counted.append(rounds)
        for name in rounds.found[0]:
            who, _, what = name.partition(" ")
            if who == "penstock":
                other = f"transformers {what}"
                rows.append(measured(
                    f"{layers} layers, P={RANKS} in process", what, rounds.ratio(name, other), "s",
                    ours=rounds[name].middle, torch=rounds[other].middle,
                ))  # fmt: skip
    from benchmarks import by_hand  # not in the fresh interpreters, whose imports are measured

    for layers in LAYERS:
        rounds = rounds_of(partial(by_hand.round_of, layers), repeats, warm_up=0)
        raw[f"{layers} layers, a process each"] = rounds.found
        counted.append(rounds)
        for which in ("first", "second"):
            ours, theirs = (f"{who} {which}" for who in by_hand.WHO)
            rows.append(measured(
                f"{layers} layers, P={RANKS}, a process each, all imported",
                f"{which} pipeline of a process: build and first step", rounds.ratio(ours, theirs), "s",
                ours=rounds[ours].middle, torch=rounds[theirs].middle, at_most=1.0, quiet=rounds.quiet,
            ))  # fmt: skip
    cuts = rounds_of(by_hand.round_of_cuts, CUTS, warm_up=0)
    raw[f"{by_hand.CUT} layers, cut by torch"] = cuts.found
    counted.append(cuts)
    rows.append(measured(
        f"{by_hand.CUT} layers, P={RANKS}, a process each, all imported",
        "first pipeline: build and first step; torch's own cut of the whole model alone",
        cuts.ratio("penstock", "torch"), "s", ours=cuts["penstock"].middle, torch=cuts["torch"].middle,
    ))  # fmt: skip
    notes = (
        f"Llama of width 32, 8 rows of 16 tokens in {RANKS} microbatches; one thread; {summary(counted)}",
        "other: transformers' from_config, forward and backward of the same microbatches on the whole model",
        "other where each rank has a process: torch.distributed.pipelining, 1F1B, of stages written by hand, "
        "which make no layer but their own",
        "other where torch cuts the whole model: torch.distributed.pipelining.pipeline, without a step, as "
        "it refuses this model's backward",
        "cold: each library in a fresh interpreter, imports included; warm: again in the same process",
    )
    return Found("startup", "Start-up of a deep model", rows, notes, raw)


def main() -> None:
    build = {"penstock": penstock, "transformers": transformers}[sys.argv[1]]
    print(json.dumps({state: stamps(build, int(sys.argv[2])) for state in ("cold", "warm")}))


if __name__ == "__main__":
    main()
