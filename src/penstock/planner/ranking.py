"""The table of a search's best runs, which the command prints and the page shows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from penstock.planner.estimate import Estimate
from penstock.reading import gib

HEADS = (
    "", "mesh", "schedule", "microbatches", "recomputed", "s/step", "tokens/s", "MFU", "bubble", "exposed",
    "GiB",
)  # fmt: skip
WORDS = ("mesh", "schedule", "recomputed", "exposed")  # columns that are no numbers
_SHOWN = 0.001  # of a step


def ranked_rows(best: Sequence[Estimate]) -> Iterator[tuple[str, ...]]:
    """The cells of each run, a text for each of `HEADS`."""
    for place, run in enumerate(best, 1):
        candidate = run.candidate
        yield (
            str(place),
            candidate.mesh,
            candidate.label,
            f"{candidate.microbatches} x {candidate.rows}",
            candidate.recomputation,
            f"{run.seconds:.4g}",
            f"{run.tokens_per_second:,.0f}",
            f"{run.mfu:.1%}",
            f"{run.bubble:.1%}",
            " ".join(f"{axis} {share:.1%}" for axis, share in exposed_shares(run).items()) or "none",
            gib(run.nbytes),
        )


def exposed_shares(run: Estimate) -> Mapping[str, float]:
    """The share of a step that ranks wait for communication, by axis; what is below 0.1 % is left out."""
    shares = {axis: time / run.seconds for axis, time in run.exposed.items()}
    return {axis: share for axis, share in shares.items() if share >= _SHOWN}
