"""Forwards alone: their loss, their outputs, and that they change nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from penstock import AutoPipeline, Pipeline
from penstock.errors import BatchError, ConfigError, PenstockError
from support.adapted import adapted
from support.families import pipeline, ragged_batch, tiny_model
from support.own_chain import Piece, squares, x_batch
from support.pairs import pair_batch, plain_logps
from support.pool import Pool
from support.reference import TOLERANCE, assert_gradients, gradients_of, plain_step
from support.refusals import refuses


def test_evaluate_before_the_first_step_touches_nothing() -> None:
    model = tiny_model("llama")
    pipe = AutoPipeline(ranks=3, microbatches=4).build(model)
    for rows in (8, 5, 3, 1):  # fewer rows than microbatches are as welcome
        batch = ragged_batch(rows)
        if int((batch["labels"][:, 1:] != -100).sum()):
            assert pipe.evaluate(batch).loss == pytest.approx(plain_step(model, batch)[0], rel=1e-5)
    assert all(parameter.grad is None for parameter in pipe.parameters())
    assert all(module.training for module in pipe.modules.values())


@pytest.mark.parametrize("outputs", [False, True])
def test_an_evaluation_changes_nothing(outputs: bool) -> None:
    """0.1.0: parts in evaluation mode came back in training mode, and the timeline was the evaluation's."""
    model, batch = tiny_model("llama"), ragged_batch()
    _, expected = plain_step(model, batch)
    pipe = pipeline(model)
    frozen = pipe.modules[1].get_submodule("model.norm")
    frozen.eval()
    pipe.evaluate(ragged_batch(6), outputs=outputs)  # type: ignore[call-overload]
    pipe.step(batch)
    before = pipe.timeline
    pipe.evaluate(ragged_batch(6), outputs=outputs)  # type: ignore[call-overload]
    assert pipe.timeline == before
    assert pipe.modules[1].training
    assert not frozen.training
    assert_gradients(gradients_of(pipe), expected, TOLERANCE[torch.float32])


def test_evaluate_turns_dropout_off() -> None:
    model = tiny_model("gpt2", resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5)
    pipe = AutoPipeline(ranks=2, microbatches=2).build(model)
    assert pipe.evaluate(ragged_batch()).loss == pipe.evaluate(ragged_batch()).loss
    assert pipe.step(ragged_batch()).loss != pipe.step(ragged_batch()).loss


def test_logits_of_an_evaluation() -> None:
    model, batch = tiny_model("llama"), ragged_batch(7)
    pipe = pipeline(model)
    expected = model(batch["input_ids"], use_cache=False).logits
    found = pipe.evaluate(batch, outputs=True)
    torch.testing.assert_close(found.outputs, expected.detach())
    assert found.loss == pytest.approx(plain_step(model, batch)[0], rel=1e-5)
    assert found.tokens == pipe.evaluate(batch).tokens
    assert pipe.evaluate({"input_ids": batch["input_ids"]}, outputs=True).loss is None
    with refuses(BatchError, rule="reads 'labels'"):
        pipe.evaluate({"input_ids": batch["input_ids"]})
    assert all(parameter.grad is None for parameter in pipe.parameters())


def test_outputs_of_several_shapes_and_kinds() -> None:
    pipe = pipeline(tiny_model("llama"))
    microbatches = [ragged_batch(2, 6), ragged_batch(3, 6), ragged_batch(1, 9)]
    several = pipe.evaluate(microbatches, outputs=True)
    assert [list(logits.shape[:2]) for logits in several.outputs] == [[2, 6], [3, 6], [1, 9]]
    assert pipe.evaluate(microbatches[:2], outputs=True).outputs.shape[:2] == (5, 6)
    best = pipe.evaluate(ragged_batch(), outputs=lambda logits, number: (number, logits.argmax(-1)))
    assert [number for number, _ in best.outputs] == [0, 1, 2, 3]
    own = Pipeline.from_provider(Piece, ranks=2, microbatches=2, loss_fn=squares)
    found = own.evaluate(x_batch(), outputs=True)
    assert found.outputs.shape[0] == 8
    assert found.loss == pytest.approx(own.evaluate(x_batch()).loss)


@pytest.mark.parametrize("microbatches", [1, 3])
def test_log_probabilities_are_those_of_one_process(microbatches: int) -> None:
    model, batch = tiny_model("llama", torch.float64), pair_batch(4)
    expected = plain_logps(model, batch)[0].detach()
    for options in ({}, {"shapes": "padded"}, {"chunked_loss": False}):
        pipe = AutoPipeline(ranks=2, microbatches=microbatches, **options).build(model)
        logps = pipe.logprobs(batch)
        torch.testing.assert_close(logps, expected, rtol=1e-12, atol=1e-12)
        assert not logps.requires_grad
    listed = [{name: value[at] for name, value in batch.items()} for at in (slice(0, 1), slice(1, 8))]
    torch.testing.assert_close(pipe.logprobs(listed), expected, rtol=1e-12, atol=1e-12)
    assert all(parameter.grad is None for parameter in pipe.parameters())
    with refuses(BatchError, rule="reads 'labels'"):
        pipe.logprobs({"input_ids": batch["input_ids"]})


def test_log_probabilities_without_adapters_are_the_base_models() -> None:
    peft, batch = adapted(tiny_model("llama", torch.float64)), pair_batch(4)
    with peft.disable_adapter():
        expected = plain_logps(peft, batch)[0].detach()
    with_adapters = plain_logps(peft, batch)[0].detach()
    pipe = AutoPipeline(ranks=2, microbatches=3).build(peft)
    torch.testing.assert_close(pipe.logprobs(batch), with_adapters, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(pipe.logprobs(batch, adapters=False), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(pipe.logprobs(batch), with_adapters, rtol=1e-12, atol=1e-12)
    assert float((with_adapters - expected).abs().max()) > 0.01


@pytest.mark.parametrize("schedule", ["1f1b", "zb_v", "dualpipe"])
def test_every_rank_has_all_log_probabilities(pool: Pool, schedule: str) -> None:
    expected = plain_logps(tiny_model("llama"), pair_batch(4))[0].detach()
    for logps in pool.run(2, logprobs, schedule):
        torch.testing.assert_close(logps, expected)


def logprobs(schedule: str) -> torch.Tensor:
    pipe = AutoPipeline(ranks=2, schedule=schedule, microbatches=4, timeout=30).build(tiny_model("llama"))
    return pipe.logprobs(pair_batch(4))


@pytest.mark.parametrize(("schedule", "owner"), [("1f1b", 1), ("zb_v", 0), ("dualpipe", None)])
def test_evaluation_over_processes(pool: Pool, schedule: str, owner: int | None) -> None:
    """owner: the rank of the last stage; None where each has one of its own"""
    answers = pool.run(2, evaluated, schedule)
    model, batch = tiny_model("llama"), ragged_batch()
    loss, _ = plain_step(model, batch)
    logits = model(batch["input_ids"], use_cache=False).logits.detach()
    for rank, (alone, together, best, unlabelled, refused, info, _) in enumerate(answers):
        assert together.loss == best.loss == pytest.approx(loss, rel=1e-5)
        if owner is None:  # a list with holes in 0.4.0
            assert "the last stage of each has the outputs of half the batch. Give everywhere=True" in alone
        else:
            assert (alone.loss, alone.tokens) == (together.loss, together.tokens)
            assert (alone.outputs is not None) == (rank == owner)
        torch.testing.assert_close(together.outputs, logits)
        assert torch.equal(unlabelled.outputs, together.outputs)
        assert unlabelled.loss is None
        assert [entry["number"] for entry in best.outputs] == [0, 1, 2, 3]
        assert torch.equal(torch.cat([entry["best"] for entry in best.outputs]), together.outputs.argmax(-1))
        assert best.outputs[0]["above"].dtype == torch.bool
        assert "a result that cannot be sent (a set in" in refused
        assert info == answers[0][5]
    assert answers[0][6] == answers[1][6]


def evaluated(schedule: str) -> list[Any]:
    """As this rank sees them: logits on their owner and on all, a callback's results, and without labels."""
    pipe = AutoPipeline(ranks=2, schedule=schedule, microbatches=4, timeout=30).build(tiny_model("llama"))
    batch = ragged_batch()
    unlabelled = {"input_ids": batch["input_ids"]}

    def best(logits: torch.Tensor, number: int) -> dict[str, Any]:
        return {"number": number, "best": logits.argmax(-1), "above": logits[:, 0] > 0}

    alone: Any
    try:
        alone = pipe.evaluate(batch, outputs=True)
    except ConfigError as error:
        alone = str(error)
    return [
        alone,
        pipe.evaluate(batch, outputs=True, everywhere=True),
        pipe.evaluate(batch, outputs=best, everywhere=True),
        pipe.evaluate(unlabelled, outputs=True, everywhere=True),
        refused(pipe),
        [facts[1:] for facts in pipe.info],
        str(pipe),
    ]


def refused(pipe: Pipeline) -> str:
    """What cannot be sent is refused by all ranks, and the next evaluation goes well."""
    try:
        pipe.evaluate(ragged_batch(), outputs=lambda logits, number: {1, 2}, everywhere=True)
    except PenstockError as error:
        assert pipe.evaluate(ragged_batch(), outputs=True, everywhere=True).outputs is not None
        return str(error)
    return "no error"
