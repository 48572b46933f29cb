"""A proven schedule, lowered to what one rank does: posts, waits, computes, sends and frees.

Everything is fixed here, before the first step; the executor only follows. For 1F1B on rank 1 of 2:

    post 0F0   wait 0F0   1F0   post 0F1   1B0   send 1B0   wait 0F1   1F1   post 0F2   1B1   send 1B1
    wait 0F2   free 1B0   1F2 ...

- A receive is posted as far ahead of the op that needs it as `penstock.schedule.order` says, so that it lands
  while its rank computes. On each channel receives are posted in the order in which the other end sends: that
  is all that first in, first out needs.
- A send is started as soon as its op has ended, and nothing waits for it.
- A send is freed at the first later wait that proves it done: what comes from a rank was computed after
  everything that this rank had waited for before. So freeing never blocks.
- A result for a stage of the same rank is handed over at once.

Where what a rank sends and receives between two ops goes together (`penstock.schedule.order`), receives
are posted where that says, and an exchange begins what was sent and posted before it:

    post 0F0  exchange  wait 0F0  1F0   1B0  send 1B0  post 0F1  exchange  wait 0F1  1F1 ...
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple, TypeGuard

from penstock.schedule import Op, Proof, Schedule
from penstock.schedule.order import AHEAD, Exchanges, posts


class Message(NamedTuple):
    """The result of `op` on its way to stage `target`: activations forward, gradients backward."""

    op: Op
    target: int

    @property
    def channel(self) -> Channel:
        return Channel(self.op.stage, self.target)

    def __str__(self) -> str:
        return f"{self.op} for stage {self.target}"


class Channel(NamedTuple):
    """A directed edge between two stages on different ranks; first in, first out."""

    source: int
    target: int


class Post(NamedTuple):
    """Post a receive buffer."""

    message: Message


class Wait(NamedTuple):
    """Block until the message is here."""

    message: Message


class Compute(NamedTuple):
    """Run `op`, on what `takes` made on another stage, if on anything; `gives`: whether one waits for it."""

    op: Op
    takes: Op | None
    gives: bool


class Hand(NamedTuple):
    """Give a result to another stage of this rank."""

    message: Message


class Send(NamedTuple):
    """Start sending; do not wait."""

    message: Message


class Exchange(NamedTuple):
    """Begin what was posted and sent since the last exchange, all of it together; do not wait.

    in_line: whether the rank may be held up until it is over all the same
    """

    messages: tuple[Message, ...]
    in_line: bool


class Free(NamedTuple):
    """Let go of what was sent: it has arrived."""

    message: Message


class Reduce(NamedTuple):
    """Sum the gradients of a stage over the ranks beside the pipeline: all its backwards have run."""

    stage: int


Action = Post | Wait | Compute | Hand | Send | Exchange | Free | Reduce


@dataclass(frozen=True)
class Plan:
    """One rank's actions for one step.

    recomputed: the (stage, microbatch) of this rank whose forward keeps only its inputs, and is run again in
        the backward
    """

    rank: int
    schedule: Schedule
    actions: tuple[Action, ...]
    peak_live: int
    recomputed: frozenset[tuple[int, int]] = frozenset()

    @cached_property
    def peak_posted(self) -> int:
        """The most receives that are posted at once and not yet waited for."""
        changes = [isinstance(a, Post) - isinstance(a, Wait) for a in self.actions]
        return max(accumulate(changes, initial=0))


def channels(schedule: Schedule) -> tuple[Channel, ...]:
    """Every channel of a schedule on this placement, in one order for all ranks."""
    placement = schedule.placement
    edges = [(s, s + 1) for s in range(placement.stages) if not placement.is_last(s)]
    apart = [edge for edge in edges if placement.rank_of[edge[0]] != placement.rank_of[edge[1]]]
    return tuple(Channel(*edge) for s, t in apart for edge in ((s, t), (t, s)))


def lower(
    proof: Proof,
    rank: int,
    *,
    ahead: float = AHEAD,
    recomputed: frozenset[tuple[int, int]] = frozenset(),
    together: Exchanges | None = None,
    reduced: frozenset[int] = frozenset(),
) -> Plan:
    """The plan of `rank`. Takes the proof, not the schedule, so that nothing unproven ever runs.

    ahead: the units of own compute that lie between the post of a receive and its use, F, I and W being one
    recomputed: the (stage, microbatch), of any rank, whose forward is run again in the backward
    together: of the same schedule, where messages go in exchanges; then `ahead` does not count
    reduced: the stages whose gradients are summed over the ranks beside the pipeline
    """
    schedule = proof.schedule
    own = frozenset(place for place in recomputed if schedule.placement.rank_of[place[0]] == rank)
    actions = tuple(_Lowering(schedule, rank, ahead, together, reduced))
    return Plan(rank, schedule, actions, proof.peak_live[rank], own)


class _Lowering:
    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        ahead: float,
        together: Exchanges | None,
        reduced: frozenset[int],
    ) -> None:
        assert together is None or together.schedule == schedule
        self._schedule, self._together = schedule, together
        # by stage, its last op: no gradient is added after it
        last = {op.stage: op for op in schedule.programs[rank] if op.kind != "F"}
        self._completes = {op: stage for stage, op in last.items() if stage in reduced}
        self._posts: Sequence[Sequence[Op]] = (
            posts(schedule, rank, ahead) if together is None else together.receives[rank]
        )
        self._program = schedule.programs[rank]
        own = channels(schedule)
        stages = {stage for channel in own if rank in map(self._host, channel) for stage in channel}
        peers = {self._host(stage) for stage in stages} - {rank}
        self._position = {op: i for peer in peers for i, op in enumerate(schedule.programs[peer])}
        self._in_flight: dict[int, list[Message]] = {}  # rank -> sends to it, not yet proven done

    def __iter__(self) -> Iterator[Action]:
        if self._together is None:
            return self._one_by_one()
        return _in_exchanges(self._one_by_one(), self._together.in_line)

    def _one_by_one(self) -> Iterator[Action]:
        for op, upcoming in zip(self._program, self._posts, strict=True):
            for source in upcoming:
                yield Post(Message(source, source.stage + (1 if source.kind == "F" else -1)))
            taken = self._taken(op)
            if self._is_remote(taken):
                yield Wait(taken)
                yield from self._frees_after(taken)
            given = self._given(op)
            yield Compute(op, None if taken is None else taken.op, given is not None)
            if self._is_remote(given):
                yield Send(given)
                self._in_flight.setdefault(self._host(given.target), []).append(given)
            elif given is not None:
                yield Hand(given)
            if op in self._completes:  # after the send, so that nobody waits for this
                yield Reduce(self._completes[op])
        for sends in self._in_flight.values():
            yield from map(Free, sends)

    def _host(self, stage: int) -> int:
        return self._schedule.placement.rank_of[stage]

    def _is_remote(self, message: Message | None) -> TypeGuard[Message]:
        return message is not None and self._host(message.op.stage) != self._host(message.target)

    def _taken(self, op: Op) -> Message | None:
        """What `op` needs of another stage."""
        for needed in self._schedule.predecessors(op):
            if needed.stage != op.stage:
                return Message(needed, op.stage)
        return None

    def _given(self, op: Op) -> Message | None:
        """Where the result of `op` goes, if to another stage."""
        placement = self._schedule.placement
        if op.kind == "W" or (placement.is_last if op.kind == "F" else placement.is_first)(op.stage):
            return None
        return Message(op, op.stage + (1 if op.kind == "F" else -1))

    def _frees_after(self, message: Message) -> Iterator[Action]:
        """The sends to the other rank that it must have received before it computed `message`."""
        peer, reached = self._host(message.op.stage), self._position[message.op]
        still = []
        for sent in self._in_flight.get(peer, []):
            if self._position[self._consumer(sent)] <= reached:
                yield Free(sent)
            else:
                still.append(sent)
        self._in_flight[peer] = still

    def _consumer(self, message: Message) -> Op:
        if message.op.kind == "F":
            return Op(message.target, "F", message.op.microbatch)
        return self._schedule.gradient(message.target, message.op.microbatch)


def _in_exchanges(actions: Iterable[Action], in_line: bool) -> Iterator[Action]:
    """The same, with an exchange after each run of sends and posts."""
    begun: list[Message] = []
    for action in actions:
        if isinstance(action, Send | Post):
            begun.append(action.message)
        elif begun:
            yield Exchange(tuple(begun), in_line)
            begun = []
        yield action
    if begun:
        yield Exchange(tuple(begun), in_line)
