"""Pairs side by side, with expert parallelism inside: exact, and an error ends the step on every rank."""

from __future__ import annotations

from typing import Any

import pytest

from support import jobs_overlap
from support.pool import Pool

PAIRED = {"schedule": "1f1b", "paired": True}


@pytest.mark.parametrize("schedule", ["dualpipe_v", PAIRED], ids=str)
@pytest.mark.parametrize("options", [{"activation_checkpointing": True}], ids=["recomputed"])
def test_a_mixture_as_one_process(pool: Pool, schedule: Any, options: dict[str, Any]) -> None:
    for told in pool.run(4, jobs_overlap.mixture, schedule, options):
        assert told["worst"] < 1e-10
        assert told["losses"] == [pytest.approx(told["expected"], rel=1e-10)] * 3
        first, second, third = told["ran"]
        assert third - second == second - first > 0  # each step's pairs, once all forwards are known
        assert told["backward_first"] == third - second  # one after the other it would be the forward
        assert told["peaks"] == [told["proven"]] * 3
        assert 0 <= told["bubble"] < 1
        assert not told["threads"]
        assert max(told["busy"]) <= told["makespan"]


@pytest.mark.parallel
@pytest.mark.parametrize("schedule", ["dualpipe_v", PAIRED], ids=str)
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_error_within_a_pair_ends_the_step_on_all_ranks(pool: Pool, schedule: Any, where: str) -> None:
    *others, failed = pool.run(4, jobs_overlap.failing, schedule, where)
    kind, _, notes = failed["told"]
    assert kind == "ValueError"
    assert ("F" if where == "forward" else "B") in notes[0].split(" in ")[1].split(",")[0]
    for told in others:
        assert told["told"][0] in ("PeerLostError", "StalledPeerError"), told["told"]
    for told in (*others, failed):
        assert told["ran"] > 0
        assert not told["threads"]
