"""How long a step takes whose ranks share the cores of one machine.

`penstock.schedule.simulate` gives each rank a device of its own. Here the ops that run at one time share
`cores`: of n ops each runs at the rate min(1, cores / n). Messages take no core.

    two cores, three ranks      rank 0 |0F0   |
                                rank 1 |1F0   |1B0 |      each of three ops at two thirds of its rate,
                                rank 2 |2F0   |           then one at its whole rate
"""

from __future__ import annotations

from itertools import pairwise

from penstock.planner.estimate import Trial, optimizer_seconds
from penstock.schedule import Costs, Proof
from penstock.schedule.op_arrays import NOTHING
from penstock.schedule.simulation.simulate import delays_of, durations_of

_NONE_LEFT = 1e-12  # seconds


def shared_makespan(proof: Proof, costs: Costs, cores: int) -> float:
    """Seconds of a step's ops. Reductions over other axes of a mesh are left out."""
    arrays = proof.arrays
    left, delays = durations_of(arrays, costs).tolist(), delays_of(arrays, costs).tolist()
    source = arrays.source.tolist()
    ahead = [list(range(first, last))[::-1] for first, last in pairwise(arrays.bounds)]
    ended: dict[int, float] = {}
    now = 0.0
    while any(ahead):
        running, arrivals = list[list[int]](), list[float]()
        for ops in filter(None, ahead):
            op = ops[-1]
            needs = source[op]
            there = 0.0 if needs == NOTHING else ended.get(needs, float("inf")) + delays[op]
            if there <= now:
                running.append(ops)
            else:
                arrivals.append(there)
        rate = min(1.0, cores / len(running)) if running else 1.0
        ends = [now + left[ops[-1]] / rate for ops in running]
        until = min(ends + arrivals)
        for ops in running:
            left[ops[-1]] -= (until - now) * rate
            if left[ops[-1]] <= _NONE_LEFT:
                ended[ops.pop()] = until
        now = until
    return now


def shared_step(trial: Trial, cores: int) -> float:
    """Seconds of a whole step: the optimizers of all ranks share the cores, too."""
    optimizers = [optimizer_seconds([rank], trial.cluster.device) for rank in trial.fixed]
    rest = trial.after() - max(optimizers)
    together = max(max(optimizers), sum(optimizers) / cores)
    return shared_makespan(trial.proof, trial.costs(), cores) + together + rest
