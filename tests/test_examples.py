"""The examples run plainly, draw what ran, and refuse what cannot be run."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from support import jobs_edges
from support.pool import Pool

OWN_MODEL_SCHEDULES = ["1f1b", "interleaved_1f1b", "zb_v", "dualpipe_v"]
EXAMPLES = Path(__file__).parent.parent / "examples"


def run(name: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / name), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


@pytest.mark.parametrize(
    ("name", "schedule"),
    [pytest.param("afab.py", "gpipe", marks=pytest.mark.sweep), ("one_f_one_b.py", "1f1b")],
)
def test_starts_its_own_ranks_and_draws_prediction_and_measurement(
    name: str, schedule: str, tmp_path: Path
) -> None:
    sizes = ("--ranks", "2", "--microbatches", "3", "--pseudo-computation-time", "0.01")
    done = run(name, *sizes, "--out", str(tmp_path / "new"))
    assert done.returncode == 0, done.stderr
    assert "predicted bubble 25.0%" in done.stdout
    assert "measured bubble" in done.stdout
    assert "<svg" in (tmp_path / "new" / f"{schedule}.svg").read_text()
    assert "rank 1 | .  F0" in (tmp_path / "new" / f"{schedule}.txt").read_text()


@pytest.mark.parametrize(
    "options",
    [("--microbatches", "0"), ("--ranks", "0"), ("--ranks", "two"), ("--pseudo-computation-time", "-1")],
)
def test_wrong_options_end_in_one_line(
    options: tuple[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The script in this process."""
    monkeypatch.setattr(sys, "argv", [str(EXAMPLES / "afab.py"), *options])
    monkeypatch.syspath_prepend(EXAMPLES)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(sys.argv[0], run_name="__main__")
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert options[0] in err
    assert options[1] in err


def test_a_model_of_ones_own_learns() -> None:
    done = run("own_model.py", "--ranks", "3")
    assert (done.returncode, done.stderr) == (0, "")
    losses = [float(loss) for loss in re.findall(r"step \d+: loss (\S+)", done.stdout)]
    assert losses[0] > 2.5
    assert losses[-1] < 0.5
    share = re.search(r"(\d+)% of the unseen numbers are right", done.stdout)
    assert share is not None
    assert int(share[1]) > 90


def test_a_model_of_ones_own_has_the_gradients_of_one_stage_that_holds_all() -> None:
    jobs_edges.own_model(3, OWN_MODEL_SCHEDULES)


def test_a_model_of_ones_own_has_them_over_gloo_too(pool: Pool) -> None:
    pool.run(3, jobs_edges.own_model, 3, OWN_MODEL_SCHEDULES)
