"""The routers' loss over a sequence that is cut: that of one process, microbatch by microbatch."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.mixtral import modeling_mixtral

from penstock import AutoPipeline, Axes
from penstock.errors import BatchError, ConfigError, ModelError
from penstock.parallel.context.check import check
from penstock.parallel.context.sequence import split
from penstock.parallel.expert.balance import balance_function, check_load_balancing, replace_balance_loss
from support import jobs_balance as jobs
from support import zoo
from support.families import tiny_model
from support.jobs_context import left, odd, right
from support.jobs_mesh import batch
from support.pool import Pool
from support.reference import assert_gradients

ULYSSES, RING = {"context": "ulysses"}, {"context": "ring"}
Case = tuple[str, int, Axes, Any, str, dict[str, Any]]
CASES: list[Case] = [
    ("mixtral", 2, Axes(cp=2), "1f1b", "masked", ULYSSES),
    ("qwen3_moe", 2, Axes(cp=2), "zb_h1", "odd", RING),
    ("olmoe", 1, Axes(cp=2, tp=2), "1f1b", "odd", ULYSSES),
    ("gpt_oss", 1, Axes(dp_shard=2, cp=2, ep=4), "1f1b", "masked",
     {**RING, "activation_checkpointing": True}),
]  # fmt: skip
# every family, either way, beside each other axis
MORE: list[Case] = [
    (family, ranks, axes, schedule, kind, how)
    for family in ("mixtral", "qwen3_moe", "olmoe", "gpt_oss")
    for how in (ULYSSES, RING)
    for kind in ("odd", "masked")
    for ranks, axes, schedule in (
        (2, Axes(cp=2), "zb_h1"),
        (1, Axes(cp=4), "1f1b"),
        (1, Axes(dp_replicate=2, cp=2), "1f1b"),
    )
]


def compare(pool: Pool, cases: list[Case]) -> None:
    found = pool.run(4, jobs.steps, cases)
    for rank in found:
        for case, told in zip(cases, rank, strict=True):
            wrong = {name: by for name, by in told["worst"].items() if by > 1e-10}
            assert not wrong, case
            assert told["loss"] == pytest.approx(told["expected"], rel=1e-10), case
            assert told["evaluated"] == pytest.approx(told["expected"], rel=1e-10), case
            # in float32 whatever the model's dtype
            assert told["outputs"] == pytest.approx(told["auxiliary"], rel=1e-5), case


def test_as_one_process(pool: Pool) -> None:
    compare(pool, CASES)


@pytest.mark.parallel
@pytest.mark.parametrize("first", range(0, len(MORE), 8))
def test_more_ways(pool: Pool, first: int) -> None:
    compare(pool, MORE[first : first + 8])


def with_a_loss(types: Sequence[str]) -> list[str]:
    """Those whose forward has such a loss, and whose attention may be cut."""
    found = []
    for name in types:
        if name in zoo.SKIPPED or balance_function(model := zoo.tiny_model(name)) is None:
            continue
        with suppress(ModelError):
            check(model, 2, "ring")
            found.append(name)
    return found


@pytest.mark.sweep
@pytest.mark.parametrize("first", range(0, len(zoo.TYPES), 20))
def test_every_type_that_has_one(pool: Pool, first: int) -> None:
    """In float64 to float32's bound, as some of them make logits in float32."""
    for name in with_a_loss(zoo.TYPES[first : first + 20]):
        (told,) = pool.run(4, jobs.steps, [(name, 1, Axes(cp=4), "1f1b", "odd", RING)])[0]
        assert told["loss"] == pytest.approx(told["expected"], rel=1e-6), name
        assert max(told["worst"].values()) < 1e-5, name


# ---- which tokens count


def test_padding_does_not_count() -> None:
    """What the cut adds never does; the caller's own only where the model's function is told no mask."""
    for rank, tokens in ((0, 9), (1, 10)):  # of 19, padded to 20
        whole = split(odd(), rank, 2)["context"]
        assert whole.counted_tokens(masked=True).sum(1).tolist() == [tokens] * 4
    for given in (left(), right()):
        parts = [split(given, rank, 2)["context"] for rank in range(2)]
        real = int(given["attention_mask"].sum())
        assert sum(int(part.counted_tokens(masked=True).sum()) for part in parts) == real
        assert (
            sum(int(part.counted_tokens(masked=False).sum()) for part in parts) == given["input_ids"].numel()
        )


@pytest.mark.parametrize("how", ["exchanged", "padded"])
def test_padding_to_one_length_does_not_count(how: str) -> None:
    """Where no mask would tell padding it is refused, and rows of one length need none."""
    model = jobs.routed("mixtral")
    pipe = AutoPipeline(ranks=2, schedule="1f1b", microbatches=2, shapes=how).build(model)
    parts = [batch(2, length) for length in (9, 12)]
    loss, expected = jobs.one_by_one(model, parts)
    if how == "padded":
        with pytest.raises(BatchError, match=r"9 tokens a row to be padded, without attention_mask"):
            pipe.step(parts)
        parts = [{**part, "attention_mask": torch.ones_like(part["input_ids"])} for part in parts]
    assert pipe.step(parts).loss == pytest.approx(loss, rel=1e-10)
    assert_gradients(
        {name: p.grad for name, p in pipe.named_parameters() if p.grad is not None}, expected, 1e-10
    )
    same = [batch(2, 9)] * 2
    assert pipe.step(same).loss == pytest.approx(jobs.one_by_one(model, same)[0], rel=1e-10)


def test_a_part_knows_what_the_whole_counts_for() -> None:
    valid = int((odd()["labels"][:, 1:] != -100).sum())
    parts = [split(odd(), rank, 2) for rank in range(2)]
    assert [int(part["valid_items"]) for part in parts] == [valid] * 2
    assert sum(int((part["shift_labels"] != -100).sum()) for part in parts) == valid


# ---- whose function it is


def halved(
    gate_logits: Any, num_experts: Any = None, top_k: int = 2, attention_mask: Tensor | None = None
) -> Tensor:
    own: Any = modeling_mixtral.load_balancing_loss_func
    return own(gate_logits, num_experts, top_k, attention_mask) / 2  # type: ignore[no-any-return]


def test_another_loss_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    check_load_balancing(modeling_mixtral.load_balancing_loss_func, 4, 2)
    with pytest.raises(ModelError, match=r"halved, which gives .* and not "):
        check_load_balancing(halved, 4, 2)
    with pytest.raises(ModelError, match=r"which takes \(logits\)"):
        check_load_balancing(lambda logits: logits, 4, 2)
    model = tiny_model("mixtral", output_router_logits=True)
    check(model, 2, "ring")
    monkeypatch.setattr(modeling_mixtral, "load_balancing_loss_func", lambda *given: torch.ones(()))
    with pytest.raises(ModelError, match=r"which takes \(given\).* cp=1"):
        check(model, 2, "ring")


def test_a_model_without_such_a_loss_is_refused() -> None:
    model = zoo.tiny_model("deepseek_v3", output_router_logits=True)
    with pytest.raises(ConfigError, match="DeepseekV3ForCausalLM calls no load_balancing_loss_func"):
        check(model, 2, "ring")


def test_one_model_alone_calls_another_function() -> None:
    ours, other = (tiny_model("mixtral", output_router_logits=True) for _ in range(2))
    ids = odd()["input_ids"]
    before = ours(ids).aux_loss
    function = modeling_mixtral.load_balancing_loss_func
    replace_balance_loss(ours, halved)
    assert torch.equal(2 * ours(ids).aux_loss, before)
    assert torch.equal(other(ids).aux_loss, before)
    assert ours(ids, return_dict=False)[0].shape == ours(ids)[0].shape  # what decorates it still does
    assert inspect.signature(ours.forward) == inspect.signature(other.forward)
    assert modeling_mixtral.load_balancing_loss_func is function
