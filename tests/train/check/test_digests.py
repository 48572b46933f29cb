"""Digests estimate differences, and rounding widens a tolerance only so far."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from penstock.pipeline.compare import Report
from penstock.train.check import digests
from penstock.train.check.digests import Digest, Digests, compare_digests, digest, distance


@pytest.mark.parametrize("shape", [(7,), (5, 3), (4, 3, 2), (300, 200), ()])
def test_a_digest_measures_differences(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(digests, "_AT_ONCE", 4096)  # less than the largest one has
    tensor = torch.randn(shape)
    other = tensor + 1e-3 * torch.randn(shape)
    assert digest("a", tensor) == digest("a", tensor.clone())
    assert digest("a", tensor)[0] == pytest.approx(float(tensor.double().norm()), rel=1e-9)
    difference = float((tensor - other).double().norm())
    assert 0.05 * difference < distance(digest("a", tensor), digest("a", other)) < 20 * difference


ONES = torch.ones(400) / 20  # of norm 1


def compared(
    found: Digest | None,
    expected: Digest | None,
    rounding: Mapping[str, float] | None = None,
    name: str = "a",
) -> Report:
    """The report on the gradient of one parameter, which is `name` in the reference model."""
    split = [(("a", 0, 0), Digests(digest("a", ONES), found))]
    reference = {name: Digests(digest("a", ONES), expected)}
    return compare_digests((1.0, 1.0), split, reference, 1e-5, torch.float32, rounding or {})


@pytest.mark.parametrize(
    ("entries", "moved", "wrong"),
    [(1.0, 9.0, 0), (1.01, 0.0, 1), (1.01, 0.005, 0), (1.01, 0.002, 1), (0.0, 9.0, 1), (-1.0, 9.0, 1)],
)
def test_rounding_leaves_room_but_not_for_another_gradient(entries: float, moved: float, wrong: int) -> None:
    """The reference gradient has a norm of 1, and the split one is `entries` times it."""
    assert len(compared(digest("a", ONES * entries), digest("a", ONES), {"a": moved}).wrong) == wrong


def test_what_only_one_of_them_has_is_wrong() -> None:
    some = digest("a", ONES)
    assert compared(None, None).passed
    for found, expected in ((some, None), (None, some)):
        (wrong,) = compared(found, expected).wrong
        assert wrong.remark == "only one of the two has it"
    (wrong,) = compared(some, some, name="b").wrong
    assert wrong.remark == "the whole model has no weight of that name"
