from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from penstock.batch.kto import mismatched
from penstock.batch.loss import IGNORED
from penstock.train.data.packing import Pieces, one_each
from penstock.train.data.rows import SourceRows, StoredRows
from penstock.train.data.unpaired import UnpairedLayout, neighbours
from support.stores import in_memory

LENGTHS = [4, 2, 6, 5]  # tokens of each document, of which all but the first two, or one of the second, count


def rows(neighbours: list[int]) -> StoredRows:
    """Tokens are numbered through. Rows 0 and 2 are desirable."""
    ids, ends = np.arange(sum(LENGTHS)), np.cumsum(LENGTHS)
    labels = np.concatenate([np.where(np.arange(n) < min(n - 1, 2), IGNORED, ids[e - n : e])
                             for n, e in zip(LENGTHS, ends, strict=True)])  # fmt: skip
    store = in_memory(ids, LENGTHS, labels.astype(np.int32), np.array([[1.0], [0.0], [1.0], [0.0]]))
    pieces = Pieces((ends - LENGTHS).astype(np.int64), np.array(LENGTHS))
    source = SourceRows(store, pieces, one_each(pieces.lengths, 8))
    return StoredRows((source,), np.arange(8.0).reshape(4, 2), np.array(neighbours))


def test_a_microbatch_has_labels_references_and_the_same_rows_with_other_completions() -> None:
    made, layout = rows([3, 0, 1, 2]), UnpairedLayout((2,), packed=False, refers=True)
    batch, beside = layout.content(made, range(4)), layout.beside(made, range(4))
    assert layout.order(made, range(4)) == [2, 3, 0, 1]
    assert [part["desirable"].tolist() for part in batch] == [[True, False], [True, False]]
    assert [part["reference_logps"].tolist() for part in batch] == [[4, 6], [0, 2]]
    assert [part["reference_logps"].tolist() for part in beside] == [[5, 7], [1, 3]]
    assert beside[0]["input_ids"].tolist() == [[6, 7, 5, 0, 0, 0], [12, 13, 8, 9, 10, 11]]
    assert beside[0]["labels"].tolist() == [[-100, -100, 5, -100, -100, -100], [-100, -100, 8, 9, 10, 11]]
    assert beside[1]["input_ids"].tolist() == [[0, 1, 14, 15, 16], [4, 2, 3, 0, 0]]


def test_rows_for_the_reference_take_turns_and_long_ones_are_cut() -> None:
    layout = UnpairedLayout((1,), packed=False, longest=4, refers=True)
    (referred,) = layout.referred(rows([3, 0, 1, 2]), [0, 1])
    assert referred["input_ids"].tolist() == [[0, 1, 2, 3], [0, 1, 14, 15], [4, 5, 0, 0], [4, 2, 3, 0]]
    assert "reference_logps" not in referred


def test_a_neighbours_completion_is_cut_once_and_not_where_its_own_row_ends() -> None:
    made, layout = rows([2, 0, 1, 2]), UnpairedLayout((1,), packed=False, longest=5, refers=True)
    (source,) = made.sources  # of document 2, tokens 6 to 11, its row has 4; row 0 has room for 3
    short = replace(source, pieces=source.pieces._replace(lengths=np.minimum(source.pieces.lengths, 4)))
    (beside,) = layout.beside(replace(made, sources=(short,)), [0])
    assert beside["input_ids"].tolist() == [[0, 1, 8, 9, 10]]


def test_the_rows_of_the_kl_term_are_those_that_a_loop_of_ones_own_makes() -> None:
    made, layout = rows([3, 0, 1, 2]), UnpairedLayout((1,), packed=False)
    (batch,), (beside,) = layout.content(made, range(4)), layout.beside(made, range(4))
    order = layout.order(made, range(4))
    in_turn = torch.tensor([order.index(row) for row in range(4)])
    other = mismatched({name: batch[name][in_turn] for name in ("input_ids", "labels")})
    for name in other:
        assert torch.equal(beside[name][in_turn], other[name]), name


def test_a_neighbour_is_the_row_before_in_the_first_step_of_a_row() -> None:
    assert neighbours(4).tolist() == [3, 0, 1, 2]
    steps = [[5, 2, 7], [0, 3, 6], [2, 1, 5]]
    made = neighbours(8, steps)
    assert made[[5, 2, 7]].tolist() == [7, 5, 2]
    assert made[[0, 3, 6]].tolist() == [6, 0, 3]
    assert made[1] == 2  # 2 and 5 have theirs from the first step
    assert made[4] == 3  # in no step


def test_no_row_is_its_own_neighbour_where_a_step_has_it_twice() -> None:
    """The last step of the first epoch ends with the first rows of the second."""
    made = neighbours(5, [[0, 1, 2], [4, 3, 4], [3, 3, 3]])
    assert made[[4, 3]].tolist() == [3, 4]
    assert neighbours(5, [[4, 4]]).tolist() == neighbours(5).tolist()
