from pathlib import Path

import pytest

from penstock.errors import ConfigError, ScheduleError
from penstock.schedule import Costs, Op, Schedule, Timeline, build, loop, render, simulate
from support.refusals import refuses


@pytest.mark.parametrize("ending", [".txt", ".svg", ".html", ".json"])
def test_a_step_without_length_is_drawn_too(tmp_path: Path, ending: str) -> None:
    without_time = simulate(build("gpipe", ranks=2, microbatches=2), Costs(0, 0, 0))
    for timeline in (Timeline("mine", 2, (), (0, 0)), without_time):
        render(timeline, tmp_path / f"drawing{ending}")
        assert "makespan 0" in render(timeline)


@pytest.mark.parametrize("ending", [".txt", ".svg", ".SVG", ".html", ".json"])
def test_what_is_returned_is_what_is_written(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"drawing{ending}"
    result = render(build("gpipe", ranks=2, microbatches=2), path)
    assert path.read_text(encoding="utf-8") == result
    begin = {".txt": "gpipe: 2 ranks", ".svg": "<svg", ".html": "<!DOCTYPE html>", ".json": "{"}
    assert result.startswith(begin[ending.lower()])
    assert render(build("gpipe", ranks=2, microbatches=2), str(path)) == result


@pytest.mark.parametrize(("name", "ending"), [("drawing.png", ".png"), ("drawing", "no ending")])
def test_another_ending_is_refused(tmp_path: Path, name: str, ending: str) -> None:
    with refuses(ConfigError, f"drawing {str(tmp_path / name)!r}", f"{ending} chooses none") as caught:
        render(build("gpipe", ranks=2, microbatches=2), tmp_path / name)
    assert caught.value.remedy == "End the path in one of .txt, .svg, .html, .json"
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with refuses(ConfigError, rule="No such file or directory"):
        render(build("gpipe", ranks=2, microbatches=2), tmp_path / "nowhere" / "drawing.svg")


def test_a_schedule_that_would_hang_is_not_drawn() -> None:
    with pytest.raises(ScheduleError):
        render(Schedule("mine", loop(1), 1, ((Op(0, "B", 0), Op(0, "F", 0)),)))


def test_the_unit_is_shown() -> None:
    timeline = simulate(build("gpipe", ranks=1, microbatches=1), Costs(0.5, 0.5, 0.5))
    assert "makespan 1.5, " in render(timeline)
    assert "makespan 1.5 s, " in render(timeline, unit="s")
    assert "makespan 1.5 ticks, " in render(timeline, unit="ticks")
    assert "makespan 1.5, " in render(timeline, predicted=timeline, unit="")
    tiny = simulate(build("gpipe", ranks=1, microbatches=1), Costs(5e-6, 5e-6, 5e-6))
    assert "makespan 15 µs, " in render(tiny, unit="s")


def test_a_schedule_is_simulated_with_the_costs_given() -> None:
    schedule = build("gpipe", ranks=1, microbatches=1)
    assert "makespan 7, " in render(schedule, costs=Costs(forward=2, input_grad=4))


def test_costs_for_a_timeline_are_refused() -> None:
    timeline = simulate(build("gpipe", ranks=1, microbatches=1))
    with refuses(ConfigError, rule="a timeline knows"):
        render(timeline, costs=Costs())
