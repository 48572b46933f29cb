"""The examples run plainly, draw what ran, and refuse what cannot be run."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from support import jobs_edges
from support.pool import Pool

OWN_MODEL_SCHEDULES = ["1f1b", "interleaved_1f1b", "zb_v", "dualpipe_v"]
EXAMPLES = Path(__file__).parent.parent / "examples"


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Run an example in this process: exit code, stdout and stderr, also of the ranks that it starts."""

    def example(name: str, *options: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", [str(EXAMPLES / name), *options])
        monkeypatch.setattr(sys, "orig_argv", [sys.executable, *sys.argv])
        monkeypatch.syspath_prepend(EXAMPLES)
        code = 0
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        except SystemExit as ended:
            code = int(ended.code or 0)
        return code, *capfd.readouterr()

    return example


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("name", "schedule"),
    [("afab.py", "gpipe"), ("one_f_one_b.py", "1f1b")],
)
def test_starts_its_own_ranks_and_draws_prediction_and_measurement(
    run: Run, name: str, schedule: str, tmp_path: Path
) -> None:
    sizes = ("--ranks", "2", "--microbatches", "3", "--pseudo-computation-time", "0.01")
    code, out, err = run(name, *sizes, "--out", str(tmp_path / "new"))
    assert code == 0, err
    assert "predicted bubble 25.0%" in out
    assert "measured bubble" in out
    assert "<svg" in (tmp_path / "new" / f"{schedule}.svg").read_text()
    assert "rank 1 | .  F0" in (tmp_path / "new" / f"{schedule}.txt").read_text()


@pytest.mark.parametrize(
    "options",
    [("--microbatches", "0"), ("--ranks", "0"), ("--ranks", "two"), ("--pseudo-computation-time", "-1")],
)
def test_wrong_options_end_in_one_line(run: Run, options: tuple[str, str]) -> None:
    code, out, err = run("afab.py", *options)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert options[0] in err
    assert options[1] in err


@pytest.mark.parametrize(("ranks", "microbatches"), [(3, 4), (3, 2), (2, 6)])
def test_1f1b_by_hand_has_the_gradients_of_the_library(pool: Pool, ranks: int, microbatches: int) -> None:
    pool.run(ranks, jobs_edges.from_scratch, microbatches)


def test_1f1b_by_hand_has_under_120_lines() -> None:
    assert len((EXAMPLES / "from_scratch.py").read_text().splitlines()) < 120


def test_fine_tuned_chats_are_answered(run: Run) -> None:
    code, out, err = run("sft.py")
    assert code == 0, err
    assert "What is a stage? A slice of layers.\n" in out
    assert len((EXAMPLES / "sft.py").read_text().splitlines()) < 60


def test_a_classifier_learns_and_opens_in_transformers(run: Run) -> None:
    code, out, err = run("classify.py")
    assert code == 0, err
    accuracy = re.search(r"accuracy ([\d.]+)", out)
    assert accuracy is not None, out
    assert float(accuracy[1]) > 0.9
    assert "saved with ['more ones', 'more twos'], same logits: True" in out
    assert len((EXAMPLES / "classify.py").read_text().splitlines()) < 60


def test_a_reward_model_learns_which_row_is_preferred(run: Run) -> None:
    code, out, err = run("reward.py")
    assert code == 0, err
    share = re.search(r"(\d+)% of the unseen pairs are in order", out)
    assert share is not None, out
    assert int(share[1]) > 90
    assert len((EXAMPLES / "reward.py").read_text().splitlines()) < 60


def test_dpo_prefers_what_was_chosen(run: Run) -> None:
    code, out, err = run("dpo.py")
    assert code == 0, err
    first, *_, last = out.splitlines()
    assert "loss 0.6931  margin +0.000" in first
    assert "accuracy 1.00" in last
    assert len((EXAMPLES / "dpo.py").read_text().splitlines()) < 60


def test_grpo_earns_more_reward(run: Run) -> None:
    code, out, err = run("grpo.py")
    assert code == 0, err
    rewards = [float(reward) for reward in re.findall(r"reward (\S+)", out)]
    assert rewards[0] < 0.7
    assert min(rewards[-3:]) > 0.9
    assert len((EXAMPLES / "grpo.py").read_text().splitlines()) < 60


def test_a_model_of_ones_own_learns(run: Run) -> None:
    code, out, err = run("own_model.py", "--ranks", "2")
    assert (code, err) == (0, "")
    losses = [float(loss) for loss in re.findall(r"step \d+: loss (\S+)", out)]
    assert losses[0] > 2.5
    assert losses[-1] < 0.5
    share = re.search(r"(\d+)% of the unseen numbers are right", out)
    assert share is not None
    assert int(share[1]) > 90


@pytest.mark.sweep  # tests/integrations has its parts in each run
def test_transformers_trainer_learns_under_torchrun(tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command = [*launch, str(EXAMPLES / "trainer.py"), "--out", str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    best = re.search(r"best weights of \S+checkpoint-\d+: evaluation loss (\S+)", done.stdout)
    assert best is not None
    assert float(best[1]) < 0.7  # at random it is ln 32, 3.5
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config.vocab_size == 32
    assert len((EXAMPLES / "trainer.py").read_text().splitlines()) < 60


def test_a_model_generates_what_it_has_learned(run: Run) -> None:
    code, out, err = run("generate.py", "--steps", "20")
    assert (code, err) == (0, "")
    assert "[3, 4, 5] goes on [6, 7, 8, 9, 10, 11]" in out
    assert "[17, 18] goes on [19, 0, 1, 2, 3, 4]" in out
    assert len((EXAMPLES / "generate.py").read_text().splitlines()) < 60


def test_a_model_of_ones_own_has_the_gradients_of_one_stage_that_holds_all() -> None:
    jobs_edges.own_model(3, OWN_MODEL_SCHEDULES)


def test_a_model_of_ones_own_has_them_over_gloo_too(pool: Pool) -> None:
    pool.run(3, jobs_edges.own_model, 3, ["interleaved_1f1b", "dualpipe_v"])
