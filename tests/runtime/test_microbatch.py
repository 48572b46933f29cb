from __future__ import annotations

import pytest
import torch

from penstock.errors import BatchError
from penstock.runtime.microbatch import batch_rows, fingerprint, split


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
    ("batch", "dims", "told"),
    [
        ({"x": torch.zeros(2)}, {}, "a batch of 2 rows: it is to be split into 3 microbatches"),
        (
            {"x": torch.zeros(4), "y": torch.zeros(5)},
            {},
            "x: 4, y: 5: all tensors of a batch have the same length",
        ),
        ({"x": torch.zeros(4)}, {"x": 1}, "x of shape [4]: it is to be split along dimension 1"),
        ({"flag": True}, {}, "none of it can be split"),
    ],
)
def test_refusals(batch: dict[str, object], dims: dict[str, int | None], told: str) -> None:
    with pytest.raises(BatchError) as error:
        split(batch, 3, dims)
    assert told in str(error.value)


def test_negative_dimensions_count_from_the_end() -> None:
    assert batch_rows({"x": torch.zeros(2, 7)}, {"x": -1}) == 7


def test_fingerprints_tell_batches_apart() -> None:
    one = split({"x": torch.arange(6)}, 2, {})
    same = split({"x": torch.arange(6)}, 2, {})
    others = [
        (split({"x": torch.arange(6)}, 3, {}), 1),
        (split({"x": torch.arange(6) + 1}, 2, {}), 1),
        (split({"x": torch.arange(6).float()}, 2, {}), 1),
        (split({"x": torch.arange(6).flip(0)}, 2, {}), 1),
        (split({"y": torch.arange(6)}, 2, {}), 1),
        (one, 2),
    ]
    assert fingerprint(one, 1) == fingerprint(same, 1)
    assert all(fingerprint(*other)[0] != fingerprint(one, 1)[0] for other in others)
