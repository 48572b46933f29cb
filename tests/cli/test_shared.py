"""What all commands on schedules share: names, options, errors, and what is written to a pipe."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import NoReturn

import pytest

from penstock.cli import schedule as commands
from penstock.schedule.builders import BUILDERS
from support.command import Command

SMALL = ("--ranks", "2", "--microbatches", "4")


@pytest.fixture
def penstock(penstock: Command) -> Command:
    return partial(penstock, "schedule")


@pytest.mark.parametrize("name", BUILDERS)
def test_every_schedule_by_name(penstock: Command, name: str) -> None:
    assert penstock("verify", name, "--ranks", "4", "--microbatches", "8").code == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("show", "1f1bb", *SMALL), "Did you mean '1f1b'?"),
        (("show", "1f1b", "-m", "4"), "without ranks"),
        (("show", "1f1b", *SMALL, "--waves", "2"), "schedule option waves=2: schedule '1f1b' takes"),
        (("show", "1f1b", *SMALL, "--option", "waves"), "--option 'waves': an option is a key and a value"),
        (("show", "inference", *SMALL, "--option", "stages-per-rank=0"), "stages_per_rank=0"),
        (("show", "1f1b", *SMALL, "--option", "schedule=gpipe"), "the name is '1f1b' already"),
        (("simulate", "1f1b", *SMALL, "--memory-limit", "nan"), "--memory-limit nan: it is the most"),
        (("verify", "none.csv"), "schedule file 'none.csv': it cannot be read: No such file or directory"),
        (("verify", "none.svg"), "End the path in .json or in .csv"),
        (("draw", "1f1b", *SMALL, "--out", "s.png"), "End the path in one of"),
        (("simulate", "1f1b", *SMALL, "--forward", "1,x"), "--forward '1,x': a cost is a number"),
        (("compare", *SMALL, "--search", "0"), "Invalid value for '--search'"),
        (("search", *SMALL, "--seconds", "0"), "seconds=0"),
        (("compare", "--ranks", "two", "--microbatches", "4"), "Invalid value"),
        (("shwo",), "No such command"),
    ],
)
def test_errors_teach(
    penstock: Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = penstock(*arguments)
    assert (code, out) == (2, "")
    assert said in err
    assert "Traceback" not in err


def test_options_reach_the_builder(penstock: Command) -> None:
    for option in (("--stages-per-rank", "2"), ("--option", "stages_per_rank=2")):
        assert "inference: 2 ranks, 4 stages" in penstock("show", "inference", *SMALL, *option).out


def test_ctrl_c(penstock: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "verify", interrupt)
    assert penstock("verify", "1f1b", *SMALL) == (130, "", "penstock: interrupted\n")


def test_a_reader_that_goes_away_is_no_error() -> None:
    arguments = ["-m", "penstock", "schedule", "show", "gpipe", "-r", "8", "-m", "2000", "--programs"]
    command = [sys.executable, *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline().startswith("gpipe: 8 ranks")
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait(timeout=60) == 141


def test_a_narrow_terminal_cuts_nothing_off_and_a_file_has_no_colours(
    penstock: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = penstock("compare", *SMALL, "--memory-limit", "2")
    monkeypatch.setenv("COLUMNS", "20")
    assert penstock("compare", *SMALL, "--memory-limit", "2") == wide
    assert "\x1b" not in wide.out


CLOSED = """
import os, sys
from penstock.cli.shared import open_streams
open_streams()
assert [stream.fileno() for stream in (sys.stdin, sys.stdout, sys.stderr)] == [0, 1, 2]
assert all(os.get_inheritable(number) for number in range(3))
print("a word")
print("another", file=sys.stderr)
assert sys.stdin.read() == ""
file = os.open(os.devnull, os.O_RDONLY)
sys.exit(0 if file > 2 else 1)
"""


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_become_empty_ones(closed: str) -> None:
    """0.5.0: AttributeError, as Python has None for them."""
    command = ["sh", "-c", f'exec "$0" -c "$1" {closed}', sys.executable, CLOSED]
    assert subprocess.run(command, stdin=subprocess.DEVNULL, check=False).returncode == 0
