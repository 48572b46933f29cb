"""Two copies of the model in one pipeline: equal from the start, and equal after every step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock import Pipeline
from penstock.batch.shapes import Microbatch
from penstock.errors import ModelError
from penstock.models.stage import StageInfo
from penstock.pipeline.steps import shared_gradients
from penstock.schedule import Placement, Schedule, both_ways
from support import jobs
from support.pool import Pool
from support.programs import written
from support.refusals import refuses

# microbatches 0 and 2 go from rank 0 to rank 1, microbatch 1 the other way
BOTH_WAYS = written(both_ways(2), 3, "0F0 0F2 3F1 3B1 0B0 0B2", "2F1 1F0 1I0 1W0 1F2 1B2 2B1")


class Part(nn.Module):
    """Initialised from torch's own random state, so that copies start apart; one weight is never used."""

    def __init__(self, info: StageInfo) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3, dtype=torch.float64)
        self.unused = nn.Parameter(torch.ones(2, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


def mean_square(output: Tensor, microbatch: Microbatch) -> Tensor:
    return F.mse_loss(output, microbatch["y"], reduction="sum") / output.shape[0]


def batch() -> dict[str, Tensor]:
    x = torch.linspace(-1, 1, 21, dtype=torch.float64).reshape(7, 3)
    return {"x": x, "y": x.flip(0)}


def made(provider: Any = Part, schedule: Schedule = BOTH_WAYS, **options: Any) -> Pipeline:
    return Pipeline.from_provider(provider, schedule=schedule, loss_fn=mean_square, **options)


def reference(pipe: Pipeline) -> tuple[float, list[nn.Module]]:
    """A plain process with the values of the first copy; the loss and modules with gradients."""
    whole = [Part(StageInfo(stage, 2)) for stage in range(2)]
    for stage, part in enumerate(whole):
        part.load_state_dict(pipe.modules[stage].state_dict())
    loss = mean_square(nn.Sequential(*whole)(batch()["x"]), batch())
    loss.backward()  # type: ignore[no-untyped-call]
    return float(loss.detach()), list(whole)


class Unread(Tensor):
    def tolist(self) -> Any:
        raise AssertionError("the host waits for the GPU")


def test_whether_other_copies_were_used_is_read_only_where_it_matters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """0.5.0: each step waited for it."""
    monkeypatch.setattr(shared_gradients, "to_device", lambda tensor, device: tensor.as_subclass(Unread))
    pipe = made()
    for module in pipe.modules.values():
        module.unused.requires_grad_(False)
    pipe.step(batch())
    with pytest.raises(AssertionError, match="waits for the GPU"):
        made().step(batch())  # with a weight that no stage uses


def test_copies_start_equal_and_get_the_sum_of_the_gradients() -> None:
    pipe = made()
    modules = pipe.modules
    for stage in (0, 1):
        for one, other in zip(modules[stage].parameters(), modules[stage + 2].parameters(), strict=True):
            assert torch.equal(one, other)
            assert one is not other
    loss, whole = reference(pipe)
    assert pipe.step(batch()).loss == pytest.approx(loss, rel=1e-12)
    for stage, module in modules.items():
        for name, parameter in module.named_parameters():
            expected = whole[stage % 2].get_parameter(name).grad
            if expected is None:
                assert parameter.grad is None, name
            else:
                torch.testing.assert_close(parameter.grad, expected, rtol=1e-10, atol=0)
    assert pipe.timeline.peak_live == pipe.proof.peak_live
    assert pipe.evaluate(batch()).loss == pytest.approx(loss, rel=1e-12)


def test_gradients_of_several_steps_add_up() -> None:
    pipe = made()
    _, whole = reference(pipe)
    pipe.step(batch())
    pipe.step(batch())
    for stage, module in pipe.modules.items():
        torch.testing.assert_close(
            module.get_parameter("linear.weight").grad,
            2 * whole[stage % 2].get_parameter("linear.weight").grad,  # type: ignore[operator]
        )


def test_a_copy_counts_once_in_the_norm_and_stays_equal_under_an_optimizer() -> None:
    pipe = made()
    _, whole = reference(pipe)
    pipe.step(batch())
    norm = nn.utils.clip_grad_norm_([p for part in whole for p in part.parameters()], 1e9)
    assert pipe.clip_grad_norm_(1e9) == pytest.approx(float(norm), rel=1e-12)
    torch.optim.AdamW(pipe.parameters(), lr=0.1).step()
    for stage in (0, 1):
        first, second = pipe.modules[stage], pipe.modules[stage + 2]
        assert all(map(torch.equal, first.parameters(), second.parameters()))


def test_a_rank_whose_copy_gets_no_microbatch() -> None:
    """0.2.0: such a step ended in "max() arg is an empty sequence": the bubble took an op of every rank."""
    pipe = made(schedule=written(Placement((0, 1), 2), 1, "0F0 0B0", ""))
    result = pipe.step(batch())
    assert pipe.evaluate(batch()).loss == pytest.approx(result.loss, rel=1e-12)
    assert pipe.timeline.bubble == pytest.approx(result.bubble)
    assert result.bubble >= 0.5
    first, second = (module.get_parameter("linear.weight").grad for module in pipe.modules.values())
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def test_a_tied_weight_of_which_one_copy_is_frozen_is_refused_on_all_ranks(pool: Pool) -> None:
    """0.5.0: the copies went apart, or the other rank waited for its part of the gradient."""
    for errors in (jobs.frozen_copies(), *pool.run(2, jobs.frozen_copies)):
        for text in errors:
            assert text.startswith(
                "model.embed_tokens.weight of stage 0 frozen, and lm_head.weight of stage 1 not: "
            )


def test_a_stage_of_which_one_copy_is_frozen_is_refused() -> None:
    def freeze_all_but_the_first(module: nn.Module) -> nn.Module:
        seen.append(module.requires_grad_(not seen))
        return module

    seen: list[nn.Module] = []
    with refuses(ModelError, "unused of stage 2 frozen, and unused of stage 0 not"):
        made(parallelize_fn=freeze_all_but_the_first)
    pipe = made()
    frozen = pipe.modules[3].get_parameter("linear.bias").requires_grad_(False)
    with refuses(ModelError, "linear.bias of stage 3 frozen, and linear.bias of stage 1 not"):
        pipe.step(batch())
    pipe.modules[1].get_parameter("linear.bias").requires_grad_(False)
    pipe.zero_grad()
    pipe.step(batch())
    assert frozen.grad is None


def test_over_gloo(pool: Pool) -> None:
    """Each rank holds stage 0 of one copy and stage 1 of the other."""
    found = pool.run(2, jobs.replicas)
    pipe = made()
    for values, gradients, loss, norm in found:
        for stage, state in values.items():
            pipe.modules[stage].load_state_dict(state)
        assert found[0][2:] == (loss, norm)
        for stage in gradients:
            other = found[1 - pipe.schedule.placement.rank_of[stage]][1][(stage + 2) % 4]
            assert all(map(torch.equal, gradients[stage], other))
    loss, whole = reference(pipe)
    assert found[0][2] == pytest.approx(loss, rel=1e-12)
    for stage, gradients in found[0][1].items():
        expected = [p.grad for p in whole[stage % 2].parameters() if p.grad is not None]
        for one, other in zip(gradients, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=0)


def test_copies_begin_with_the_values_of_one_of_them() -> None:
    values: list[Tensor] = []

    def provider(info: StageInfo) -> nn.Module:
        part = Part(info)
        values.append(part.linear.weight.detach().clone())
        return part

    pipe = made(provider)
    for module in pipe.modules.values():
        assert any(torch.equal(module.get_parameter("linear.weight"), value) for value in values)


def test_a_copy_that_was_replaced_is_refused() -> None:
    """0.5.0: gradients were summed into the parameter that was there before, and the new one kept its own."""
    pipe = made()
    pipe.step(batch())
    state = {name: value.clone() for name, value in pipe.modules[1].state_dict().items()}
    pipe.modules[1].load_state_dict(state, assign=True)
    with refuses(ModelError, "of stage 1, another parameter than"):
        pipe.step(batch())


class Counting(Part):
    def __init__(self, info: StageInfo) -> None:
        super().__init__(info)
        self.register_buffer("runs", torch.zeros(()))
        self.runs: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        return super().forward(x)


def test_buffers_that_a_forward_writes_into_are_refused_in_two_copies() -> None:
    """0.5.0: the copies' buffers went apart, and the first copy's were saved."""
    with refuses(ModelError, "runs of stage 0, a buffer that the forward writes into"):
        made(Counting).step(batch())
