"""Packed documents stay apart, in transformers' own models, or are refused."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from penstock.batch.packing import (
    boundaries,
    is_packed,
    metadata,
    positions,
    refuse_packed,
    split_lens,
    with_positions,
)
from penstock.errors import BatchError, ModelError
from support.families import FAMILIES, tiny_model
from support.refusals import refuses

LENGTHS = (5, 8, 6)  # longer than the sliding windows
TAKE_NO_NOTICE = {"opt", "gpt_oss"}  # take position_ids, and make their masks without


def documents(vocabulary: int = 64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, vocabulary, (1, length), generator=generator) for length in LENGTHS]


def logits(model: PreTrainedModel, ids: Tensor, **more: Any) -> Tensor:
    out: Tensor = model(input_ids=ids, use_cache=False, **more).logits
    return out


@pytest.mark.parametrize("mask", [False, True], ids=["packed", "hidden by a mask"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_a_loss_on_one_document_gives_no_gradient_to_another(family: str, mask: bool) -> None:
    model = tiny_model(family)
    batch = {"input_ids": torch.cat(documents(), dim=1), **metadata(LENGTHS)}
    embedded = model.get_input_embeddings()(batch.pop("input_ids")).detach().requires_grad_()
    more = {"attention_mask": torch.ones(1, sum(LENGTHS))} if mask else {}
    out = model(inputs_embeds=embedded, use_cache=False, **batch, **more).logits
    first, second, _ = LENGTHS
    out[:, first : first + second].square().sum().backward()
    assert embedded.grad is not None
    reached = embedded.grad[0].abs().amax(dim=-1) > 0
    assert reached[first : first + second].all()
    assert not reached[first + second :].any()
    # what with_positions refuses, and why: with a mask of ones alone transformers looks for no documents
    assert bool(reached[:first].any()) is mask


@pytest.mark.parametrize(
    ("family", "attention"), [*product(FAMILIES, [None]), ("qwen3", "eager"), ("gemma2", "eager")]
)
def test_a_family_keeps_documents_apart_or_is_refused(family: str, attention: str | None) -> None:
    model = tiny_model(family, attn_implementation=attention).eval()
    alone = torch.cat([logits(model, document) for document in documents()], dim=1)
    together = logits(model, torch.cat(documents(), dim=1))
    assert (together - alone).abs().max() > 1e-3  # so that the comparison would show it
    packed = logits(model, torch.cat(documents(), dim=1), **metadata(LENGTHS))
    if family in TAKE_NO_NOTICE:
        assert (packed - alone).abs().max() > 1e-3
        with refuses(ModelError, rule="ignores documents"):
            refuse_packed(model)
    else:
        assert (packed - alone).abs().max() < 1e-5
        refuse_packed(model)


@pytest.mark.parametrize(
    ("family", "more", "reason"),
    [
        ("mamba", {}, "its state runs over the whole row"),
        ("jamba", {}, "its state runs over the whole row"),
        ("lfm2", {"layer_types": ["conv", "full_attention"]}, "its convolutions run over the whole row"),
        ("bloom", {}, "it takes no position_ids"),
        ("falcon", {}, "ignores documents"),
    ],
)
def test_models_that_mix_documents_are_refused_without_a_weight(
    family: str, more: dict[str, Any], reason: str
) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes, **more))
    with pytest.raises(ModelError) as error:
        refuse_packed(model)
    assert type(model).__name__ in error.value.value
    assert reason in error.value.rule
    assert "data.packing=none" in error.value.remedy


def test_a_class_is_refused_by_its_name_and_signature() -> None:
    class Stateful(nn.Module):
        _is_stateful = True

        def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
            return input_ids + position_ids

    with refuses(ModelError, "packed documents in Stateful", "its state runs"):
        refuse_packed(Stateful)
    refuse_packed(type(tiny_model("llama")))


def test_flash_attention_finds_documents_by_the_boundaries() -> None:
    model = tiny_model("gpt_oss")
    model.config._attn_implementation_internal = "flash_attention_2"
    refuse_packed(model)


def test_metadata_is_what_transformers_takes() -> None:
    made = metadata([2, 1, 3])
    assert made["position_ids"].tolist() == [[0, 1, 0, 0, 1, 2]]
    assert made["position_ids"].dtype == torch.int64
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        assert made[name].tolist() == [0, 2, 3, 6]
        assert made[name].dtype == torch.int32
    assert (made["max_length_q"], made["max_length_k"]) == (3, 3)
    assert type(made["max_length_q"]) is int
    for wrong in ([], [2, 0]):
        with refuses(BatchError, rule="each document"):
            metadata(wrong)


@st.composite
def rows_of_documents(draw: st.DrawFn) -> tuple[int, Tensor]:
    """The length of a row, and the boundaries of some rows of documents laid end to end."""
    rows, length = draw(st.integers(1, 6)), draw(st.integers(1, 9))
    inside = draw(st.sets(st.integers(1, rows * length - 1))) if rows * length > 1 else set()
    ends = sorted({*range(0, rows * length + 1, length), *inside})
    return length, torch.tensor(ends, dtype=torch.int32)


@given(made=rows_of_documents(), data=st.data())
def test_split_boundaries_are_those_of_the_split_rows(made: tuple[int, Tensor], data: st.DataObject) -> None:
    length, bounds = made
    rows = int(bounds[-1]) // length
    cuts = sorted(data.draw(st.sets(st.integers(1, rows - 1)))) if rows > 1 else []
    parts = split_lens("cu_seq_lens_q", bounds, rows, cuts)
    places = positions(bounds).view(rows, length).tensor_split(cuts)
    for part, place in zip(parts, places, strict=True):
        assert part.dtype == torch.int32
        assert torch.equal(positions(part).view(-1, length), place)
        assert int(part[-1]) == place.numel()
    assert sum(len(part) - 1 for part in parts) == len(bounds) - 1
    assert max(boundaries(part)["max_length_q"] for part in parts) == boundaries(bounds)["max_length_q"]


def test_a_document_over_a_rows_end_is_refused() -> None:
    ids = torch.ones(2, 4, dtype=torch.long)
    over = torch.tensor([0, 3, 6, 8])
    with refuses(BatchError, "cu_seq_lens_q of 3 documents for 2 rows of 4 tokens", "4 up to 8"):
        with_positions({"input_ids": ids, "cu_seq_lens_q": over})
    with refuses(BatchError, "cu_seq_lens_q of 3 documents for 2 rows of 4 tokens", "documents end"):
        split_lens("cu_seq_lens_q", over, 2, [1])
    with refuses(BatchError, "cu_seq_lens_q of 1 documents for 2 rows of 2 tokens", "documents end"):
        split_lens("cu_seq_lens_q", torch.tensor([0, 4]), 2, [1])
    for wrong in ([0, 4, 4, 8], [1, 4, 8], [0, 8, 4], [0]):
        with refuses(BatchError, rule="no document is empty"):
            split_lens("cu_seq_lens_q", torch.tensor(wrong), 2, [])


def test_positions_are_added_where_they_are_missing() -> None:
    ids = torch.ones(2, 4, dtype=torch.long)
    bounds = torch.tensor([0, 3, 4, 8])
    added = with_positions({"input_ids": ids, "cu_seq_lens_q": bounds})
    assert added["position_ids"].tolist() == [[0, 1, 2, 0], [0, 1, 2, 3]]
    plain = {"input_ids": ids}
    assert with_positions(plain) is plain
    assert with_positions(added) is added
    run_on = {"input_ids": ids, "cu_seq_lens_q": bounds, "position_ids": torch.arange(4)[None]}
    with refuses(BatchError, "position_ids that go on at token 3 where cu_seq_lens_q begins"):
        with_positions(run_on)
    a_row_each = {"cu_seq_lens_q": torch.tensor([0, 4, 8]), "position_ids": torch.arange(8).view(2, 4)}
    assert with_positions({"input_ids": ids, **a_row_each}).keys() == {"input_ids", *a_row_each}
    of_three = {**run_on, "position_ids": torch.arange(4).expand(3, 2, 4)}
    assert with_positions(of_three) is of_three


def test_rows_are_as_long_as_labels_say_that_have_several_for_each_token() -> None:
    labels = torch.ones(2, 4, 3, dtype=torch.long)
    added = with_positions({"labels": labels, "cu_seq_lens_q": torch.tensor([0, 3, 4, 8])})
    assert added["position_ids"].tolist() == [[0, 1, 2, 0], [0, 1, 2, 3]]


def test_a_mask_that_hides_the_documents_is_refused() -> None:
    ids, ones = torch.ones(1, 4, dtype=torch.long), torch.ones(1, 4)
    packed = {"input_ids": ids, **metadata([2, 2])}
    assert is_packed(packed)
    for batch in (packed, {"input_ids": ids, "position_ids": packed["position_ids"]}):
        with refuses(BatchError, "attention_mask of shape [1, 4] with packed documents"):
            with_positions({**batch, "attention_mask": ones})
    four = {**packed, "attention_mask": torch.ones(1, 1, 4, 4)}
    assert with_positions(four) is four  # made by hand for these documents
    alone = {"input_ids": ids, **metadata([4]), "attention_mask": ones}
    assert not is_packed(alone)
    assert with_positions(alone) is alone


def test_left_padding_is_no_packing() -> None:
    mask = torch.tensor([[0, 0, 1, 1, 1]])
    for places in ([[1, 1, 0, 1, 2]], [[0, 0, 0, 1, 2]]):
        batch = {"input_ids": torch.ones(1, 5), "attention_mask": mask, "position_ids": torch.tensor(places)}
        assert not is_packed(batch)
        assert with_positions(batch) is batch
