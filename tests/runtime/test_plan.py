"""Plans: golden ones, and for any schedule that messages pair up and are freed only once received."""

from __future__ import annotations

from collections import Counter
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ScheduleError
from penstock.runtime.plan import (
    Action,
    Await,
    Compute,
    Deliver,
    Exchange,
    Free,
    Plan,
    Post,
    Send,
    lower,
)
from penstock.schedule import Placement, Proof, build, verify
from penstock.schedule.builders.gpipe import forwards
from penstock.schedule.choose import chosen_schedule
from penstock.schedule.offload import HostCopy, host_copies
from penstock.schedule.order import AHEAD, Message, exchanges
from support.programs import valid, written
from support.refusals import refuses
from support.schedules import FORMS


def text(plan: Plan) -> list[str]:
    """One line for each op: what is done before it, the op, what is sent after it."""
    lines: list[list[str]] = [[]]
    for action in plan.actions:
        name = type(action).__name__.lower()
        match action:
            case Compute(op):
                lines[-1].append(str(op))
                lines.append([])
            case Post(message) | Await(message) | Send(message) | Free(message) | Deliver(message):
                lines[-1].append(f"{name} {message.op}")
            case Exchange():
                lines[-1].append(name)
            case HostCopy():
                lines[-1].append(str(action))
    return [" ".join(line) for line in lines]


def peak_posted(plan: Plan) -> int:
    """The largest number of receives that are posted and not yet waited for."""
    return max(accumulate((isinstance(a, Post) - isinstance(a, Await) for a in plan.actions), initial=0))


def test_golden_first_rank() -> None:
    plan = lower(verify(build("1f1b", ranks=2, microbatches=3)), 0)
    assert text(plan) == [
        "0F0",
        "send 0F0 post 1B0 0F1",
        # 1B0 is back, so rank 1 has received 0F0; 0F1 it may not have received yet
        "send 0F1 post 1B1 await 1B0 free 0F0 0B0",
        "0F2",
        "send 0F2 post 1B2 await 1B1 free 0F1 0B1",
        "await 1B2 free 0F2 0B2",
        "",
    ]


def test_golden_last_rank() -> None:
    plan = lower(verify(build("1f1b", ranks=2, microbatches=3)), 1)
    assert text(plan) == [
        "post 0F0 await 0F0 1F0",
        "post 0F1 1B0",
        "send 1B0 await 0F1 1F1",
        "post 0F2 1B1",
        # 0F2 was computed after 0B0, which took 1B0
        "send 1B1 await 0F2 free 1B0 1F2",
        "1B2",
        "send 1B2 free 1B1 free 1B2",
    ]


def test_golden_in_exchanges() -> None:
    schedule = chosen_schedule("1f1b", 2, 2)
    assert text(lower(verify(schedule), 1, exchanges=exchanges(verify(schedule)))) == [
        "post 0F0 exchange await 0F0 1F0",
        "1B0",
        "send 1B0 post 0F1 exchange await 0F1 1F1",
        "1B1",
        "send 1B1 exchange free 1B0 free 1B1",
    ]


def test_golden_with_activations_in_host_memory() -> None:
    schedule = build("1f1b", ranks=3, microbatches=4)
    assert text(lower(verify(schedule), 0, copies=host_copies(schedule))) == [
        "0F0",
        "send 0F0 0F1",
        "send 0F1 post 1B0 offload 0F1 0F2",
        "send 0F2 post 1B1 offload 0F2 release 0F1 await 1B0 free 0F0 free 0F1 0B0",
        "release 0F2 reload 0F1 0F3",
        "send 0F3 post 1B2 reload 0F2 await 1B1 free 0F2 restore 0F1 0B1",
        "post 1B3 await 1B2 free 0F3 restore 0F2 0B2",
        "await 1B3 0B3",
        "",
    ]


def test_copies_of_another_schedule_are_refused() -> None:
    schedule = build("1f1b", ranks=2, microbatches=6)
    with refuses(ScheduleError, "schedule '1f1b'", "front of 16"):
        lower(verify(schedule), 0, copies=host_copies(build("1f1b", ranks=2, microbatches=8)))


def test_receives_are_posted_as_far_ahead_as_asked() -> None:
    proof = verify(build("gpipe", ranks=2, microbatches=3))
    assert text(lower(proof, 1, ahead=0))[:3] == [
        "post 0F0 await 0F0 1F0", "post 0F1 await 0F1 1F1", "post 0F2 await 0F2 1F2",
    ]  # fmt: skip
    assert text(lower(proof, 1, ahead=2))[:3] == [
        "post 0F0 post 0F1 post 0F2 await 0F0 1F0", "await 0F1 1F1", "await 0F2 1F2",
    ]  # fmt: skip
    assert [peak_posted(lower(proof, 1, ahead=ahead)) for ahead in (0, 1, 2, 9)] == [1, 2, 3, 3]
    assert lower(proof, 1) == lower(proof, 1, ahead=AHEAD)


def test_a_plan_knows_which_of_its_own_forwards_are_run_again() -> None:
    proof = verify(build("1f1b", ranks=2, microbatches=3, stages_per_rank=2))
    plans = [lower(proof, rank, recomputed=frozenset({(0, 1), (2, 0), (3, 2)})) for rank in (0, 1)]
    computes = [[a for a in plan.actions if isinstance(a, Compute) and a.op.kind == "F"] for plan in plans]
    again = [{a.op[::2] for a in rank if a.how.recompute} for rank in computes]
    assert again == [{(0, 1), (2, 0)}, {(3, 2)}]
    assert text(plans[0]) == text(lower(proof, 0))


@st.composite
def proofs(draw: st.DrawFn) -> Proof:
    microbatches = draw(st.integers(1, 9))
    name = draw(st.sampled_from(["gpipe", "1f1b", "inference", "forwards"]))
    ranks = draw(st.integers(1, 5))
    if name == "inference":
        return verify(
            build(name, ranks=ranks, microbatches=microbatches, stages_per_rank=draw(st.integers(1, 3)))
        )
    if name == "forwards":
        back = [*range(ranks), *reversed(range(ranks))]
        return verify(forwards(Placement(tuple(back)), microbatches))
    return verify(build(name, ranks=ranks, microbatches=microbatches))


any_proof = st.one_of(proofs(), valid().map(verify))
depths = st.sampled_from([0.0, 1.0, AHEAD, 9.0])


@settings(deadline=None)
@given(any_proof, depths)
def test_every_plan_pairs_up(proof: Proof, ahead: float) -> None:
    plans = [lower(proof, rank, ahead=ahead) for rank in range(proof.schedule.ranks)]
    for plan in plans:
        assert [a.op for a in plan.actions if isinstance(a, Compute)] == list(
            proof.schedule.programs[plan.rank]
        )
        seen = {
            kind: [a.message for a in plan.actions if isinstance(a, kind)]
            for kind in (Post, Await, Send, Free)
        }
        assert Counter(seen[Post]) == Counter(seen[Await])
        assert Counter(seen[Send]) == Counter(seen[Free])
        assert all(count == 1 for count in Counter(seen[Post] + seen[Send]).values())
    sent = [a.message for plan in plans for a in plan.actions if isinstance(a, Send)]
    posted = [a.message for plan in plans for a in plan.actions if isinstance(a, Post)]
    for channel in {message.channel for message in sent}:  # first in, first out pairs the same messages
        assert [m for m in sent if m.channel == channel] == [m for m in posted if m.channel == channel]


@settings(deadline=None)
@given(proofs())
def test_few_receives_are_posted_at_once(proof: Proof) -> None:
    """What this op and the two after it need."""
    assert all(peak_posted(lower(proof, rank)) <= 3 for rank in range(proof.schedule.ranks))


class Machine:
    """Takes the ranks' plans step by step, and knows what was posted, sent and received so far."""

    def __init__(self, proof: Proof, ahead: float) -> None:
        self.left = [list(lower(proof, rank, ahead=ahead).actions) for rank in range(proof.schedule.ranks)]
        self.posted: set[Message] = set()
        self.sent: set[Message] = set()
        self.received: set[Message] = set()

    def advance(self, rank: int) -> bool:
        """Take one action of `rank` if it need not wait."""
        if not self.left[rank]:
            return False
        match self.left[rank][0]:
            case Post(message):
                self.posted.add(message)
            case Await(message):
                assert message in self.posted
                if message not in self.sent:
                    return False
                self.received.add(message)
            case Send(message):
                self.sent.add(message)
            case Free(message) if any(isinstance(action, Compute) for action in self.left[rank]):
                assert message in self.received, f"{message} is freed before it is received"
        del self.left[rank][0]
        return True


@settings(deadline=None)
@given(any_proof, depths)
def test_a_message_is_posted_before_its_wait_and_freed_only_once_received(proof: Proof, ahead: float) -> None:
    """Whichever rank runs as far ahead as it can, while the others dawdle."""
    for eager in range(proof.schedule.ranks):
        machine = Machine(proof, ahead)
        while any(machine.left):
            while machine.advance(eager):
                pass
            for rank in range(proof.schedule.ranks):
                machine.advance(rank)


def test_consumers_that_go_another_way_get_the_right_message() -> None:
    """Stage 1 takes the microbatches backwards: receives are posted in the sender's order all the same."""
    plan = lower(verify(written(Placement((0, 1)), 2, "0F0 0F1", "1F1 1F0")), 1)
    assert text(plan) == ["post 0F0 post 0F1 await 0F1 1F1", "await 0F0 1F0", ""]


@pytest.mark.parametrize("name", [name for name in FORMS if "searched" not in name])
def test_all_that_is_posted_or_sent_goes_into_the_next_exchange(name: str) -> None:
    schedule = chosen_schedule(FORMS[name], 4, 8)
    proof = verify(schedule)
    together = exchanges(proof)
    for rank in range(4):
        moved: list[Action] = []  # since the last exchange
        for action in lower(proof, rank, exchanges=together).actions:
            match action:
                case Post() | Send():
                    moved.append(action)
                case Exchange():
                    assert moved
                    moved = []
                case _:
                    assert not moved
        assert not moved
