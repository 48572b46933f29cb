"""The pipeline in one's own loop."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from penstock import AutoPipeline
from penstock.errors import BatchError, CheckpointError, ConfigError, EquivalenceError
from support import jobs
from support.families import ragged_batch, tiny_config, tiny_model
from support.pool import Pool
from support.reference import plain_step


def test_the_four_lines(tmp_path: Path) -> None:
    """Training in a pipeline gives the weights that training in one process gives."""
    model, reference = tiny_model("qwen3", torch.float64), tiny_model("qwen3", torch.float64)
    pipe = AutoPipeline(ranks=4, schedule="1f1b", microbatches=8).build(model)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
    plain = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    for step in range(3):
        batch = ragged_batch(8, 10 + step)
        loss, gradients = plain_step(reference, batch)
        for name, parameter in reference.named_parameters():
            parameter.grad = gradients[name]
        expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        plain.step()

        result = pipe.step(batch)
        assert pipe.clip_grad_norm_(0.5) == pytest.approx(float(expected), rel=1e-9)
        optimizer.step()
        optimizer.zero_grad()
        assert result.loss == pytest.approx(loss, rel=1e-9)
        assert result.tokens == int((batch["labels"][:, 1:] != -100).sum())
    for name, parameter in pipe.named_parameters(remove_duplicate=False):
        torch.testing.assert_close(parameter, reference.get_parameter(name), rtol=1e-7, atol=1e-9)
    pipe.save_pretrained(tmp_path / "model")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    torch.testing.assert_close(saved(batch["input_ids"]).logits, reference(batch["input_ids"]).logits)


def test_a_saved_folder_that_was_altered_is_refused(tmp_path: Path) -> None:
    """A flipped bit would load without a word."""
    pipe = AutoPipeline(ranks=2, microbatches=2).build(tiny_config("llama"))
    pipe.save_pretrained(tmp_path / "model")
    AutoPipeline(ranks=3, microbatches=2).build(tmp_path / "model")
    shard = tmp_path / "model" / "model-00002-of-00002.safetensors"
    content = bytearray(shard.read_bytes())
    content[-50] ^= 1
    shard.write_bytes(content)
    with pytest.raises(CheckpointError, match="its contents differ from what was written"):
        AutoPipeline(ranks=3, microbatches=2).build(tmp_path / "model")


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_norm_counts_a_tied_weight_once(ranks: int) -> None:
    model = tiny_model("llama", torch.float64, tied=True)
    _, gradients = plain_step(model, ragged_batch())
    for name, parameter in model.named_parameters():
        parameter.grad = gradients[name]
    expected = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    pipe = AutoPipeline(ranks=ranks, microbatches=3).build(model)
    pipe.step(ragged_batch())
    assert pipe.clip_grad_norm_(0.1) == pytest.approx(float(expected), rel=1e-9)
    assert pipe.clip_grad_norm_(1.0) == pytest.approx(0.1, rel=1e-4)
    assert {name for name, _ in pipe.owned_parameters()} == set(dict(model.named_parameters()))


def test_evaluate_before_the_first_step_touches_nothing() -> None:
    model = tiny_model("llama")
    pipe = AutoPipeline(ranks=3, microbatches=4).build(model)
    for rows in (8, 5, 3, 1):  # fewer rows than microbatches are as welcome
        batch = ragged_batch(rows)
        if int((batch["labels"][:, 1:] != -100).sum()):
            assert pipe.evaluate(batch).loss == pytest.approx(plain_step(model, batch)[0], rel=1e-5)
    assert all(parameter.grad is None for parameter in pipe.parameters())
    assert all(module.training for module in pipe.modules.values())
    pipe.step(ragged_batch())
    before = {
        name: parameter.grad.clone()
        for name, parameter in pipe.named_parameters(remove_duplicate=False)
        if parameter.grad is not None
    }
    pipe.evaluate(ragged_batch(6))
    assert all(
        torch.equal(before[name], p.grad)
        for name, p in pipe.named_parameters(remove_duplicate=False)
        if p.grad is not None
    )


def test_evaluate_puts_everything_back() -> None:
    """0.1.0: parts in evaluation mode came back in training mode, and the timeline was the evaluation's."""
    pipe = AutoPipeline(ranks=2, microbatches=4).build(tiny_model("llama"))
    frozen = pipe.modules[1].get_submodule("model.norm")
    frozen.eval()
    pipe.step(ragged_batch())
    before = pipe.timeline
    pipe.evaluate(ragged_batch())
    assert pipe.timeline == before
    assert not frozen.training
    assert pipe.modules[1].training


def test_a_model_in_evaluation_mode_is_trained_all_the_same() -> None:
    """0.1.0: from_pretrained gives evaluation mode, in which transformers checkpoints no activations."""
    pipe = AutoPipeline(ranks=2, microbatches=2, activation_checkpointing=True).build(
        tiny_model("llama").eval()
    )
    saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(1) or t, lambda t: t):  # type: ignore[func-returns-value]
        pipe.step(ragged_batch())
    kept: list[int] = []
    plain = AutoPipeline(ranks=2, microbatches=2).build(tiny_model("llama"))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(1) or t, lambda t: t):  # type: ignore[func-returns-value]
        plain.step(ragged_batch())
    assert len(saved) < len(kept)


def test_a_refused_batch_costs_no_gradient() -> None:
    """0.1.0: tied weights lost what earlier steps had accumulated."""
    pipe = AutoPipeline(ranks=2, microbatches=4).build(tiny_model("llama", tied=True))
    pipe.step(ragged_batch())
    before = {
        name: p.grad.clone()
        for name, p in pipe.named_parameters(remove_duplicate=False)
        if p.grad is not None
    }
    with pytest.raises(BatchError):
        pipe.step(ragged_batch(2))
    assert all(
        p.grad is not None and torch.equal(p.grad, before[n])
        for n, p in pipe.named_parameters(remove_duplicate=False)
    )


def test_a_tied_weight_that_is_unfrozen_later() -> None:
    """0.1.0: what was frozen when the pipeline was built was never summed."""
    model = tiny_model("llama", tied=True)
    model.lm_head.weight.requires_grad_(False)
    pipe = AutoPipeline(ranks=2, microbatches=2).build(model)
    pipe.step(ragged_batch())
    assert all(
        p.grad is None
        for name, p in pipe.named_parameters(remove_duplicate=False)
        if "embed" in name or "head" in name
    )
    for parameter in (*pipe.parameters(), *model.parameters()):
        parameter.requires_grad_(True)
    pipe.verify_against(model, ragged_batch())


def test_a_step_turns_gradients_on() -> None:
    pipe = AutoPipeline(ranks=2, microbatches=2).build(tiny_model("llama"))
    with torch.no_grad():
        pipe.step(ragged_batch())
    assert all(p.grad is not None for p in pipe.parameters())


def test_verify_against_leaves_dropout_out() -> None:
    model = tiny_model("gpt2", resid_pdrop=0.5)
    AutoPipeline(ranks=2, microbatches=2).build(model).verify_against(model, ragged_batch())
    assert model.training


def test_evaluate_turns_dropout_off() -> None:
    model = tiny_model("gpt2", resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5)
    pipe = AutoPipeline(ranks=2, microbatches=2).build(model)
    assert pipe.evaluate(ragged_batch()).loss == pipe.evaluate(ragged_batch()).loss
    assert pipe.step(ragged_batch()).loss != pipe.step(ragged_batch()).loss


def test_the_model_given_is_left_as_it_was() -> None:
    model = tiny_model("gemma3_text", tied=True)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    pipe = AutoPipeline(ranks=2, microbatches=2).build(model)
    pipe.step(ragged_batch())
    with torch.no_grad():
        for parameter in pipe.parameters():
            parameter.zero_()
    assert all(torch.equal(p, before[name]) and p.grad is None for name, p in model.named_parameters())


def test_verify_against_finds_what_differs() -> None:
    model, batch = tiny_model("llama"), ragged_batch()
    pipe = AutoPipeline(ranks=2, microbatches=4).build(model)
    pipe.step(batch)
    kept = {
        name: p.grad.clone()
        for name, p in pipe.named_parameters(remove_duplicate=False)
        if p.grad is not None
    }
    pipe.verify_against(model, batch)
    assert all(
        torch.equal(kept[n], p.grad)
        for n, p in pipe.named_parameters(remove_duplicate=False)
        if p.grad is not None
    )

    norm = pipe.modules[1].get_parameter("model.norm.weight")
    hook = norm.register_hook(lambda grad: grad * 1.001)  # type: ignore[no-untyped-call]
    with pytest.raises(
        EquivalenceError, match=r"^gradient model\.norm\.weight: it differs by [^;]*: the split model"
    ):
        pipe.verify_against(model, batch)
    hook.remove()
    with torch.no_grad():
        model.model.norm.weight[0] += 1e-3
    with pytest.raises(EquivalenceError, match=r"weight model\.norm\.weight: it differs before any step"):
        pipe.verify_against(model, batch)


def test_batches_that_cannot_be_stepped_on() -> None:
    pipe = AutoPipeline(ranks=2, microbatches=4).build(tiny_config("llama"))
    with pytest.raises(BatchError, match="a batch of 3 rows"):
        pipe.step(ragged_batch(3))
    with pytest.raises(BatchError, match="reads 'labels'"):
        pipe.step({"input_ids": ragged_batch()["input_ids"]})
    with pytest.raises(BatchError, match="without a valid token"):
        pipe.step({**ragged_batch(), "labels": torch.full((8, 10), -100)})
    pipe.step(ragged_batch())  # and it goes on


def test_a_loss_of_ones_own() -> None:
    model, batch = tiny_model("llama", torch.float64), ragged_batch(6)

    def spread(logits: torch.Tensor, microbatch: object) -> torch.Tensor:
        return logits.var(dim=-1).mean()

    pipe = AutoPipeline(ranks=2, microbatches=4, loss_fn=spread).build(model)
    result = pipe.step(batch)
    expected = spread(model(batch["input_ids"], use_cache=False).logits, batch)
    expected.backward()  # type: ignore[no-untyped-call]
    assert result.loss == pytest.approx(float(expected.detach()), rel=1e-10)
    for name, parameter in pipe.named_parameters(remove_duplicate=False):
        torch.testing.assert_close(parameter.grad, model.get_parameter(name).grad)


def test_options_that_do_not_fit() -> None:
    with pytest.raises(ConfigError, match="schedule='1f1b' without ranks"):
        AutoPipeline(microbatches=2).build(tiny_config("llama"))
    with pytest.raises(ConfigError, match=r"Did you mean '1f1b'"):
        AutoPipeline(ranks=2, microbatches=2, schedule="1F1").build(tiny_config("llama"))
    with pytest.raises(ConfigError, match=r"timeout=-1"):
        AutoPipeline(ranks=2, microbatches=2, timeout=-1).build(tiny_config("llama"))


def test_all_ranks_tell_the_same_numbers(pool: Pool) -> None:
    answers = pool.run(3, jobs.results, "qwen2", 3, 4)
    assert answers[0] == answers[1] == answers[2]
    evaluated, loss, tokens, bubble, norm, clipped = answers[0]
    model = tiny_model("qwen2")
    expected, gradients = plain_step(model, ragged_batch())
    assert evaluated == pytest.approx(expected, rel=1e-5)
    assert loss == pytest.approx(expected, rel=1e-5)
    assert tokens == int((ragged_batch()["labels"][:, 1:] != -100).sum())
    assert 0 < bubble < 1
    total = torch.stack(
        [g.norm() for n, g in gradients.items() if n in dict(model.named_parameters())]
    ).norm()
    assert norm == pytest.approx(float(total), rel=1e-5)
    assert clipped == pytest.approx(0.5, rel=1e-4)
