"""The loss of a large vocabulary in blocks equals that of whole logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.batch import head_logits
from penstock.batch.head_logits import HeadLogits
from penstock.batch.loss import IGNORED, NextToken

ROWS, SEQUENCE, WIDTH, VOCABULARY = 2, 5, 8, 23
Head = tuple[Tensor, Tensor, Tensor | None]


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 4 tokens of the vocabulary, the last of 3."""
    monkeypatch.setattr(head_logits, "HELD_BYTES", 4 * ROWS * (SEQUENCE - 1) * 4)


def head(dtype: torch.dtype = torch.float64, bias: bool = True) -> Head:
    torch.manual_seed(0)
    shapes = [(ROWS, SEQUENCE, WIDTH), (VOCABULARY, WIDTH), *([(VOCABULARY,)] if bias else [])]
    hidden, weight, *rest = [torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes]
    return hidden, weight, rest[0] if rest else None


def labels() -> Tensor:
    found = torch.randint(VOCABULARY, (ROWS, SEQUENCE))
    found[0, 2] = IGNORED
    return found


def backward(total: Tensor) -> None:
    total.backward()  # type: ignore[no-untyped-call]


def in_bfloat16() -> Head:
    hidden, weight, bias = head()
    assert bias is not None
    narrow = [tensor.detach().to(torch.bfloat16).requires_grad_() for tensor in (hidden, weight, bias)]
    return narrow[0], narrow[1], narrow[2]


FORWARDS: dict[str, Callable[[Any], Any]] = {
    "plain": lambda logits: logits,
    "scale": lambda logits: logits * 0.25,
    "soft cap": lambda logits: torch.tanh(logits / 3.0) * 3.0,
    "float": lambda logits: (2 * logits.float()).contiguous().to(torch.float64),
    "rows": lambda logits: logits[0:2],
}


def both(loss: NextToken, forward: Callable[[Any], Any], made: Callable[[], Head]) -> list[list[Tensor]]:
    """Loss and gradients with whole logits, and with HeadLogits."""
    found = []
    for kind in (F.linear, HeadLogits):
        hidden, weight, bias = made()
        total = loss.total(forward(kind(hidden, weight, bias)), {"labels": labels()})
        backward(total / 7)
        given = [tensor.grad for tensor in (hidden, weight, bias) if tensor is not None]
        found.append([total.detach(), *(gradient for gradient in given if gradient is not None)])
    return found


@pytest.mark.parametrize("forward", FORWARDS.values(), ids=FORWARDS)
@pytest.mark.parametrize("penalties", [(0, 0), (0.1, 0), (0, 1e-2), (0.2, 1e-3)], ids=str)
def test_loss_and_gradients_are_those_of_whole_logits(
    forward: Callable[[Any], Any], penalties: tuple[float, float]
) -> None:
    torch.manual_seed(1)
    whole, blocks = both(NextToken(*penalties), forward, head)
    assert len(whole) == len(blocks) == 4
    torch.testing.assert_close(blocks, whole, rtol=1e-12, atol=1e-12)


# counts _linear, the product of the head, which no public call shows
def test_a_recorded_forward_never_runs_the_head_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    linear = head_logits._linear

    def counting(*args: Any) -> Tensor:
        result = linear(*args)
        sizes.append(result.numel())
        return result

    monkeypatch.setattr(head_logits, "_linear", counting)
    monkeypatch.setattr(HeadLogits, "whole", lambda self: pytest.fail("whole logits"))
    logits = FORWARDS["soft cap"](HeadLogits(*head()))
    backward(NextToken().total(logits, {"labels": labels()}))
    assert set(sizes) == {ROWS * (SEQUENCE - 1) * 4, ROWS * (SEQUENCE - 1) * 3}
    assert len(sizes) == 2 * 6


def test_half_precision_is_summed_in_float32_and_no_worse_than_with_whole_logits() -> None:
    exact, _ = both(NextToken(), FORWARDS["plain"], head)
    whole, blocks = both(NextToken(), FORWARDS["plain"], in_bfloat16)
    assert blocks[0].dtype == torch.float32
    for mine, theirs, right in zip(blocks, whole, exact, strict=True):
        assert mine.dtype == theirs.dtype
        error, usual = (float((each.double() - right).norm()) for each in (mine, theirs))
        assert error < 1.5 * usual + 1e-3


USES: dict[str, Callable[[Any], Any]] = {
    "sum": lambda logits: logits.sum(-1),
    "argmax": lambda logits: logits.argmax(-1),
    "columns": lambda logits: logits[..., :3],
    "other tensor": lambda logits: logits * torch.arange(float(VOCABULARY)),
    "from the left": lambda logits: torch.ones(VOCABULARY) + logits,
    "in place": lambda logits: logits.div_(3.0) + logits.mul_(2.0).sum(),
    "entries": lambda logits: [logits.__setitem__((slice(None), 0), 0.0), logits * 2][1],
    "after use": lambda logits: [logits.zero_(), logits * 2, logits[:, :2]][1:],
    "of the class": lambda logits: logits.softmax(-1).log(),
    "list": lambda logits: torch.cat([logits, logits]),
    "numpy": lambda logits: torch.from_numpy(logits.detach().numpy()),
    "transposed": lambda logits: logits.mT,
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_any_other_use_has_plain_logits(use: Callable[[Any], Any]) -> None:
    hidden, weight, bias = (None if t is None else t.detach() for t in head(torch.float32))
    assert hidden is not None
    assert weight is not None
    expected, found = use(F.linear(hidden, weight, bias)), use(HeadLogits(hidden, weight, bias))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert type(found[0] if isinstance(found, list) else found) is Tensor


def test_facts_need_no_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HeadLogits, "whole", lambda self: pytest.fail("whole logits"))
    logits = HeadLogits(*head())
    assert (logits.shape, logits.dtype, logits.dim(), len(logits)) == (
        (ROWS, SEQUENCE, VOCABULARY), torch.float64, 3, ROWS
    )  # fmt: skip
    assert logits[:, 1:].shape == (ROWS, SEQUENCE - 1, VOCABULARY)
    assert (logits.float() / 2).dtype == torch.float32
    assert logits.requires_grad
    assert "HeadLogits" in repr(logits)


def test_frozen_weights_get_no_gradient() -> None:
    hidden, weight, bias = head()
    assert bias is not None
    backward(NextToken().total(HeadLogits(hidden, weight.detach(), bias.detach()), {"labels": labels()}))
    assert hidden.grad is not None
    frozen = HeadLogits(hidden.detach(), weight, bias)
    hidden.grad = None
    backward(NextToken().total(frozen, {"labels": labels()}))
    assert weight.grad is not None
    assert hidden.grad is None


@pytest.mark.parametrize("name", ["labels", "shift_labels"])
def test_a_change_in_place_counts(name: str) -> None:
    """Whichever labels a batch has, and so whether the logits are sliced."""
    torch.manual_seed(0)
    hidden = torch.randn(2, 5, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(7, 4, dtype=torch.float64, requires_grad=True)
    microbatch = {"labels": torch.randint(7, (2, 5))}
    if name == "shift_labels":
        microbatch = {name: microbatch["labels"]}
    gradients = []
    for logits in (HeadLogits(hidden, weight), torch.nn.functional.linear(hidden, weight)):
        logits[..., -1] = -5.0
        logits.mul_(3.0)
        total = NextToken().total({"logits": logits}, microbatch)
        gradients.append((total, *torch.autograd.grad(total, (hidden, weight))))
    for deferred, whole in zip(*gradients, strict=True):
        torch.testing.assert_close(deferred, whole, rtol=1e-12, atol=1e-12)
