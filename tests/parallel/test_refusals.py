"""What some ranks refuse and others would take: one typed error on all of them, before anything is sent.

0.5.0: the others waited in a collective until they timed out.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from penstock import Axes
from support import jobs_refusals as jobs
from support.pool import Pool

PARTS = {  # on the second part of the batch, of pp=2 x dp_shard=2
    "labels": r"BatchError: a batch of \['input_ids'\], given to process 1, 3: the next-token loss reads",
    "labels of outputs": "BatchError: labels for some parts of a batch, and none given to process 1, 3: ",
    "outputs": r"ShapeError: a result that cannot be sent \(.*\), given to process 1, 3: ",
    "a list to evaluate": "BatchError: a list of 3 microbatches, given to process 1, 3: ",
    "longer labels": r"BatchError: labels of shape \[2, 24\], given to process 1, 3: .*\[2, 12\]",
    "flat labels": r"BatchError: labels of shape \[2\], given to process 1, 3: ",
    "no rows": "BatchError: microbatch 1, given to process 1, 3: it has no rows",
}
PROCESS = {  # on process 3 alone, which has the second part as process 1 has
    "twice": "BatchError: labels as an argument, given to process 3: the batch has it as well",
    "nothing": "BatchError: a batch given as NoneType, given to process 3: ",
    "nothing to evaluate": "BatchError: a batch given as NoneType, given to process 3: ",
    "forbidden": "BatchError: 'use_cache' in a batch, given to process 3: ",
    "labels of outputs": "BatchError: labels for some parts of a batch, and none given to process 3: ",
    "split": "BatchError: .*more: 1, given to process 3: all tensors of a batch have the same length",
    "other mask": r"BatchError: process 1: .*; process 3: .*attention_mask int64\[4, 12\].* pipe.batch_part",
}
ALONE = {  # on rank 1 of a pipeline that is all there is
    "few rows": r"BatchError: rank 0: schedule .*; rank 1: it refuses its batch \(a batch of 1 rows: ",
    "forbidden": r"BatchError: rank 0: schedule .*; rank 1: it refuses its batch \('use_cache' in a batch: ",
    "nothing": r"BatchError: rank 0: schedule .*; rank 1: it refuses its batch \(a batch given as NoneType",
    "labels of outputs": "BatchError: rank 0: .* labels int64.*; rank 1: ",
    "other order": "BatchError: rank 0: .*; rank 1: .* all ranks of a pipeline step on the same batch",
}
PADDED = {
    "few rows": "BatchError: a batch of 1 rows, given to rank 1: it is to be split into 2 microbatches",
    "nothing": "BatchError: a batch given as NoneType, given to rank 1: ",
    "forbidden": r"BatchError: rank 0: schedule .*; rank 1: it refuses its batch \('use_cache' in a batch: ",
}


def check(found: list[Any], messages: dict[str, str]) -> None:
    """Of all ranks, which tell the same, and go on."""
    for wrong, message in messages.items():
        words = {told[wrong][0] for told in found}
        assert len(words) == 1, (wrong, words)
        assert re.match(message, words.pop()), found[0][wrong]
    losses = {loss for told in found for _, loss in told.values()}
    assert max(losses) - min(losses) < 1e-12


@pytest.mark.parametrize(("messages", "by"), [(PARTS, [1, 3]), (PROCESS, [3])])
def test_on_a_mesh(pool: Pool, messages: dict[str, str], by: list[int]) -> None:
    check(pool.run(4, jobs.refused, 2, Axes(dp_shard=2), [*messages], by, {}), messages)


@pytest.mark.parametrize(("messages", "shapes"), [(ALONE, "inferred"), (PADDED, "padded")])
def test_of_one_pipeline(pool: Pool, messages: dict[str, str], shapes: str) -> None:
    check(pool.run(2, jobs.refused, 2, None, [*messages], [1], {"shapes": shapes}), messages)


@pytest.mark.parametrize("axes", [Axes(cp=2), Axes(tp=2)])
def test_data_that_has_to_be_the_same(pool: Pool, axes: Axes) -> None:
    """On ranks of cp and of tp: rows in another order, which have the same sum, or one more entry."""
    words = "BatchError: process 0: .*; process 3: .* those of cp and tp beside them, step on the same part"
    messages = {"other order": words, "other mask": words}
    check(pool.run(4, jobs.refused, 2, axes, [*messages], [3], {}), messages)


def test_lengths_that_sequence_parallel_does_not_take(pool: Pool) -> None:
    """Found in the forward, they would leave the other part of the batch waiting for its weights."""
    messages = {"odd length": "BatchError: a sequence of 7 tokens with .* tp=2, given to process 2, 3: "}
    options = {"sequence_parallel": True}
    check(pool.run(4, jobs.refused, 1, Axes(dp_shard=2, tp=2), [*messages], [2, 3], options), messages)


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        (False, "BatchError: rows of 9, given to process 1, 3: they hold 8 numbers at most. Cut them"),
        (True, "ModelError: what stages 0 and 1 declare .*, given to process 1, 3: .*a declared row"),
    ],
)
def test_edges_that_one_part_alone_has_not(pool: Pool, declared: bool, message: str) -> None:
    found = pool.run(4, jobs.refused_edges, declared)
    assert all(told == found[0] for told in found)
    assert re.match(message, found[0][0]), found[0]
    assert found[0][1] == 1.0


@pytest.mark.parametrize(("ranks", "axes"), [(2, Axes(dp_shard=2, ep=2)), (1, Axes(dp_shard=4, ep=4)),
                                             (1, Axes(dp_replicate=2, cp=2))])  # fmt: skip
def test_every_group_has_the_pipelines_time_limit(pool: Pool, ranks: int, axes: Axes) -> None:
    """0.5.0: torch's 30 minutes, but for those of ep; and an axis over all processes used the job's own."""
    for found in pool.run(4, jobs.limits, ranks, axes):
        patient = {name for name, seconds in found.items() if seconds == 3600}
        assert len(patient) == 1, found  # what waits for disks
        assert {seconds for name, seconds in found.items() if name not in patient} == {17.0}, found


@pytest.mark.parametrize(("reduces", "what"), [(False, "0F0"), (True, "the reduction of stage 0")])
def test_a_rank_that_stays_away_within_a_step(pool: Pool, reduces: bool, what: str) -> None:
    """Who notices closes its connections, so that the others may lose those before their time is up."""
    *told, _ = pool.run(4, jobs.stalled, 1, Axes(dp_shard=4), reduces)
    for words in told:
        waiting = f"rank 0 waiting for what {what} exchanges from the other ranks: "
        lost = f"PeerLostError: {waiting}process \\d failed first: rank 0 waiting for .*: "
        assert re.match(f"(StalledPeerError: {waiting}|{lost})some rank has been silent for", words), words
    assert any(words.startswith("StalledPeerError") for words in told)


@pytest.mark.parametrize(("ranks", "axes"), [(1, Axes(dp_shard=4)), (2, Axes(dp_replicate=2))])
def test_all_pipelines_of_a_mesh_are_told_what_failed(pool: Pool, ranks: int, axes: Axes) -> None:
    """0.5.0: those of other pipelines were told that the others had been silent, or had died."""
    *told, last = pool.run(4, jobs.raised, ranks, axes)
    assert last == "ValueError: this layer gave up"
    for words in told:
        assert re.search(r"(process 3|rank 1) failed first: .*ValueError: this layer gave up", words), words
