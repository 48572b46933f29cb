"""Rows made equal in length: every token stays where it was, and nothing new counts."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from penstock.batch.loss import NextToken
from penstock.batch.packing import metadata
from penstock.batch.padding import Lengths, Padding, PadEntry
from penstock.errors import BatchError, ConfigError
from support.refusals import refuses


def microbatch(rows: int, length: int, **more: Any) -> dict[str, Any]:
    ids = torch.arange(1, rows * length + 1).view(rows, length)
    return {"input_ids": ids, "labels": ids.clone(), **more}


def padded(given: dict[str, Any], full: int, padding: Padding | None = None) -> dict[str, Any]:
    return (padding or Padding()).pad(given, Lengths(full, full))


@given(
    longest=st.integers(1, 300),
    multiple=st.integers(1, 70),
    shards=st.integers(1, 8),
    buckets=st.lists(st.integers(1, 200), unique=True, max_size=5).map(lambda found: tuple(sorted(found))),
)
def test_lengths_are_the_least_that_fit(
    longest: int, multiple: int, shards: int, buckets: tuple[int, ...]
) -> None:
    local, full = Padding(multiple=multiple, context_shards=shards, buckets=buckets).lengths(longest)
    assert full == local * shards >= longest
    assert local % multiple == 0
    least = -(-longest // shards)
    least = min((bucket for bucket in buckets if bucket >= least), default=least)
    assert least <= local < least + multiple


def test_a_fixed_length_is_kept_whatever_comes_up_to_it() -> None:
    padding = Padding(length=100, context_shards=3, multiple=8)
    assert padding.lengths(1) == padding.lengths(100) == Lengths(40, 120)
    with refuses(BatchError, "a microbatch of 101 tokens a row", "fixed length 100"):
        padding.lengths(101)


@st.composite
def packed_rows(draw: st.DrawFn) -> tuple[int, int, list[list[int]]]:
    rows, length = draw(st.integers(1, 4)), draw(st.integers(1, 12))
    documents = []
    for _ in range(rows):
        cuts = draw(st.sets(st.integers(1, length - 1))) if length > 1 else set()
        ends = [0, *sorted(cuts), length]
        documents.append([b - a for a, b in pairwise(ends)])
    return rows, length, documents


@given(given=packed_rows(), extra=st.integers(0, 9))
def test_nothing_real_moves_and_nothing_new_counts(
    given: tuple[int, int, list[list[int]]], extra: int
) -> None:
    rows, length, documents = given
    lens = metadata([count for row in documents for count in row])
    positions = lens["position_ids"].view(rows, length)
    before = microbatch(
        rows, length, attention_mask=torch.ones(rows, length, dtype=torch.bool),
        inputs_embeds=torch.randn(rows, length, 3), token_type_ids=torch.ones(rows, length, dtype=torch.long),
        **{**lens, "position_ids": torch.stack([positions] * 3)}, use_cache=False, weight=torch.ones(rows),
    )  # fmt: skip
    after = padded(before, length + extra)
    fills = {"input_ids": 0, "labels": -100, "attention_mask": 0, "token_type_ids": 0}
    for name, fill in fills.items():
        assert after[name].dtype == before[name].dtype
        assert torch.equal(after[name][:, :length], before[name])
        assert (after[name][:, length:] == fill).all()
        assert after[name].shape == (rows, length + extra)
    assert torch.equal(after["inputs_embeds"][:, :length], before["inputs_embeds"])
    assert after["inputs_embeds"].shape == (rows, length + extra, 3)
    assert (after["inputs_embeds"][:, length:] == 0).all()
    assert torch.equal(after["position_ids"][..., :length], before["position_ids"])
    assert (after["position_ids"][..., length:] == 0).all()
    assert after["use_cache"] is False
    assert after["weight"] is before["weight"]
    assert NextToken().weight(after) == NextToken().weight(before)

    # the same documents in the same rows, of which each row's last has grown
    grown = [[*row[:-1], row[-1] + extra] for row in documents]
    expected = metadata([count for row in grown for count in row])
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        assert torch.equal(after[name], expected[name])
        assert after[name].dtype == torch.int32
    assert after["max_length_q"] == after["max_length_k"] == expected["max_length_q"]
    if not extra:
        assert all(after[name] is before[name] for name in before)


def test_what_may_or_may_not_be_a_sequence_has_to_be_named() -> None:
    before = microbatch(2, 5, speaker=torch.ones(2, 5), table=torch.zeros(5, 7))
    with refuses(BatchError, "speaker of shape [2, 5]", remedy="PadEntry(dim=1, value=0) for 'speaker'"):
        padded(before, 8)
    with refuses(BatchError, "speaker"):
        padded(before, 5)  # at the first step, and not at the first that happens to be padded
    as_sequence = padded(before, 8, Padding(entries={"speaker": PadEntry(1, -1)}))
    assert as_sequence["speaker"].tolist() == [[1, 1, 1, 1, 1, -1, -1, -1]] * 2
    assert as_sequence["table"] is before["table"]
    left = padded(before, 8, Padding(entries={"speaker": None}))
    assert left["speaker"] is before["speaker"]


def test_own_entries_go_before_the_known_ones_and_tell_the_length() -> None:
    frames = {"frames": torch.ones(4, 2, 6), "labels": torch.ones(2)}
    padding = Padding(entries={"frames": PadEntry(2, 0.5)})
    assert padding.longest([frames]) == 6
    after = padded(frames, 7, padding)
    assert after["frames"].shape == (4, 2, 7)
    assert (after["frames"][..., 6] == 0.5).all()
    assert after["labels"] is frames["labels"]  # one for each row
    places = {"position_ids": torch.ones(3, 4, 6)}  # of text, height and width: the rows come second
    longer = padded(places, 7)
    assert longer["position_ids"].shape == (3, 4, 7)
    other = padded(microbatch(1, 2), 3, Padding(entries={"input_ids": PadEntry(1, 9)}))
    assert other["input_ids"].tolist() == [[1, 2, 9]]


@pytest.mark.parametrize(
    ("more", "value", "rule"),
    [
        (
            {"attention_mask": torch.ones(2, 1, 5, 5)},
            "attention_mask of shape [2, 1, 5, 5]",
            "masks of (rows, sequence)",
        ),
        ({"attention_mask": torch.ones(2, 9)}, "attention_mask of shape [2, 9]", "along dimension -1"),
        ({"cu_seq_lens_q": torch.tensor([0, 4, 10])}, "cu_seq_lens_q of 2 documents", "every multiple of 5"),
        (
            {"cu_seq_lens_k": torch.tensor([0, 5, 5, 10])},
            "cu_seq_lens_k of 3 documents",
            "no document is empty",
        ),
    ],
)
def test_what_cannot_be_padded_is_refused(more: dict[str, Tensor], value: str, rule: str) -> None:
    with refuses(BatchError, value, rule):
        padded(microbatch(2, 5, **more), 8)


def test_a_microbatch_without_rows_is_refused() -> None:
    with refuses(BatchError, "a microbatch of ['flag', 'x']", "shows the length"):
        Padding().longest([{"x": torch.ones(3), "flag": True}])


@pytest.mark.parametrize(
    ("options", "value", "rule"),
    [
        ({"length": 0}, "padding length=0", "whole number from 1"),
        ({"multiple": 0}, "padding multiple=0", "whole number from 1"),
        ({"context_shards": -1}, "padding context_shards=-1", "whole number from 1"),
        ({"buckets": (4, 4)}, "padding buckets=[4, 4]", "longer than the one before"),
        ({"buckets": (0, 4)}, "padding buckets=[0, 4]", "longer than the one before"),
        ({"buckets": (4,), "length": 4}, "padding length=4 with buckets=[4]", "a fixed length"),
    ],
)
def test_wrong_settings_are_refused(options: dict[str, Any], value: str, rule: str) -> None:
    with refuses(ConfigError, value, rule):
        Padding(**options)
