"""The executor agrees with every verdict: what is proven runs exactly, and what is refused could not."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor, nn

from penstock.batch.microbatches import StepInput
from penstock.batch.payload import EdgeSpecs, TensorSpec
from penstock.batch.shapes import Microbatch
from penstock.errors import ScheduleError
from penstock.runtime.executor import Executor, run_together
from penstock.runtime.plan import lower
from penstock.runtime.recorder import Recorder
from penstock.runtime.stage import Stage
from penstock.runtime.transport.interface import LocalTransport
from penstock.schedule import Proof, Schedule, verify
from penstock.schedule.op_arrays import OpArrays
from support.programs import perhaps_broken

WIDTH = 2


class Layer(nn.Module):
    """The first stage of a copy reads the microbatch."""

    def __init__(self, place: int) -> None:
        super().__init__()
        torch.manual_seed(place)
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def __call__(self, received: tuple[Tensor, ...], microbatch: Microbatch) -> Tensor:
        hidden = received[0] if received else microbatch["x"]
        return torch.tanh(self.linear(hidden))


class Sum:
    def weight(self, microbatch: Microbatch) -> int:
        return 1

    def total(self, output: Tensor, microbatch: Microbatch) -> Tensor:
        return output.square().sum()


def microbatches(count: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(count)
    return [{"x": torch.randn(1, WIDTH, generator=generator, dtype=torch.float64)} for _ in range(count)]


def edge(stage: int, microbatch: Microbatch) -> EdgeSpecs:
    return EdgeSpecs((TensorSpec((1, WIDTH), torch.float64),))


def run(schedule: Schedule, proof: Proof) -> list[nn.Module]:
    """One step on this process's executor, by stage; AssertionError where anything is left over."""
    depth = schedule.placement.depth
    stages = {s: Stage(s, layer := Layer(s % depth), layer) for s in range(schedule.stages)}
    transport = LocalTransport()
    executors = [
        Executor(
            lower(proof, rank),
            {stage: stages[stage] for stage in schedule.placement.stages_of(rank)},
            edge,
            Sum(),
            transport,
            Recorder(torch.device("cpu")),
        )
        for rank in range(schedule.ranks)
    ]
    run_together(executors, StepInput(microbatches(schedule.microbatches), 1))
    assert sum(executor.left_over for executor in executors) + transport.messages.pending == 0
    assert tuple(executor.memory.peak_live for executor in executors) == proof.peak_live
    return [stages[stage].module for stage in range(schedule.stages)]


def exact(schedule: Schedule, modules: list[nn.Module]) -> bool:
    """Whether every gradient, summed over the copies of the model, is a plain process's."""
    depth = schedule.placement.depth
    reference = [Layer(place) for place in range(depth)]
    for microbatch in microbatches(schedule.microbatches):
        hidden: tuple[Tensor, ...] = ()
        for layer in reference:
            hidden = (layer(hidden, microbatch),)
        Sum().total(hidden[0], microbatch).backward()  # type: ignore[no-untyped-call]
    for place, layer in enumerate(reference):
        for name, parameter in layer.named_parameters():
            copies = [modules[s].get_parameter(name).grad for s in range(place, schedule.stages, depth)]
            found = sum(copy for copy in copies if copy is not None)
            assert parameter.grad is not None
            right = isinstance(found, Tensor) and torch.allclose(found, parameter.grad, 1e-10, 1e-13)
            if not right:
                return False
    return True


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(perhaps_broken(always_trains=True))
def test_the_executor_agrees_with_the_verdict(schedule: Schedule) -> None:
    agree(schedule)


@pytest.mark.sweep
@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(perhaps_broken(always_trains=True))
def test_the_executor_agrees_with_many_verdicts(schedule: Schedule) -> None:
    agree(schedule)


def agree(schedule: Schedule) -> None:
    """Raise AssertionError unless the executor ends, and is exact, where the verifier accepts alone."""
    try:
        proof = verify(schedule)
    except ScheduleError:
        peaks = (10**6,) * schedule.ranks
        unproven = Proof(schedule, peaks, peaks, OpArrays.of(schedule), [])
        with pytest.raises((AssertionError, KeyError, IndexError, StopIteration, RuntimeError, TypeError)):
            assert exact(schedule, run(schedule, unproven))
    else:
        modules = run(schedule, proof)
        if schedule.trains:
            assert exact(schedule, modules)
        else:  # all backwards were dropped, so that it is one for inference
            assert all(parameter.grad is None for module in modules for parameter in module.parameters())
