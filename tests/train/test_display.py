"""Plain lines in a log, a bar on a terminal, nothing from other processes."""

from __future__ import annotations

import sys

import pytest

from penstock.train.metrics import Bar, Display, Lines, make_display


def row(step: int, padding: float = 0.0) -> dict[str, float]:
    return {
        "step": step, "loss": 2.5, "tokens_per_second": 1234.5, "bubble": 0.125, "learning_rate": 1e-3,
        "padding": padding,
    }  # fmt: skip


def test_lines_come_every_so_often_and_at_both_ends(capsys: pytest.CaptureFixture[str]) -> None:
    with make_display(True, 7, 0, 3) as display:
        assert isinstance(display, Lines)
        for step in range(1, 8):
            display.step(row(step))
        display.say("that is all [bold]")
    said = capsys.readouterr().out.splitlines()
    assert said[1] == "step 3/7  loss 2.500  1,234 tokens/s  bubble 12.5%  lr 1.00e-03"
    assert [line.split()[1] for line in said[:-1]] == ["1/7", "3/7", "6/7", "7/7"]
    assert said[-1] == "that is all [bold]"


def test_padding_is_shown_where_there_is_some(capsys: pytest.CaptureFixture[str]) -> None:
    make_display(True, 7, 0, 1).step(row(1, padding=0.0625))
    assert "bubble 12.5%  padding 6.2%  lr" in capsys.readouterr().out


def test_a_terminal_gets_a_bar(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    with make_display(True, 7, 2, 3) as display:
        assert isinstance(display, Bar)
        display.step(row(7))
        display.say("that is all [bold]")
    said = capsys.readouterr().out
    assert "that is all [bold]" in said
    assert "loss 2.500" in said
    assert "7/7" in said


def test_other_processes_are_silent(capsys: pytest.CaptureFixture[str]) -> None:
    with make_display(False, 7, 0, 1) as display:
        assert type(display) is Display
        display.step(row(1))
        display.say("text")
    assert capsys.readouterr().out == ""
