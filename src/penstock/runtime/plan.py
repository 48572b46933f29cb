"""A proven schedule, lowered to what one rank does: posts, awaits, computes, sends and frees.

Every action is fixed here, before the first step; the executor only follows. 1F1B on rank 1 of 2:

    post 0F0   await 0F0   1F0   post 0F1   1B0   send 1B0   await 0F1   1F1   post 0F2   1B1   send 1B1
    await 0F2   free 1B0   1F2 ...

- A receive is posted as far ahead of its use as `penstock.schedule.order` says, so that the message arrives
  while the rank computes. On each channel, receives are posted in the order in which the other end sends.
- A send starts when its op has ended. Nothing waits for it.
- A send is freed at the first later await that proves it complete: a rank computes a message only after
  everything that it awaited before. So freeing never blocks.
- A result for a stage of the same rank is delivered at once.

With `exchanges`, a rank's sends and receives between two ops go together. Each exchange starts what was
posted and sent before it:

    post 0F0  exchange  await 0F0  1F0   1B0  send 1B0  post 0F1  exchange  await 0F1  1F1 ...

With `copies`, activations move to host memory and back (penstock.schedule.offload):

    0F0   send 0F0   offload 0F0   0F1   send 0F1   release 0F0   0F2   send 0F2   reload 0F0   0F3   send 0F3
    await 1B0   restore 0F0   0B0 ...
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple, TypeGuard

from penstock.runtime.stage_part import Forward
from penstock.schedule import Op, Proof, Schedule
from penstock.schedule.offload import HostCopies, HostCopy, offloaded, verify_copies
from penstock.schedule.order import AHEAD, Channel, Exchanges, Message, posts


class Post(NamedTuple):
    """Post a receive buffer."""

    message: Message


class Await(NamedTuple):
    """Block until the message is here."""

    message: Message


class Compute(NamedTuple):
    """Run `op`, with all that is known about it before the first step.

    takes: the op of another stage whose result it needs
    gives: whether another stage needs its result
    sends: the message that its result becomes, where that stage is on another rank
    is_last: whether the stage is the last one of its copy of the model
    how: how the forward of this microbatch runs
    """

    op: Op
    takes: Op | None
    gives: bool
    sends: Message | None
    is_last: bool
    how: Forward


class Deliver(NamedTuple):
    """Pass a result to another stage of this rank."""

    message: Message


class Send(NamedTuple):
    """Start sending; do not wait."""

    message: Message


class Exchange(NamedTuple):
    """Start all that was posted and sent since the last exchange; do not wait."""


class Free(NamedTuple):
    """Free a sent message: it has arrived."""

    message: Message


class Reduce(NamedTuple):
    """Sum the gradients of a stage over the mesh: all its backwards have run."""

    stage: int


Action = Post | Await | Compute | Deliver | Send | Exchange | Free | Reduce | HostCopy


@dataclass(frozen=True)
class Plan:
    """One rank's actions for one step."""

    rank: int
    schedule: Schedule
    actions: tuple[Action, ...]
    peak_live: int


def channels(schedule: Schedule) -> tuple[Channel, ...]:
    """Every channel of a schedule, in the same order on all ranks."""
    placement = schedule.placement
    edges = [(s, s + 1) for s in range(placement.stages) if not placement.is_last(s)]
    remote = [edge for edge in edges if placement.rank_of[edge[0]] != placement.rank_of[edge[1]]]
    return tuple(Channel(*edge) for s, t in remote for edge in ((s, t), (t, s)))


def lower(
    proof: Proof,
    rank: int,
    *,
    ahead: float = AHEAD,
    recomputed: frozenset[tuple[int, int]] = frozenset(),
    exchanges: Exchanges | None = None,
    reduced: frozenset[int] = frozenset(),
    copies: Sequence[HostCopies] | None = None,
) -> Plan:
    """The plan of `rank`. Takes the proof, not the schedule, so that nothing unproven ever runs.

    Args:
        ahead: units of this rank's compute between the post of a receive and its use; F, I and W are one
            unit.
        recomputed: the (stage, microbatch) of any rank whose forward runs again in the backward.
        exchanges: of the same schedule, where messages go in batches; then `ahead` has no effect.
        reduced: the stages whose gradients are summed over the mesh.
        copies: by rank, the steps of offloading; verified here. Raises ScheduleError.
    """
    schedule = proof.schedule
    if copies is not None:
        verify_copies(proof, copies)
    receives = posts(proof, rank, ahead) if exchanges is None else exchanges.receives[rank]
    actions = _Lowering(schedule, rank, receives, recomputed, reduced, copies).actions()
    if exchanges is not None:
        assert exchanges.schedule == schedule
        actions = _with_exchanges(actions)
    return Plan(rank, schedule, tuple(actions), proof.peak_live[rank])


class _Lowering:
    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        receives: Sequence[Sequence[Op]],
        recomputed: frozenset[tuple[int, int]],
        reduced: frozenset[int],
        copies: Sequence[HostCopies] | None = None,
    ) -> None:
        self._schedule, self._placement, self._receives = schedule, schedule.placement, receives
        self._program, self._recomputed = schedule.programs[rank], recomputed
        self._copies: HostCopies = [()] * len(self._program) if copies is None else copies[rank]
        self._offloaded = frozenset() if copies is None else offloaded(copies)
        # no gradient is added to a stage after its last op
        last = {op.stage: op for op in self._program if op.kind != "F"}
        self._completes = {op: stage for stage, op in last.items() if stage in reduced}
        stages = {s for channel in channels(schedule) if rank in map(self._host, channel) for s in channel}
        peers = {self._host(stage) for stage in stages} - {rank}
        self._position = {op: i for peer in peers for i, op in enumerate(schedule.programs[peer])}
        self._in_flight: dict[int, list[Message]] = {}  # by receiving rank: sends not yet proven complete

    def actions(self) -> Iterator[Action]:
        for op, receives, copies in zip(self._program, self._receives, self._copies, strict=True):
            for source in receives:
                yield Post(Message.of(source))
            # after the posts, so that all sends and posts between two ops stay together
            yield from (copy for copy in copies if copy.step != "restore")
            feeder = self._schedule.source(op)
            needed = None if feeder is None else Message.of(feeder)
            result = None if self._schedule.taker(op) is None else Message.of(op)
            if self._is_remote(needed):
                yield Await(needed)
                yield from self._frees_after(needed)
            yield from (copy for copy in copies if copy.step == "restore")
            yield self._compute(op, needed, result)
            if self._is_remote(result):
                yield Send(result)
                self._in_flight.setdefault(self._host(result.target), []).append(result)
            elif result is not None:
                yield Deliver(result)
            if op in self._completes:  # after the send: no other rank waits for the reduction
                yield Reduce(self._completes[op])
        for sends in self._in_flight.values():
            yield from map(Free, sends)

    def _compute(self, op: Op, needed: Message | None, result: Message | None) -> Compute:
        key = op.stage, op.microbatch
        return Compute(
            op,
            None if needed is None else needed.op,
            result is not None,
            result if self._is_remote(result) else None,
            self._placement.is_last(op.stage),
            Forward(key in self._schedule.split, key in self._recomputed, key in self._offloaded),
        )

    def _host(self, stage: int) -> int:
        return self._placement.rank_of[stage]

    def _is_remote(self, message: Message | None) -> TypeGuard[Message]:
        return message is not None and self._host(message.op.stage) != self._host(message.target)

    def _frees_after(self, message: Message) -> Iterator[Action]:
        """The sends that the other rank must have received before it computed `message`."""
        peer, reached = self._host(message.op.stage), self._position[message.op]
        still = []
        for sent in self._in_flight.get(peer, []):
            taker = self._schedule.taker(sent.op)
            assert taker is not None, "a message has a taker"
            if self._position[taker] <= reached:
                yield Free(sent)
            else:
                still.append(sent)
        self._in_flight[peer] = still


def _with_exchanges(actions: Iterable[Action]) -> Iterator[Action]:
    """The same actions, with an exchange after each run of sends and posts."""
    for moves, run in groupby(actions, lambda action: isinstance(action, Send | Post)):
        yield from run
        if moves:
            yield Exchange()
