"""Which rows a step sees, and the batch that each pipeline has of them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.batch.placement import sent_ahead
from penstock.errors import DataError
from penstock.train.data import batches as batches_module
from penstock.train.data.batches import Data, LoadedBatch
from penstock.train.data.packing import PACKINGS, Packing, Pieces, one_each
from penstock.train.data.rows import SourceRows, StoredRows, StreamLayout
from penstock.train.data.sampler import Mixture, Sampler
from penstock.train.sizes import Size, StepSizes
from support.refusals import refuses
from support.stores import in_memory
from support.texts import TEXTS, fail_at, letters, load_texts, microbatches


def of_rows(rows: int, length: int, microbatches: int = 2) -> StepSizes:
    return StepSizes((), Size(rows, length, (microbatches,)))


def rows_of(count: int, held_out: int = 2, seed: int = 0) -> Data:
    """`count` rows of three tokens, 0 to 2, 3 to 5, ..., in batches of two."""
    store = in_memory(np.arange(count * 3, dtype=np.uint8), [count * 3])

    def rows(first: int, end: int) -> StoredRows:
        starts = np.arange(first, end) * 3
        pieces = Pieces(starts, np.full_like(starts, 3))
        return StoredRows((SourceRows(store, pieces, one_each(starts, 3)),))

    trained = count - held_out
    sampler = Sampler(Mixture((1.0,), (None,)), (trained,), seed)
    return Data(rows(0, trained), rows(trained, count), StreamLayout(), of_rows(2, 3), sampler)


def whole(batch: LoadedBatch) -> dict[str, Tensor]:
    assert isinstance(batch.content, dict)
    return batch.content


def test_an_epoch_sees_every_row_once_and_none_that_is_held_out() -> None:
    rows = rows_of(11)  # 9 rows to train on, in batches of 2: epochs end within a batch
    seen = torch.cat([whole(rows.batch(step))["input_ids"] for step in range(1, 10)])
    first, second = seen[:9], seen[9:]
    expected = torch.arange(27).reshape(9, 3)
    for epoch in (first, second):
        assert torch.equal(epoch[epoch[:, 0].argsort()], expected)
    assert not torch.equal(first, second)
    assert not torch.equal(first, expected)


def test_a_batch_follows_from_its_step_alone() -> None:
    forwards = [whole(rows_of(11).batch(step))["input_ids"] for step in range(1, 20)]
    rows = rows_of(11)
    for step in reversed(range(1, 20)):
        assert torch.equal(whole(rows.batch(step))["input_ids"], forwards[step - 1])
    assert not torch.equal(whole(rows_of(11, seed=1).batch(1))["input_ids"], forwards[0])


def test_batches_are_those_of_the_steps_wherever_they_begin() -> None:
    rows, cpu = rows_of(11), torch.device("cpu")
    expected = [whole(rows.batch(step))["input_ids"] for step in range(1, 20)]
    for first in (1, 8):
        found = [whole(batch)["input_ids"] for batch in rows.batches(range(first, 20), cpu)]
        assert len(found) == 20 - first
        assert all(map(torch.equal, found, expected[first - 1 :]))


def test_the_next_batch_is_made_while_one_is_in_use_and_no_further_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[int] = []
    second = threading.Event()
    original = Data.batch

    def batch(data: Data, step: int) -> LoadedBatch:
        assert threading.current_thread() is not threading.main_thread()
        made.append(step)
        if step == 2:
            second.set()
        return original(data, step)

    monkeypatch.setattr(Data, "batch", batch)
    batches = rows_of(11).batches(range(1, 20), torch.device("cpu"))
    next(batches)
    assert second.wait(30)
    batches.close()
    assert made == [1, 2]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("penstock-data")]


def test_a_failed_batch_is_raised_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    fail_at(3, monkeypatch)
    batches = rows_of(11).batches(range(1, 20), torch.device("cpu"))
    assert next(batches)
    assert next(batches)
    with refuses(DataError, "row 7"):
        next(batches)


def test_a_batch_for_a_gpu_is_pinned_and_sent_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the thread, on the GPU of the pipeline. torch's own part is emulated."""
    calls: list[object] = []

    class Copies:
        def __init__(self, device: torch.device) -> None:
            calls.append(device)

        def up(self, hosts: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], None]:
            calls.append(threading.current_thread().name[:12])
            return tuple(host + 1 for host in hosts), None

    def pin(tensor: Tensor) -> Tensor:
        calls.append(tensor.shape)
        return tensor + 1

    monkeypatch.setattr(Tensor, "pin_memory", pin)
    monkeypatch.setattr(torch.cuda, "set_device", calls.append)
    monkeypatch.setattr(batches_module, "CudaCopies", Copies)
    (batch,) = rows_of(11).batches(range(1, 2), torch.device("cuda", 3))
    device = torch.device("cuda", 3)
    assert calls == [device, device, (2, 3), (2, 3), "penstock-dat"]
    labels = whole(batch)["labels"]
    assert torch.equal(labels, whole(rows_of(11).batch(1))["labels"] + 1)
    sent = sent_ahead(labels, torch.device("cpu"))
    assert sent is not None
    assert torch.equal(sent, labels + 1)


def test_a_batch_is_what_transformers_takes() -> None:
    batch = whole(rows_of(11).batch(1))
    assert batch["input_ids"].shape == (2, 3)
    assert batch["input_ids"].dtype == torch.int64
    assert torch.equal(batch["input_ids"], batch["labels"])
    assert batch["input_ids"].data_ptr() != batch["labels"].data_ptr()


def test_held_out_batches_are_spread_over_the_held_out_rows() -> None:
    rows = rows_of(20, held_out=9)
    (batch,) = rows.held_out_batches(1)
    assert whole(batch)["input_ids"][:, 0].tolist() == [33, 57]
    assert [len(whole(batch)["input_ids"]) for batch in rows.held_out_batches(100)] == [2, 2, 2, 2, 1]
    starts = torch.cat([whole(batch)["input_ids"][:, 0] for batch in rows.held_out_batches(100)])
    assert starts.min() == 33
    assert len(set(starts.tolist())) == 9


def test_held_out_rows_that_make_no_whole_batch_are_batches_of_about_one_size() -> None:
    data = replace(rows_of(40, held_out=11), sizes=of_rows(8, 3))
    sizes = [len(whole(batch)["input_ids"]) for batch in data.held_out_batches(4)]
    assert sizes == [6, 5]
    for parts in (2, 4):  # of the smaller one too, each part has as many microbatches
        dealt = [replace(data, parts=parts, part=part).held_out_batches(4)[1] for part in range(parts)]
        assert sum(len(whole(batch)["input_ids"]) for batch in dealt) == 5


def one_row(source: SourceRows) -> SourceRows:
    bounds = source.packing.bounds
    return replace(source, packing=Packing(source.packing.pieces[: bounds[1]], bounds[:2]))


@pytest.mark.parametrize("packing", ["none", "best_fit"])
def test_a_part_without_a_held_out_row_gets_one_in_which_no_token_counts(
    tmp_path: Path, packing: str
) -> None:
    data = load_texts(tmp_path / "a.jsonl", TEXTS, packing, held_out_from="end")
    data = replace(data, held_out=replace(data.held_out, sources=(one_row(data.held_out.sources[0]),)))
    dealt = [replace(data, parts=3, part=part).held_out_batches(4) for part in range(3)]
    counts = [[int((part["labels"] >= 0).sum()) for part in microbatches(batch)] for (batch,) in dealt]
    assert [len(of_part) for of_part in counts] == [1, 1, 1]
    assert sorted(sum(of_part) for of_part in counts)[:2] == [0, 0]
    (alone,) = data.held_out_batches(4)
    assert sum(sum(of_part) for of_part in counts) == sum(
        int((part["labels"] >= 0).sum()) for part in microbatches(alone)
    )


def parts_of(data: Data, parts: int, step: int) -> list[LoadedBatch]:
    return [replace(data, parts=parts).of(part).batch(step) for part in range(parts)]


def test_the_parts_of_a_batch_are_the_batch_that_one_process_has() -> None:
    for rows, parts in ((8, 2), (7, 2), (9, 4)):
        data = replace(rows_of(40, held_out=10), sizes=of_rows(rows, 3))
        for step in (1, 5, 9):
            dealt = parts_of(data, parts, step)
            together = torch.cat([whole(batch)["input_ids"] for batch in dealt])
            assert torch.equal(together, whole(data.batch(step))["input_ids"])
            assert {batch.fill for batch in dealt} == {data.batch(step).fill}
        held = [replace(data, parts=parts, part=part).held_out_batches(1)[0] for part in range(parts)]
        together = torch.cat([whole(batch)["input_ids"] for batch in held])
        assert torch.equal(together, whole(data.held_out_batches(1)[0])["input_ids"])


def documents_in(batches: list[LoadedBatch]) -> list[tuple[list[int], list[int]]]:
    """The tokens and labels of every row, sorted, without padding."""
    return sorted(
        (ids[labels != -100].tolist(), labels[labels != -100].tolist())
        for batch in batches
        for microbatch in microbatches(batch)
        for ids, labels in zip(microbatch["input_ids"], microbatch["labels"], strict=True)
    )


@pytest.mark.parametrize("packing", PACKINGS)
def test_documents_are_dealt_out_whole_and_each_part_gets_long_ones(tmp_path: Path, packing: str) -> None:
    texts = ["abcdefghijklmnopqrst"[: 2 + number % 17] for number in range(300)]
    data = load_texts(tmp_path / "a.jsonl", texts, packing, sequence_length=18)
    data = replace(data, sizes=of_rows(16, 18))

    for step in (1, 4):
        dealt = parts_of(data, 2, step)
        assert documents_in(dealt) == documents_in([data.batch(step)])
        assert [len(microbatches(batch)) for batch in dealt] == [2, 2]
        own = [sum(microbatch["input_ids"].numel() for microbatch in microbatches(batch)) for batch in dealt]
        assert dealt[0].fill == dealt[1].fill
        assert dealt[0].fill.slots == sum(own)
        assert max(own) <= 1.2 * min(own)
    assert replace(data, parts=2).expected(3).tokens == data.expected(3).tokens


@pytest.mark.parametrize("packing", ["sequential", "best_fit"])
def test_a_batch_follows_from_its_step_and_not_from_the_microbatches(tmp_path: Path, packing: str) -> None:
    data, again = (load_texts(tmp_path / name, TEXTS, packing) for name in ("a.jsonl", "b.jsonl"))
    for step in (7, 1, 30):
        for one, other in zip(*map(microbatches, (data.batch(step), again.batch(step))), strict=True):
            assert all(torch.equal(one[name], other[name]) for name in one)
    one_part = replace(data, sizes=of_rows(2, 16, microbatches=1))
    assert letters([one_part.batch(5)]) == letters([data.batch(5)])


def test_the_expected_fill_is_that_of_the_first_steps(tmp_path: Path) -> None:
    data = load_texts(tmp_path / "a.jsonl", TEXTS, "sequential")
    fills = [data.batch(step).fill for step in (1, 2, 3)]
    assert data.expected(3) == fills[0] + fills[1] + fills[2]
    assert data.expected(10**9) == data.expected(100)
