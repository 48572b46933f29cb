"""Problems of the search, for every schedule in small sizes."""

from __future__ import annotations

from random import Random

from hypothesis import assume
from hypothesis import strategies as st

from penstock.schedule import Costs, loop, wave
from penstock.schedule.dispatch import Programs

# one policy as the search draws it
from penstock.schedule.search.listing import _drawn, follow, reserves
from penstock.schedule.search.problem import Problem, problem

number = st.sampled_from([0.0, 0.1, 0.5, 1.0, 1.7])


@st.composite
def problems(draw: st.DrawFn) -> tuple[Problem, Costs]:
    ranks, microbatches = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    placement = draw(st.sampled_from([loop(ranks), wave(ranks), loop(ranks, 2)]))
    stages = placement.stages
    times = [draw(st.lists(number, min_size=stages, max_size=stages)) for _ in range(3)]
    kept = draw(st.sampled_from([None, 0.0, 0.4, 1.3]))
    costs = Costs(times[0], times[1], times[2], draw(number), held_for_weight=kept)
    limit = draw(st.sampled_from([None, 2.6, 3.0, 2.0 * ranks + 1]))
    return problem(placement, microbatches, costs, [limit] * ranks, None, draw(st.booleans())), costs


def some(given: Problem, seed: int) -> Programs:
    """What some policy leads to. Where W holds more than F did it may find that nothing fits."""
    found = follow(given, _drawn(given, Random(seed)), reserves(given))
    assume(found is not None)
    assert found is not None
    return found
