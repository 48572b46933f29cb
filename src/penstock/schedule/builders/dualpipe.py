"""DualPipe: two copies of the model, fed from both ends, with forwards beside backwards.

DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024 (arXiv 2412.19437). P = 4 ranks, m = 6 microbatches, a
whole backward twice as long as a forward:

    rank 0 | 0F0 0F1 .   7F3 0F2 7B3 7B3 7F4 7B4 7B4 7F5 .   0B0 0B0 7B5 7B5 0I1 0W1 0I2 0W2
    rank 1 | .   1F0 6F3 1F1 6F4 1F2 .   6B3 6B3 6F5 1B0 1B0 6B4 6B4 1B1 1B1 6I5 1I2 6W5 1W2
    rank 2 | .   5F3 2F0 5F4 2F1 5F5 .   2B0 2B0 2F2 5B3 5B3 2B1 2B1 5B4 5B4 2I2 5I5 2W2 5W5
    rank 3 | 4F3 4F4 .   3F0 4F5 3B0 3B0 3F1 3B1 3B1 3F2 .   4B3 4B3 3B2 3B2 4I4 4W4 4I5 4W5

Stages 0 ... P-1 are one copy and take microbatches 0 ... m/2-1 from rank 0 on; stages P ... 2P-1 are the
other copy and take the rest from rank P-1 on. P and m are even. With q = min(r, P-1-r), F0, B0, I0 of the
stage whose data comes from the nearer end, F1, B1, I1 of the other one, each in the order of the
microbatches; F&B are to overlap, and each W is of the oldest I that still awaits it:

    phase 1  F0             P - 2q - 2 times
    phase 2  F0 F1          q + 1 times
    phase 3  I1 W F1        P/2 - 1 - q times
    phase 4  F0&B1 F1&B0    m/2 - P + q + 1 times; the first F0 and B1 of the two ranks in the middle apart
    phase 5  B1 F1&B0       P/2 - 1 - q times
    phase 6  B1 B0          q + 1 times, the second half of them I
    phase 7  W I0           P/2 - 1 - q times
    phase 8  W              q + 1 times

It is DualPipeV on P/2 ranks, unfolded: what turns round on its last rank crosses the middle here. With less
than 2P microbatches the phases are those of 2P, less what the earlier ones of each copy do.

With F, I and W of equal length and overlapped ops one after the other, the step takes 3m + P/2 - 1 for
m >= 2P, a bubble of (P/2-1) / (3m+P/2-1); P - m/2 more than that for m from P+2, and 2m + 2P - 2 for m up
to P. Rank r holds min(P+1, m, m/2+1+q) live activations.
"""

from __future__ import annotations

from collections.abc import Iterator

from penstock.errors import ConfigError
from penstock.schedule.builders.dualpipe_v import Entry, eight_phases, paired
from penstock.schedule.ops import Op, Schedule
from penstock.schedule.placement import both_ways


def dualpipe(ranks: int, microbatches: int) -> Schedule:
    _check(ranks, microbatches)
    each_way = microbatches // 2

    def entries(rank: int) -> Iterator[Entry]:
        from_end = min(rank, ranks - 1 - rank)
        stages = (rank, 2 * ranks - 1 - rank)  # of copy 0 and of copy 1
        near = 0 if rank < ranks // 2 else 1  # the copy whose data enters at the nearer end
        for steps in eight_phases(ranks // 2, from_end, each_way):
            yield tuple(
                Op(stages[copy], kind, microbatch + copy * each_way)
                for chunk, kind, microbatch in steps
                for copy in (chunk ^ near,)
            )

    return paired("dualpipe", both_ways(ranks), microbatches, map(entries, range(ranks)))


def _check(ranks: int, microbatches: int) -> None:
    for name, value, rule in (
        ("ranks", ranks, "DualPipe meets in the middle, so that the number of ranks is even"),
        ("microbatches", microbatches, "DualPipe sends half of the microbatches each way"),
    ):
        if value % 2:
            fit = f"{value + 1}" if value == 1 else f"{value - 1} or {value + 1}"
            raise ConfigError(f"{name}={value}", rule, f"Give {name}={fit}, or take dualpipe_v")
