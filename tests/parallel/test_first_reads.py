"""load="broadcast": one rank reads what several need. The same weights, bit for bit, and an error on all."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig
from transformers.core_model_loading import Transpose, WeightConverter

from penstock import Axes
from penstock.models.weights import files
from penstock.models.weights.reading import Reader
from penstock.models.weights.tensor_file import TensorFile
from penstock.runtime.sharded_weights import local_shard
from support.mesh import build_whole, error_of, full, later
from support.pool import Pool


class Built(NamedTuple):
    """What a rank has: its shards by name; bytes that its process read during the build, of its stage, and of
    its shards."""

    shards: dict[str, Tensor]
    read: int
    stage: int
    own: int


def bytes_read() -> int:
    """By read and pread, of this process so far."""
    return int(Path("/proc/self/io").read_text().split()[1])


def build(folder: str, ranks: int, axes: Axes, load: str) -> Built:
    before = bytes_read()
    pipe = build_whole(folder, ranks, axes, load=load)
    read = bytes_read() - before
    named = dict(pipe.named_parameters(remove_duplicate=False))
    shards = {name: local_shard(p.detach()).clone() for name, p in named.items()}
    once = {id(p): p.detach() for p in named.values()}.values()
    whole, own = sum(p.numel() * p.itemsize for p in once), sum(local_shard(p).nbytes for p in once)
    pipe.close()
    return Built(shards, read, whole, own)


def built(folder: str, ranks: int, axes: Axes) -> tuple[Built, Built]:
    build(folder, ranks, axes, "each")  # what is imported on the way is read by now
    return build(folder, ranks, axes, "each"), build(folder, ranks, axes, "broadcast")


@pytest.fixture
def folder(family: str, tmp_path: Path) -> str:
    """Weights of several MiB in several files, in bfloat16, which is not what they are trained in."""
    sizes = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 2048,
             "num_hidden_layers": 4}  # fmt: skip
    config = (
        LlamaConfig(**sizes, intermediate_size=512, tie_word_embeddings=True)
        if family == "llama"
        else MixtralConfig(**sizes, intermediate_size=128, num_local_experts=4)
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path, max_shard_size="1MB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    return str(tmp_path)


CASES: list[tuple[str, int, Axes]] = [
    ("llama", 2, Axes(dp_shard=2)),
    ("mixtral", 1, Axes(dp_shard=4, ep=2)),
    ("llama", 2, Axes(tp=2)),
    ("llama", 2, Axes(dp_replicate=2)),
    ("llama", 1, Axes(dp_replicate=2, tp=2)),
    ("llama", 1, Axes(dp_shard=2, cp=2)),
    ("mixtral", 2, Axes(dp_shard=2, ep=2)),
]


@pytest.mark.parametrize(("family", "ranks", "axes"), [CASES[0], *later(*CASES[1:])])
def test_weights_are_the_same_and_one_rank_of_a_stage_reads_them(
    pool: Pool, family: str, ranks: int, axes: Axes, folder: str
) -> None:
    found = pool.run(4, built, folder, ranks, axes)
    for each, broadcast in found:
        assert each.shards.keys() == broadcast.shards.keys()
        for name, shard in each.shards.items():
            assert shard.dtype == broadcast.shards[name].dtype
            assert torch.equal(shard, broadcast.shards[name]), name
    for rank, (each, broadcast) in enumerate(found):
        if family == "llama" and axes.tp == 1:  # 0.5.0: every rank read the whole stage
            assert each.own < each.read < each.own + 0.1 * each.stage
        else:  # tp may divide columns, of which no range of the file has one part; experts are put together
            assert each.read > 0.5 * each.stage
        if rank % axes.ranks_per_stage == 0:  # `pp` is the outermost axis
            assert broadcast.read > broadcast.stage
        else:
            assert broadcast.read < 0.2 * broadcast.stage, (broadcast.read, broadcast.stage)


def turned(folder: str, axes: Axes | None) -> dict[str, Tensor]:
    """The weights of a stage whose square matrices are turned on the way in, as a conversion may do."""
    turns = WeightConverter("o_proj.weight", "o_proj.weight", operations=[Transpose(0, 1)])
    with patch.object(files, "get_model_conversion_mapping", lambda stage: [turns]):
        pipe = build_whole(folder, 1, axes)
    found = {name: full(p.detach()).clone() for name, p in pipe.named_parameters()}
    pipe.close()
    return found


@pytest.mark.parametrize("family", ["llama"])
def test_a_tensor_that_is_converted_is_read_whole(pool: Pool, folder: str) -> None:
    """Its rows are no rows of the file, though it has the parameter's shape."""
    expected = turned(folder, None)
    for found in pool.run(2, turned, folder, Axes(dp_shard=2)):
        assert found.keys() == expected.keys()
        assert all(torch.equal(value, expected[name]) for name, value in found.items())


def failing(folder: str, where: str, rank: int) -> str:
    """The error of a build in which the process of this rank cannot read some tensor, or has other files."""
    import torch.distributed as dist

    own, count = TensorFile.read, 0

    def fails(file: TensorFile, name: str, reader: Reader) -> Tensor:
        nonlocal count
        count += 1
        if dist.get_rank() == rank and count > 3:
            raise OSError(5, "Input/output error")
        return own(file, name, reader)

    if where == "tensor":
        TensorFile.read = fails  # type: ignore[assignment, method-assign]
    elif dist.get_rank() == rank:
        folder += "-elsewhere"  # of other weights, on a host of its own
    try:
        return error_of(lambda: build_whole(folder, 2, Axes(dp_shard=2), load="broadcast").close())
    finally:
        TensorFile.read = own  # type: ignore[method-assign]


@pytest.mark.parametrize("family", ["llama"])
@pytest.mark.parametrize("where", ["tensor", "files"])
def test_an_error_of_one_rank_is_that_of_all(pool: Pool, where: str, folder: str) -> None:
    shutil.copytree(folder, f"{folder}-elsewhere")  # the same config and names, and files of another dtype
    for file in Path(f"{folder}-elsewhere").glob("*.safetensors"):
        values = {name: value.float() for name, value in load_file(file).items()}
        save_file(values, file, {"format": "pt"})
    found = pool.run(4, failing, folder, where, 2)
    assert len(set(found)) == 1, found
    if where == "tensor":
        assert found[0].startswith("CheckpointError: ")
        assert "Input/output error" in found[0]
    else:
        assert found[0].startswith("HandshakeError: ")
        assert "tensors of model-00001-of-" in found[0]
