"""A step drafted from short ones takes as long as the whole one, and holds as much."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.planner.candidate import Candidate
from penstock.planner.estimate import Trial
from penstock.planner.search import drafted
from penstock.planner.short import Draft, shortened
from penstock.planner.space import SCHEDULES
from support.planning import LENGTH, cluster, small_config, workload

HOSTS = cluster(1, 4)


@pytest.mark.parametrize("recomputed", ["none", "full"])
@pytest.mark.parametrize(
    ("name", "options"),
    [(kind.name, kind.options) for kind in SCHEDULES if 2 * kind.stages <= small_config().num_hidden_layers],
)
def test_a_draft_is_close_to_the_whole_step(name: str, options: dict[str, Any], recomputed: Any) -> None:
    run = Candidate(
        2,
        schedule=name,
        options=tuple(sorted(options.items())),
        length=LENGTH,
        microbatches=49,
        recomputed=recomputed,
    )
    draft = drafted(workload(), run, HOSTS, 1e12)
    assert isinstance(draft, Draft)
    whole = Trial.of(workload(), run, HOSTS, buffers=False).estimate()
    assert draft.candidate.microbatches == 49
    assert draft.seconds == pytest.approx(whole.seconds, rel=0.005)
    assert draft.nbytes == pytest.approx(whole.nbytes, rel=0.005)


def test_a_run_of_few_microbatches_and_one_that_holds_all_stay_whole() -> None:
    assert shortened(Candidate(4, microbatches=16)) is None
    assert shortened(Candidate(4, schedule="looped_bfs", microbatches=1000)) is None
    short = shortened(Candidate(4, microbatches=1002))
    assert short is not None
    assert short.microbatches == 14
