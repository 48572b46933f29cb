"""A long step by two short ones, of a few microbatches a rank.

Between a pipeline's first and last microbatches each one takes as long as the one before, so that a step
grows evenly with them, and what a rank holds does not grow at all. `looped_bfs` holds all microbatches: it is
never shortened.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from penstock.planner.candidate import Candidate
from penstock.planner.estimate import Estimate, Trial
from penstock.planner.hardware import Cluster
from penstock.planner.workload import Workload

_A_RANK = 3  # microbatches of the shorter step; the longer has one more a rank


class Draft(NamedTuple):
    """A run whose step is predicted from short ones. seconds: of a step; nbytes: of its fullest rank"""

    candidate: Candidate
    seconds: float
    nbytes: float


def shortened(candidate: Candidate) -> Candidate | None:
    """The same run with few microbatches; None where it has no more than that."""
    ranks, microbatches = candidate.ranks, candidate.microbatches
    few = (
        _A_RANK * ranks + microbatches % ranks
    )  # some schedules work in rounds of as many as there are ranks
    if candidate.schedule == "looped_bfs" or microbatches <= few + ranks:
        return None
    return replace(candidate, microbatches=few)


def lengthened(model: Workload, run: Estimate, cluster: Cluster, microbatches: int) -> Draft:
    """The step of `run`, a short one without messages' memory, with so many microbatches."""
    few = run.candidate.microbatches
    longer = replace(run.candidate, microbatches=few + run.candidate.ranks)
    growth = Trial.of(model, longer, cluster, buffers=False).estimate().seconds - run.seconds
    seconds = run.seconds + growth * (microbatches - few) / run.candidate.ranks
    return Draft(replace(run.candidate, microbatches=microbatches), seconds, run.nbytes)
