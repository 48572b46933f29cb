"""``penstock train --dry-run``: what it needs, what it refuses, and what it prints."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from rich.console import Console

import draw_pictures
from penstock import Axes
from penstock.cli import dry_run
from penstock.models.split.multiply_adds import MultiplyAdds
from penstock.models.weights.tensor_file import TensorFile
from penstock.parallel.axes import MESH
from penstock.pipeline.building.memory import RankMemory
from penstock.train.data import loading
from support.command import Command
from support.tiny import QWEN3, config_file, save_model

ROOT = Path(__file__).parents[2]
LARGE = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 16384, "intermediate_size": 53248,
    "num_hidden_layers": 9, "num_attention_heads": 128, "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
}  # fmt: skip
ELSEWHERE: dict[str, dict[str, Any]] = {
    "model": {"config": LARGE, "dtype": "bfloat16", "attention": "flash_attention_2"},
    "data": {"path": "/nowhere/text", "tokenizer": "/nowhere/tokenizer", "sequence_length": 4096},
    "pipeline": {"ranks": 8, "microbatches": 8, "transport": "nccl"},
    "parallel": {"dp_shard": -1},
    "train": {"batch_size": 64, "device": "cuda"},
}


def elsewhere(folder: Path, **sections: dict[str, Any]) -> Path:
    """The config of a run for 64 GPUs, of which this machine has none, nor its text."""
    file = folder / "config.yaml"
    made = {"output": {"folder": str(folder / "out")}, **ELSEWHERE}
    file.write_text(yaml.safe_dump({name: {**made.get(name, {}), **sections.get(name, {})} for name in made}))
    return file


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("COLUMNS", "80")


def test_a_login_node_needs_neither_data_nor_gpus_nor_flash_attention_nor_a_world(
    tmp_path: Path, penstock: Command
) -> None:
    """0.5.0: each of them ended it with an error; a table that was too wide lost its last columns."""
    code, out, err = penstock("train", elsewhere(tmp_path), "--dry-run", "--world", "64")
    assert (code, err) == (0, "")
    assert out.startswith("model ")  # the summary
    summary = " ".join(out.partition("\n\n")[0].split())
    for text in (
        "9 layers, 32,892,043,264 parameters, bfloat16", "64 processes: pp=8 x dp_shard=8",
        "64 rows of 4096 tokens, divided between 8 pipelines", "1f1b, 8 ranks, 8 stages, 8 microbatches",
        "predicted, if time goes by multiply-adds of forwards, input gradients",
        "bfloat16: products, weights, gradients and states",
        "1 communicator a rank, for all messages",
        "GiB predicted for a process of rank", "data.path=/nowhere/text: not on this machine",
        "data.tokenizer=/nowhere/tokenizer: not on this machine", "flash_attention_2: not installed",
        "torch sees no GPU",
    ):  # fmt: skip
        assert text in summary
    lines = out.partition("\nconfig\n")[0].splitlines()
    assert max(map(len, lines)) <= 80
    assert not re.search("…", out)
    assert out.count("bubble") == 1
    assert "\n   1-5    1-5  1-5, 1 each  3,187,703,808  10.4%\n" in out  # alike: one line
    for text in ("8 groups of 8 {0-56 by 8}, {1-57 by 8}, ...,", "8 groups of 8 {0-7}, {8-15}, ..., {56-63}"):
        assert text in out
    assert "dp_shard: 8\n" in out  # in the config


@pytest.mark.parametrize(
    ("attention", "told"), [("eager", True), pytest.param("sdpa", False, marks=pytest.mark.sweep)]
)
def test_eager_attention_says_what_its_scores_take(
    tmp_path: Path, penstock: Command, attention: str, told: bool
) -> None:
    """1.0: 3.1 GiB a layer of gpt-oss, without a word of why."""
    config = ROOT / "configs" / "stdlib.yaml"
    _, out, err = penstock(
        "train", config, f"data.path={tmp_path}", f"model.attention={attention}", "--dry-run"
    )
    assert err == ""
    assert ("eager: a layer keeps the scores of all pairs" in " ".join(out.split())) == told


def test_the_memory_says_that_it_leaves_towers_out(
    tmp_path: Path, penstock: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A frozen tower holds nothing for a backward."""
    draw_pictures.write(tmp_path, 30)
    places = {"model.path": "model", "data.path": "chats.jsonl", "data.images": "images"}
    keys = [f"{key}={tmp_path / name}" for key, name in places.items()]
    config, said = (
        ROOT / "configs" / "pictures.yaml",
        "rank 0 also holds its towers' activations, which are not counted",
    )
    _, out, _ = penstock("train", config, "--dry-run", *keys, f"output.folder={tmp_path / 'out'}")
    assert said in " ".join(out.split())
    frozen = [MultiplyAdds(1.0), MultiplyAdds(0.0, image=4.0), MultiplyAdds(1.0)]
    monkeypatch.setattr(dry_run, "works", lambda *_: frozen)
    _, out, err = penstock("train", config, "--dry-run", *keys, f"output.folder={tmp_path / 'out'}")
    assert err == ""
    assert said not in " ".join(out.split())


@pytest.mark.parametrize(("room", "said"), [(1 << 20, "this host has 0.00"), (1 << 40, "")])
def test_a_host_that_holds_no_copy_of_a_checkpoint_is_told(
    tmp_path: Path, penstock: Command, monkeypatch: pytest.MonkeyPatch, room: int, said: str
) -> None:
    """0.5.0: the copies of a checkpoint were in no account; weights and both moments of AdamW are."""
    monkeypatch.setattr(dry_run, "room_in_memory", lambda: room)
    code, out, _ = penstock("train", ROOT / "configs" / "stdlib.yaml", f"data.path={tmp_path}", "--dry-run")
    assert code == 0
    text = " ".join(out.split())
    assert f"{3 * 4 * 3_148_288 / 2**30:.4f} GiB, copied to host memory and written while training" in text
    assert said in text
    assert ("training waits until it is written" in text) == bool(said)


@pytest.mark.parametrize(("schedule", "pairs"), [("dualpipe", True), ("1f1b", False)])
def test_how_pairs_run_is_told(tmp_path: Path, penstock: Command, schedule: str, pairs: bool) -> None:
    file = config_file(tmp_path, pipeline={"schedule": schedule, "microbatches": 8}, train={"batch_size": 8})
    code, out, err = penstock("train", file, "--dry-run")
    assert (code, err) == (0, "")
    assert ("their ops run one after the other" in " ".join(out.split())) == pairs


def test_a_world_belongs_to_a_dry_run_and_has_to_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, penstock: Command
) -> None:
    file = elsewhere(tmp_path)
    assert "--world 64: it is the number of processes" in penstock("train", file, "--world", "64").err
    assert "12 processes for pp=8 x dp_shard=-1" in penstock("train", file, "--dry-run", "--world", "12").err
    assert "for a dry run give --world" in penstock("train", file, "--dry-run").err
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "64")
    monkeypatch.setattr(os, "_exit", exit)
    assert "without torchrun" in penstock("train", file, "--dry-run", "--world", "64").err


def test_flash_attention_is_refused_where_it_would_be_though_it_is_not_installed(
    tmp_path: Path, penstock: Command
) -> None:
    file = elsewhere(tmp_path, parallel={"cp": 2, "dp_shard": 1})
    code, _, err = penstock("train", file, "--dry-run")
    assert code == 2
    assert "attn_implementation=flash_attention_2 with cp" in err


def test_a_dry_run_reads_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, penstock: Command) -> None:
    monkeypatch.setattr(loading, "open_source", None)
    code, out, _ = penstock("train", config_file(tmp_path), "--dry-run")
    assert code == 0
    assert "text: not read" in " ".join(out.split())


def test_layers_per_stage_choose_the_number_of_stages(tmp_path: Path, penstock: Command) -> None:
    keys = ("pipeline.ranks=2", "pipeline.layers_per_stage=1", "model.config.num_hidden_layers=4")
    code, out, _ = penstock("train", config_file(tmp_path), *keys, "--dry-run")
    assert code == 0
    assert "4 stages" in " ".join(out.split())
    code, _, err = penstock("train", config_file(tmp_path), *keys, "pipeline.ranks=3", "--dry-run")
    assert code == 2
    assert "layers_per_stage=1: 4 layers make 4 stages of it, and the schedule takes multiples of 3" in err


def test_a_balance_that_is_measured_later_is_told(tmp_path: Path, penstock: Command) -> None:
    """The table of stages is that of the default split."""
    measured = "pipeline.balance=measured: layers are measured when the run starts"
    for keys, said in ((("pipeline.balance=measured", "pipeline.head_weight=null"), True), ((), False)):
        code, out, err = penstock("train", config_file(tmp_path), "pipeline.ranks=2", *keys, "--dry-run")
        assert code == 0, err
        assert (measured in " ".join(out.split())) == said


def test_what_waits_in_host_memory_is_counted(tmp_path: Path, penstock: Command) -> None:
    keys = ("pipeline.ranks=2", "pipeline.schedule=gpipe", "pipeline.microbatches=4")
    away = "train.activation_offloading={modules: [mlp], min_bytes: 0}"
    code, out, _ = penstock("train", config_file(tmp_path), *keys, away, "--dry-run")
    assert code == 0
    assert "activations of 8 of 8 forwards wait in host memory" in " ".join(out.split())


def test_a_folder_of_another_model_is_refused_from_its_headers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, penstock: Command
) -> None:
    """0.5.0: it passed the dry run, and failed on the first rank that read it, if at all."""
    save_model(tmp_path / "model", num_hidden_layers=3, intermediate_size=16)
    other = type(save_model(tmp_path / "other").config)(**{**QWEN3, "tie_word_embeddings": True})
    other.save_pretrained(tmp_path / "model")
    monkeypatch.setattr(TensorFile, "read", None)  # reads a tensor
    section = {"config": None, "path": str(tmp_path / "model")}
    code, _, err = penstock("train", config_file(tmp_path, model=section), "--dry-run")
    assert code == 2
    assert (
        "6 of another shape than the model's: model.layers.0.mlp.down_proj.weight is [16, 16], not [16, 32]"
        in err
    )
    assert "11 that the model has no place for: model.layers.2." in err


# _memory makes the table of a plan whose sizes no small model has
def test_every_column_of_memory_is_whole_in_80_columns() -> None:
    """The widest table: gathered weights, and weights in host memory, of more ranks than it has lines."""
    wide = RankMemory(*[size * 2**30 for size in (99, 99, 99, 99, 99, 90, 500)])
    needs = [wide._replace(weights=wide.weights + rank) for rank in range(32)]
    console = Console(width=80)
    with console.capture() as caught:
        console.print(dry_run._memory(needs, range(100, 132)))
    lines = caught.get().splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[2].split() == ["16", *["99.00"] * 3, "198.00", "-90.00", "116", "500.00", "905.00"]
    assert lines[-1].split() == ["rest", "less"]


def test_a_folder_that_fits_says_so(tmp_path: Path, penstock: Command) -> None:
    save_model(tmp_path / "model")
    section = {"config": None, "path": str(tmp_path / "model")}
    code, out, _ = penstock("train", config_file(tmp_path, model=section), "--dry-run")
    assert code == 0
    assert "1 file, whose headers have the model's names and shapes" in " ".join(out.split())


def test_a_mesh_is_shown_by_its_groups() -> None:
    lines = dict(dry_run.mesh(2, Axes(dp_replicate=2, dp_shard=2, cp=2, ep=4, tp=2)))
    groups = {name: text.partition(":")[0].partition(", inside")[0] for name, text in lines.items()}
    assert groups == {
        "pp": "16 groups of 2 {0, 16}, {1, 17}, ..., {15, 31}",
        "dp_replicate": "16 groups of 2 {0, 8}, {1, 9}, ..., {23, 31}",
        "dp_shard": "16 groups of 2 {0, 4}, {1, 5}, ..., {27, 31}",
        "cp": "16 groups of 2 {0, 2}, {1, 3}, ..., {29, 31}",
        "tp": "16 groups of 2 {0-1}, {2-3}, ..., {30-31}",
        "ep": "8 groups of 4 {0-6 by 2}, {1-7 by 2}, ..., {25-31 by 2}",
        "gradients": "4 groups of 8 {0-14 by 2}, {1-15 by 2}, ..., {17-31 by 2}",
    }


# _MEANING is the table of words itself
def test_a_dry_run_has_words_for_every_axis() -> None:
    assert list(dry_run._MEANING) == list(MESH)


def test_a_large_mesh_takes_no_more_lines_than_a_small_one() -> None:
    assert len(list(dry_run.mesh(64, Axes(dp_shard=512)))) == len(list(dry_run.mesh(2, Axes(dp_shard=2))))


def test_the_sample_in_the_tutorial_is_what_it_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, penstock: Command
) -> None:
    text = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
    code, out, _ = penstock("train", ROOT / "configs" / "stdlib.yaml", f"data.path={tmp_path}", "--dry-run")
    assert code == 0
    summary, *rest = out.partition("\nconfig\n")[0].strip().split("\n\n")
    for part in (summary.partition("\nnote ")[0], *rest):
        assert part in text, "write it into docs/tutorial.md"


def test_a_rank_above_its_devices_memory_is_one_warning(tmp_path: Path, penstock: Command) -> None:
    """1.0: a rank that no device holds was printed without a word."""
    config = elsewhere(tmp_path, parallel={"dp_shard": 1}, train={"batch_size": 16})
    dry = ("train", config, "--dry-run", "pipeline.ranks=8")
    assert "\nwarning " not in penstock(*dry).out  # no device is at hand
    cluster = tmp_path / "cluster.yaml"
    summaries = []
    for memory in ("300 GB", "80 GB"):
        cluster.write_text(f"hosts: 8\nhost: DGX H100\ndevice: {{memory: {memory}}}\n")
        code, out, err = penstock(*dry, "--cluster", cluster)
        assert (code, err) == (0, "")
        summaries.append(" ".join(out.partition("\n\n")[0].split()))
    roomy, summary = summaries
    assert "of H100: " not in roomy
    assert "of H100: " in summary
    needed = re.search(r"warning ([\d.]+) GiB is above the 74.51 GiB of H100", summary)
    assert needed
    assert f"memory {needed[1]} GiB predicted" in summary
    assert "train.activation_checkpointing=full" in summary
    assert "more pipeline.microbatches, of fewer than 2 rows" in summary
    assert "a larger parallel.dp_shard would help" in summary or "dp_shard; " in summary


def test_a_cluster_of_a_run_that_does_not_plan_is_refused(tmp_path: Path, penstock: Command) -> None:
    code, _, err = penstock("train", config_file(tmp_path), "--cluster", "CPU host")
    assert code == 2
    assert "--cluster 'CPU host': it is what pipeline.schedule=planned plans for" in err
    code, _, err = penstock("train", elsewhere(tmp_path), "--dry-run", "--world", "64", "--cluster", "DGX 9")
    assert code == 2
    assert "it is neither a known host nor a file" in err
