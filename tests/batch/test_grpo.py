"""GRPO: TRL's own loss on given rollouts, in one process and over any split, and what is refused."""

from __future__ import annotations

import importlib.util
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock import AutoPipeline
from penstock.batch.grpo import GRPO, group_advantages
from penstock.errors import BatchError, ConfigError
from support.families import tiny_model
from support.pairs import pair_batch, plain_gradients
from support.reference import assert_gradients, gradients_of
from support.refusals import refuses

ROWS, PROMPT = 6, 4


def token_logps(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """That of each token, (rows, sequence), whether it counts or not; of the first one 0."""
    logits = model(input_ids=batch["input_ids"], use_cache=False).logits[:, :-1]
    logps = torch.log_softmax(logits, -1).gather(2, batch["input_ids"][:, 1:, None])[..., 0]
    return torch.nn.functional.pad(logps, (1, 0))


def rollouts(model: Any) -> dict[str, Tensor]:
    """Rows of completions of several lengths, and log-probabilities some way off the model's own."""
    batch = {name: value[:ROWS] for name, value in pair_batch(3).items()}
    now = token_logps(model, batch).detach()
    torch.manual_seed(1)
    old, reference = now + 0.3 * torch.randn_like(now), now + 0.5 * torch.randn_like(now)
    rewards = torch.tensor([1.0, 0.0, 0.5, 2.0, 2.0, -1.0], dtype=now.dtype)
    return {
        **batch,
        "advantages": group_advantages(rewards, 3),
        "old_logps": old,
        "reference_logps": reference,
    }


def trl_loss(
    model: Any, batch: dict[str, Tensor], kind: str, beta: float, high: float, said: Any = None
) -> Tensor:
    """What GRPOTrainer computes of these rows, by its own code: one process, one microbatch.

    said: gets its metrics
    """
    from trl import GRPOTrainer

    said = defaultdict(list) if said is None else said

    def logps_of(*_: Any, **options: Any) -> tuple[Tensor, Tensor, None]:
        logps = token_logps(model, batch)[:, PROMPT:]
        return logps, torch.zeros_like(logps), None

    mask = (batch["labels"] != -100)[:, PROMPT:].long()
    trainer: Any = SimpleNamespace(
        aux_loss_enabled=False, top_entropy_quantile=1.0, off_policy_mask_threshold=None, beta=beta,
        importance_sampling_level="token", loss_type=kind, epsilon_low=0.2, epsilon_high=high,
        use_vllm=False, current_gradient_accumulation_steps=1, max_completion_length=9,
        _entropy_bonus_enabled=False, _get_per_token_logps_and_entropies=logps_of,
        args=SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1),
        model=SimpleNamespace(training=True), _metrics={"train": said},
        accelerator=SimpleNamespace(num_processes=1, gather=lambda value: value,
                                    reduce=lambda value, **_: value), _step=0,
    )  # fmt: skip
    inputs = {
        "prompt_ids": batch["input_ids"][:, :PROMPT], "completion_ids": batch["input_ids"][:, PROMPT:],
        "prompt_mask": torch.ones(ROWS, PROMPT), "completion_mask": mask,
        "advantages": batch["advantages"], "old_per_token_logps": batch["old_logps"][:, PROMPT:],
        "ref_per_token_logps": batch["reference_logps"][:, PROMPT:], "num_items_in_batch": mask.sum(),
    }  # fmt: skip
    loss: Tensor = GRPOTrainer._compute_loss(trainer, model, inputs)
    return loss


@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="trl is not installed")
@pytest.mark.parametrize("microbatches", [1, 2, 5])
@pytest.mark.parametrize("kind", ["grpo", "dapo", "dr_grpo"])
def test_every_gradient_is_that_of_trls_loss_in_one_process(kind: Any, microbatches: int) -> None:
    model = tiny_model("llama", torch.float64)
    batch = rollouts(model)
    loss = GRPO(0.2, 0.28, beta=0.1, kind=kind, longest=9 if kind == "dr_grpo" else None)
    said: Any = defaultdict(list)
    expected, gradients = plain_gradients(model, lambda: trl_loss(model, batch, kind, 0.1, 0.28, said))
    pipe = AutoPipeline(ranks=2, microbatches=microbatches, loss_fn=loss).build(model)
    step, metrics = pipe.step(batch), loss.metrics()
    assert step.loss == pytest.approx(expected, rel=1e-10)
    assert_gradients(gradients_of(pipe), gradients, 1e-9)
    assert 0 < metrics["clip_ratio/region_mean"] < 1
    for name, value in metrics.items():
        assert value == pytest.approx(said[name][0], rel=1e-6), name


@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="trl is not installed")
def test_trls_bnpo_is_dapo_where_it_has_one_microbatch() -> None:
    model = tiny_model("llama", torch.float64)
    batch = rollouts(model)
    expected, gradients = plain_gradients(model, lambda: trl_loss(model, batch, "bnpo", 0.0, 0.2))
    pipe = AutoPipeline(ranks=2, microbatches=3, loss_fn=GRPO()).build(model)
    assert pipe.step(batch).loss == pytest.approx(expected, rel=1e-10)
    assert_gradients(gradients_of(pipe), gradients, 1e-9)


def test_rows_without_old_logps_are_of_the_present_weights() -> None:
    model = tiny_model("llama", torch.float64)
    batch = {name: value for name, value in rollouts(model).items() if name != "old_logps"}
    pipe = AutoPipeline(ranks=2, microbatches=2, loss_fn=GRPO()).build(model)
    first = pipe.step(batch).loss
    expected = gradients_of(pipe)
    pipe.zero_grad()
    old = pipe.logprobs(batch, by_token=True)
    assert pipe.step(batch, old_logps=old).loss == pytest.approx(first, rel=1e-12)
    assert_gradients(gradients_of(pipe), expected, 1e-10)


@pytest.mark.parametrize("shapes", ["inferred", "padded"])
def test_log_probabilities_by_token_are_those_of_one_process(shapes: Any) -> None:
    model, batch = tiny_model("llama", torch.float64), pair_batch(3)
    expected = token_logps(model, batch).detach() * (batch["labels"] != -100)
    pipe = AutoPipeline(ranks=2, microbatches=3, shapes=shapes).build(model)
    torch.testing.assert_close(pipe.logprobs(batch, by_token=True), expected, rtol=1e-10, atol=1e-12)
    parts = [{name: value[:2, :9] for name, value in batch.items()}, {n: v[2:] for n, v in batch.items()}]
    of_parts = pipe.logprobs(parts, by_token=True)
    torch.testing.assert_close(of_parts[:2, :9], expected[:2, :9], rtol=1e-10, atol=1e-12)
    assert not bool(of_parts[:2, 9].any())
    torch.testing.assert_close(of_parts[2:], expected[2:], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(pipe.logprobs(batch), expected.sum(1), rtol=1e-10, atol=1e-12)


def test_advantages_are_those_of_a_group() -> None:
    rewards = torch.tensor([1.0, 0.0, 5.0, 5.0])
    apart, spread = 0.5, 0.5**0.5
    expected = [apart / (spread + 1e-4), -apart / (spread + 1e-4), 0.0, 0.0]
    assert group_advantages(rewards, 2).tolist() == pytest.approx(expected)
    assert group_advantages(rewards, 2, scaled=False).tolist() == [0.5, -0.5, 0, 0]
    assert group_advantages(rewards, 1).tolist() == [0, 0, 0, 0]
    with refuses(BatchError, "rewards of 4 rows", "group of 3"):
        group_advantages(rewards, 3)
    with refuses(BatchError, "a reward of nan for row 1"):
        group_advantages(torch.tensor([0.0, float("nan")]), 2)


def changed(**entries: Any) -> dict[str, Any]:
    batch = {**pair_batch(2), "advantages": torch.zeros(4), "reference_logps": torch.zeros(4, 10), **entries}
    return {name: value for name, value in batch.items() if value is not None}


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "no advantages": ({"advantages": None}, "a batch of", "GRPO reads 'advantages'"),
    "too few": ({"advantages": torch.zeros(2)}, "advantages given as [2]", "floats of [4]"),
    "of rows": ({"old_logps": torch.zeros(4)}, "old_logps given as [4]", "floats of [4, 10]"),
    "no reference": ({"reference_logps": None}, "a batch of", "beta=0.1 reads 'reference_logps'"),
    "no labels": ({"labels": None}, "a batch of", "reads 'labels'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_entries_that_do_not_fit_are_refused(name: str) -> None:
    entries, *said = REFUSED[name]
    assert GRPO(beta=0.1, kind="grpo").weight(changed()) == 4
    with refuses(BatchError, *said):
        GRPO(beta=0.1).weight(changed(**entries))


def test_options_that_mean_nothing_are_refused(tmp_path: Path) -> None:
    for options, said in (
        ({"kind": "bnpo"}, "kind='bnpo'"),
        ({"epsilon": -1}, "epsilon=-1"),
        ({"kind": "dr_grpo"}, "longest=None"),
        ({"longest": 4}, "longest=4"),
    ):
        with refuses(ConfigError, said):
            GRPO(**options)
