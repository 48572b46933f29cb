"""What a rank's process holds at most while it takes its stage from a folder, read from /proc."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, PreTrainedConfig

from penstock import AutoPipeline
from penstock.models.weights.reading import HostReader
from support.pool import start

MIB = 2**20
CONSTANT = 12 * MIB  # what may come and go beside the weights


def held(what: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{what}:"))


def load(result: Connection, folder: Path, dtype: torch.dtype) -> None:
    """In a process of its own: the peak while a stage is filled, and the bytes of it and of its largest."""
    torch.set_num_threads(1)
    auto = AutoPipeline(ranks=2, microbatches=2, dtype=dtype)
    plan = auto.build_plan(folder)
    stage = plan.model_of(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = held("VmRSS")
    plan.source.fill(stage, auto.seed)
    sizes = [parameter.nbytes for parameter in stage.parameters()]
    result.send((held("VmHWM") - before, sum(sizes), max(sizes)))


def config_of(kind: str) -> PreTrainedConfig:
    sizes = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 8000}
    if kind == "llama":
        return LlamaConfig(**sizes, intermediate_size=1536, num_hidden_layers=8, tie_word_embeddings=True)
    return MixtralConfig(**sizes, intermediate_size=768, num_hidden_layers=6, num_local_experts=4)


@pytest.fixture
def folder(kind: str, tmp_path: Path) -> Path:
    """Weights of about 100 MiB in several shards, in float32."""
    AutoModelForCausalLM.from_config(config_of(kind)).save_pretrained(tmp_path, max_shard_size="20MB")
    return tmp_path


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("mixtral", torch.float32),
        pytest.param("llama", torch.bfloat16, marks=pytest.mark.sweep),
        pytest.param("llama", torch.float32, marks=pytest.mark.sweep),
        pytest.param("mixtral", torch.bfloat16, marks=pytest.mark.sweep),
    ],
)
def test_a_ranks_peak_is_its_stage_and_one_tensor(kind: str, dtype: torch.dtype, folder: Path) -> None:
    """All of the process's memory counts, files mapped into it as well: VmHWM.

    The one tensor is in the files' float32, and may be the experts of a layer, put together of many.
    """
    ours, theirs = multiprocessing.Pipe()
    process = start(load, theirs, folder, dtype)
    assert ours.poll(60), "it failed"
    peak, stage, largest = ours.recv()
    process.join()
    slack = largest * torch.float32.itemsize // dtype.itemsize
    assert stage > 20 * MIB
    assert stage <= peak + CONSTANT, "the weights are not in memory: nothing was measured"
    assert peak <= stage + slack, (peak / MIB, stage / MIB, slack / MIB)


def test_what_is_dropped_between_two_that_stay_is_given_back() -> None:
    """malloc would keep it: after it has freed a larger one, it takes what follows from its heap."""
    torch.zeros(8 * MIB, dtype=torch.uint8)
    made = [HostReader().empty([MIB], torch.uint8).zero_() for _ in range(128)]
    before = held("VmRSS")
    del made[::2]
    assert held("VmRSS") < before - 60 * MIB
    assert all(not tensor.any() for tensor in made)
