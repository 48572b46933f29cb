from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.runtime.plan import Compute, Free, Message, Plan, Post, Send, Wait, lower
from penstock.schedule import Op, Placement, Proof, Schedule, build, verify
from penstock.schedule.builders.gpipe import forwards
from penstock.schedule.order import AHEAD
from support.programs import valid


def text(plan: Plan) -> list[str]:
    """One line for each op: what is done before it, the op, what is sent after it."""
    lines, line = [], []
    for action in plan.actions:
        match action:
            case Compute(op):
                line.append(str(op))
            case Post(message) | Wait(message) | Send(message) | Free(message):
                line.append(f"{type(action).__name__.lower()} {message.op}")
        if isinstance(action, Compute):
            lines.append(line)
            line = []
    return [" ".join(actions) for actions in [*lines, line]]


def test_golden_first_rank() -> None:
    plan = lower(verify(build("1f1b", ranks=2, microbatches=3)), 0)
    assert text(plan) == [
        "0F0",
        "send 0F0 post 1B0 0F1",
        # 1B0 is back, so rank 1 has received 0F0; 0F1 it may not have received yet
        "send 0F1 post 1B1 wait 1B0 free 0F0 0B0",
        "0F2",
        "send 0F2 post 1B2 wait 1B1 free 0F1 0B1",
        "wait 1B2 free 0F2 0B2",
        "",
    ]


def test_golden_last_rank() -> None:
    plan = lower(verify(build("1f1b", ranks=2, microbatches=3)), 1)
    assert text(plan) == [
        "post 0F0 wait 0F0 1F0",
        "post 0F1 1B0",
        "send 1B0 wait 0F1 1F1",
        "post 0F2 1B1",
        # 0F2 was computed after 0B0, which took 1B0
        "send 1B1 wait 0F2 free 1B0 1F2",
        "1B2",
        "send 1B2 free 1B1 free 1B2",
    ]
    assert plan.peak_posted == 1


def test_how_far_ahead_can_be_told() -> None:
    proof = verify(build("gpipe", ranks=2, microbatches=3))
    assert text(lower(proof, 1, ahead=0))[:3] == [
        "post 0F0 wait 0F0 1F0", "post 0F1 wait 0F1 1F1", "post 0F2 wait 0F2 1F2",
    ]  # fmt: skip
    assert text(lower(proof, 1, ahead=2))[:3] == [
        "post 0F0 post 0F1 post 0F2 wait 0F0 1F0", "wait 0F1 1F1", "wait 0F2 1F2",
    ]  # fmt: skip
    assert [lower(proof, 1, ahead=ahead).peak_posted for ahead in (0, 1, 2, 9)] == [1, 2, 3, 3]
    assert lower(proof, 1) == lower(proof, 1, ahead=AHEAD)


def test_a_plan_knows_which_of_its_own_forwards_are_run_again() -> None:
    proof = verify(build("1f1b", ranks=2, microbatches=3, stages_per_rank=2))
    plans = [lower(proof, rank, recomputed=frozenset({(0, 1), (2, 0), (3, 2)})) for rank in (0, 1)]
    computes = [[a for a in plan.actions if isinstance(a, Compute) and a.op.kind == "F"] for plan in plans]
    again = [{a.op[::2] for a in rank if a.recompute} for rank in computes]
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
            for kind in (Post, Wait, Send, Free)
        }
        assert Counter(seen[Post]) == Counter(seen[Wait])
        assert Counter(seen[Send]) == Counter(seen[Free])
        assert all(count == 1 for count in Counter(seen[Post] + seen[Send]).values())
    sent = [a.message for plan in plans for a in plan.actions if isinstance(a, Send)]
    posted = [a.message for plan in plans for a in plan.actions if isinstance(a, Post)]
    for channel in {message.channel for message in sent}:  # first in, first out pairs the same messages
        assert [m for m in sent if m.channel == channel] == [m for m in posted if m.channel == channel]


@settings(deadline=None)
@given(any_proof, depths)
def test_nothing_is_waited_for_before_it_is_posted(proof: Proof, ahead: float) -> None:
    for rank in range(proof.schedule.ranks):
        plan = lower(proof, rank, ahead=ahead)
        posted, waiting, most = set(), 0, 0
        for action in plan.actions:
            match action:
                case Post(message):
                    posted.add(message)
                    waiting += 1
                    most = max(most, waiting)
                case Wait(message):
                    assert message in posted
                    waiting -= 1
        assert plan.peak_posted == most


@settings(deadline=None)
@given(proofs())
def test_few_receives_are_posted_at_once(proof: Proof) -> None:
    """What this op and the two after it need."""
    assert all(lower(proof, rank).peak_posted <= 3 for rank in range(proof.schedule.ranks))


class Machine:
    """Takes the ranks' plans step by step, and knows what was sent and received so far."""

    def __init__(self, proof: Proof) -> None:
        self.left = [list(lower(proof, rank).actions) for rank in range(proof.schedule.ranks)]
        self.sent: set[Message] = set()
        self.received: set[Message] = set()

    def advance(self, rank: int) -> bool:
        """Take one action of `rank` if it need not wait."""
        if not self.left[rank]:
            return False
        match self.left[rank][0]:
            case Wait(message):
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
@given(any_proof)
def test_a_send_is_freed_only_once_its_receiver_took_it(proof: Proof) -> None:
    """Whichever rank runs as far ahead as it can, while the others dawdle."""
    for eager in range(proof.schedule.ranks):
        machine = Machine(proof)
        while any(machine.left):
            while machine.advance(eager):
                pass
            for rank in range(proof.schedule.ranks):
                machine.advance(rank)


def test_consumers_that_go_another_way_get_the_right_message() -> None:
    """Stage 1 takes the microbatches backwards: receives are posted in the sender's order all the same."""
    schedule = Schedule(
        "crossed",
        Placement((0, 1)),
        2,
        ((Op(0, "F", 0), Op(0, "F", 1)), (Op(1, "F", 1), Op(1, "F", 0))),
    )
    plan = lower(verify(schedule), 1)
    assert text(plan) == ["post 0F0 post 0F1 wait 0F1 1F1", "wait 0F0 1F0", ""]
