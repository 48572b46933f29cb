"""``penstock schedule``: what each command prints, with which code it ends, and that it needs no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from penstock.cli import schedule as commands
from penstock.schedule import Costs, build, sample, simulate, slow_rank_costs, wave
from penstock.schedule.files import dump, load
from penstock.schedule.simulation.compare import compare, share
from support.command import Command

SMALL = ("--ranks", "2", "--microbatches", "4")


@pytest.fixture
def penstock(penstock: Command) -> Command:
    return partial(penstock, "schedule")


def test_show_draws_and_proves(penstock: Command) -> None:
    code, out, err = penstock("show", "1F1B", *SMALL)
    assert (code, err) == (0, "")
    for text in (
        "1f1b: 2 ranks, 2 stages, 4 microbatches",
        "rank 0 | F0 F1 .  .  B0 B0 F2 B1 B1 F3 B2 B2 .  B3 B3",
        "rank 1 | .  F0 B0 B0 F1",
        "proven: each op is there once",
    ):
        assert text in out
    assert [line.split() for line in out.splitlines() if line.startswith("   ")][:1] == [["0", "0", "2", "0"]]


def test_verify_proves_or_lists_every_violation(penstock: Command, tmp_path: Path) -> None:
    assert penstock("verify", "gpipe", *SMALL, "--memory-limit", "4").code == 0
    code, out, err = penstock("verify", "gpipe", *SMALL, "--memory-limit", "3")
    assert code == 2
    assert out.splitlines() == [
        f"rank {rank}: it holds 4 live activations at its peak, and 3 are allowed" for rank in (0, 1)
    ]
    assert err == "penstock: error: schedule 'gpipe' breaks 2 rule(s)\n"
    (tmp_path / "s.csv").write_text(",".join(f"0F{i}" for i in range(60)) + ",0B0\n")
    assert len(penstock("verify", tmp_path / "s.csv").out.splitlines()) == 59  # and not only the first twenty


def test_simulate_predicts(penstock: Command) -> None:
    costs = ("--forward", "1,2", "--input-grad", "1", "--weight-grad", "0.5,1", "--communication", "0.25")
    code, out, err = penstock("simulate", "1f1b", *SMALL, *costs, "--activation", "2")
    assert (code, err) == (0, "")
    found = simulate(build("1f1b", ranks=2, microbatches=4), Costs([1, 2], 1, [0.5, 1], 0.25, activation=2))
    rows = [line.split() for line in out.splitlines()]
    for rank in (0, 1):
        assert [
            str(rank), f"{found.busy[rank]:g}", f"{found.rank_bubble[rank]:.1%}",
            f"{found.rank_inner_bubble[rank]:.1%}", f"{found.idle[rank].peer / found.makespan:.1%}",
            f"{found.idle[rank].wire / found.makespan:.1%}", str(2 - rank), str(4 - 2 * rank),
        ] in rows  # fmt: skip
    assert f"makespan {found.makespan:g}, most memory 4" in out
    assert f"bubble {found.bubble:.1%}, or {found.inner_bubble:.1%} between" in out
    assert "critical path: 0F0 1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3 0B3" in out


def test_simulate_for_machines(penstock: Command) -> None:
    code, out, _ = penstock("simulate", "gpipe", *SMALL, "--json", "--memory-limit", "3")
    data = json.loads(out)
    assert code == 2  # more than the limit
    assert data["makespan"] == 15
    assert data["bubble"] == pytest.approx(0.2)
    assert [rank["peak_memory"] for rank in data["per_rank"]] == [4, 4]
    assert data["per_rank"][1]["idle"] == {
        "peer": 0, "wire": 0, "runtime": 0, "outside": 3, "reduce": 0,
    }  # fmt: skip
    assert data["critical_path"][0] == "0F0"
    assert penstock("simulate", "gpipe", *SMALL, "--json", "--memory-limit", "4").code == 0


def test_messages_count_as_memory_where_their_buffer_is_given(penstock: Command) -> None:
    buffer = ("--buffer", "0.25", "--memory-limit", "4.5")
    simulated = penstock("simulate", "gpipe", *SMALL, *buffer, "--json")
    assert simulated.code == 2  # and 0 without a buffer at a limit of 4
    data = json.loads(simulated.out)
    predicted = simulate(build("gpipe", ranks=2, microbatches=4), Costs(buffer=0.25))
    assert [rank["peak_memory"] for rank in data["per_rank"]] == list(predicted.peak_memory)
    entries = json.loads(penstock("compare", *SMALL, *buffer, "--json").out)["schedules"]
    fits = {entry["name"]: entry["fits"] for entry in entries if not entry["options"]}
    assert (fits["1f1b"], fits["gpipe"]) == (True, False)
    refused = penstock("simulate", "gpipe", *SMALL, "--buffer", "-1")
    assert (refused.code, "Costs(buffer=-1.0)" in refused.err) == (2, True)


def test_sample_draws_steps(penstock: Command) -> None:
    options = ("--jitter", "0.1", "--slow", "1=1.5", "--replicas", "3", "--samples", "7", "--seed", "2")
    code, out, err = penstock("sample", "1f1b", *SMALL, *options, "--reduction", "1,2", "--json")
    assert (code, err) == (0, "")
    data, costs = json.loads(out), Costs(reduction=[1, 2])
    expected = sample(build("1f1b", ranks=2, microbatches=4), costs, jitter=0.1, slow={1: 1.5}, replicas=3,
                      samples=7, seed=2)  # fmt: skip
    assert data["steps"] == list(expected.steps)
    assert data["by_slow_rank"] == {"1": expected.by_slow_rank[1]}
    assert data["percentiles"]["50"] == expected.percentile(50)
    out = penstock("sample", "1f1b", *SMALL, *options, "--reduction", "1,2").out
    assert "7 steps, 3 replicas, 6 ranks in all" in out
    assert f"mean step {expected.mean:.6g}, {expected.loss:.1%} more than the undisturbed 16" in out
    assert f"rank 1 alone, as slow, and no jitter: {100 * expected.by_slow_rank[1]:.2f} % more" in out


@pytest.mark.parametrize("slow", ["1", "1=", "x=1.01", "1:1.01"])
def test_a_slow_rank_is_written_with_its_factor(penstock: Command, slow: str) -> None:
    code, _, err = penstock("sample", "1f1b", *SMALL, "--slow", slow)
    assert (code, "Write it like --slow 3=1.01" in err) == (2, True)


def test_compare_has_what_a_slow_rank_costs(penstock: Command) -> None:
    """With more stages a rank, its costs are divided as those of the table above."""
    costs = Costs(forward=[1, 2], communication=0.1)
    options = (*SMALL, "--forward", "1,2", "--communication", "0.1", "--slow-rank", "1.5")
    entries = json.loads(penstock("compare", *options, "--json").out)["schedules"]
    slowed = {entry["name"]: entry["by_slow_rank"] for entry in entries if not entry["options"]}
    for name, factor in (("1f1b", 1), ("v_half", 2)):
        schedule = build(
            name, ranks=2, microbatches=4, **({"costs": share(costs, wave(2))} if factor > 1 else {})
        )
        assert slowed[name] == list(slow_rank_costs(schedule, share(costs, schedule.placement), 1.5))
    shown = penstock("compare", *options).out.split("alone is slow")[1].splitlines()
    row = next(line.split() for line in shown if line.startswith("gpipe "))
    assert row[1:] == [text for cost in slowed["gpipe"] for text in (f"{100 * cost:.2f}", "%")]
    assert "by_slow_rank" not in penstock("compare", *SMALL, "--json").out


def test_draw_as_text_and_to_a_file(penstock: Command, tmp_path: Path) -> None:
    assert "rank 0 | F0 F0 F1 F1" in penstock("draw", "gpipe", *SMALL, "--forward", "4").out
    path = tmp_path / "s.svg"
    assert penstock("draw", "1f1b", *SMALL, "--forward", "2", "--out", path) == (0, f"wrote {path}\n", "")
    assert path.read_text().startswith("<svg")


def test_convert_there_and_back(penstock: Command, tmp_path: Path) -> None:
    first, second = tmp_path / "gpipe.csv", tmp_path / "gpipe.json"
    assert penstock("convert", "gpipe", first, *SMALL).code == 0
    assert penstock("convert", first, second).code == 0
    assert load(second) == build("gpipe", ranks=2, microbatches=4)
    assert penstock("verify", second, *SMALL).code == 0


def test_compare_for_machines(penstock: Command) -> None:
    data = json.loads(penstock("compare", *SMALL, "--memory-limit", "2", "--json").out)
    entries = compare(ranks=2, microbatches=4, memory_limit=2)
    assert [entry["name"] for entry in data["schedules"]] == [entry.name for entry in entries]
    assert [entry["fits"] for entry in data["schedules"]] == [entry.fits for entry in entries]
    assert entries[0].timeline is not None
    assert data["schedules"][0]["makespan"] == entries[0].timeline.makespan
    assert "NaN" not in json.dumps(data)
    assert "Infinity" not in json.dumps(data)


def test_a_file_brings_its_own_numbers(penstock: Command, tmp_path: Path) -> None:
    file = tmp_path / "s.json"
    dump(build("1f1b", ranks=2, microbatches=4), file)
    assert penstock("verify", file, *SMALL).code == 0
    assert "ranks=3: the schedule given has 2" in penstock("verify", file, "-r", "3").err
    assert "waves=2 with" in penstock("verify", file, "--waves", "2").err


# None among the modules is what Python takes for a module that is not installed
NO_TORCH = """
import sys

sys.modules.update(dict.fromkeys(["torch", "transformers", "ortools"]))
from penstock.cli.main import main

for line in sys.stdin.read().splitlines():
    sys.argv = ["penstock", "schedule", *line.split()]
    try:
        main()
    except SystemExit as ended:
        print("ended with", ended.code, *sys.argv[2:])
"""


def test_no_command_needs_torch(tmp_path: Path) -> None:
    named = "1f1b --ranks 2 --microbatches 4"
    lines = [f"{command} {named}" for command in ("show", "verify", "simulate", "draw")]
    lines += [f"draw {named} --out {tmp_path}/s{ending}" for ending in (".txt", ".svg")]
    lines += [f"convert 1f1b {tmp_path}/s.csv --ranks 2 --microbatches 4", f"verify {tmp_path}/s.csv"]
    lines += ["compare --ranks 2 --microbatches 4", "search --ranks 2 --microbatches 2 --seconds 0.1"]
    found = subprocess.run(
        [sys.executable, "-c", NO_TORCH], input="\n".join(lines), capture_output=True, text=True, timeout=60
    )
    ends = [line for line in found.stdout.splitlines() if line.startswith("ended with")]
    assert ends == [f"ended with 0 {line}" for line in lines], found.stderr


def test_search_says_how_good_it_is(
    penstock: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule = build("1f1b", ranks=2, microbatches=4)
    asked: dict[str, object] = {}

    def search(**given: object) -> SimpleNamespace:
        asked.update(given)
        timeline = simulate(schedule)
        return SimpleNamespace(
            schedule=schedule, timeline=timeline, value=timeline.makespan, lower_bound=12.0, optimal=False,
            method="luck", best_builder="gpipe", builder_value=16.0, cut_short=True,
        )  # fmt: skip

    monkeypatch.setattr(commands, "best_schedule", search)
    out_file = tmp_path / "best.json"
    code, out, err = penstock(
        "search", *SMALL, "--placement", "v", "--memory-limit", "3", "--seconds", "0.5", "--out", out_file
    )
    assert (code, err) == (0, "")
    assert asked == {
        "ranks": 2, "microbatches": 4, "costs": Costs(), "memory_limit": 3.0, "placement": "v",
        "stages_per_rank": None, "objective": "makespan", "seconds": 0.5, "seed": 0,
    }  # fmt: skip
    for text in (
        "makespan 15", "found by luck", "none is faster than 12: at most 25.0% could be gained",
        "the best built by name that keeps the limit: gpipe, 16", "another run may find another one",
    ):  # fmt: skip
        assert text in out
    assert load(out_file) == schedule
    asked.clear()
    assert "there is no folder" in penstock("search", *SMALL, "--out", tmp_path / "no" / "s.csv").err
    assert not asked  # before the time is spent
    assert "searched placement=loop" not in penstock("compare", *SMALL).out
    assert asked == {}
    penstock("compare", *SMALL, "--search", "0.5")
    assert (asked["placement"], asked["seconds"]) == (wave(2), 0.25)
    assert asked["costs"] == share(Costs(), wave(2))


@pytest.mark.parametrize("command", ["show", "verify", "simulate", "draw", "convert", "compare", "search"])
def test_help_has_an_example(penstock: Command, command: str) -> None:
    code, out, _ = penstock(command, "--help")
    assert code == 0
    assert f"Example: penstock schedule {command} " in " ".join(out.split())
