from __future__ import annotations

import torch
from transformers.loss.loss_utils import ForCausalLMLoss

from penstock.batch.loss import MeanOverRows, NextToken, TokenLabels, total_of
from penstock.errors import BatchError, ModelError
from support.refusals import refuses


def test_next_token_is_the_loss_of_transformers() -> None:
    logits, labels = torch.randn(3, 7, 11), torch.randint(0, 11, (3, 7))
    labels[0, 3:] = -100
    loss, microbatch = NextToken(), {"labels": labels}
    mean = loss.total(logits, microbatch) / loss.weight(microbatch)
    torch.testing.assert_close(mean, ForCausalLMLoss(logits, labels, vocab_size=11))


def test_the_first_label_predicts_nothing() -> None:
    labels = torch.full((2, 5), -100)
    labels[:, 0] = 3
    assert NextToken().weight({"labels": labels}) == 0


def test_shifted_labels_go_before_labels() -> None:
    """As in transformers; a loss of each token's own label takes none."""
    logits, labels = torch.randn(2, 5, 11), torch.randint(0, 11, (2, 5))
    shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    both = {"labels": torch.zeros_like(labels), "shift_labels": shifted}
    NextToken().check(both, 11)
    assert NextToken().weight(both) == 8
    loss = NextToken().total(logits, both)
    torch.testing.assert_close(loss, NextToken().total(logits, {"labels": labels}))
    with refuses(BatchError, "shift_labels in a batch"):
        TokenLabels().check(both, 11)


def test_half_precision_is_summed_in_float32() -> None:
    logits, labels = torch.randn(2, 400, 50), torch.randint(0, 50, (2, 400))
    half = NextToken().total(logits.bfloat16(), {"labels": labels})
    assert half.dtype == torch.float32
    torch.testing.assert_close(half, NextToken().total(logits.bfloat16().float(), {"labels": labels}))
    assert NextToken().total(logits.double(), {"labels": labels}).dtype == torch.float64


def test_labels_are_asked_for() -> None:
    with refuses(BatchError, rule="reads 'labels'"):
        NextToken().weight({"input_ids": torch.zeros(1, 2)})


def test_a_mean_is_weighted_by_its_rows() -> None:
    loss = MeanOverRows(lambda output, microbatch: output.mean(), lambda microbatch: 5)
    assert float(loss.total(torch.full((5,), 2.0), {})) == 10.0
    with refuses(ModelError, rule="one number"):
        MeanOverRows(lambda output, microbatch: output, lambda microbatch: 5).total(torch.zeros(5), {})


def test_a_function_of_three_arguments_is_given_the_number() -> None:
    def third(output: torch.Tensor, microbatch: object, number: int) -> torch.Tensor:
        return output.mean() * number

    def second(output: torch.Tensor, microbatch: object, scale: float = 1.0) -> torch.Tensor:
        return output.mean() * scale

    output = torch.full((5,), 2.0)
    assert float(total_of(MeanOverRows(third, lambda microbatch: 5), output, {}, 3)) == 30.0
    assert float(total_of(MeanOverRows(second, lambda microbatch: 5), output, {}, 3)) == 10.0
    builtin = MeanOverRows(torch.dot, lambda microbatch: 1)  # whose signature is not known
    assert not builtin.takes_number
    assert float(builtin.total(output, output)) == 20.0  # type: ignore[arg-type]
