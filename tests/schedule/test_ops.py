import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.schedule import Op, Schedule, build, loop

ops = st.builds(Op, st.integers(0, 10_000), st.sampled_from(["F", "B"]), st.integers(0, 10_000))


@given(ops)
def test_an_op_is_read_back_from_its_text(op: Op) -> None:
    assert Op.parse(str(op)) == op


def test_the_text_is_stage_kind_microbatch() -> None:
    assert str(Op(2, "F", 10)) == "2F10"
    assert Op.parse(" 2B10\n") == Op(2, "B", 10)


@pytest.mark.parametrize("text", ["", "F0", "2F", "2X0", "2f0", "-1F0", "2F0 2F1", "2 F 0"])
def test_text_that_is_no_op_is_refused(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Op.parse(text)
    assert caught.value.value == f"op {text!r}"
    assert "2F0" in caught.value.remedy


@pytest.mark.parametrize(
    ("op", "needs"),
    [
        ("0F1", []),
        ("1F1", ["0F1"]),
        ("2F1", ["1F1"]),
        ("2B1", ["2F1"]),
        ("1B1", ["1F1", "2B1"]),
        ("0B1", ["0F1", "1B1"]),
    ],
)
def test_predecessors_in_three_stages(op: str, needs: list[str]) -> None:
    assert [str(needed) for needed in Op.parse(op).predecessors(stages=3)] == needs


def test_the_only_stage_needs_only_itself() -> None:
    assert Op(0, "F", 0).predecessors(stages=1) == ()
    assert Op(0, "B", 0).predecessors(stages=1) == (Op(0, "F", 0),)


def test_a_schedule_prints_a_program_a_line() -> None:
    schedule = build("1f1b", ranks=2, microbatches=2)
    assert str(schedule) == "0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1"
    assert (schedule.ranks, schedule.stages, schedule.trains) == (2, 2, True)


def test_a_schedule_without_backwards_does_not_train() -> None:
    assert not Schedule("forward", loop(1), 1, ((Op(0, "F", 0),),)).trains
