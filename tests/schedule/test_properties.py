"""Random programs: `verify` accepts exactly those that a plain executor, written apart from it, finishes."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ScheduleError
from penstock.schedule import Costs, Op, Schedule, Timeline, Violation, build, loop, render, simulate, verify
from penstock.schedule.builders.conformance import check_builder
from support.programs import can_finish, paired, perhaps_broken, valid

modest = settings(max_examples=80, deadline=None)


def violations(schedule: Schedule) -> tuple[Violation, ...]:
    try:
        verify(schedule)
    except ScheduleError as error:
        return error.violations
    return ()


@settings(max_examples=100, deadline=None)
@given(perhaps_broken())
def test_verify_accepts_exactly_what_can_finish(schedule: Schedule) -> None:
    assert (not violations(schedule)) == can_finish(schedule), f"{schedule.placement}\n{schedule}"


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(["1f1b", "interleaved_zero_bubble", "zb_v", "dualpipe", "dualpipe_v"]), st.data())
def test_a_built_schedule_with_one_change(name: str, data: st.DataObject) -> None:
    schedule = build(name, ranks=4, microbatches=8)
    programs = [list(program) for program in schedule.programs]
    program = programs[data.draw(st.integers(0, 3))]
    here, there = (data.draw(st.integers(0, len(program) - 1)) for _ in range(2))
    match data.draw(st.sampled_from(["swap", "move", "kind"])):
        case "swap":
            program[here], program[there] = program[there], program[here]
        case "move":
            program.insert(there, program.pop(here))
        case _:
            program[here] = program[here]._replace(kind=data.draw(st.sampled_from(["F", "B", "I", "W"])))
    pairs = {two for program in programs for two in pairwise(program)}
    kept = frozenset(pair for pair in schedule.overlaps if tuple(pair) in pairs)
    changed = replace(schedule, programs=tuple(map(tuple, programs)), overlaps=kept)
    assert (not violations(changed)) == can_finish(changed)


@modest
@given(paired())
def test_overlapped_ops_wait_together(schedule: Schedule) -> None:
    found = violations(schedule)
    assert (not found) == can_finish(schedule), f"{schedule.placement}\n{schedule}"
    assert not violations(replace(schedule, overlaps=frozenset()))


@modest
@given(valid(), st.data())
def test_reordering_a_program_hangs_or_not_as_proven(schedule: Schedule, data: st.DataObject) -> None:
    """Only orders change here, so that what is refused is refused for its order."""
    shuffled = tuple(tuple(data.draw(st.permutations(program))) for program in schedule.programs)
    schedule = replace(schedule, programs=shuffled)
    found = violations(schedule)
    assert (not found) == can_finish(schedule), str(schedule)
    assert all("comes later" in violation.rule or violation.cycle for violation in found)


@modest
@given(valid())
def test_the_proven_peaks_are_what_is_held(schedule: Schedule) -> None:
    live, deferred = [], []
    for program in schedule.programs:
        kinds = [[op.kind for op in program[:until]] for until in range(len(program) + 1)]
        held = [k.count("F") - k.count("B") - k.count("W") for k in kinds]
        live.append(max(held) if schedule.trains else 0)
        deferred.append(max(k.count("I") - k.count("W") for k in kinds))
    assert verify(schedule).peak_live == tuple(live)
    assert verify(schedule).peak_deferred == tuple(deferred)
    timeline = simulate(schedule)
    assert timeline.peak_live == tuple(live)
    if schedule.trains:
        assert timeline.peak_memory == timeline.peak_live  # by default one is held for each, to the very end
        assert tuple(max((held for _, held in curve), default=0) for curve in timeline.live) == tuple(live)


@settings(max_examples=40, deadline=None)
@given(valid())
def test_any_valid_schedule_conforms_and_can_be_drawn(schedule: Schedule) -> None:
    if all(schedule.programs):
        check_builder(
            lambda ranks, microbatches: schedule, ranks=[schedule.ranks], microbatches=[schedule.microbatches]
        )
    assert render(schedule).count("rank ") >= schedule.ranks


numbers = st.lists(st.integers(0, 5), min_size=8, max_size=8)


@modest
@given(valid(), numbers, numbers, numbers, st.integers(0, 3))
def test_no_op_could_have_started_earlier(
    schedule: Schedule, forward: list[int], input_grad: list[int], weight_grad: list[int], latency: int
) -> None:
    """Each starts at the very moment that its rank is free and the last of its inputs is there."""
    stages, hosts, placement = schedule.stages, schedule.placement.rank_of, schedule.placement
    costs = Costs(forward[:stages], input_grad[:stages], weight_grad[:stages], latency)
    timeline = simulate(schedule, costs)
    ends = {span.op: span.end for span in timeline.spans}
    for rank in range(schedule.ranks):
        free_at = 0.0
        for span in timeline.of_rank(rank):
            stage, kind, microbatch = span.op
            needs = []
            if kind == "F" and stage % placement.depth:
                needs = [Op(stage - 1, "F", microbatch)]
            elif kind in "BI":
                needs = [Op(stage, "F", microbatch)]
                if (stage + 1) % placement.depth:
                    needs += [op for k in "BI" if (op := Op(stage + 1, k, microbatch)) in ends]  # type: ignore[arg-type]
            there = [ends[op] + (latency if hosts[op.stage] != rank else 0) for op in needs]
            assert span.start == max([free_at, *there])
            length = {"F": forward, "I": input_grad, "W": weight_grad}.get(kind)
            whole = input_grad[stage] + weight_grad[stage]
            assert span.end == span.start + (whole if length is None else length[stage])
            free_at = span.end
    _check_critical_path(schedule, timeline.critical_path, ends, timeline.makespan)
    _check_waits(timeline, latency)


def _check_waits(timeline: Timeline, latency: float) -> None:
    """They are the gaps: nothing else keeps a rank that has begun, and with what it was busy all adds up."""
    for rank, idle in enumerate(timeline.idle):
        spans = timeline.of_rank(rank)
        gaps = [(b.op, a.end, b.start) for a, b in pairwise(spans) if b.start > a.end]
        waits = [wait for wait in timeline.inner_waits if wait.rank == rank]
        assert [(wait.op, wait.start, wait.end) for wait in waits] == gaps
        assert all(wait.end == wait.sent + latency for wait in waits)
        assert idle.runtime == 0
        assert min(idle) >= 0
        assert sum(idle) + timeline.busy[rank] == timeline.makespan


def _check_critical_path(
    schedule: Schedule, path: tuple[Op, ...], ends: dict[Op, float], makespan: float
) -> None:
    """It ends with the step, and each op on it waits for the one before: on its rank, or for its result."""
    assert ends[path[-1]] == makespan
    for before, after in pairwise(path):
        host = schedule.placement.rank_of[after.stage]
        program = schedule.programs[host]
        neighbour = program[program.index(after) - 1]
        assert before in (neighbour, *schedule.predecessors(after))


hostile = st.one_of(
    st.none(), st.integers(), st.text(max_size=3),
    st.tuples(st.integers(), st.text(max_size=1), st.integers()),
    st.builds(Op, st.sampled_from([0, -1, 1.0, "1", None, 2**70]), st.sampled_from(["F", "B", "W", "", None]),
              st.sampled_from([0, -1, 0.5, "0", 2**70])),
)  # fmt: skip


@modest
@given(valid(), st.lists(hostile, min_size=1, max_size=4), st.data())
def test_what_is_no_op_is_refused_and_nothing_else_happens(
    schedule: Schedule, strange: list[object], data: st.DataObject
) -> None:
    programs = [list(program) for program in schedule.programs]
    for entry in strange:
        program = programs[data.draw(st.integers(0, len(programs) - 1))]
        program.insert(data.draw(st.integers(0, len(program))), entry)  # type: ignore[arg-type]
    broken = replace(schedule, programs=tuple(map(tuple, programs)))
    assert violations(broken)


def test_a_number_of_microbatches_out_of_all_proportion_is_refused_at_once() -> None:
    schedule = Schedule("huge", loop(1), 10**9, ((Op(0, "F", 0), Op(0, "B", 0)),))
    (violation,) = violations(schedule)
    assert violation.rule == "2 ops; 1000000000 microbatches on 1 stages are 2000000000 at least"
