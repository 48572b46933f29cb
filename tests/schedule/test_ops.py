import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.schedule import Op, Pair, Placement, Schedule, both_ways, build, loop
from support.programs import written
from support.refusals import refuses

ops = st.builds(Op, st.integers(0, 10_000), st.sampled_from(["F", "B", "I", "W"]), st.integers(0, 10_000))


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
        ("2I0", ["2F0"]),
        ("1I0", ["1F0", "2I0"]),
        ("0B0", ["0F0", "1I0"]),  # a whole backward may follow a split one
        ("1W0", ["1I0"]),
    ],
)
def test_predecessors_in_three_stages(op: str, needs: list[str]) -> None:
    schedule = written(loop(3), 2, "0F0 0F1 0B1 0B0", "1F0 1F1 1B1 1I0 1W0", "2F0 2F1 2B1 2I0 2W0")
    assert [str(needed) for needed in schedule.predecessors(Op.parse(op))] == needs


def test_the_only_stage_needs_only_itself() -> None:
    schedule = build("gpipe", ranks=1, microbatches=1)
    assert schedule.predecessors(Op(0, "F", 0)) == ()
    assert schedule.predecessors(Op(0, "B", 0)) == (Op(0, "F", 0),)


def test_each_copy_of_the_model_is_a_chain_of_its_own() -> None:
    schedule = Schedule("own", both_ways(2), 2, ((), ()))
    assert schedule.predecessors(Op(2, "F", 1)) == ()
    assert schedule.predecessors(Op(3, "F", 1)) == (Op(2, "F", 1),)
    assert schedule.predecessors(Op(1, "B", 0)) == (Op(1, "F", 0),)


def test_a_pair_stands_together_in_a_program_s_text() -> None:
    pair = Pair(Op(0, "F", 1), Op(0, "B", 0))
    program = (Op(0, "F", 0), *pair, Op(0, "B", 1))
    schedule = Schedule("own", loop(1), 2, (program,), frozenset({pair}))
    assert str(schedule) == "0F0 (0F1;0B0)OVERLAP_F_B 0B1"
    assert Pair.parse("(0F1;0B0)OVERLAP_F_B") == pair
    assert Pair.parse("0F1") is None


def test_a_schedule_prints_a_program_a_line() -> None:
    schedule = build("1f1b", ranks=2, microbatches=2)
    assert str(schedule) == "0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1"
    assert (schedule.ranks, schedule.stages, schedule.trains) == (2, 2, True)
    assert not build("inference", ranks=1, microbatches=1).trains


def test_loop_goes_round_the_ranks() -> None:
    placement = loop(3, stages_per_rank=2)
    assert placement.rank_of == (0, 1, 2, 0, 1, 2)
    assert (placement.ranks, placement.stages) == (3, 6)
    assert [placement.stages_of(rank) for rank in range(3)] == [(0, 3), (1, 4), (2, 5)]


def test_a_given_placement_keeps_the_order_of_the_data() -> None:
    there_and_back = Placement((0, 1, 1, 0))
    assert there_and_back.stages_of(0) == (0, 3)
    assert there_and_back.stages_of(1) == (1, 2)


@pytest.mark.parametrize("rank_of", [(), (1,), (0, 2), (0, -1)])
def test_a_rank_without_a_stage_is_refused(rank_of: tuple[int, ...]) -> None:
    with refuses(ConfigError, rule="0 to the highest") as caught:
        Placement(rank_of)
    assert caught.value.value == f"placement {list(rank_of)}"
