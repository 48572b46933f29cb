"""The routers' loss over a split sequence: that of one process, microbatch by microbatch."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.mixtral import modeling_mixtral

from penstock import AutoPipeline, Axes
from penstock.batch.loss import VALID_ITEMS
from penstock.errors import BatchError, ConfigError, ModelError
from penstock.parallel.context.check import check
from penstock.parallel.context.sequence import FULL_SEQUENCE, split
from penstock.parallel.expert.balance import balance_function, check_load_balancing, replace_balance_loss
from support import zoo
from support.covering import pairs
from support.families import tiny_model
from support.mesh import batch, build_whole, full, own_part
from support.mixtures import mixture
from support.pool import Pool
from support.reference import assert_gradients, gradients_of, plain_steps
from support.refusals import refuses
from support.sequences import left, odd, right

COEFFICIENT = 0.001  # the models sum their routers' loss in float32, whatever the dtype
MICROBATCHES = 2


def routed(model_type: str) -> PreTrainedModel:
    """Asks for its routers' loss, whose part in their gradients is not a rounding."""
    model = mixture(model_type, torch.float64, layers=2, output_router_logits=True)
    vars(model)["router_aux_loss_coef"] = COEFFICIENT
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith((".gate.weight", ".router.weight")):  # so that pieces are used unlike each other
                parameter *= 10
    return model


def given(how: str) -> dict[str, Tensor]:
    """odd: a length that pieces do not divide; masked: rows with padding of the caller's own as well"""
    whole = batch(length=13)
    if how == "masked":
        mask = torch.ones_like(whole["input_ids"])
        for row in range(len(mask)):
            mask[row, 13 - row :] = 0
        whole["labels"] = whole["labels"].masked_fill(mask == 0, -100)
        whole["labels"][0, 1] = 5
        whole["attention_mask"] = mask
    return whole


def chunks(whole: dict[str, Tensor], count: int) -> list[dict[str, Tensor]]:
    """The microbatches of a batch: the routers' loss is each one's own."""
    return [own_part(whole, at, count) for at in range(count)]


def steps(cases: list[tuple[str, int, Axes, Any, str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Of each case (model type, ranks, axes, schedule, batch, options) how far loss and gradients are off."""
    found = []
    for model_type, ranks, axes, schedule, how, options in cases:
        model, whole = routed(model_type), given(how)
        pipe = build_whole(model, ranks, axes, schedule=schedule, **options)
        part, parts = pipe.batch_part
        expected_loss, expected = plain_steps(model, chunks(whole, parts * MICROBATCHES))
        mine = own_part(whole, part, parts)
        evaluated = pipe.evaluate(mine).loss
        loss = pipe.step(mine).loss
        worst = {}
        for name, p in pipe.named_parameters():
            assert (p.grad is not None) == (name in expected), name
            if p.grad is None:  # a router's correction
                continue
            difference = float((full(p.grad) - expected[name]).abs().max())
            worst[name] = difference / max(float(expected[name].abs().max()), 1e-300)
        outputs = pipe.evaluate(mine, outputs=True, everywhere=True).outputs
        pipe.close()
        del mine["labels"]
        own = [model(**microbatch, use_cache=False).aux_loss for microbatch in chunks(mine, MICROBATCHES)]
        found.append({
            "loss": loss, "evaluated": evaluated, "expected": expected_loss, "worst": worst,
            "outputs": [float(output["auxiliary_loss"]) for output in outputs],
            "auxiliary": [COEFFICIENT * float(each) for each in own],
        })  # fmt: skip
    return found


ULYSSES, RING = {"context": "ulysses"}, {"context": "ring"}
Case = tuple[str, int, Axes, Any, str, dict[str, Any]]
CASES: list[Case] = [
    ("mixtral", 2, Axes(cp=2), "1f1b", "masked", ULYSSES),
    ("qwen3_moe", 2, Axes(cp=2), "zb_h1", "odd", RING),
    ("olmoe", 1, Axes(cp=2, tp=2), "1f1b", "odd", ULYSSES),
    ("gpt_oss", 1, Axes(dp_shard=2, cp=2, ep=4), "1f1b", "masked",
     {**RING, "activation_checkpointing": True}),
]  # fmt: skip
# every family, either way, with each other axis
MORE: list[Case] = [
    (row["family"], *row["mesh"], row["batch"], row["how"])
    for row in pairs({
        "family": ("mixtral", "qwen3_moe", "olmoe", "gpt_oss"),
        "how": (ULYSSES, RING),
        "batch": ("odd", "masked"),
        "mesh": ((2, Axes(cp=2), "zb_h1"), (1, Axes(cp=4), "1f1b"), (1, Axes(dp_replicate=2, cp=2), "1f1b")),
    })
]  # fmt: skip


def check_cases(pool: Pool, cases: list[Case]) -> None:
    found = pool.run(4, steps, cases)
    for rank in found:
        for case, found_losses in zip(cases, rank, strict=True):
            wrong = {name: by for name, by in found_losses["worst"].items() if by > 1e-10}
            assert not wrong, case
            assert found_losses["loss"] == pytest.approx(found_losses["expected"], rel=1e-10), case
            assert found_losses["evaluated"] == pytest.approx(found_losses["expected"], rel=1e-10), case
            # in float32 whatever the model's dtype
            assert found_losses["outputs"] == pytest.approx(found_losses["auxiliary"], rel=1e-5), case


@pytest.mark.sweep
def test_as_one_process(pool: Pool) -> None:
    check_cases(pool, CASES[1:2])


@pytest.mark.parallel
def test_every_family_method_and_axis(pool: Pool) -> None:
    check_cases(pool, [*CASES, *MORE])


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
def test_every_type_with_a_routers_loss(pool: Pool, first: int) -> None:
    """In float64 to float32's bound, as some of them make logits in float32."""
    for name in with_a_loss(zoo.TYPES[first : first + 20]):
        (found_losses,) = pool.run(4, steps, [(name, 1, Axes(cp=4), "1f1b", "odd", RING)])[0]
        assert found_losses["loss"] == pytest.approx(found_losses["expected"], rel=1e-6), name
        assert max(found_losses["worst"].values()) < 1e-5, name


def test_padding_does_not_count() -> None:
    """What the cut adds never does; the caller's own only where the model's function gets no mask."""
    for rank, tokens in ((0, 9), (1, 10)):  # of 19, padded to 20
        whole = split(odd(), rank, 2)[FULL_SEQUENCE]
        assert whole.counted_tokens(masked=True).sum(1).tolist() == [tokens] * 4
    for given in (left(), right()):
        parts = [split(given, rank, 2)[FULL_SEQUENCE] for rank in range(2)]
        real = int(given["attention_mask"].sum())
        assert sum(int(part.counted_tokens(masked=True).sum()) for part in parts) == real
        assert (
            sum(int(part.counted_tokens(masked=False).sum()) for part in parts) == given["input_ids"].numel()
        )


@pytest.mark.parametrize("how", ["exchanged", "padded"])
def test_padding_to_one_length_does_not_count(how: str) -> None:
    """Where no mask would mark padding it is refused, and rows of one length need none."""
    model = routed("mixtral")
    pipe = AutoPipeline(ranks=2, schedule="1f1b", microbatches=2, shapes=how).build(model)
    parts = [batch(2, length) for length in (9, 12)]
    loss, expected = plain_steps(model, parts)
    if how == "padded":
        with refuses(BatchError, "9 tokens a row to be padded, without attention_mask"):
            pipe.step(parts)
        parts = [{**part, "attention_mask": torch.ones_like(part["input_ids"])} for part in parts]
    assert pipe.step(parts).loss == pytest.approx(loss, rel=1e-10)
    assert_gradients(gradients_of(pipe), expected, 1e-10)
    same = [batch(2, 9)] * 2
    assert pipe.step(same).loss == pytest.approx(plain_steps(model, same)[0], rel=1e-10)


def test_a_part_knows_the_valid_tokens_of_the_whole() -> None:
    valid = int((odd()["labels"][:, 1:] != -100).sum())
    parts = [split(odd(), rank, 2) for rank in range(2)]
    assert [int(part[VALID_ITEMS]) for part in parts] == [valid] * 2
    assert sum(int((part["shift_labels"] != -100).sum()) for part in parts) == valid


def halved(
    gate_logits: Any, num_experts: Any = None, top_k: int = 2, attention_mask: Tensor | None = None
) -> Tensor:
    own: Any = modeling_mixtral.load_balancing_loss_func
    return own(gate_logits, num_experts, top_k, attention_mask) / 2  # type: ignore[no-any-return]


def test_another_loss_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    check_load_balancing(modeling_mixtral.load_balancing_loss_func, 4, 2)
    with refuses(ModelError, "halved, which gives", "load_balancing_loss_func"):
        check_load_balancing(halved, 4, 2)
    with refuses(ModelError, "which takes (logits)"):
        check_load_balancing(lambda logits: logits, 4, 2)
    model = tiny_model("mixtral", output_router_logits=True)
    check(model, 2, "ring")
    monkeypatch.setattr(modeling_mixtral, "load_balancing_loss_func", lambda *given: torch.ones(()))
    with refuses(ModelError, "which takes (given)", remedy="cp=1"):
        check(model, 2, "ring")


def test_a_model_without_such_a_loss_is_refused() -> None:
    model = zoo.tiny_model("deepseek_v3", output_router_logits=True)
    with refuses(
        ConfigError,
        "output_router_logits=True with cp",
        "DeepseekV3ForCausalLM calls no load_balancing_loss_func",
    ):
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
