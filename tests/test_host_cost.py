"""What a step costs the host, by counts that no machine changes."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from benchmarks import host

from support.covering import every

# calls of Python an op, beyond a plain loop's: what they are now, and some more for other versions of Python
CALLS = every(3, [("zb_h1", 108), ("1f1b", 93), ("zb_v", 110)])


@pytest.mark.parametrize(("schedule", "most"), CALLS)
def test_a_step_makes_few_calls_and_no_run_of_the_engine_for_w(schedule: str, most: int) -> None:
    """0.5.0: a function mode saw every call of a forward, and each W ran the engine for each weight.

    Beyond a plain loop these were 447 calls an op in zb_h1.
    """
    pipe, whole, rows = host.pipeline(schedule), host.model(), host.batch()
    pipe.step(rows)  # learns where products are
    host.loop(whole, rows)
    kinds = Counter(op.kind for program in pipe.schedule.programs for op in program)
    assert host.engine_runs(lambda: pipe.step(rows)) == kinds["B"] + kinds["I"]
    beyond = host.python_calls(lambda: pipe.step(rows)) - host.python_calls(lambda: host.loop(whole, rows))
    assert beyond / host.ops(pipe) <= most
    pipe.zero_grad()
    assert host.engine_runs(lambda: pipe.step(rows)) == kinds["B"] + kinds["I"]  # the first gradients too


@pytest.mark.parametrize("schedule", every(4, host.SCHEDULES))
def test_the_stages_by_hand_give_the_loops_gradients(schedule: str) -> None:
    """Else they would be no measure of what a step has to cost."""
    pipe, whole, rows = host.pipeline(schedule), host.model(), host.batch()
    host.ByHand(pipe, rows).step()
    host.loop(whole, rows)
    expected = dict(whole.named_parameters())
    found = dict(pipe.named_parameters())
    assert found.keys() == expected.keys()
    for name, parameter in found.items():
        torch.testing.assert_close(parameter.grad, expected[name].grad, msg=name)
