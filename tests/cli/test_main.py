"""The command: what it prints, and its exit code."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from penstock.cli import main, restart
from penstock.errors import ConfigError, RunError
from penstock.launch.stop import Stop
from penstock.pipeline import Account
from penstock.train import preflight, run
from penstock.train.config.load import load_config
from support.command import Command
from support.mutations import CASES, seeded
from support.pool import alive
from support.started import finish, ranks_of, start, wait_for_rows
from support.tiny import QWEN3, assert_same_tensors, checkpoint, config_file, metrics


def test_version_and_help(penstock: Command) -> None:
    code, out, _ = penstock("--version")
    assert code == 0
    assert out.startswith("penstock 0.")
    assert "Train a Hugging Face model" in penstock("train", "--help").out
    assert "Check that a model, split into stages" in penstock("check", "--help").out
    assert penstock("train").code == 2
    assert penstock("trian", "x.yaml").code == 2


def test_a_dry_run_shows_what_is_known_and_writes_nothing(tmp_path: Path, penstock: Command) -> None:
    sizes = ("pipeline.microbatches=2", "parallel.dp_shard=2")
    code, out, _ = penstock("train", config_file(tmp_path), "--dry-run", *sizes)
    assert code == 0
    for text in (
        "microbatches: 2", "final_fraction: 0.1", "rank 1 |", "% predicted", "AdamW", "{0-1}, {2-3}",
        "4 processes: pp=2 x dp_shard=2", "divided between 2 pipelines", "gathered",
    ):  # fmt: skip
        assert text in out
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["config.yaml", "text"]


def test_memory_that_only_a_run_can_tell_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, penstock: Command
) -> None:
    """As of experts whose forward looks at how many tokens they get."""
    monkeypatch.setattr(Account, "costs", lambda *_: None)
    code, out, _ = penstock("train", config_file(tmp_path), "--dry-run")
    assert code == 0
    assert "unknown" in out


BAD = {
    "an unknown key": (["train.stps=3"], "train.stps=3: section train has no such key. Did you mean"),
    "no data": (["data.path=/nowhere"], "data.path=/nowhere: there is no such file or folder. Give"),
    "no data to evaluate on": (
        ["data.validation={path: /nowhere}"], "data.validation.path=/nowhere: there is no such file or folder"
    ),
    "no such checkpoint": (["--resume", "/nowhere"], "checkpoint /nowhere: there is no such folder"),
    "two paths": (["--resume", "/a", "/b"], "'/a': what follows the config file is section.key=value"),
    "a stray argument": (["steps=3"], "'steps=3': what follows the config file is section.key=value"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input_ends_with_code_2_and_one_error(tmp_path: Path, penstock: Command, case: str) -> None:
    arguments, message = BAD[case]
    code, out, err = penstock("train", config_file(tmp_path), *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("penstock: error: ")
    assert message in err
    assert err.count("penstock: error") == 1
    assert not (tmp_path / "out").exists()


# ---- What is an override, and what is a checkpoint's path


# _sort_arguments is what the command does before it reads a config or a checkpoint
@pytest.mark.parametrize(
    ("arguments", "checkpoint"),
    [
        (["optimizer={learning_rate: 1e-3}"], "newest"),
        (["adapter="], "newest"),
        (["model.config.some-key=1"], "newest"),
        (
            ["train.steps=3", "runs/lr=1e-3/checkpoints/step-00000002"],
            "runs/lr=1e-3/checkpoints/step-00000002",
        ),
        (["./lr=1", "optimizer={learning_rate: 1e-3}"], "./lr=1"),
        (["newest"], "./newest"),
    ],
)
def test_a_resume_takes_what_a_first_launch_takes(arguments: list[str], checkpoint: str) -> None:
    """0.5.0: a whole section after --resume was taken for the checkpoint's path."""
    overrides = [argument for argument in arguments if argument not in (checkpoint, "newest")]
    assert main._sort_arguments(arguments, True) == (overrides, checkpoint)
    assert main._sort_arguments(arguments, False) == (arguments, None)


# _sort_arguments, in many orders: a command for each would take minutes
@pytest.mark.parametrize("cases", CASES)
def test_an_override_means_the_same_wherever_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cases: range
) -> None:
    """A first launch, a resume from a path or from the newest, and a restart have the same config."""
    commands: list[list[str]] = []
    monkeypatch.setattr(restart, "Launcher", lambda *_: nullcontext())

    def keep_running(_: object, __: int, command: Callable[[int], list[str]], *___: object) -> int:
        commands.append(command(1))
        return 0

    monkeypatch.setattr(restart, "keep_running", keep_running)
    file, server = config_file(tmp_path), SimpleNamespace(follow=lambda _: None, rehearse=lambda _: None)
    for number in cases:
        with seeded(number) as choices:
            overrides = choices.sample(OVERRIDES, choices.randint(1, 4))
            try:
                expected = load_config(file, overrides)
            except ConfigError:
                continue
            path = choices.choice(("runs/a=b/step-00000001", "/a=b", "~/x", "step", None))
            given = [*overrides]
            if path is not None:
                given.insert(choices.randrange(len(given) + 1), path)
            taken, checkpoint = main._sort_arguments(given, True)
            assert checkpoint == (Path(path).expanduser().as_posix() if path else "newest")
            assert load_config(file, taken) == expected
            one = {"plan": SimpleNamespace(schedule=SimpleNamespace(ranks=1)),
                   "axes": SimpleNamespace(ranks_per_stage=1)}  # fmt: skip
            prepared = SimpleNamespace(config=expected, choice="", **one)
            restart.start_ranks(server, prepared, file, taken, checkpoint, 1)  # type: ignore[arg-type]
            _, _, _, _, command, config, *rest = commands.pop()
            assert (command, config) == ("train", str(file))
            again, resumed = main._sort_arguments([each for each in rest if each != "--resume"], True)
            assert (load_config(file, again), resumed) == (expected, checkpoint)


OVERRIDES = [
    "optimizer={learning_rate: 1e-3}", "optimizer={name: muon}", "adapter=", "adapter=null",
    "train={steps: 7}", "train.steps=7", "train.steps=9", "model.config.a-b=1", "model.config.a b=x=y",
    "data.path='a=b'", "data.path=a/b=c", "output={folder: a/b=c}",
    "pipeline.schedule={schedule: 1f1b, stages_per_rank: 1}",
    "train.clip_norm=null", 'data.tokenizer="bytes"', "data.include=['*=*']", "data.path=--resume",
    "train.check=off", "train.steps=1:30", "trian.steps=3", "output.folder=~/x",
    "model.config={model_type: qwen3, vocab_size: 256}",
]  # fmt: skip


@pytest.mark.parametrize("arguments", [["check", ""], ["train", "x.yaml", ""], ["merge", "x", "--out", ""]])
def test_an_empty_argument_is_refused(penstock: Command, arguments: list[str]) -> None:
    """0.5.0: an empty path was the working folder, as where a shell's variable is not set."""
    code, out, err = penstock(*arguments)
    assert (code, out) == (2, "")
    assert err == (
        "penstock: error: an empty argument: as a path it would be the working folder. Leave it out\n"
    )


@pytest.mark.parametrize(
    "arguments",
    [["check", "{}"], ["merge", "{}", "--out", "x"], ["merge", "x", "--out", "{}"], ["train", "{}"],
     ["train", "config.yaml", "--resume", "{}"], ["report", "{}"], ["data", "show", "{}"]],
)  # fmt: skip
@pytest.mark.parametrize("path", ["a" * 300, "a/" * 2500, "~nobody-of-this-name/x", "a\udcff"])
def test_paths_that_no_file_has_are_errors_of_the_command(
    tmp_path: Path, penstock: Command, monkeypatch: pytest.MonkeyPatch, arguments: list[str], path: str
) -> None:
    """0.5.0: tracebacks of Python's own OSError and RuntimeError."""
    monkeypatch.chdir(config_file(tmp_path).parent)
    code, out, err = penstock(*(path if each == "{}" else each for each in arguments))
    assert (code, out) == (2, "")
    assert err.startswith("penstock: error: ")
    assert err.count("penstock: error") == 1


@pytest.mark.parametrize("damage", ["missing", "truncated"])
def test_a_damaged_model_is_refused(tmp_path: Path, penstock: Command, damage: str) -> None:
    folder = tmp_path / "model"
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**QWEN3))
    model.save_pretrained(folder, max_shard_size="20KB")
    shard = min(folder.glob("model-*.safetensors"))
    shard.unlink() if damage == "missing" else shard.write_bytes(shard.read_bytes()[:-100])
    code, _, err = penstock("train", config_file(tmp_path, model={"config": None, "path": str(folder)}))
    assert code == 2
    assert "model-00001-of-" in err


def test_ctrl_c_before_the_ranks_start_ends_with_130(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, penstock: Command
) -> None:
    def interrupt(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(preflight, "preflight", interrupt)
    assert penstock("train", config_file(tmp_path)) == (130, "", "penstock: interrupted\n")


def test_one_rank_of_a_machine_reports_a_world_that_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, penstock: Command
) -> None:
    monkeypatch.setattr(os, "_exit", sys.exit)
    monkeypatch.setenv("WORLD_SIZE", "3")
    reports = []
    for rank in "01":
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("LOCAL_RANK", rank)
        reports.append(penstock("train", config_file(tmp_path)))
    assert not [thread for thread in threading.enumerate() if thread.name == "penstock-signals"]
    remedy = "Start it with 2 processes, or set pipeline.ranks=3"
    text = f"pipeline.ranks=2: each rank is one process, and the world has 3. {remedy}\n"
    assert reports == [(2, "", f"penstock: error: rank 0: {text}"), (2, "", "")]


@pytest.mark.parametrize("variables", [{}, {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}])
def test_a_process_that_trains_listens_to_signals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, penstock: Command, variables: dict[str, str]
) -> None:
    """As one process, and as a rank of torchrun's or the launcher's."""
    heard = []

    def train(_: preflight.Prepared, stop: Stop) -> NoReturn:
        assert signal.getsignal(signal.SIGUSR1) != signal.SIG_DFL  # it would end pytest
        with stop.saves(60, RunError("a run", "it is late", "Wait")):
            os.kill(os.getpid(), signal.SIGUSR1)
            while not stop.number:
                time.sleep(0.01)
        heard.append(stop.number)
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "run", train)
    monkeypatch.setattr(os, "_exit", sys.exit)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert penstock("train", config_file(tmp_path), "pipeline.ranks=1").code == 130
    assert heard == [signal.SIGUSR1]


TORCHRUN = ("torch.distributed.run", "--nproc-per-node=2", "--standalone", "-m")


def test_two_ranks_train_and_say_what_they_wrote(tmp_path: Path, penstock: Command) -> None:
    sampled = {"sample_prompt": "AB", "sample_tokens": 2}
    code, out, err = penstock("train", config_file(tmp_path, output=sampled))
    assert (code, err) == (0, "")
    for text in ("step 4/4  loss", "held-out loss", "metrics.jsonl", "timeline.svg", "predicted", "\nAB"):
        assert text in out
    names = {path.name for path in checkpoint(tmp_path, 4).iterdir()}
    assert {"optimizer-00001-of-00002.safetensors", "optimizer-00002-of-00002.safetensors"} <= names


@pytest.mark.sweep
@pytest.mark.parametrize("launcher", [(), TORCHRUN], ids=["plain", "torchrun"])
def test_a_resumed_run_is_the_same_bit_for_bit(launcher: tuple[str, ...], tmp_path: Path) -> None:
    """Over processes; `make test` resumes in one process, and over the pool."""
    file = config_file(tmp_path, train={"checkpoint_every": 2})
    assert finish(start("train", file))[0] == 0
    half = checkpoint(tmp_path, 2)
    again = f"output.folder={tmp_path / 'again' / 'out'}"
    code, out, err = finish(start("train", file, "--resume", half, again, launcher=launcher))
    assert code == 0, err
    assert f"going on from {half}" in out
    assert_same_tensors(checkpoint(tmp_path, 4), checkpoint(tmp_path / "again", 4))


def stop(folder: Path, who: str, number: signal.Signals, *more: str) -> tuple[int, str, str]:
    """Send a signal to the launcher, or to a rank, of a run that has done some steps. How it ends."""
    process = start("train", folder / "config.yaml", "train.steps=2000", "train.evaluate_every=2000", *more)
    wait_for_rows(folder, 3)
    os.kill(process.pid if who == "launcher" else ranks_of(process.pid)[who], number)
    return finish(process)


@pytest.mark.sweep
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_to_the_command_stops_the_run_with_a_checkpoint(
    tmp_path: Path, number: signal.Signals
) -> None:
    """0.5.0: 143, 130, or killed; what was done since the last checkpoint was lost."""
    file = config_file(tmp_path)
    code, out, err = stop(tmp_path, "launcher", number, "--restarts", "3")
    assert code == 75, err
    assert err == (
        f"penstock: {number.name}: a checkpoint after this step, then the end; a second signal ends at once\n"
    )
    done = max(row["step"] for row in metrics(tmp_path) if "loss" in row)
    assert f"after step {done} of 2000: the launcher got {number.name}" in out
    (row,) = [json.loads(line) for line in (tmp_path / "out" / "restarts.jsonl").read_text().splitlines()]
    assert (row["exit_code"], row["checkpoint"]) == (75, done)
    code, out, err = finish(start("train", file, "--resume", f"train.steps={done + 2}"))
    assert code == 0, err
    assert [row["step"] for row in metrics(tmp_path) if "loss" in row] == list(range(1, done + 3))


@pytest.mark.sweep
def test_a_signal_to_one_rank_stops_all_and_names_it_and_restarts_go_on(tmp_path: Path) -> None:
    """0.5.0: it was a failure of that rank."""
    config_file(tmp_path)
    code, out, err = stop(tmp_path, "1", signal.SIGTERM)
    assert code == 75, err
    named = f"rank 1 on {socket.gethostname()} got SIGTERM"
    assert named in out
    process = start("train", tmp_path / "config.yaml", "--resume", "train.steps=2000", "--restarts", "1")
    wait_for_rows(tmp_path, len(metrics(tmp_path)) + 3)
    os.kill(ranks_of(process.pid)["1"], signal.SIGTERM)
    assert process.stderr is not None
    assert "restart 1 at once" in process.stderr.readline()
    wait_for_rows(tmp_path, len(metrics(tmp_path)) + 3)
    process.send_signal(signal.SIGTERM)
    code, out, err = finish(process)
    assert code == 75, err
    found = [json.loads(line) for line in (tmp_path / "out" / "restarts.jsonl").read_text().splitlines()]
    assert named in found[0]["cause"]
    assert "the launcher got SIGTERM" in found[1]["cause"]
    assert "restarted once" in err


@pytest.mark.sweep
def test_a_run_that_cannot_save_in_time_says_so(tmp_path: Path) -> None:
    config_file(tmp_path)
    process = start("train", tmp_path / "config.yaml", "train.steps=2000", "train.stop_seconds=1")
    wait_for_rows(tmp_path, 3)
    ranks = ranks_of(process.pid)
    os.kill(ranks["1"], signal.SIGSTOP)
    process.send_signal(signal.SIGTERM)
    code, _, err = finish(process)
    assert code == 1
    assert f"penstock: error: rank 0 on {socket.gethostname()}: train.stop_seconds=1: a signal asked" in err
    assert [pid for pid in ranks.values() if alive(pid)] == []
