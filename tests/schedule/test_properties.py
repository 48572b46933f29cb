"""Random programs: `verify` accepts exactly those that a plain executor, written apart from it, finishes."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ScheduleError
from penstock.schedule import Costs, Op, Placement, Schedule, Violation, render, simulate, verify
from penstock.schedule.conformance import check_builder

Token = tuple[
    str, int, int
]  # what lies ready: an "input", a "saved" forward or a "gradient"; stage, microbatch

modest = settings(max_examples=300, deadline=None)


def takes_and_gives(op: Op, stages: int) -> tuple[set[Token], set[Token]]:
    """The tokens that an op uses up, and those that it leaves."""
    stage, kind, microbatch = op
    if kind == "F":
        given_on = {("input", stage + 1, microbatch)}
        if stage == stages - 1:
            given_on = {("gradient", stage, microbatch)}  # the loss hands its gradient back at once
        return {("input", stage, microbatch)}, {("saved", stage, microbatch), *given_on}
    return (
        {("saved", stage, microbatch), ("gradient", stage, microbatch)},
        {("gradient", stage - 1, microbatch)},
    )


def can_finish(schedule: Schedule) -> bool:
    """Run the programs by passing tokens until none can go on: was every op run once, and nothing else?"""
    stages, microbatches = schedule.stages, schedule.microbatches
    tokens: set[Token] = {("input", 0, microbatch) for microbatch in range(microbatches)}
    left = [list(program) for program in schedule.programs]
    done: list[Op] = []
    moved = True
    while moved:
        moved = False
        for rank, program in enumerate(left):
            while program and schedule.placement.rank_of[program[0].stage : program[0].stage + 1] == (rank,):
                takes, gives = takes_and_gives(program[0], stages)
                if not takes <= tokens:
                    break
                tokens = (tokens - takes) | gives
                done.append(program.pop(0))
                moved = True
    kinds = {op.kind for program in schedule.programs for op in program}
    expected = stages * microbatches * (2 if "B" in kinds else 1)
    return not any(left) and len(done) == expected


def violations(schedule: Schedule) -> tuple[Violation, ...]:
    try:
        verify(schedule)
    except ScheduleError as error:
        return error.violations
    return ()


@st.composite
def valid(draw: st.DrawFn) -> Schedule:
    """Any placement, and any order in which the ops of a step can be run, dealt out to the ranks."""
    ranks = draw(st.integers(1, 4))
    stages = draw(st.integers(ranks, 5))
    hosts = draw(st.permutations([*range(ranks), *draw(st.lists(
        st.integers(0, ranks - 1), min_size=stages - ranks, max_size=stages - ranks))]))  # fmt: skip
    microbatches = draw(st.integers(1, 3))
    kinds = "FB" if draw(st.booleans()) else "F"
    pending = [Op(s, "F" if kind == "F" else "B", i)
               for kind in kinds for s in range(stages) for i in range(microbatches)]  # fmt: skip
    tokens: set[Token] = {("input", 0, microbatch) for microbatch in range(microbatches)}
    programs: list[list[Op]] = [[] for _ in range(ranks)]
    while pending:
        ready = [op for op in pending if takes_and_gives(op, stages)[0] <= tokens]
        op = draw(st.sampled_from(ready))
        takes, gives = takes_and_gives(op, stages)
        tokens = (tokens - takes) | gives
        pending.remove(op)
        programs[hosts[op.stage]].append(op)
    return Schedule("random", Placement(tuple(hosts)), microbatches, tuple(map(tuple, programs)))


@st.composite
def perhaps_broken(draw: st.DrawFn) -> Schedule:
    """A valid schedule after up to three small changes, some of which leave it valid."""
    schedule = draw(valid())
    programs = [list(program) for program in schedule.programs]
    for change in draw(st.lists(st.sampled_from(CHANGES), max_size=3)):
        rank = draw(st.integers(0, len(programs) - 1))
        program = programs[rank]
        if not program:
            continue
        here, there = (draw(st.integers(0, len(program) - 1)) for _ in range(2))
        if change == "swap":
            program[here], program[there] = program[there], program[here]
        elif change == "move":
            program.insert(there, program.pop(here))
        elif change == "drop":
            program.pop(here)
        elif change == "repeat":
            program.insert(there, program[here])
        elif change == "give away":
            other = programs[draw(st.integers(0, len(programs) - 1))]
            other.insert(draw(st.integers(0, len(other))), program.pop(here))
        else:
            stage, microbatch = draw(st.integers(0, 5)), draw(st.integers(0, 3))
            program[here] = Op(stage, draw(st.sampled_from(["F", "B"])), microbatch)
    return Schedule("random", schedule.placement, schedule.microbatches, tuple(map(tuple, programs)))


CHANGES = ("swap", "swap", "move", "move", "drop", "repeat", "give away", "replace")


@modest
@given(perhaps_broken())
def test_verify_accepts_exactly_what_can_finish(schedule: Schedule) -> None:
    assert (not violations(schedule)) == can_finish(schedule), str(schedule)


@modest
@given(valid(), st.data())
def test_reordering_a_program_hangs_or_not_as_proven(schedule: Schedule, data: st.DataObject) -> None:
    """Only orders change here, so that what is refused is refused for its order."""
    shuffled = tuple(tuple(data.draw(st.permutations(program))) for program in schedule.programs)
    schedule = Schedule("random", schedule.placement, schedule.microbatches, shuffled)
    found = violations(schedule)
    assert (not found) == can_finish(schedule), str(schedule)
    assert all("stands later" in violation.rule or violation.cycle for violation in found)


@modest
@given(valid())
def test_the_proven_peak_is_what_is_held(schedule: Schedule) -> None:
    peaks = []
    for program in schedule.programs:
        held = [
            sum(op.kind == "F" for op in program[:until]) - sum(op.kind == "B" for op in program[:until])
            for until in range(len(program) + 1)
        ]
        peaks.append(max(held) if schedule.trains else 0)
    assert verify(schedule).peak_live == tuple(peaks)


@settings(max_examples=60, deadline=None)
@given(valid())
def test_any_valid_schedule_conforms_and_can_be_drawn(schedule: Schedule) -> None:
    check_builder(
        lambda ranks, microbatches: schedule, ranks=[schedule.ranks], microbatches=[schedule.microbatches]
    )
    assert render(schedule).count("rank ") >= schedule.ranks


@modest
@given(
    valid(),
    st.lists(st.integers(0, 5), min_size=5, max_size=5),
    st.lists(st.integers(0, 5), min_size=5, max_size=5),
    st.integers(0, 3),
)
def test_no_op_could_have_started_earlier(
    schedule: Schedule, forward: list[int], backward: list[int], latency: int
) -> None:
    """Each starts at the very moment that its rank is free and the last of its inputs is there."""
    stages, hosts = schedule.stages, schedule.placement.rank_of
    costs = Costs(forward[:stages], backward[:stages], 0, latency)
    timeline = simulate(schedule, costs)
    ends = {span.op: span.end for span in timeline.spans}
    for rank in range(schedule.ranks):
        free_at = 0.0
        for span in timeline.of_rank(rank):
            stage, kind, microbatch = span.op
            needs = [Op(stage - 1, "F", microbatch)] if kind == "F" else [Op(stage + 1, "B", microbatch)]
            inputs = [ends[op] + (latency if hosts[op.stage] != rank else 0) for op in needs if op in ends]
            own_forward = [ends[Op(stage, "F", microbatch)]] if kind == "B" else []
            assert span.start == max([free_at, *inputs, *own_forward])
            length = forward[stage] if kind == "F" else backward[stage]
            assert span.end == span.start + length
            free_at = span.end
