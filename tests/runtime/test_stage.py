"""What a stage holds between a forward and its backward, and when it lets go."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.batch.payload import EdgeSpecs, Payload, TensorSpec, declared, flatten
from penstock.batch.shapes import Microbatch
from penstock.runtime.sharded_weights import FSDPGradients
from penstock.runtime.stage import Stage
from penstock.runtime.stage_part import Forward


class Residual(nn.Module):
    """Its output is a sum, which autograd does not save."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=torch.float64)

    def __call__(self, received: tuple[Any, ...], microbatch: Microbatch) -> Tensor:
        (hidden,) = received
        result: Tensor = hidden + self.linear(hidden)
        return result


def payload(value: Any) -> Payload:
    """As it comes from another stage, where every floating-point tensor had a gradient."""
    tensors, form = flatten(value)
    return Payload(tensors, EdgeSpecs(tuple(TensorSpec(t.shape, t.dtype) for t in tensors), form))


def test_a_sent_output_is_not_kept_alive() -> None:
    stage = Stage(0, module := Residual(), module)
    (output,) = stage.forward(0, payload(torch.ones(2, 4, dtype=torch.float64)), {}).tensors
    gone = weakref.ref(output.untyped_storage())
    del output
    assert gone() is None
    (gradient,) = stage.backward(0, [torch.ones(2, 4, dtype=torch.float64)])
    expected = 1 + module.linear.weight.sum(0)
    torch.testing.assert_close(gradient, expected.expand(2, 4).detach())
    assert stage.live == {}


@pytest.mark.parametrize("split", [False, True])
def test_a_received_tensor_that_is_passed_on_unchanged(split: bool) -> None:
    stage = Stage(1, nn.Identity(), lambda received, microbatch: received[0])
    stage.forward(0, payload(torch.ones(3)), {}, how=Forward(split))
    backward = stage.input_backward if split else stage.backward
    (gradient,) = backward(0, [torch.full((3,), 5.0)])
    assert gradient.tolist() == [5.0] * 3


def test_an_input_that_the_output_does_not_use_gets_zeros() -> None:
    stage = Stage(1, nn.Identity(), lambda received, microbatch: received[0][0] * 2)
    stage.forward(0, payload((torch.ones(2), torch.ones(3))), {})
    used, unused = stage.backward(0, [torch.ones(2)])
    assert (used.tolist(), unused.tolist()) == ([2.0, 2.0], [0.0, 0.0, 0.0])


def test_integers_cross_without_gradients() -> None:
    def scaled(received: tuple[Any, ...], microbatch: Microbatch) -> Any:
        hidden, whole = received[0]
        return hidden * whole, whole

    stage = Stage(1, nn.Identity(), scaled)
    outputs = stage.forward(0, payload((torch.ones(2), torch.tensor([3, 4]))), {}).tensors
    assert outputs[1].dtype == torch.int64
    gradients = stage.backward(0, [torch.ones(2)])
    assert [g.tolist() for g in gradients] == [[3.0, 4.0]]


def test_a_stage_that_trains_nothing() -> None:
    stage = Stage(0, nn.Identity(), lambda received, microbatch: microbatch["x"])
    stage.forward(0, None, {"x": torch.ones(2)})  # no gradient comes back
    assert stage.backward(0, []) == ()
    stage.forward(1, None, {"x": torch.ones(2)}, declared(torch.ones(2)))  # it expects to send one
    assert stage.backward(1, [torch.ones(2)]) == ()


def test_where_fsdp_reduces_in_the_backward_nothing_is_deferred(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its reduction would come before W; tests/runtime/split_backward/test_backward.py has the real one."""
    monkeypatch.setattr(FSDPGradients, "reduces_in_backward", property(lambda self: True))
    stage = Stage(0, module := Residual(), module)
    stage.forward(0, payload(torch.ones(2, 4, dtype=torch.float64)), {}, how=Forward(split=True))
    stage.input_backward(0, [torch.ones(2, 4, dtype=torch.float64)])
    assert stage.deferred[0].nbytes == 0
    assert module.linear.weight.grad is not None
    whole = module.linear.weight.grad.clone()
    stage.weight_backward(0)
    assert torch.equal(module.linear.weight.grad, whole)
    assert stage.left_over == 0
