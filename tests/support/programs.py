"""Random schedules, valid and broken, and a plain executor written apart from penstock's to judge them."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import strategies as st

from penstock.schedule import Op, Pair, Placement, Schedule

# what lies ready: an "input", a "saved" forward, a "gradient" or a "deferred" product; stage, microbatch
Token = tuple[str, int, int]


def written(placement: Placement, microbatches: int, *programs: str) -> Schedule:
    """A schedule from the text of its programs."""
    rows = tuple(tuple(map(Op.parse, program.split())) for program in programs)
    return Schedule("mine", placement, microbatches, rows)


def received(schedule: Schedule, op: Op) -> Op | None:
    """The op on another rank whose result `op` takes."""
    hosts = schedule.placement.rank_of
    return next((n for n in schedule.predecessors(op) if hosts[n.stage] != hosts[op.stage]), None)


def takes_and_gives(op: Op, placement: Placement) -> tuple[set[Token], set[Token]]:
    """The tokens that an op uses up, and those that it leaves."""
    stage, kind, microbatch = op
    if kind == "F":
        given_on = {("input", stage + 1, microbatch)}
        if (stage + 1) % placement.depth == 0:
            given_on = {("gradient", stage, microbatch)}  # the loss hands its gradient back at once
        return {("input", stage, microbatch)}, {("saved", stage, microbatch), *given_on}
    if kind == "W":
        return {("deferred", stage, microbatch)}, set()
    left = set() if stage % placement.depth == 0 else {("gradient", stage - 1, microbatch)}
    if kind == "I":
        left |= {("deferred", stage, microbatch)}
    return {("saved", stage, microbatch), ("gradient", stage, microbatch)}, left


def inputs(placement: Placement, microbatches: int) -> set[Token]:
    return {("input", stage, i) for stage in range(0, placement.stages, placement.depth)
            for i in range(microbatches)}  # fmt: skip


def can_finish(schedule: Schedule) -> bool:
    """Run the programs by passing tokens until none can go on: was every op run once, and nothing else?

    Two ops that overlap start together: what both take must be there.
    """
    placement, microbatches = schedule.placement, schedule.microbatches
    tokens = inputs(placement, microbatches)
    left = [list(program) for program in schedule.programs]
    done: list[Op] = []
    moved = True
    while moved:
        moved = False
        for rank, program in enumerate(left):
            while program:
                together = program[:2] if set(program[:2]) in map(set, schedule.overlaps) else program[:1]
                if any(placement.rank_of[op.stage : op.stage + 1] != (rank,) for op in together):
                    break
                flows = [takes_and_gives(op, placement) for op in together]
                takes: set[Token] = set().union(*(taken for taken, _ in flows))
                if not takes <= tokens:
                    break
                tokens = (tokens - takes).union(*(given for _, given in flows))
                done += together
                del program[: len(together)]
                moved = True
    return not any(left) and _is_all(done, placement, microbatches)


def _is_all(done: list[Op], placement: Placement, microbatches: int) -> bool:
    """Whether each microbatch went all the way through one copy of the model, each op once."""
    trains = any(op.kind != "F" for op in done)
    for microbatch in range(microbatches):
        own = [op for op in done if op.microbatch == microbatch]
        copies = {op.stage // placement.depth for op in own}
        if len(copies) != 1 or len(set(own)) != len(own):
            return False
        for stage in range(placement.depth * min(copies), placement.depth * (min(copies) + 1)):
            kinds = sorted(op.kind for op in own if op.stage == stage)
            if kinds not in ([["B", "F"], ["F", "I", "W"]] if trains else [["F"]]):
                return False
    return True


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    """Any map of up to five stages on up to four ranks; sometimes of two copies of the model."""
    ranks = draw(st.integers(1, 4))
    replicas = draw(st.sampled_from([1, 1, 1, 2]))
    depth = draw(st.integers(-(-ranks // replicas), 5 if replicas == 1 else max(2, -(-ranks // replicas))))
    more = depth * replicas - ranks
    hosts = draw(st.permutations([*range(ranks), *draw(st.lists(
        st.integers(0, ranks - 1), min_size=more, max_size=more))]))  # fmt: skip
    return Placement(tuple(hosts), replicas)


@st.composite
def valid(draw: st.DrawFn, always_trains: bool = False) -> Schedule:
    """Any placement, and any order in which the ops of a step can be run, dealt out to the ranks."""
    placement = draw(placements())
    microbatches = draw(st.integers(1, 3))
    trains = always_trains or draw(st.booleans())
    pending: list[Op] = []
    for microbatch in range(microbatches):
        copy = draw(st.integers(0, placement.replicas - 1))
        for stage in range(placement.depth * copy, placement.depth * (copy + 1)):
            kinds = draw(st.sampled_from(["FB", "FIW"])) if trains else "F"
            pending += [Op(stage, kind, microbatch) for kind in kinds]  # type: ignore[arg-type]
    tokens = inputs(placement, microbatches)
    programs: list[list[Op]] = [[] for _ in range(placement.ranks)]
    while pending:
        ready = [op for op in pending if takes_and_gives(op, placement)[0] <= tokens]
        op = draw(st.sampled_from(ready))
        takes, gives = takes_and_gives(op, placement)
        tokens = (tokens - takes) | gives
        pending.remove(op)
        programs[placement.rank_of[op.stage]].append(op)
    return Schedule("random", placement, microbatches, tuple(map(tuple, programs)))


@st.composite
def paired(draw: st.DrawFn) -> Schedule:
    """A valid schedule, some of whose neighbours are to overlap; that may make it hang."""
    schedule = draw(valid(always_trains=True))
    pairs: set[Pair] = set()
    taken: set[Op] = set()
    for program in schedule.programs:
        for here, there in pairwise(program):
            fits = here.kind == "F" and there.kind in "BI" and taken.isdisjoint((here, there))
            if fits and draw(st.booleans()):
                pairs.add(Pair(here, there))
                taken |= {here, there}
    return Schedule("random", schedule.placement, schedule.microbatches, schedule.programs, frozenset(pairs))


CHANGES = ("swap", "swap", "move", "move", "drop", "repeat", "give away", "replace")


@st.composite
def perhaps_broken(draw: st.DrawFn, always_trains: bool = False) -> Schedule:
    """A valid schedule after up to three small changes, some of which leave it valid."""
    schedule = draw(valid(always_trains))
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
            program[here] = Op(stage, draw(st.sampled_from(["F", "B", "I", "W"])), microbatch)
    return Schedule("random", schedule.placement, schedule.microbatches, tuple(map(tuple, programs)))
