"""Each data-parallel part takes its rows of a batch, and rows that are added count for nothing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from penstock.batch.microbatches import split_batch
from penstock.errors import BatchError
from penstock.integrations.rows import microbatches_of, own_rows
from support.refusals import refuses


def batch(rows: int) -> dict[str, Tensor]:
    ids = torch.arange(rows * 3).reshape(rows, 3)
    return {"input_ids": ids, "labels": ids + 100}


@pytest.mark.parametrize("rows", range(1, 8))
@pytest.mark.parametrize("parts", [1, 2, 3])
def test_parts_have_each_row_once(rows: int, parts: int) -> None:
    given = batch(rows)
    taken = [own_rows(given, part, parts) for part in range(parts)]
    assert len({len(part["input_ids"]) for part in taken}) == 1
    together = {name: torch.cat([part[name] for part in taken]) for name in given}
    for name, value in given.items():
        assert torch.equal(together[name][:rows], value)
    added = together["labels"][rows:]
    assert len(added) == -rows % parts
    assert added.eq(-100).all()
    assert all(torch.equal(row, given["input_ids"][-1]) for row in together["input_ids"][rows:])


def test_values_without_rows_go_to_every_part() -> None:
    given = {**batch(2), "scale": torch.tensor(2.0), "name": "a"}
    for part in range(2):
        taken = own_rows(given, part, 2)
        assert (taken["scale"], taken["name"]) == (given["scale"], "a")


def test_rows_are_not_added_without_labels() -> None:
    given = {"input_ids": batch(3)["input_ids"]}
    assert own_rows(given, 0, 1).keys() == {"input_ids"}
    assert len(own_rows(given, 2, 3)["input_ids"]) == 1
    with refuses(BatchError, "a batch without labels", "2 data-parallel parts"):
        own_rows(given, 0, 2)


@pytest.mark.parametrize(("rows", "most", "count"), [(4, 2, 2), (3, 2, 2), (1, 2, 1), (5, 1, 1)])
def test_a_part_has_at_most_that_many_microbatches(rows: int, most: int, count: int) -> None:
    pieces, expected = microbatches_of(batch(rows), most), split_batch(batch(rows), count)
    assert len(pieces) == count
    for ours, theirs in zip(pieces, expected, strict=True):
        assert all(torch.equal(ours[name], theirs[name]) for name in ("input_ids", "labels"))
