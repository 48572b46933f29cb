"""DualPipe and DualPipeV: every forward overlaps with a backward."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain

from penstock.errors import ConfigError
from penstock.schedule.builders.one_f_one_b import row
from penstock.schedule.ops import Kind, Op, Pair, Placement, Schedule, both_ways, wave

_WHOLE: tuple[Kind, ...] = ("F", "B")


def dualpipe_v(ranks: int, microbatches: int) -> Schedule:
    """DualPipeV: DualPipe cut in half, a V of two stages per rank, each forward paired with a backward.

    Sea AI Lab's cut of DualPipe (DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, arXiv 2412.19437), in the
    authors' repository DualPipe as DualPipeV. P = 2 ranks, m = 4 microbatches, a whole backward twice as long
    as a forward:

        rank 0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 3B1 3F2 0B0 0B0 3B2 3B2 3F3 .   0B1 0B1 3B3 3B3 0I2 0W2 0I3 0W3
        rank 1 | .   1F0 2F0 1F1 2F1 1F2 2B0 2B0 2F2 1B0 1B0 1F3 2B1 2B1 2F3 1B1 1B1 2B2 2B2 1B2 1B2 2I3 1I3 2W3 1W3

    On rank r, with F0, B0, I0 of stage r and F1, B1, I1 of stage 2P-1-r, each in the order of the
    microbatches; F&B overlap, and each W belongs to the oldest I that still awaits it:

        phase 1  F0             2 (P-1-r) times
        phase 2  F0 F1          r + 1 times
        phase 3  I1 W F1        P - 1 - r times
        phase 4  F0&B1 F1&B0    m - 2P + r + 1 times; on rank P-1 the first F0 and B1 apart
        phase 5  B1 F1&B0       P - 1 - r times
        phase 6  B1 B0          r + 1 times, the second half of them I
        phase 7  W I0           P - 1 - r times
        phase 8  W              r + 1 times

    With fewer than 2P microbatches the phases are those of 2P without the first ones.

    With F, I and W of equal length and overlapped ops one after the other, the step takes 6m + P - 1 for
    m >= 2P, a bubble of (P-1) / (6m+P-1); 2P - m more than that for m from P+1, and 4m + 4P - 2 for m up to
    P. Rank r holds min(2P+1, 2m, m+1+r) live activations.
    """  # noqa: E501

    def of_rank(rank: int) -> tuple[list[Op], list[Pair]]:
        return eight_phases(ranks, rank, microbatches, [(rank, 0), (2 * ranks - 1 - rank, 0)])

    return paired("dualpipe_v", wave(ranks), microbatches, map(of_rank, range(ranks)))


def paired(
    name: str, placement: Placement, microbatches: int, ranks: Iterable[tuple[list[Op], list[Pair]]]
) -> Schedule:
    """A schedule from the program and the overlapped pairs of each rank."""
    programs, pairs = zip(*ranks, strict=True)
    return Schedule(name, placement, microbatches, (*map(tuple, programs),), frozenset(chain(*pairs)))


def eight_phases(
    ranks: int, rank: int, microbatches: int, chunks: Sequence[tuple[int, int]]
) -> tuple[list[Op], list[Pair]]:
    """The program of one rank, and its overlapped pairs.

    chunks: the stage of chunk 0 and of chunk 1, and the first microbatch that goes through it
    """
    left_out = max(0, 2 * ranks - microbatches)  # the phases are those of 2P without the first ones
    entries = [entry.split("&") for entry in _phases(ranks, rank, microbatches + left_out)]
    steps = [*chain.from_iterable(entries)]
    none: list[Op | None] = [None] * left_out
    rows = {
        f"{kind}{chunk}": [*none, *row(stage, kind, range(first, first + microbatches))]
        for chunk, (stage, first) in enumerate(chunks) for kind in _WHOLE
    }  # fmt: skip
    ops = [*map(next, map(_in_order(steps, rows).__getitem__, steps))]
    ends = accumulate(map(len, entries))
    seconds = [end - 1 for end, entry in zip(ends, entries, strict=True) if len(entry) == 2]
    pairs = (Pair(ops[at - 1], ops[at]) for at in seconds if ops[at - 1] and ops[at])  # type: ignore[arg-type]
    return [*filter(None, ops)], [*pairs]


def _in_order(steps: Sequence[str], rows: Mapping[str, list[Op | None]]) -> dict[str, Iterator[Op | None]]:
    """By step, a kind and a chunk, its ops in order; W is the oldest that is deferred, of either chunk.

    rows: of F and B, by chunk: an op for each microbatch, or None where it is left out
    """
    iterators = {step: iter(rows[step]) for step in ("F0", "F1")}
    weights: dict[str, Iterator[Op | None]] = {}
    for chunk in "01":
        backwards = [step[0] for step in steps if step in (f"B{chunk}", f"I{chunk}")]
        ops = rows[f"B{chunk}"][: len(backwards)]
        split = [at for at, kind in enumerate(backwards) if kind == "I"]  # few
        weights[f"I{chunk}"] = iter([_of_kind("W", ops[at]) for at in split])
        for at in split:
            ops[at] = _of_kind("I", ops[at])
        iterators[f"B{chunk}"] = iterators[f"I{chunk}"] = iter(ops)
    return iterators | {"W": iter([next(weights[step]) for step in steps if step[0] == "I"])}


def _of_kind(kind: Kind, op: Op | None) -> Op | None:
    return op and op._replace(kind=kind)


def _phases(ranks: int, rank: int, microbatches: int) -> list[str]:
    """The phases by kind and chunk, with at least 2P microbatches."""
    after = ranks - 1 - rank
    steady = ["F0&B1", "F1&B0"] * (microbatches - 2 * ranks + rank + 1)
    if after == 0:  # B1 needs no other rank here; one after the other, F0 is sent earlier
        steady[:1] = ["F0", "B1"]
    backwards = ["B1", "B0"] * (rank + 1)
    return [
        *["F0"] * (2 * after),  # phase 1
        *["F0", "F1"] * (rank + 1),  # phase 2
        *["I1", "W", "F1"] * after,  # phase 3
        *steady,  # phase 4
        *["B1", "F1&B0"] * after,  # phase 5
        *backwards[: rank + 1],  # phase 6
        *[step.replace("B", "I") for step in backwards[rank + 1 :]],
        *["W", "I0"] * after,  # phase 7
        *["W"] * (rank + 1),  # phase 8
    ]


def dualpipe(ranks: int, microbatches: int) -> Schedule:
    """DualPipe: two copies of the model, fed from both ends, each forward paired with a backward.

    DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024 (arXiv 2412.19437). P = 4 ranks, m = 6 microbatches, a
    whole backward twice as long as a forward:

        rank 0 | 0F0 0F1 .   7F3 0F2 7B3 7B3 7F4 7B4 7B4 7F5 .   0B0 0B0 7B5 7B5 0I1 0W1 0I2 0W2
        rank 1 | .   1F0 6F3 1F1 6F4 1F2 .   6B3 6B3 6F5 1B0 1B0 6B4 6B4 1B1 1B1 6I5 1I2 6W5 1W2
        rank 2 | .   5F3 2F0 5F4 2F1 5F5 .   2B0 2B0 2F2 5B3 5B3 2B1 2B1 5B4 5B4 2I2 5I5 2W2 5W5
        rank 3 | 4F3 4F4 .   3F0 4F5 3B0 3B0 3F1 3B1 3B1 3F2 .   4B3 4B3 3B2 3B2 4I4 4W4 4I5 4W5

    Stages 0 ... P-1 are one copy and take microbatches 0 ... m/2-1 from rank 0 on; stages P ... 2P-1 are the
    other copy and take the rest from rank P-1 on. P and m are even. With q = min(r, P-1-r), F0, B0, I0 of
    the stage whose data comes from the nearer end, F1, B1, I1 of the other one, each in the order of the
    microbatches; F&B overlap, and each W belongs to the oldest I that still awaits it:

        phase 1  F0             P - 2q - 2 times
        phase 2  F0 F1          q + 1 times
        phase 3  I1 W F1        P/2 - 1 - q times
        phase 4  F0&B1 F1&B0    m/2 - P + q + 1 times; on the two middle ranks the first F0 and B1 apart
        phase 5  B1 F1&B0       P/2 - 1 - q times
        phase 6  B1 B0          q + 1 times, the second half of them I
        phase 7  W I0           P/2 - 1 - q times
        phase 8  W              q + 1 times

    It is DualPipeV on P/2 ranks, unfolded: the turn on its last rank becomes the crossing of the middle. With
    fewer than 2P microbatches the phases are those of 2P without the first ones of each copy.

    With F, I and W of equal length and overlapped ops one after the other, the step takes 3m + P/2 - 1 for m
    >= 2P, a bubble of (P/2-1) / (3m+P/2-1); P - m/2 more than that for m from P+2, and 2m + 2P - 2 for m up
    to P. Rank r holds min(P+1, m, m/2+1+q) live activations.
    """
    _check(ranks, microbatches)
    each_way = microbatches // 2

    def of_rank(rank: int) -> tuple[list[Op], list[Pair]]:
        from_end = min(rank, ranks - 1 - rank)
        copies = [(rank, 0), (2 * ranks - 1 - rank, each_way)]  # each copy's stage and first microbatch
        if rank >= ranks // 2:  # chunk 0 is of the copy whose data enters at the nearer end
            copies.reverse()
        return eight_phases(ranks // 2, from_end, each_way, copies)

    return paired("dualpipe", both_ways(ranks), microbatches, map(of_rank, range(ranks)))


def _check(ranks: int, microbatches: int) -> None:
    for name, value, rule in (
        ("ranks", ranks, "DualPipe meets in the middle, so that the number of ranks is even"),
        ("microbatches", microbatches, "DualPipe sends half of the microbatches each way"),
    ):
        if value % 2:
            fit = f"{value + 1}" if value == 1 else f"{value - 1} or {value + 1}"
            raise ConfigError(f"{name}={value}", rule, f"Give {name}={fit}, or take dualpipe_v")
