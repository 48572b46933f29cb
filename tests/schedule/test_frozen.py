"""Stages that train nothing: their backwards are whole, and the schedule stays a valid one."""

from __future__ import annotations

import pytest

from penstock.schedule import build, verify
from penstock.schedule.frozen import without_weight_gradients


def test_a_frozen_stage_has_b_in_the_place_of_i_and_no_w() -> None:
    schedule = build("zb_h1", ranks=2, microbatches=3)
    frozen = without_weight_gradients(schedule, {0})
    assert str(schedule) == "0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2\n1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2"
    assert str(frozen) == "0F0 0F1 0B0 0F2 0B1 0B2\n1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2"
    verify(frozen)


@pytest.mark.parametrize("name", ["zb_h1", "zb_h2", "zb_v", "v_half", "dualpipe", "dualpipe_v"])
def test_all_schedules_stay_valid(name: str) -> None:
    schedule = build(name, ranks=4, microbatches=8)
    for stages in ({0}, {1, 2}, set(range(schedule.stages))):
        frozen = without_weight_gradients(schedule, stages)
        proof = verify(frozen)
        kinds = {op.kind for program in frozen.programs for op in program if op.stage in stages}
        assert kinds == {"F", "B"}
        assert max(proof.peak_live) <= max(verify(schedule).peak_live)
        assert len(frozen.overlaps) == len(schedule.overlaps)


def test_nothing_changes_without_frozen_stages() -> None:
    schedule = build("zb_h1", ranks=2, microbatches=3)
    assert without_weight_gradients(schedule, ()) is schedule
    plain = build("1f1b", ranks=2, microbatches=3)
    assert without_weight_gradients(plain, {0}) is plain
