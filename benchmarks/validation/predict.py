"""Predict published runs with a set of constants, and fit the constants to the rows that are there for it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import numpy as np

from benchmarks.validation.models import seconds, workload
from benchmarks.validation.runs import Run, Table
from penstock.planner.estimate import Trial, estimate
from penstock.planner.hardware import Cluster, read_cluster

FITTED = Path(__file__).with_name("constants.json")
_ROUNDS = 20  # of the fit at most
_STEP, _MOST = 0.02, 0.4  # a difference, and the most that a round changes, in logarithms
_STILL = 0.005  # a round that changes no constant by more is the last
_DAMPING = 0.05  # of a constant that no row says much about


@dataclass(frozen=True)
class Constants:
    """What a device reaches in published runs.

    matmul, float8: the share of the peak of products in half precision and in float8
    attention: of attention
    traffic: bytes that fused ops move, over those that the same ops move one by one
    launch: seconds of an op beside its work, where the host waits for each op
    reserve: bytes that a driver counts, over those of tensors
    """

    matmul: float
    float8: float
    attention: float
    traffic: float
    launch: float
    reserve: float = 1.0


@dataclass(frozen=True)
class Predicted:
    """A run, measured and predicted. memory: bytes of the fullest rank; None where none was published

    bubble: the share of the pipeline's time in which ranks wait for others
    """

    run: Run
    measured: float
    seconds: float
    memory: float | None
    bubble: float

    @property
    def error(self) -> float:
        """Of the step time: 0.1 is a tenth too long."""
        return self.seconds / self.measured - 1

    @property
    def memory_error(self) -> float | None:
        return None if self.memory is None or self.run.memory is None else self.memory / self.run.memory - 1

    @property
    def speed(self) -> tuple[float, float]:
        """Seconds for a token on a device, measured and predicted."""
        run = self.run
        work = run.batch * run.repeats * run.length / run.candidate.devices
        return self.measured / work, self.seconds / work


def library(cluster: Cluster) -> Constants:
    """What devices.yaml says, before anything is fitted."""
    shares = cluster.device.efficiencies
    return Constants(shares.matmul, shares.matmul, shares.attention, 1.0, cluster.device.launch)


def predict(table: Table, run: Run, constants: Constants) -> Predicted:
    cluster = _with(table.hardware(run), run, constants)
    step = estimate(workload(run), run.candidate, cluster)
    passes = run.repeats * step.timeline.makespan + step.after
    memory = None
    if run.memory is not None:
        states = (sum(getattr(rank, name) for name in table.float32) for rank in step.memory)
        memory = max(rank.total + more for rank, more in zip(step.memory, states, strict=True))
        memory = memory * (constants.reserve if table.reserved else 1.0) + table.memory_more
    return Predicted(run, seconds(run, table.measured), passes, memory, step.bubble)


def _with(cluster: Cluster, run: Run, constants: Constants) -> Cluster:
    """The cluster whose device reaches `constants` in this run."""
    device = cluster.device
    peaks, matmul, attention = dict(device.peaks), constants.matmul, constants.attention
    if (
        run.float8
    ):  # the planner knows no products in float8: it takes their peak, and attention keeps its rate
        attention *= peaks["bfloat16"] / peaks["float8"]
        peaks["bfloat16"], matmul = peaks["float8"], constants.float8
    matmul, attention = matmul * run.computing, attention * run.computing
    changed = {
        "peaks": peaks,
        "launch": constants.launch if run.blocking else device.launch,
        "bandwidth": device.bandwidth / (constants.traffic if run.fused else 1.0),
        "efficiencies": {**device.efficiencies.model_dump(), "matmul": matmul, "attention": attention},
    }
    keys = cluster.model_dump(exclude_none=True)
    return read_cluster({**keys, "device": {**keys["device"], **changed}})


# ---- the fit: least squares of the logarithms of predicted over measured, by Gauss-Newton within limits


def fitting(tables: Mapping[str, Table], name: str) -> list[tuple[Table, Run]]:
    """The rows that fit the set of constants called `name`."""
    return [
        (table, run)
        for table in tables.values()
        if table.constants == name
        for run in table.runs
        if run.half == "fit" and not run.unpredicted
    ]


def free(rows: Sequence[tuple[Table, Run]], name: str) -> list[str]:
    """The constants that these rows can say something about.

    Attention of the A100's runs was not fused yet. The other devices keep the library's.
    """
    kinds = {run.float8 for _, run in rows}
    return [
        *(["matmul"] if False in kinds else []),
        *(["float8"] if True in kinds else []),
        *(["attention"] if name == "A100" else []),
        "traffic",
        *(["launch"] if any(run.blocking for _, run in rows) else []),
    ]


def fit(rows: Sequence[tuple[Table, Run]], name: str) -> Constants:
    """Each row is simulated once; then its step grows as the work of the rank that has most to do.

    No constant passes the library's: these are of the fastest products, and of ops that move all their bytes.
    """
    constants = library(rows[0][0].hardware(rows[0][1]))
    most = replace(constants, launch=math.inf)
    names = free(rows, name)
    firsts = [predict(table, run, constants) for table, run in rows]
    misses = np.array([math.log(first.seconds / first.measured) for first in firsts])
    start = _busy(rows, constants)
    for _ in range(_ROUNDS):
        here = _busy(rows, constants)
        now = misses + here - start
        slopes = [(_busy(rows, _scaled(constants, {one: -_STEP})) - here) / -_STEP for one in names]
        at_most = np.array([getattr(constants, one) >= getattr(most, one) for one in names])
        limited = np.clip(_change(np.stack(slopes, axis=1), now, at_most), -_MOST, _MOST)
        before, scaled = constants, _scaled(constants, dict(zip(names, map(float, limited), strict=True)))
        constants = replace(scaled, **{one: min(getattr(scaled, one), getattr(most, one)) for one in names})
        if all(abs(math.log(getattr(constants, one) / getattr(before, one))) < _STILL for one in names):
            break
    return replace(constants, reserve=_reserve(rows, constants))


def _reserve(rows: Sequence[tuple[Table, Run]], constants: Constants) -> float:
    """The mean, in logarithms, of what rows whose memory a driver counts hold, over what is predicted."""
    logarithms = []
    for table, run in rows:
        tensors = predict(table, run, constants).memory if table.reserved else None
        if tensors is not None and run.memory is not None:
            logarithms.append(math.log((run.memory - table.memory_more) / (tensors - table.memory_more)))
    return math.exp(sum(logarithms) / len(logarithms)) if logarithms else 1.0


def _change(slopes: np.ndarray, misses: np.ndarray, at_most: np.ndarray) -> np.ndarray:
    """The step of least squares, in logarithms, that raises no constant which is `at_most`.

    Such a constant stays, and the others are found anew without it: to clip the step instead would leave them
    where they are best for a constant beyond its limit.
    """
    change, moves = np.zeros(len(at_most)), np.ones(len(at_most), bool)
    while moves.any():
        held_back = np.vstack([slopes[:, moves], _DAMPING * np.eye(moves.sum())])
        change[moves], *_ = np.linalg.lstsq(
            held_back, np.concatenate([-misses, np.zeros(moves.sum())]), rcond=None
        )
        if not (beyond := moves & at_most & (change > 0)).any():
            break
        moves &= ~beyond
        change[beyond] = 0.0
    return change


def _busy(rows: Sequence[tuple[Table, Run]], constants: Constants) -> np.ndarray:
    """For each row the logarithm of the work of a step on the rank that has most of it."""
    return np.array([math.log(_work(table, run, constants)) for table, run in rows])


def _work(table: Table, run: Run, constants: Constants) -> float:
    trial = Trial.of(workload(run), run.candidate, _with(table.hardware(run), run, constants))
    again = 0.0 if run.recomputed == "none" else 1.0
    of_stages = [
        stage.forward + stage.input_grad + stage.weight_grad + again * stage.recomputed
        for stage in trial.stages
    ]
    placement = trial.proof.schedule.placement
    ranks = (placement.stages_of(rank) for rank in range(run.pp))
    return max(sum(of_stages[stage % placement.depth] for stage in stages) for stages in ranks)


def _scaled(constants: Constants, logarithms: Mapping[str, float]) -> Constants:
    return replace(
        constants, **{name: getattr(constants, name) * math.exp(by) for name, by in logarithms.items()}
    )


def read_constants() -> dict[str, Constants]:
    tree = json.loads(FITTED.read_text(encoding="utf-8"))
    return {
        name: Constants(**{one.name: keys[one.name] for one in fields(Constants)})
        for name, keys in tree.items()
    }


def write_constants(fitted: Mapping[str, Constants], tables: Mapping[str, Table]) -> None:
    tree = {
        name: asdict(constants) | {"fitted_on": fitting_names(tables, name)}
        for name, constants in fitted.items()
    }
    FITTED.write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")


def fitting_names(tables: Mapping[str, Table], name: str) -> list[str]:
    """The rows that fit the set of constants called `name`, as ``file: row``."""
    stems = {table.table: stem for stem, table in tables.items()}
    return [f"{stems[table.table]}: {run.name}" for table, run in fitting(tables, name)]
