from __future__ import annotations

import pytest
import torch

from penstock.batch.microbatches import PerRow, batch_rows, checksums, fingerprint, joined, split, split_batch
from penstock.errors import BatchError
from support.refusals import refuses


def test_uneven_rows_go_to_the_first_microbatches() -> None:
    pieces = split({"x": torch.arange(10)}, 4, {})
    assert [piece["x"].tolist() for piece in pieces] == [[0, 1, 2], [3, 4, 5], [6, 7], [8, 9]]


def test_each_entry_along_its_own_dimension() -> None:
    batch = {
        "x": torch.arange(6).reshape(1, 6),
        "scale": torch.tensor(2.0),
        "y": torch.arange(6),
        "flag": True,
    }
    pieces = split({**batch, "table": torch.arange(5)}, 3, {"x": 1, "table": None})
    assert [piece["x"].tolist() for piece in pieces] == [[[0, 1]], [[2, 3]], [[4, 5]]]
    assert [piece["y"].tolist() for piece in pieces] == [[0, 1], [2, 3], [4, 5]]
    assert all(piece["flag"] and piece["table"].shape == (5,) and piece["scale"] == 2 for piece in pieces)


@pytest.mark.parametrize(
    ("batch", "dims", "message"),
    [
        ({"x": torch.zeros(2)}, {}, "a batch of 2 rows: it is to be split into 3 microbatches"),
        (
            {"x": torch.zeros(4), "y": torch.zeros(5)},
            {},
            "x: 4, y: 5: all tensors of a batch have the same length",
        ),
        ({"x": torch.zeros(4)}, {"x": 1}, "x of shape [4]: it is to be split along dimension 1"),
        ({"flag": True}, {}, "none of it can be split"),
        (
            {"x": torch.zeros(4), "cu_seq_lens_q": [0, 4]},
            {},
            "cu_seq_lens_q given as list: it lists, from 0 on",
        ),
        ({"x": torch.zeros(4), "cu_seq_lens_k": torch.arange(0)}, {}, "cu_seq_lens_k int64[0]: it lists"),
        ({"x": torch.zeros(4), "cu_seq_lens_q": torch.tensor([0, 1])}, {}, "documents end where a row ends"),
        ({"x": torch.zeros(4), "cu_seq_lens_q": torch.tensor(4)}, {}, "cu_seq_lens_q int64[]: it lists"),
        (
            {"x": torch.zeros(4), "cu_seq_lens_q": torch.tensor([0.0, 4.0])},
            {},
            "cu_seq_lens_q float32[2]: it",
        ),
    ],
)
def test_refusals(batch: dict[str, object], dims: dict[str, int | None], message: str) -> None:
    with pytest.raises(BatchError) as error:
        split(batch, 3, dims)
    assert message in str(error.value)


def test_negative_dimensions_count_from_the_end() -> None:
    assert batch_rows({"x": torch.zeros(2, 7)}, {"x": -1}) == 7


def test_fingerprints_of_other_steps_differ() -> None:
    def number(batch: dict[str, torch.Tensor], count: int = 2, schedule: int = 1) -> int:
        return fingerprint([batch], count, schedule)[0]

    one = {"x": torch.arange(6)}
    assert number(one) == number({"x": torch.arange(6)})
    others = [
        {"x": torch.arange(6) + 1},
        {"x": torch.arange(6).float()},
        {"x": torch.arange(8)},
        {"x": torch.arange(6).flip(0)},
        {"y": torch.arange(6)},
    ]
    assert all(number(other) != number(one) for other in others)
    assert number(one, count=3) != number(one)
    assert number(one, schedule=2) != number(one)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64]
)
def test_checksums_are_exact_and_take_any_dtype(dtype: torch.dtype) -> None:
    values = torch.randn(50, 3).to(dtype)
    assert checksums([values]) == checksums([values.clone()])
    rows = values.clone()
    rows[[3, 7]] = rows[[7, 3]]
    assert checksums([rows]) != checksums([values]) or torch.equal(rows, values)
    other = values.clone()
    other[7, 1] = 1 - other[7, 1] if dtype != torch.bool else ~other[7, 1]
    assert checksums([other]) != checksums([values])


def test_a_checksum_of_much_data_takes_a_part_of_it_from_everywhere() -> None:
    values = torch.randint(0, 1000, (700, 1000))
    for part in (slice(0, 10), slice(345, 355), slice(690, 700)):
        other = values.clone()
        other[part] += 1
        assert checksums([other]) != checksums([values])
    assert checksums([torch.zeros(0)]) == [0]


def test_a_batch_is_split_as_a_step_splits_it() -> None:
    batch = {"x": torch.arange(7), "table": torch.arange(3)}
    pieces = split_batch(batch, 3, sharding={"table": None})
    assert [piece["x"].tolist() for piece in pieces] == [[0, 1, 2], [3, 4], [5, 6]]
    assert all(len(piece["table"]) == 3 for piece in pieces)
    assert [len(piece["x"]) for piece in split_batch({"x": torch.arange(6)}, 3, even=True)] == [2, 2, 2]


def test_rows_of_a_group_stay_in_one_microbatch() -> None:
    batch = {"x": torch.arange(8), "nest": (torch.arange(8),), "seen": PerRow([torch.ones(1)] * 8)}
    parts = split_batch(batch, 3, rows_per_group=2)
    assert [part["x"].tolist() for part in parts] == [[0, 1, 2, 3], [4, 5], [6, 7]]
    assert [part["nest"][0].tolist() for part in parts] == [[0, 1, 2, 3], [4, 5], [6, 7]]
    assert [len(part["seen"]) for part in parts] == [4, 2, 2]
    documents = {"x": torch.zeros(6, 3), "cu_seq_lens_q": torch.arange(0, 19, 3)}
    bounds = [part["cu_seq_lens_q"].tolist() for part in split_batch(documents, 2, rows_per_group=2)]
    assert bounds == [[0, 3, 6, 9, 12], [0, 3, 6]]
    with refuses(BatchError, "a batch of 8 rows", "each group of 3", "multiple of 3"):
        split_batch(batch, 2, rows_per_group=3)
    with refuses(BatchError, "a batch of 8 rows", "5 microbatches of at least one group of 2", "at most 4"):
        split_batch(batch, 5, rows_per_group=2)


@pytest.mark.parametrize(
    ("batch", "count", "value", "rule"),
    [
        ({"x": torch.arange(7)}, 3, "7 rows in 3 microbatches", "same number of rows"),
        ({"x": torch.arange(7)}, 0, "microbatches=0", "one microbatch or more"),
        ({"x": torch.arange(2)}, 3, "a batch of 2 rows", "3 microbatches"),
        ({"x": [1, 2, 3]}, 3, "x given as list", "only tensors"),
    ],
)
def test_a_batch_that_is_not_split(batch: dict[str, object], count: int, value: str, rule: str) -> None:
    with refuses(BatchError, value, rule):
        split_batch(batch, count, even=True)


def test_tensors_of_each_row_are_laid_end_to_end() -> None:
    first, last = torch.zeros(2, 3), torch.ones(1, 3)
    batch = {"x": torch.arange(4), "seen": PerRow([first, None, None, last])}
    whole = torch.cat([first, last])
    for given in (split_batch(batch, 1)[0], joined(batch), split(batch, 2, {"seen": None})[1]):
        assert torch.equal(given["seen"], whole)
    assert ["seen" in each for each in split_batch(batch, 4)] == [True, False, False, True]
    assert fingerprint([batch], 1, 0) != fingerprint(
        [{**batch, "seen": PerRow([None, first, None, last])}], 1, 0
    )


def test_rows_that_list_no_tensors_are_refused() -> None:
    with refuses(BatchError, "seen with a list", "PerRow lists a tensor or None for each row"):
        split_batch({"x": torch.arange(2), "seen": PerRow([[1.0, 2.0], None])}, 1)  # type: ignore[list-item]
