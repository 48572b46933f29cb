"""A model of the recovery protocol, and its exhaustive exploration.

A state has the folder and the place of each rank of two jobs in its program. A step changes the folder as one
call of the file system does. `explore` visits every state that any order of steps and kills leads to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

RANKS = range(3)
FAILED, DONE = -1, -2  # in place of a rank's place in its program


class BrokenError(AssertionError):
    """An interleaving that breaks the protocol, step by step."""


class Content(NamedTuple):
    """A folder: who wrote which parts, and whether there is a manifest."""

    parts: tuple[str, ...] = ("", "", "")
    manifest: bool = False

    @property
    def whole(self) -> bool:
        return self.manifest and len(set(self.parts)) == 1 and "" not in self.parts


class Job(NamedTuple):
    """pcs: the place of each rank in its program; start: the step that it goes on from

    path: the step that it was told to go on from, 0 for the newest; saw: the owner that it found; seen: the
    steps that were there; writes: it owns the folder; wrong: what it has read and must not
    """

    pcs: tuple[int, int, int] = (0, 0, 0)
    killed: tuple[bool, bool, bool] = (False, False, False)
    path: int = 0
    start: int = -1
    saw: str = ""
    saw_ended: bool = False
    seen: tuple[int, ...] = ()
    writes: bool = False
    wrong: str = ""


class State(NamedTuple):
    """visible: by step; writing: by job; aside: the folders that were moved out of the way, by step"""

    jobs: tuple[Job, Job]
    owner: str = "0"
    ended: bool = True
    visible: tuple[tuple[int, Content], ...] = ()
    writing: tuple[tuple[str, Content], ...] = ()
    aside: tuple[tuple[int, Content], ...] = ()
    crashes: int = 0


class Step(NamedTuple):
    """name: of the step; real: the steps of the real functions that it stands for"""

    name: str
    real: tuple[str, ...] = ()


def program(rank: int = 0) -> list[Step]:
    """What a rank does, in order. "meet" waits for the other ranks."""
    if rank:
        return [Step("meet"), Step("meet"), Step("write", ("write",)), Step("meet"), Step("meet")]
    return [
        Step("look"), Step("read owner"), Step("own", ("own",)), Step("settle"), Step("look again"),
        Step("clear"), Step("meet"), Step("load"), Step("make", ("mkdir",)), Step("meet"),
        Step("write", ("write", "write")), Step("meet"), Step("manifest", ("write",)), Step("aside"),
        Step("rename", ("rename",)), Step("remove aside"), Step("meet"), Step("prune", ("rename",)),
        Step("release", ("own",)),
    ]  # fmt: skip


PROGRAMS = [program(rank) for rank in RANKS]

TOGETHER, AGAIN = "both jobs go on from the newest", "one is told to go on from an older one"
ONE = Content(("0", "0", "0"), True)
BEGINNINGS = {
    TOGETHER: State((Job(), Job()), visible=((1, ONE),)),
    AGAIN: State((Job(path=1), Job()), visible=((1, ONE), (2, ONE))),
}


# what is put in on purpose: where it shows, and as what
BUGS = {
    "renamed before its manifest": (TOGETHER, "half"),
    "nobody owns the folder": (TOGETHER, "two jobs write"),
    "taken over though its owner lives": (TOGETHER, "two jobs write"),
    "no second look": (TOGETHER, "goes on from step 1, and 2 is whole"),
    "the older folder is removed first": (AGAIN, "older than 2"),
    "hidden older folders do not count": (AGAIN, "older than 2"),
}


def explore(begin: State, crashes: int, bug: str = "") -> int:
    """Visit every state, and return how many there are.

    Raises BrokenError, with the steps that led to a state which no restart may find.
    """
    begin = begin._replace(crashes=crashes)
    came: dict[State, tuple[State, str] | None] = {begin: None}
    rest = [begin]
    while rest:
        state = rest.pop()
        best = _newest(state, bug)
        for words, after in _successors(state, bug):
            if after in came:
                continue
            came[after] = (state, words)
            if problem := _problem(after, best, bug):
                raise BrokenError(f"{problem}:\n  " + "\n  ".join(_path(after, came)))
            rest.append(after)
    return len(came)


def _path(state: State, came: dict[State, tuple[State, str] | None]) -> list[str]:
    words: list[str] = []
    while (before := came[state]) is not None:
        state, word = before
        words.append(word)
    return words[::-1]


def _newest(state: State, bug: str) -> int:
    """The step that a restart goes on from, as `newest_checkpoint` finds it."""
    found = [*state.visible] + ([] if bug == "hidden older folders do not count" else [*state.aside])
    return max((step for step, content in found if content.whole), default=0)


def _problem(state: State, best: int, bug: str) -> str:
    if wrong := [job.wrong for job in state.jobs if job.wrong]:
        return wrong[0]
    if sum(job.writes for job in state.jobs) > 1:
        return "two jobs write"
    if any(not content.whole for _, content in state.visible):
        return "a checkpoint has its name and is half"
    now = _newest(state, bug)
    if not now:
        return "no whole checkpoint is left"
    return f"a restart reads step {now}, older than {best}" if now < best else ""


def _successors(state: State, bug: str) -> Iterator[tuple[str, State]]:
    for index, job in enumerate(state.jobs):
        for rank in RANKS:
            if job.killed[rank] or job.pcs[rank] < 0:
                continue
            who = f"{'AB'[index]}{rank}"
            if state.crashes:
                yield f"{who} is killed", _killed(state, index, rank)
            after = _step(state, index, rank, bug)
            if after is not None:
                yield f"{who}: {_at(job, rank) or 'end'}", after


def _at(job: Job, rank: int) -> str:
    """The name of the next step of a rank; empty where there is none."""
    program = PROGRAMS[rank]
    return program[job.pcs[rank]].name if 0 <= job.pcs[rank] < len(program) else ""


def _killed(state: State, index: int, rank: int) -> State:
    job = state.jobs[index]
    killed = tuple(dead or each == rank for each, dead in enumerate(job.killed))
    after = job._replace(killed=killed, writes=job.writes and rank != 0)  # type: ignore[arg-type]
    return _with(state, index, after)._replace(crashes=state.crashes - 1)


def _with(state: State, index: int, job: Job) -> State:
    jobs = (job, state.jobs[1]) if index == 0 else (state.jobs[0], job)
    return state._replace(jobs=jobs)


def _moved(job: Job, rank: int, pc: int) -> Job:
    return job._replace(pcs=tuple(pc if each == rank else old for each, old in enumerate(job.pcs)))  # type: ignore[arg-type]


def _over(state: State, index: int, rank: int) -> State:
    """This rank ends by itself, with an error or without: the first one releases the folder."""
    done = state.jobs[index].pcs[rank] >= len(PROGRAMS[rank]) - (rank == 0)
    name, job = "AB"[index], _moved(state.jobs[index], rank, DONE if done else FAILED)
    if rank == 0:
        if job.writes and state.owner == name:
            state = state._replace(ended=True)
        job = job._replace(writes=False)
    return _with(state, index, job)


def _step(state: State, index: int, rank: int, bug: str) -> State | None:
    """The state after the next step of a rank; None where it has to wait."""
    job, name = state.jobs[index], "AB"[index]
    program = PROGRAMS[rank]
    if job.pcs[rank] == len(program):
        return _over(state, index, rank)
    step = program[job.pcs[rank]].name
    if step == "meet":
        return _meet(state, index, rank)
    on = _with(state, index, _moved(job, rank, job.pcs[rank] + 1))
    if rank == 0:
        return FIRST[step](state, on, index, bug)
    writing = dict(state.writing)
    if name not in writing:  # another owner has cleared it
        return _over(state, index, rank)
    return on._replace(writing=_items(writing | {name: _written(writing[name], name, rank)}))


def _written(content: Content, name: str, rank: int) -> Content:
    parts = tuple(name if each == rank else part for each, part in enumerate(content.parts))
    return content._replace(parts=parts)


def _items(table: dict) -> tuple:  # type: ignore[type-arg]
    return tuple(sorted(table.items()))


def _meet(state: State, index: int, rank: int) -> State | None:
    """All ranks go on at once when all have come; one whose peer is gone ends."""
    job = state.jobs[index]
    mine = _meetings(job, rank)
    behind = [each for each in RANKS if _meetings(job, each) < mine]
    if any(job.killed[each] or job.pcs[each] == FAILED for each in behind):
        cleared = dict(state.writing)
        cleared.pop("AB"[index], None)  # whoever fails removes what was being written
        return _over(state._replace(writing=_items(cleared)), index, rank)
    if behind:
        return None
    here = [each for each in RANKS if _meetings(job, each) == mine and _at(job, each) == "meet"]
    return _with(state, index, job._replace(pcs=tuple(p + (r in here) for r, p in enumerate(job.pcs))))  # type: ignore[arg-type]


def _meetings(job: Job, rank: int) -> int:
    """How many meetings a rank has come to, with the one in which it waits."""
    place, steps = job.pcs[rank], PROGRAMS[rank]
    if place == DONE:
        return sum(step.name == "meet" for step in steps)
    if place == FAILED:
        return -1
    return sum(step.name == "meet" for step in steps[: place + 1])


# ---- The steps of a job's first rank


def _look(state: State, on: State, index: int, bug: str) -> State:
    job, seen = on.jobs[index], tuple(step for step, _ in state.visible)
    return _with(on, index, job._replace(start=job.path or _newest(state, bug), seen=seen))


def _read_owner(state: State, on: State, index: int, bug: str) -> State:
    other = next((job for name, job in zip("AB", state.jobs, strict=True) if name == state.owner), None)
    lives = other is not None and not state.ended and not other.killed[0]
    if lives and bug not in ("nobody owns the folder", "taken over though its owner lives"):
        return _over(state, index, 0)
    return _with(on, index, on.jobs[index]._replace(saw=state.owner, saw_ended=state.ended))


def _own(state: State, on: State, index: int, bug: str) -> State:
    job = state.jobs[index]
    if (job.saw, job.saw_ended) != (state.owner, state.ended) and bug != "nobody owns the folder":
        return _over(state, index, 0)
    return on._replace(owner="AB"[index], ended=False)


def _settle(state: State, on: State, index: int, bug: str) -> State | None:
    other = state.jobs[1 - index]
    if _at(other, 0) == "own" and not other.killed[0]:
        return None  # it is long enough that no other stands between its look and its write
    if state.owner != "AB"[index] and bug != "nobody owns the folder":
        return _over(state, index, 0)
    return _with(on, index, on.jobs[index]._replace(writes=True))


def _look_again(state: State, on: State, index: int, bug: str) -> State:
    job = state.jobs[index]
    come = {step for step, _ in state.visible} - {*job.seen}
    return _over(state, index, 0) if come and not job.path and bug != "no second look" else on


def _clear(state: State, on: State, index: int, bug: str) -> State:
    visible = dict(state.visible)
    aside = {s: c for s, c in state.aside if not (s in visible and visible[s].whole)}
    return on._replace(writing=(), aside=_items(aside))


def _load(state: State, on: State, index: int, bug: str) -> State:
    job = state.jobs[index]
    found = [content for step, content in (*state.visible, *state.aside) if step == job.start]
    if not found:
        return _over(state, index, 0)
    wrong = "" if any(content.whole for content in found) else "a job reads half a checkpoint"
    if job.start < _newest(state, "") and not job.path:
        wrong = f"a job goes on from step {job.start}, and {_newest(state, '')} is whole"
    return _with(on, index, on.jobs[index]._replace(wrong=wrong))


def _make(state: State, on: State, index: int, bug: str) -> State:
    writing = dict(state.writing)
    writing.setdefault("AB"[index], Content())
    return on._replace(writing=_items(writing))


def _write(state: State, on: State, index: int, bug: str) -> State:
    name, writing = "AB"[index], dict(state.writing)
    if name not in writing:
        return _over(state, index, 0)
    return on._replace(writing=_items(writing | {name: _written(writing[name], name, 0)}))


def _manifest(state: State, on: State, index: int, bug: str) -> State:
    name, writing = "AB"[index], dict(state.writing)
    if bug == "renamed before its manifest":
        return on
    if name not in writing:
        return _over(state, index, 0)
    return on._replace(writing=_items(writing | {name: writing[name]._replace(manifest=True)}))


def _aside(state: State, on: State, index: int, bug: str) -> State:
    target, visible = state.jobs[index].start + 1, dict(state.visible)
    if target not in visible:
        return on
    moved = {target: visible.pop(target)}
    kept = {} if bug == "the older folder is removed first" else moved
    return on._replace(visible=_items(visible), aside=_items(dict(state.aside) | kept))


def _rename(state: State, on: State, index: int, bug: str) -> State:
    name, writing = "AB"[index], dict(state.writing)
    if name not in writing:
        return _over(state, index, 0)
    made = writing.pop(name)
    target = state.jobs[index].start + 1
    return on._replace(writing=_items(writing), visible=_items(dict(state.visible) | {target: made}))


def _remove_aside(state: State, on: State, index: int, bug: str) -> State:
    target = state.jobs[index].start + 1
    return on._replace(aside=_items({s: c for s, c in state.aside if s != target}))


def _prune(state: State, on: State, index: int, bug: str) -> State:
    if state.owner != "AB"[index] and bug != "nobody owns the folder":
        return _over(state, index, 0)
    last = state.jobs[index].start + 1
    kept = {s: c for s, c in state.visible if s >= last}
    return on._replace(visible=_items(kept), writing=())


def _release(state: State, on: State, index: int, bug: str) -> State:
    return _over(state, index, 0)


FIRST: dict[str, Callable[[State, State, int, str], State | None]] = {
    "look": _look, "read owner": _read_owner, "own": _own, "settle": _settle, "look again": _look_again,
    "clear": _clear, "load": _load, "make": _make, "write": _write, "manifest": _manifest, "aside": _aside,
    "rename": _rename, "remove aside": _remove_aside, "prune": _prune, "release": _release,
}  # fmt: skip
