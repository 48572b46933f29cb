"""Configs of other trainers: the same run in our words, and a list of what was left."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.train.config import imported as module
from penstock.train.config.imported import Imported, flags, imported
from penstock.train.config.load import load_config
from penstock.train.config.sections import TrainConfig
from support.refusals import refuses

AXOLOTL = """
base_model: NousResearch/Llama-3.2-1B
load_in_8bit: false
datasets:
  - {path: chats.jsonl, type: chat_template, field_messages: turns}
val_set_size: 0.1
output_dir: ./out
adapter: qlora
sequence_len: 2048
sample_packing: true
lora_r: 16
lora_alpha: 32
lora_target_linear: true
wandb_project: mine
gradient_accumulation_steps: 2
micro_batch_size: 3
num_epochs: 1
optimizer: adamw_bnb_8bit
lr_scheduler: cosine
learning_rate: 0.0002
bf16: auto
gradient_checkpointing: true
warmup_steps: 10
evals_per_epoch: 4
loss_watchdog_threshold: 5.0
"""
LLAMA_FACTORY = """
model_name_or_path: meta-llama/Meta-Llama-3-8B
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all
dataset: identity,alpaca_en_demo
template: llama3
cutoff_len: 1024
output_dir: saves/sft
save_steps: 500
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
report_to: none
"""
TRL = (
    "--model_name_or_path Qwen/Qwen2-0.5B --dataset_name chats.jsonl --learning_rate 2.0e-5 --packing "
    "--per-device-train-batch-size=2 --eval_strategy steps --eval_steps 100 --use_peft --lora_r 32 "
    "--lora_target_modules q_proj v_proj --eos_token <|im_end|>"
)


def read(text: str, gpus: int, folder: Path) -> tuple[TrainConfig, Imported]:
    ours = imported(yaml.safe_load(text), gpus)
    (folder / "train.yaml").write_text(ours.text("theirs.yaml"))
    return load_config(folder / "train.yaml"), ours


def test_axolotl(tmp_path: Path) -> None:
    config, ours = read(AXOLOTL, 2, tmp_path)
    assert ours.trainer == "axolotl"
    assert (config.model.path, config.data.path) == ("NousResearch/Llama-3.2-1B", "chats.jsonl")
    assert (config.data.kind, config.data.messages_field, config.data.packing) == (
        "chat",
        "turns",
        "best_fit",
    )
    assert config.adapter is not None
    assert (config.adapter.r, config.adapter.quantize, config.adapter.targets) == (16, "nf4", "all-linear")
    assert (config.train.epochs, config.train.precision) == (1, "mixed")
    optimizer: Any = config.optimizer
    assert (optimizer.states, optimizer.learning_rate, optimizer.warmup_steps) == ("8bit", 2e-4, 10)
    assert [left.key for left in ours.left] == ["evals_per_epoch", "loss_watchdog_threshold"]
    assert "#   loss_watchdog_threshold: 5.0" in ours.text("theirs.yaml")


def test_a_step_has_the_rows_that_it_had_on_as_many_devices(tmp_path: Path) -> None:
    for gpus, rows in ((1, 6), (2, 12), (16, 96)):
        config, _ = read(AXOLOTL, gpus, tmp_path)
        assert config.train.batch_size == rows
        assert config.pipeline.ranks * config.parallel.axes.ranks_per_stage == gpus
        microbatches = config.pipeline.microbatches * config.parallel.dp_shard
        assert rows == 3 * microbatches  # rows of a device at once are those of a microbatch


def test_moments_in_few_bits_that_a_mesh_would_change_are_listed(tmp_path: Path) -> None:
    assert "optimizer" not in {left.key for left in read(AXOLOTL, 8, tmp_path)[1].left}
    config, ours = read(AXOLOTL, 16, tmp_path)
    assert "optimizer" in {left.key for left in ours.left}
    optimizer: Any = config.optimizer
    assert optimizer.states is None


@pytest.mark.parametrize(
    ("source", "split", "config"),
    [
        ({"path": "tatsu-lab/alpaca"}, "train", None),
        ({"path": "org/many", "split": "validation", "name": "en"}, "validation", "en"),
        ({"path": "chats.jsonl", "split": "train"}, None, None),
    ],
)
def test_a_data_set_by_name_has_a_split_and_a_file_none(
    source: dict[str, str], split: str | None, config: str | None, tmp_path: Path
) -> None:
    made, _ = read(yaml.safe_dump({"base_model": "m", "datasets": [source]}), 1, tmp_path)
    assert (made.data.split, made.data.config) == (split, config)


def test_llama_factory(tmp_path: Path) -> None:
    config, ours = read(LLAMA_FACTORY, 4, tmp_path)
    assert ours.trainer == "LLaMA-Factory"
    assert [source.path for source in config.data.sources] == [
        "data/identity.json",
        "data/alpaca_en_demo.json",
    ]
    assert (config.data.sequence_length, config.train.epochs, config.train.batch_size) == (1024, 3, 32)
    assert (config.optimizer.warmup_ratio, config.train.checkpoint_every) == (0.1, 500)
    assert {left.key for left in ours.left} == {"dataset", "template"}


def test_trl_by_its_command_line(tmp_path: Path) -> None:
    ours = imported(flags(TRL.split()), 1)
    (tmp_path / "train.yaml").write_text(ours.text("run.sh"))
    config = load_config(tmp_path / "train.yaml")
    assert ours.trainer == "TRL"
    assert config.adapter is not None
    assert (config.adapter.r, config.adapter.targets) == (32, ("q_proj", "v_proj"))
    assert (config.train.batch_size, config.train.evaluate_every, config.data.packing) == (2, 100, "best_fit")
    assert [left.key for left in ours.left] == ["eos_token"]


def test_what_they_leave_out_has_their_defaults(tmp_path: Path) -> None:
    """Those of transformers' TrainingArguments where ours differ."""
    config, _ = read("{model_name_or_path: m, stage: sft, dataset: chats}", 1, tmp_path)
    optimizer: Any = config.optimizer
    assert (optimizer.schedule, optimizer.final_fraction, optimizer.weight_decay) == ("linear", 0, 0)
    assert (optimizer.betas, optimizer.learning_rate) == ((0.9, 0.999), 5e-5)
    assert (config.train.batch_size, config.train.epochs, config.train.seed) == (8, 3, 42)


@pytest.mark.parametrize(
    ("keys", "left"),
    [
        ({"optim": "sgd"}, "optim"),
        ({"fp16": True}, "fp16"),
        ({"stage": "dpo"}, "stage"),
        ({"finetuning_type": "freeze"}, "finetuning_type"),
        ({"learning_rate": "fast"}, "learning_rate"),
        ({"per_device_train_batch_size": [2]}, "per_device_train_batch_size"),
        ({"report_to": ["wandb", "comet_ml"]}, "report_to"),
        ({"save_steps": 0.1}, "save_steps"),
        ({"deepspeed": "ds.json"}, "deepspeed"),
        ({"load_in_8bit": True}, "load_in_8bit"),
    ],
)
def test_a_value_without_a_counterpart_is_listed(keys: dict[str, Any], left: str, tmp_path: Path) -> None:
    tree = {"model_name_or_path": "m", "stage": "sft", "cutoff_len": 64} | keys
    _, ours = read(yaml.safe_dump(tree), 1, tmp_path)
    assert left in {entry.key for entry in ours.left}


def test_a_config_of_no_known_trainer_is_refused() -> None:
    with refuses(ConfigError, "a config with model, steps"):
        imported({"model": "m", "steps": 3}, 1)
    with refuses(ConfigError, "a config with no key"):
        imported({}, 1)


@pytest.mark.parametrize("readers", ["_AXOLOTL", "_LLAMA_FACTORY", "_TRL"])
@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(data=st.data())
def test_no_value_of_theirs_ends_in_a_traceback(readers: str, data: st.DataObject) -> None:
    value = st.one_of(
        st.none(), st.booleans(), st.integers(-3, 10**6), st.floats(), st.text(max_size=8),
        st.lists(st.integers(0, 3), max_size=2), st.dictionaries(st.text(max_size=3), st.none(), max_size=2),
    )  # fmt: skip
    tree = data.draw(st.dictionaries(st.sampled_from(sorted(getattr(module, readers))), value, max_size=6))
    first = {"_AXOLOTL": "base_model", "_LLAMA_FACTORY": "model_name_or_path", "_TRL": "model_name_or_path"}
    tree = {"stage": "sft"} | tree if readers == "_LLAMA_FACTORY" else tree
    with suppress(ConfigError):
        imported({first[readers]: "m"} | tree, 2).text("theirs.yaml")
