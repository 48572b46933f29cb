"""How a run communicates where it does not do as penstock does: facts of other frameworks, for their runs.

    overlapped      of an axis' collectives and the ops they run beside, the longer counts
    copies          a token goes once to each host, and from there once to each rank, that has experts of it
    scattered       row-wise projections scatter their sums over the sequence; penstock sums, then splits
    gathered_keys   cp gathers keys and values; penstock exchanges heads
    sharded_edges   each rank of tp sends its part of a message to the next stage; penstock sends all of it

A search never sets these: penstock's own runs have the defaults.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

Axis = Literal["tp", "cp", "ep"]
AXES: tuple[Axis, ...] = ("tp", "cp", "ep")


class TokenCopies(NamedTuple):
    """The ranks, and the hosts, that a token's experts are on: means, its own included."""

    ranks: float
    hosts: float


@dataclass(frozen=True)
class Practice:
    """The facts of a run.

    overlapped: axes whose collectives run beside ops: of tp beside products, of cp beside attention,
        and of ep beside all ops of another microbatch
    copies: None sends a token once for each of its experts
    """

    overlapped: tuple[Axis, ...] = ()
    copies: TokenCopies | None = None
    scattered: bool = False
    gathered_keys: bool = False
    sharded_edges: bool = False
