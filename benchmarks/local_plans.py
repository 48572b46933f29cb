"""What the planner predicts for eight plans of a model, beside what they take on this machine.

Two and four ranks over gloo, a thread each. Each round calibrates the machine with two processes at once,
predicts all plans, and runs each with `penstock train` as `penstock plan --measure` does. The first plan of
two ranks then corrects the calibration, and so predicts the other fifteen.

Four ranks share two cores, which `benchmarks.shared_cores` simulates. The prediction knows their number.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from transformers import LlamaConfig, PretrainedConfig

from benchmarks.pool import Pool, Rank
from benchmarks.report import Found, Row, measured
from benchmarks.rounds import OTHERS, Numbers, Rounds, rounds_of
from benchmarks.shared_cores import shared_step
from penstock.errors import RunError
from penstock.planner.calibrate import calibrate
from penstock.planner.candidate import Candidate
from penstock.planner.corrections import Correction, corrected
from penstock.planner.estimate import Trial
from penstock.planner.hardware import Cluster, read_cluster, to_yaml
from penstock.planner.workload import Workload
from penstock.train.measured_runs import STEPS, WARM_UP, measured_run
from penstock.yaml_reader import parse_yaml

CLOSE, BEST = 0.05, 1.02  # of step and memory; of the chosen plan's step over the fastest one's
TOGETHER = 2  # processes of a calibration
_LOOK = 0.5  # seconds in which nothing of the benchmark runs, to see what else does


class Setting(NamedTuple):
    """What is planned and run. seconds: of a calibration; steps: of a run"""

    config: PretrainedConfig
    batch: int
    length: int
    ranks: Sequence[int] = (2, 4)
    seconds: float = 20.0
    steps: int = STEPS


LLAMA = Setting(
    LlamaConfig(
        vocab_size=4096,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=256,
    ),
    batch=16,
    length=128,
)


def plans_of(setting: Setting, ranks: int) -> dict[str, Candidate]:
    """Eight plans, by what makes them differ from the first."""
    rows = 2

    def plan(rows: int = rows, **keys: object) -> Candidate:
        few = Candidate(
            ranks, rows=rows, length=setting.length, microbatches=setting.batch // rows, precision="float32"
        )
        return replace(few, **keys)  # type: ignore[arg-type]

    layers = setting.config.num_hidden_layers
    first = layers // ranks + 1
    uneven = (first, *[layers // ranks] * (ranks - 2), layers // ranks - 1)
    return {
        "1f1b": plan(),
        "1f1b, 1 row a microbatch": plan(1),
        "1f1b, 4 rows a microbatch": plan(4),
        "1f1b, a layer more on the first rank": plan(split=uneven),
        "1f1b, all recomputed": plan(recomputed="full"),
        "1f1b, 2 stages a rank": plan(schedule="1f1b", options=(("stages_per_rank", 2),)),
        "zb_h1": plan(schedule="zb_h1"),
        "zb_v, 1 row a microbatch": plan(1, schedule="zb_v"),
    }


def measure(repeats: int, setting: Setting = LLAMA) -> Found:
    model = Workload(setting.config, "float32")
    with tempfile.TemporaryDirectory() as folder:
        setting.config.save_pretrained(folder)
        taken = rounds_of(partial(_round, setting, model, folder), repeats, warm_up=0, others=None)
    quiet = max(numbers["others"] for numbers in taken.found) < OTHERS
    rounds = Rounds(taken.found, taken.tried, quiet)
    rows = [row for ranks in setting.ranks for row in _rows(setting, ranks, rounds)]
    layers, width = setting.config.num_hidden_layers, setting.config.hidden_size
    title = (
        f"Plans predicted and measured, {layers} layers of {width}, {setting.batch} x {setting.length} tokens"
    )
    return Found("local_plans", title, rows, _notes(setting, model, rounds), {"rounds": rounds.found})


def _round(setting: Setting, model: Workload, folder: str, _: int) -> Numbers:
    """Calibrate, predict and run every plan once."""
    cluster = calibrated(setting.seconds)
    numbers, factors = dict[str, float](), Correction(1.0)
    cores, others = os.cpu_count() or 1, list[float]()
    for ranks in setting.ranks:
        whole = cluster.model_copy(update={"devices": ranks})
        for name, candidate in plans_of(setting, ranks).items():
            others.append(busy())
            trial = Trial.of(model, candidate, whole)
            run = measured_run(
                model, trial.estimate(), whole, {"path": folder}, on_cpu=True, steps=setting.steps,
                transport="gloo",
            )  # fmt: skip
            if run.error:
                raise RunError(f"P={ranks}: {name}", run.error, "Repair what it names, and measure again")
            factors = factors if numbers else Correction(run.slowdown)
            better = Trial.of(model, candidate, corrected(whole, factors))
            numbers |= {
                _key(ranks, name, "measured"): run.seconds,
                _key(ranks, name, "calibrated"): shared_step(trial, cores),
                _key(ranks, name, "corrected"): shared_step(better, cores),
                _key(ranks, name, "kept"): run.kept,
                _key(ranks, name, "predicted kept"): run.predicted_kept,
            }
    return {**numbers, "factor": factors.compute, "others": max(others)}


def calibrated(seconds: float) -> Cluster:
    """This machine, measured by processes that run at the same time."""
    with Pool(TOGETHER) as pool:
        text: str = pool.run(_calibration, seconds, timeout=120 + 2 * seconds)[0]
    return read_cluster(parse_yaml(text))


def _calibration(rank: Rank, seconds: float) -> str:
    return to_yaml(calibrate(seconds, "cpu"))


def busy() -> float:
    """The share of the cores' time that programs take now, in which this benchmark only waits."""

    def ticks() -> list[int]:
        return list(map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:9]))

    before = ticks()
    time.sleep(_LOOK)
    spent = [after - earlier for after, earlier in zip(ticks(), before, strict=True)]
    idle = spent[3] + spent[4]
    return 1 - idle / (sum(spent) or 1)


def _key(ranks: int, name: str, what: str) -> str:
    return f"P={ranks}: {name}: {what}"


def _rows(setting: Setting, ranks: int, rounds: Rounds) -> list[Row]:
    names = list(plans_of(setting, ranks))
    rows = list[Row]()
    for name in names:
        case = f"P={ranks}: {name}"
        key = partial(_key, ranks, name)
        for what in ("measured", "calibrated", "corrected"):
            rows.append(measured(case, f"step, {what}", rounds[key(what)].scaled(1e3), "ms"))
        for by in ("calibrated", "corrected"):
            is_fit = by == "corrected" and (ranks, name) == (setting.ranks[0], names[0])
            rows.append(_ratio(case, f"step, {by} / measured", rounds, key(by), key("measured"), not is_fit))
        rows.append(_ratio(case, "memory, predicted / measured", rounds, key("predicted kept"), key("kept")))
    return [*rows, _chosen(names, ranks, rounds, rounds.quiet)]


def _ratio(case: str, what: str, rounds: Rounds, ours: str, theirs: str, judged: bool = True) -> Row:
    """A prediction over its measurement, near 1 where it is right. judged: whether it was not fitted to it"""
    ratio = rounds.ratio(ours, theirs)
    ends = [abs(end - 1) <= CLOSE for end in (ratio.low, ratio.high)]
    astride = ends[0] != ends[1] or ratio.low < 1 - CLOSE < 1 + CLOSE < ratio.high
    resolved = not judged or what.startswith("memory") or (rounds.quiet and not astride)
    return Row(
        case, what, ratio.middle, bar=f"within {CLOSE:.0%}" if judged else "",
        met=abs(ratio.middle - 1) <= CLOSE if resolved and judged else None,
        low=ratio.low, high=ratio.high, resolved=resolved, why="" if judged else "fitted to it",
    )  # fmt: skip


def _chosen(names: Sequence[str], ranks: int, rounds: Rounds, quiet: bool) -> Row:
    """The plan that the calibration alone predicts to be the fastest, beside the fastest one."""
    chosen = min(names, key=lambda name: rounds[_key(ranks, name, "calibrated")].middle)
    fastest = min(names, key=lambda name: rounds[_key(ranks, name, "measured")].middle)

    def ratio(numbers: Mapping[str, float]) -> float:
        return numbers[_key(ranks, chosen, "measured")] / numbers[_key(ranks, fastest, "measured")]

    what = f"step of the plan chosen ({chosen}) / of the fastest ({fastest})"
    if chosen == fastest:
        return Row(
            f"P={ranks}", what, 1.0, bar=f"at most {BEST:g}", met=True if quiet else None, resolved=quiet
        )
    return measured(f"P={ranks}", what, rounds.of(ratio), at_most=BEST, quiet=quiet)


def _notes(setting: Setting, model: Workload, rounds: Rounds) -> list[str]:
    factors = rounds["factor"]
    others = max(numbers["others"] for numbers in rounds.found)
    name = type(model.source.model).__name__
    count = len(rounds.found)
    return [
        f"{name}, {model.parameters:,} parameters, float32; {count} rounds, medians and quartiles; a "
        f"round runs every plan once, and takes the median of its steps {WARM_UP + 1} to {setting.steps}",
        f"calibrated: by penstock plan --calibrate of {setting.seconds:g} s in the same round, in {TOGETHER} "
        f"processes at once; ops took {factors.middle:.3f} [{factors.low:.3f}, {factors.high:.3f}] times as "
        "long as it predicts",
        "corrected: by that factor, from the first plan alone, as penstock plan --measure corrects a cluster",
        "memory: live activations and messages between ops, on the fullest rank, as the ranks count them",
        f"P=4: four processes on {os.cpu_count()} cores, shared as benchmarks/shared_cores.py simulates",
        f"programs outside took at most {others:.1%} of the cores' time between runs; bars of times need "
        f"{OTHERS:.0%}",
    ]
