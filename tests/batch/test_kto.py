"""KTO: its formula in plain torch over any split, TRL's trainer step by step, and what is refused."""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock import AutoPipeline
from penstock.batch.kto import KTO, divergence, mismatched
from penstock.errors import BatchError, ConfigError
from penstock.train.encoding.tokenizer import HuggingFace
from support.families import tiny_model
from support.pairs import pair_batch, plain_gradients, plain_logps
from support.reference import assert_gradients, gradients_of
from support.refusals import refuses
from support.trl import ROWS, trl_settings, trl_steps

DESIRABLE = torch.tensor([True, True, False, True, False, False, True])


def unpaired(rows: int = 7) -> dict[str, Tensor]:
    """Rows of their own prompts and completions of several lengths."""
    batch = {name: value[:rows] for name, value in pair_batch(4).items()}
    return {**batch, "desirable": DESIRABLE[:rows]}


@pytest.mark.parametrize("microbatches", [1, 3, 7])
def test_every_gradient_is_that_of_the_formula_in_one_process(microbatches: int) -> None:
    loss, model, batch = KTO(0.3, 1.3, 0.7), tiny_model("llama", torch.float64), unpaired()
    reference = plain_logps(model, batch)[0].detach() + torch.linspace(-2, 2, 7)
    kl = 0.7

    def formula() -> Tensor:
        ratio = plain_logps(model, batch)[0] - reference
        good = 1.3 * (1 - torch.sigmoid(0.3 * (ratio - kl)))
        bad = 0.7 * (1 - torch.sigmoid(0.3 * (kl - ratio)))
        return torch.where(DESIRABLE, good, bad).mean()

    expected, gradients = plain_gradients(model, formula)
    pipe = AutoPipeline(ranks=2, microbatches=microbatches, loss_fn=loss).build(model)
    step = pipe.step(batch, reference_logps=reference, kl=kl)
    assert step.loss == pytest.approx(expected, rel=1e-12)
    assert step.tokens == 7
    assert_gradients(gradients_of(pipe), gradients, 1e-10)
    metrics, logps = loss.metrics(), plain_logps(model, batch)[0].detach()
    rewards = 0.3 * (logps - reference)
    good, bad = rewards[DESIRABLE].mean(), rewards[~DESIRABLE].mean()
    assert metrics["kl"] == pytest.approx(kl)
    assert metrics["rewards/chosen"] == pytest.approx(float(good), rel=1e-9)
    assert metrics["rewards/margins"] == pytest.approx(float(good - bad), rel=1e-9)
    assert metrics["logps/rejected"] == pytest.approx(float(logps[~DESIRABLE].mean()), rel=1e-9)
    assert loss.metrics() == {}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="trl is not installed")
def test_steps_are_those_of_trls_trainer(tmp_path: Path) -> None:
    """Losses, rewards, KL terms and every gradient of three steps of KTOTrainer."""
    from trl import KTOConfig, KTOTrainer

    said = [("q" * (1 + at % 3), "abc"[at % 3] * (3 + at % 7), at % 3 != 1) for at in range(3 * ROWS)]
    rows = [{"prompt": p, "completion": c, "label": label} for p, c, label in said]
    own, trained = HuggingFace("bytes").own, tiny_model("llama", vocab_size=258)
    own.pad_token = own.eos_token
    options = {"learning_rate": 0.05, "desirable_weight": 1.5, "train_sampling_strategy": "sequential"}
    settings = trl_settings(KTOConfig, tmp_path, beta=0.1, **options)
    gradients, logs = trl_steps(KTOTrainer, settings, trained, rows, own, ref_model=copy.deepcopy(trained))
    loss = KTO(0.1, desirable_weight=1.5)
    pipe = AutoPipeline(ranks=2, microbatches=3, loss_fn=loss).build(tiny_model("llama", vocab_size=258))
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.05)
    batches = [batch_of(said[at : at + ROWS], own) for at in range(0, len(said), ROWS)]
    others = [mismatched(batch) for batch in batches]
    both = [*zip(batches, others, strict=True)]
    references = [(pipe.logprobs(batch), pipe.logprobs(other)) for batch, other in both]
    terms = []
    for (batch, other), (reference, of_other), expected, log in zip(
        both, references, gradients, logs, strict=True
    ):
        optimizer.zero_grad()
        terms.append(divergence(pipe.logprobs(other), of_other, pipe.ranks.gather))
        result, metrics = pipe.step(batch, reference_logps=reference, kl=terms[-1]), loss.metrics()
        assert result.loss == pytest.approx(log["loss"], rel=1e-5)
        for name in ("kl", "rewards/chosen", "rewards/rejected", "rewards/margins", "logps/chosen"):
            assert metrics[name] == pytest.approx(log[name], rel=1e-4, abs=1e-5), name
        assert_gradients(gradients_of(pipe), expected, 1e-4)
        optimizer.step()
    assert max(terms) > 0.01  # the KL term mattered


def batch_of(rows: list[tuple[str, str, bool]], tokenizer: Any) -> dict[str, Tensor]:
    texts = [
        (tokenizer(p)["input_ids"], tokenizer(p + c + tokenizer.eos_token)["input_ids"]) for p, c, _ in rows
    ]
    length = max(len(ids) for _, ids in texts)
    ids = torch.tensor([ids + [tokenizer.pad_token_id] * (length - len(ids)) for _, ids in texts])
    labels = [[-100] * len(p) + ids[len(p) :] + [-100] * (length - len(ids)) for p, ids in texts]
    return {
        "input_ids": ids,
        "labels": torch.tensor(labels),
        "desirable": torch.tensor([d for *_, d in rows]),
    }


def test_mismatched_rows_have_the_completion_of_the_row_before() -> None:
    ids = torch.tensor([[1, 2, 11, 12, 0], [0, 3, 21, 0, 0], [4, 31, 32, 33, 0]])
    labels = torch.tensor(
        [[-100, -100, 11, 12, -100], [-100, -100, 21, -100, -100], [-100, 31, 32, 33, -100]]
    )
    mask = torch.tensor([[1, 1, 1, 1, 0], [0, 1, 1, 0, 0], [1, 1, 1, 1, 0]])
    other = mismatched({"input_ids": ids, "labels": labels, "attention_mask": mask})
    assert other["input_ids"].tolist() == [[1, 2, 31, 32, 33], [3, 11, 12, 0, 0], [4, 21, 0, 0, 0]]
    assert other["labels"].tolist() == [
        [-100, -100, 31, 32, 33], [-100, 11, 12, -100, -100], [-100, 21, -100, -100, -100]
    ]  # fmt: skip
    assert other["attention_mask"].sum(1).tolist() == [5, 3, 2]
    assert mismatched({"input_ids": ids, "labels": labels}).keys() == {"input_ids", "labels"}
    with refuses(BatchError, "row 1 with no label"):
        mismatched({"input_ids": ids, "labels": labels.index_fill(0, torch.tensor([1]), -100)})


def test_the_divergence_is_a_mean_over_all_parts_and_at_least_0() -> None:
    first, second = torch.tensor([1.0, 2.0]), torch.tensor([6.0])
    other = [float(second.sum()), 1]
    assert divergence(first, torch.zeros(2), lambda own: [own, other]) == pytest.approx(3.0)
    assert divergence(-first, torch.zeros(2)) == 0


def changed(**entries: Any) -> dict[str, Any]:
    batch = {**unpaired(4), "reference_logps": torch.zeros(4), "kl": 0.0, **entries}
    return {name: value for name, value in batch.items() if value is not None}


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "no word of desire": ({"desirable": None}, "without 'desirable'", "a boolean for each of 4 rows"),
    "numbers": ({"desirable": torch.ones(4)}, "given as [4] of torch.float32", "a boolean for each"),
    "a list": ({"desirable": [True] * 4}, "given as list", "a boolean for each"),
    "no reference": ({"reference_logps": None}, "a batch of", "KTO reads 'reference_logps'"),
    "no term": ({"kl": None}, "without 'kl'", "mismatched rows"),
    "below 0": ({"kl": -0.1}, "kl=-0.1", "0 or more"),
    "not a number": ({"kl": float("nan")}, "kl=nan", "0 or more"),
    "nothing to compare": ({"labels": torch.full((4, 10), -100)}, "row 0 with no label", "no token"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_rows_that_cannot_be_compared_are_refused(name: str) -> None:
    entries, *said = REFUSED[name]
    assert KTO().weight(changed()) == 4
    with refuses(BatchError, *said):
        KTO().weight(changed(**entries))


def test_options_that_mean_nothing_are_refused() -> None:
    with refuses(ConfigError, "desirable_weight=0"):
        KTO(desirable_weight=0)
