"""Activation offloading: when a microbatch's activations move to host memory and back.

Rank 0 of 1F1B with P = 4 ranks, where each copy gets the time of one op (`ahead` = 1):

    ops              F0   F1   F2   F3   B0   F4   B1   F5   ...
    F0 on device     ====#####      <<<<<====                       ==== in use   #### copied to the host
    F1 on device          ====#####           <<<<<====             <<<< copied back

The activations of a microbatch take four steps:

    offload   behind its forward: the copy to host memory begins
    release   `ahead` ops later: the copy is over, or the rank waits for it; the device's memory is free
    reload    `ahead` ops before its backward: memory is taken, and the copy back begins
    restore   in front of its backward: the copy back is over, or the rank waits for it

Activations that would be reloaded before an op has run without them stay on the device. Memory is planned as
if copies took no time; where the link is slow, the rank waits for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import Literal, NamedTuple, get_args

from penstock.errors import ScheduleError
from penstock.schedule.ops import Op, Schedule, Violation
from penstock.schedule.verify import Proof

OffloadStep = Literal["offload", "release", "reload", "restore"]
STEPS: tuple[OffloadStep, ...] = get_args(OffloadStep)


class HostCopy(NamedTuple):
    """One step of the copies of a microbatch's activations on one stage."""

    step: OffloadStep
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.step} {self.stage}F{self.microbatch}"


# by position in the program of a rank: what is done in front of the op there, in this order
HostCopies = Sequence[Sequence[HostCopy]]


def host_copies(schedule: Schedule, ahead: int = 1) -> tuple[HostCopies, ...]:
    """By rank, every step of every microbatch that is worth offloading.

    ahead: number of ops during which a copy may run, 1 or more
    """
    return tuple(_of_rank(schedule, program, ahead) for program in schedule.programs)


def _of_rank(schedule: Schedule, program: Sequence[Op], ahead: int) -> HostCopies:
    steps: list[tuple[int, int, HostCopy]] = []  # position, which of STEPS, the step
    for (stage, microbatch), forward, backward in _spans(schedule, program):
        positions = forward + 1, forward + 1 + ahead, backward - ahead, backward
        if positions[1] < positions[2]:
            copies = (HostCopy(step, stage, microbatch) for step in STEPS)
            steps += zip(positions, range(len(STEPS)), copies, strict=True)
    in_front: list[list[HostCopy]] = [[] for _ in program]
    for position, _, copy in sorted(steps, key=itemgetter(0, 1)):
        in_front[position].append(copy)
    return in_front


def _spans(schedule: Schedule, program: Sequence[Op]) -> Iterator[tuple[tuple[int, int], int, int]]:
    """Each (stage, microbatch) of a rank that trains, with the positions of its forward and its backward."""
    forwards: dict[tuple[int, int], int] = {}
    for position, (stage, kind, microbatch) in enumerate(program):
        if kind == "F":
            forwards[stage, microbatch] = position
        elif kind in ("B", "I"):
            yield (stage, microbatch), forwards[stage, microbatch], position


def offloaded(copies: Sequence[HostCopies]) -> frozenset[tuple[int, int]]:
    """The (stage, microbatch) pairs of all ranks whose activations leave the device."""
    steps = (copy for rank in copies for at in rank for copy in at)
    return frozenset((stage, microbatch) for step, stage, microbatch in steps if step == "offload")


def verify_copies(proof: Proof, copies: Sequence[HostCopies]) -> None:
    """Prove that all activations that leave return in time. Raises ScheduleError with every violation.

    Each of the four steps of a microbatch occurs once, on its rank, in order, between its forward and its
    backward.
    """
    schedule = proof.schedule
    violations: list[Violation] = []
    if len(copies) != schedule.ranks:
        violations.append(Violation(f"host copies of {len(copies)} ranks, for {schedule.ranks}"))
    else:
        for rank, rank_copies in enumerate(copies):
            violations += _violations(schedule, rank, rank_copies)
    if violations:
        raise ScheduleError(schedule.name, violations)


def _violations(schedule: Schedule, rank: int, copies: HostCopies) -> Iterator[Violation]:
    program = schedule.programs[rank]
    if len(copies) != len(program):
        yield Violation(f"host copies in front of {len(copies)} ops, and it has {len(program)}", rank)
        return
    spans = {key: (forward, backward) for key, forward, backward in _spans(schedule, program)}
    seen: dict[tuple[int, int], list[tuple[int, OffloadStep]]] = {}
    for position, at in enumerate(copies):
        for step, *key in at:
            seen.setdefault((key[0], key[1]), []).append((position, step))
    for (stage, microbatch), steps in seen.items():
        forward = Op(stage, "F", microbatch)
        if (stage, microbatch) not in spans:
            yield Violation(f"{steps[0][1]}: no forward on this rank, or no backward", rank, None, forward)
            continue
        after, before = spans[stage, microbatch]
        if tuple(step for _, step in steps) != STEPS:
            step_names, wanted = ", ".join(step for _, step in steps), ", ".join(STEPS)
            yield Violation(f"its steps are {step_names}, and not {wanted}", rank, None, forward)
        for position, step in steps:
            if not after < position <= before:
                rule = f"{step}: not between its forward at {after} and its backward at {before}"
                yield Violation(rule, rank, position, forward)
