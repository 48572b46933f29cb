"""The base of losses of rows: log-probabilities stand at their own tokens, and means are over all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from penstock import AutoPipeline, Axes
from penstock.batch.distillation import Distillation
from penstock.batch.grpo import GRPO
from penstock.batch.kto import KTO
from penstock.batch.loss import HostLoss, Loss, MeanOverRows, counted_rows
from penstock.batch.preferences import DPO, Reward
from penstock.batch.row_loss import row_logps, token_logps
from penstock.errors import ConfigError, ModelError
from support.refusals import refuses


def test_a_log_probability_stands_at_the_token_that_it_is_of() -> None:
    logits, labels = torch.randn(2, 4, 5), torch.tensor([[1, 2, -100, 3], [-100, -100, 4, 0]])
    expected = torch.zeros(2, 4)
    for row, at, label in ((0, 1, 2), (0, 3, 3), (1, 2, 4), (1, 3, 0)):
        expected[row, at] = logits[row, at - 1].log_softmax(-1)[label]
    of_tokens, counted = token_logps(logits, labels)
    torch.testing.assert_close(of_tokens, expected)
    assert torch.equal(counted, expected != 0)
    sums, tokens = row_logps(logits, labels)
    torch.testing.assert_close(sums, expected.sum(1))
    assert tokens.tolist() == [2, 2]


def test_means_are_over_all_ranks_and_a_name_that_nothing_counted_is_left_out() -> None:
    loss = KTO()
    for total in (1.0, 3.0):
        loss.keep([torch.tensor(total)] * 5, [torch.tensor(count) for count in (2.0, 0.0, 2.0, 0.0, 4.0)])
    other = [[8.0] * 5, [4.0, 0.0, 4.0, 0.0, 8.0]]
    means = loss.metrics(lambda own: [own, None, other])
    assert means == pytest.approx({"rewards/chosen": 1.5, "logps/chosen": 1.5, "kl": 0.75})
    assert loss.metrics(lambda own: [own]) == {}


@pytest.mark.parametrize("loss", [KTO(), GRPO(), Distillation(), DPO()])
def test_a_row_counts_if_a_label_after_its_first_one_does(loss: HostLoss) -> None:
    labels = torch.tensor([[5, -100, -100], [-100, 5, -100], [-100, -100, -100], [1, 2, 3]])
    assert counted_rows(loss, {"labels": labels}).tolist() == [False, True, False, True]


class Users:
    """A loss of a user, which says nothing about rows."""

    def weight(self, microbatch: dict[str, Any]) -> int:
        return 1

    def total(self, output: Any, microbatch: dict[str, Any]) -> torch.Tensor:
        return torch.zeros(())


@pytest.mark.parametrize("loss", [Reward(), Users(), MeanOverRows(lambda output, microbatch: output, len)])
def test_every_row_counts_of_a_loss_without_labels(loss: Loss) -> None:
    batch = {name: torch.full((2, 3), -100) for name in ("input_ids", "labels")}
    assert counted_rows(loss, batch).tolist() == [True, True]


def test_a_part_of_a_row_is_refused() -> None:
    for loss in (KTO(), GRPO(), Distillation()):
        with refuses(ConfigError, "cp=2", "whole rows"):
            AutoPipeline(ranks=1, loss_fn=loss, axes=Axes(cp=2)).chosen_schedule()
    with refuses(ModelError, "prediction layers", "next tokens"):
        KTO().total({"logits": torch.zeros(1, 2, 3), "mtp_logits": ()}, {})
