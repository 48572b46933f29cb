"""Marks follow values through every op."""

from __future__ import annotations

import torch

from penstock.models.tracing.provenance import Provenance


def test_a_result_has_the_marks_of_all_that_it_was_made_of() -> None:
    a, b = torch.ones(2), torch.ones(2)
    with Provenance() as provenance:
        provenance.mark(a, {1})
        provenance.mark(b, {"b"})
        assert provenance.origins((a + b) > 0) == ({1}, {"b"})
        assert provenance.marks([a, {"x": b}, 3]) == {1, "b"}
        assert provenance.marks(torch.ones(2) * 2) == frozenset()


def test_marks_pass_through_views_and_detached_values() -> None:
    with torch.no_grad(), Provenance() as provenance:
        a = provenance.marked(torch.ones(4), "a")
        assert provenance.marks(a.view(2, 2)[0].detach().clone()) == {"a"}


def test_what_an_op_writes_into_is_marked() -> None:
    written = [torch.zeros(2), torch.zeros(3)]
    with Provenance() as provenance:
        torch._foreach_add_(written, [provenance.marked(torch.ones(()), 3)] * 2)  # it returns nothing
        assert [provenance.marks(tensor) for tensor in written] == [{3}, {3}]


def test_what_only_looks_at_a_shape_has_no_mark() -> None:
    with Provenance() as provenance:
        assert provenance.marks(torch.zeros_like(provenance.marked(torch.ones(2), 3))) == frozenset()


def test_a_marked_copy_leaves_the_original_alone() -> None:
    original = torch.ones(2)
    with Provenance() as provenance:
        provenance.marked(original, "copy").zero_()
        assert provenance.marks(original) == frozenset()
    assert original.tolist() == [1, 1]
