"""Losses of pairs: their formulas in plain torch, over any split into microbatches, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from penstock import AutoPipeline, Axes
from penstock.batch.preferences import DPO, ORPO, Half, Preference, Reward, SimPO
from penstock.errors import BatchError, ConfigError, ModelError
from support.families import tiny_config, tiny_model
from support.pairs import pair_batch, plain_gradients, plain_logps
from support.pool import Pool
from support.reference import assert_gradients, gradients_of
from support.refusals import refuses

Formula = Callable[[Tensor, Tensor, Tensor], Tensor]


def sigmoid(logps: Tensor, tokens: Tensor, reference: Tensor) -> Tensor:
    ratio = logps - reference
    return -F.logsigmoid(0.3 * (ratio[::2] - ratio[1::2])).mean()


def ipo(logps: Tensor, tokens: Tensor, reference: Tensor) -> Tensor:
    ratio = (logps - reference) / tokens
    return ((ratio[::2] - ratio[1::2] - 1 / 0.6) ** 2).mean()


def orpo(logps: Tensor, tokens: Tensor, reference: Tensor) -> Tensor:
    mean = logps / tokens
    odds = torch.exp(mean) / (1 - torch.exp(mean))
    return (-mean[::2] - 0.3 * torch.log(torch.sigmoid(torch.log(odds[::2] / odds[1::2])))).mean()


def simpo(logps: Tensor, tokens: Tensor, reference: Tensor) -> Tensor:
    mean = logps / tokens
    return -torch.log(torch.sigmoid(0.3 * (mean[::2] - mean[1::2]) - 0.5)).mean()


CASES: dict[str, tuple[Preference, Formula]] = {
    "dpo": (DPO(0.3), sigmoid),
    "ipo": (DPO(0.3, variant="ipo"), ipo),
    "orpo": (ORPO(0.3), orpo),
    "simpo": (SimPO(0.3, 0.5), simpo),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("microbatches", [1, 3, 4])
def test_every_gradient_is_that_of_the_formula_in_one_process(name: str, microbatches: int) -> None:
    """Four pairs in three microbatches: no split of rows alone keeps pairs together."""
    loss, formula = CASES[name]
    model, batch = tiny_model("llama", torch.float64), pair_batch(4)
    reference = torch.randn(8, dtype=torch.float64) - 20
    expected, gradients = plain_gradients(model, lambda: formula(*plain_logps(model, batch), reference))
    pipe = AutoPipeline(ranks=2, microbatches=microbatches, loss_fn=loss).build(model)
    step = pipe.step({**batch, "reference_logps": reference})
    assert step.loss == pytest.approx(expected, rel=1e-12)
    assert step.tokens == 4
    assert_gradients(gradients_of(pipe), gradients, 1e-10)


def test_a_reward_model_scores_pairs() -> None:
    config = tiny_config("llama", num_labels=1, pad_token_id=0)
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForSequenceClassification.from_config(config, dtype=torch.float64)
    ids, loss = pair_batch(4)["input_ids"], Reward(center=0.01)

    def formula() -> Tensor:
        scores: Tensor = model(input_ids=ids).logits[:, 0]
        high, low = scores[::2], scores[1::2]
        loss: Tensor = -F.logsigmoid(high - low) + 0.01 * (high + low) ** 2
        return loss.mean()

    expected, gradients = plain_gradients(model, formula)
    pipe = AutoPipeline(ranks=2, microbatches=3, loss_fn=loss).build(model)
    assert pipe.step({"input_ids": ids}).loss == pytest.approx(expected, rel=1e-12)
    assert_gradients(gradients_of(pipe), gradients, 1e-10)
    assert loss.metrics().keys() == {
        f"rewards/{name}" for name in ("chosen", "rejected", "accuracies", "margins")
    }
    with refuses(ModelError, rule="one score a row"):
        loss.total(torch.zeros(2, 3, 5), {"input_ids": ids[:2]})


def test_metrics_are_means_over_all_pairs_since_the_last_call() -> None:
    loss, model, batch = DPO(0.3), tiny_model("llama", torch.float64), pair_batch(4)
    reference = torch.randn(8, dtype=torch.float64) - 20
    pipe = AutoPipeline(ranks=2, microbatches=3, loss_fn=loss).build(model)
    pipe.step({**batch, "reference_logps": reference})
    metrics, logps = loss.metrics(pipe.ranks.gather), plain_logps(model, batch)[0].detach()
    rewards = 0.3 * (logps - reference)
    expected = {
        "rewards/chosen": rewards[::2].mean(),
        "rewards/rejected": rewards[1::2].mean(),
        "rewards/accuracies": (rewards[::2] > rewards[1::2]).double().mean(),
        "rewards/margins": (rewards[::2] - rewards[1::2]).mean(),
        "logps/chosen": logps[::2].mean(),
        "logps/rejected": logps[1::2].mean(),
    }
    assert metrics == pytest.approx({name: float(value) for name, value in expected.items()}, rel=1e-12)
    assert loss.metrics() == {}


def test_log_odds_do_not_cancel() -> None:
    """Of a probability near 1, log(1 - exp x) in float64 has seven digits, and log(-expm1 x) all."""
    sure, other = -1e-9, -2.0
    halves = [Half(torch.tensor([x], dtype=torch.float64), torch.ones(1), None) for x in (sure, other)]
    odds = [x - math.log(-math.expm1(x)) for x in (sure, other)]
    lost = float(ORPO(1.0).of_pairs(*reversed(halves))) + other  # -log sigmoid(-d) is d, for a large d
    assert lost == pytest.approx(math.log1p(math.exp(odds[0] - odds[1])), rel=1e-12)


def test_the_auxiliary_loss_of_routers_counts_for_each_pair() -> None:
    logits, batch = torch.randn(8, 10, 64), pair_batch(4)
    plain = SimPO().total(logits, batch)
    more = SimPO().total({"logits": logits, "auxiliary_loss": torch.tensor(0.5)}, batch)
    torch.testing.assert_close(more, plain + 2)
    with refuses(ModelError, "prediction layers"):
        SimPO().total({"logits": logits, "mtp_logits": ()}, batch)


def changed(**entries: Any) -> dict[str, Any]:
    return {**pair_batch(2), "reference_logps": torch.zeros(4), **entries}


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in changed().items() if key != name}


def one_side() -> Tensor:
    labels = pair_batch(2)["labels"].clone()
    labels[3] = -100
    return labels


REFUSED = {
    "half a pair": (
        {name: value[:3] for name, value in changed().items()},
        "microbatch of 3 rows",
        "group of 2",
    ),
    "no labels": (without("labels"), "a batch of", "reads 'labels'"),
    "an empty completion": (changed(labels=one_side()), "row 3 with no label", "rejected row of pair 1"),
    "no reference": (without("reference_logps"), "a batch of", "DPO reads 'reference_logps'"),
    "whole numbers": (
        changed(reference_logps=torch.zeros(4, dtype=torch.long)),
        "given as",
        "tensor of floats",
    ),
    "too few": (changed(reference_logps=torch.zeros(2)), "given as [2]", "one for each of 4 rows"),
    "halves in blocks": (
        {name: value[[0, 2, 1, 3]] for name, value in changed().items()},
        "rows 0 and 1, with different prompts",
        "next to each other",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_rows_that_are_no_pairs_are_refused(name: str) -> None:
    batch, value, rule = REFUSED[name]
    with refuses(BatchError, value, rule):
        DPO().weight(batch)


def test_padding_on_the_left_is_no_part_of_a_prompt() -> None:
    batch = changed()
    mask = torch.ones_like(batch["input_ids"])
    rolled = {**batch, "attention_mask": mask}
    for name, pad in (("input_ids", 0), ("labels", -100), ("attention_mask", 0)):
        rolled[name] = rolled[name].clone()
        rolled[name][1] = torch.cat([torch.tensor([pad]), rolled[name][1, :-1]])
    assert DPO().weight(rolled) == 2
    with refuses(BatchError, "different prompts"):
        DPO().weight({**rolled, "attention_mask": mask})


def test_options_that_mean_nothing_are_refused() -> None:
    for make in (lambda: DPO(beta=0), lambda: ORPO(beta=-1), lambda: SimPO(beta=0)):
        with refuses(ConfigError, "beta"):
            make()
    with refuses(ConfigError, "variant='hinge'"):
        DPO(variant="hinge")  # type: ignore[arg-type]
    with refuses(ConfigError, "cp=2", "whole rows"):
        AutoPipeline(ranks=1, loss_fn=DPO(), axes=Axes(cp=2)).chosen_schedule()


def test_pairs_stay_whole_over_data_parallel_parts(pool: Pool) -> None:
    """Two pipelines, each with half of six pairs, in two microbatches of two pairs and one."""
    found = pool.run(4, on_two_parts)
    model, batch = tiny_model("llama", torch.float64), pair_batch(6)
    reference = plain_logps(model, batch)[0].detach() + torch.linspace(-1, 1, 12)
    expected, _ = plain_gradients(model, lambda: sigmoid(*plain_logps(model, batch), reference))
    for loss, metrics, logps in found:
        assert loss == pytest.approx(expected, rel=1e-12)
        assert metrics == found[0][1]
        assert metrics["rewards/margins"] == pytest.approx(0.3 * 2 / 11, rel=1e-6)
        assert len(logps) == 6


def on_two_parts() -> tuple[float, dict[str, float], list[float]]:
    """A step's loss, its metrics, and the log-probabilities of this part; every gradient is compared."""
    loss, whole = DPO(0.3), pair_batch(6)
    model = tiny_model("llama", torch.float64)
    reference = plain_logps(model, whole)[0].detach() + torch.linspace(-1, 1, 12)
    _, gradients = plain_gradients(model, lambda: sigmoid(*plain_logps(model, whole), reference))
    pipe = AutoPipeline(ranks=2, microbatches=2, loss_fn=loss, axes=Axes(dp_replicate=2), timeout=30).build(
        model
    )
    part, _ = pipe.batch_part
    mine = {name: value[6 * part : 6 * part + 6] for name, value in whole.items()}
    logps = pipe.logprobs(mine)
    torch.testing.assert_close(logps, plain_logps(model, mine)[0].detach(), rtol=1e-12, atol=1e-12)
    result = pipe.step({**mine, "reference_logps": reference[6 * part : 6 * part + 6]})
    own = {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in gradients_of(pipe).items()}
    assert_gradients(own, {name: gradients[name] for name in own}, 1e-10)
    return result.loss, loss.metrics(pipe.ranks.gather), logps.tolist()
