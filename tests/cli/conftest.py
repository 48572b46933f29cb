from __future__ import annotations

import sys
from pathlib import Path

import pytest

from penstock.cli.main import main
from support.command import Command, Ended


@pytest.fixture
def penstock(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    """Run the command in this process: exit code, stdout and stderr, also of the ranks that it starts."""

    def run(*arguments: str | Path) -> Ended:
        monkeypatch.setattr(sys, "argv", ["penstock", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        return Ended(int(ended.value.code or 0), *capfd.readouterr())

    return run
