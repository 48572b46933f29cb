"""A sharded stage is never whole on one rank while it is built: its values, and a rank's peak memory."""

from __future__ import annotations

import ctypes
import gc
import weakref
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, PreTrainedConfig

from penstock import AutoPipeline, Axes
from penstock.models.tracing.meta import write_through
from penstock.models.weights import files as weights
from penstock.runtime.sharded_weights import local_shard, materialize
from support.families import tiny_config, tiny_model
from support.mesh import batch, build_whole, later, own_part
from support.pool import Pool
from support.reference import plain_step
from support.stage_values import Values, values

KINDS = ("model", "config", "folder")


def source_of(kind: str, family: str, folder: str, tied: bool) -> Any:
    """The same model, in one of the ways in which it may be given."""
    if kind == "folder":
        return folder
    return tiny_config(family, tied=tied) if kind == "config" else tiny_model(family, tied=tied)


def built(ranks: int, axes: Axes | None, family: str, folder: str, tied: bool) -> dict[str, Values]:
    """By source, what this rank's stages have after building."""
    found = {}
    for kind in KINDS:
        pipe = build_whole(source_of(kind, family, folder, tied), ranks, axes, seed=3)
        for module in pipe.modules.values():
            assert not any(
                local_shard(tensor).is_meta for tensor in (*module.parameters(), *module.buffers())
            )
        found[kind] = values(pipe)
        pipe.close()
    return found


class Peak(NamedTuple):
    """Bytes: the most that a rank's process held above what it held before; its part; and of the stage, all
    and the largest tensor."""

    held: int
    part: int
    stage: int
    largest: int


def config_of(family: str, layers: int) -> PreTrainedConfig:
    """Layers of 2 MiB, and no tensor of more than one: the allocator keeps some of what is freed."""
    sizes = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 1024,
             "tie_word_embeddings": False, "num_hidden_layers": layers}  # fmt: skip
    if family == "llama":
        return LlamaConfig(**sizes, intermediate_size=1024)
    return MixtralConfig(**sizes, intermediate_size=128, num_local_experts=8)


DEPTHS = 2, 24  # layers of a small model, by which everything is imported, and of the one that is measured


def peaks(axes: Axes, family: str, folders: tuple[str, str]) -> dict[str, Peak]:
    """By source, what this rank held at most while the model was built; "broadcast" is a folder, too."""
    found = {}
    for kind in (*KINDS, "broadcast"):
        for depth, folder in zip(DEPTHS, folders, strict=True):
            config = config_of(family, depth)
            torch.manual_seed(depth)  # the same on every rank
            sources = {"folder": folder, "broadcast": folder, "config": config}
            given = sources.get(kind) or AutoModelForCausalLM.from_config(config)
            found[kind] = _peak(axes, given, "broadcast" if kind == "broadcast" else "each")
    return found


def _peak(axes: Axes, given: Any, load: str) -> Peak:
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = _status("VmRSS")
    pipe = build_whole(given, 1, axes, load=load)
    held = _status("VmHWM") - before
    weights = {id(p): p.detach() for p in pipe.parameters()}.values()
    sizes = [weight.numel() * weight.itemsize for weight in weights]
    part = sum(local_shard(weight).nbytes for weight in weights)
    pipe.close()
    return Peak(held, part, sum(sizes), max(sizes))


def _status(what: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{what}:"))


def saved(axes: Axes, folder: str) -> None:
    """Writes a model with a buffer that has no dimensions."""
    model = tiny_model("llama")
    model.model.norm.register_buffer("seen", torch.tensor(0.5))
    pipe = build_whole(model, 1, axes)
    pipe.save_pretrained(folder)
    pipe.close()


def let_go(axes: Axes | None) -> bool:
    """Whether the weights of the model that a pipeline was built of are gone while the pipeline lives."""
    model = tiny_model("mixtral")
    weights = [weakref.ref(parameter) for parameter in model.parameters()]
    pipe = build_whole(model, 1, axes)
    del model
    gc.collect()
    gone = all(weight() is None for weight in weights)
    pipe.close()
    return gone


def wrapped(axes: Axes) -> tuple[bool, float, float]:
    """Whether parallelize_fn was given values; the loss of a step, and that of one process."""
    model, whole = tiny_model("llama", torch.float64), batch()
    given: list[bool] = []

    def look(module: nn.Module) -> nn.Module:
        given.extend(bool(local_shard(parameter.detach()).any()) for parameter in module.parameters())
        return module

    pipe = build_whole(model, 1, axes, parallelize_fn=look)
    loss = pipe.step(own_part(whole, *pipe.batch_part)).loss
    pipe.close()
    return all(given), loss, plain_step(model, whole)[0]


MIB = 2**20
# Python's own: names, headers, meshes, and what conversions leave behind
CONSTANT = 12 * MIB
# family, ranks of the pipeline, axes, processes
CASES: list[tuple[str, int, Axes, int]] = [
    ("llama", 2, Axes(dp_shard=2), 4),
    ("mixtral", 1, Axes(dp_shard=2, ep=2, tp=2), 4),
    ("gpt2", 1, Axes(dp_shard=3), 3),  # of which some weights have no even shares
    ("qwen3", 2, Axes(tp=2), 4),
    ("gpt_oss", 1, Axes(dp_shard=2, cp=2, ep=4), 4),
    ("mixtral", 1, Axes(dp_shard=4, ep=2), 4),
    ("llama", 1, Axes(dp_replicate=2, dp_shard=2), 4),
]
MORE = [(*case, tied) for case in CASES[2:] for tied in (False, True)]


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("family", "ranks", "axes", "world", "tied"), [(*CASES[1], True), *later((*CASES[0], False), *MORE)]
)
def test_the_values_are_those_of_one_process(
    pool: Pool, tmp_path: Path, family: str, ranks: int, axes: Axes, world: int, tied: bool
) -> None:
    """Bit for bit, of a folder, a model and a config, tied weights and buffers among them."""
    tiny_model(family, tied=tied, seed=5).save_pretrained(tmp_path, max_shard_size="20KB")
    expected = built(1, None, family, str(tmp_path), tied)
    found = pool.run(world, built, ranks, axes, family, str(tmp_path), tied)
    for kind, whole in expected.items():
        assert {name for rank in found for name in rank[kind]} == whole.keys()
        for name, value in ((name, value) for rank in found for name, value in rank[kind].items()):
            assert value.dtype == whole[name].dtype, (kind, name)
            assert torch.equal(value, whole[name]), (kind, name)


@pytest.mark.parametrize(
    ("family", "axes"),
    [
        pytest.param("llama", Axes(dp_shard=2, tp=2), marks=pytest.mark.sweep),
        *later(
            ("mixtral", Axes(dp_shard=4, ep=4)),
            ("llama", Axes(dp_shard=2, cp=2)),
            ("mixtral", Axes(dp_shard=2, cp=2, ep=2)),
        ),
    ],
)
def test_a_ranks_peak_is_its_shard_plus_one_tensor(
    pool: Pool, tmp_path: Path, family: str, axes: Axes
) -> None:
    """All of the process's memory counts, read from /proc, whatever the model comes from."""
    folders = [str(tmp_path / name) for name in ("small", "large")]
    for folder, depth in zip(folders, DEPTHS, strict=True):
        model = AutoModelForCausalLM.from_config(config_of(family, depth))
        model.save_pretrained(folder, max_shard_size="20MB")
    for kind, peak in (
        each for rank in pool.run(4, peaks, axes, family, tuple(folders)) for each in rank.items()
    ):
        shown = kind, *(round(size / MIB, 1) for size in peak)
        assert peak.stage > 40 * MIB
        assert peak.part < 0.3 * peak.stage, shown
        assert peak.part <= peak.held + CONSTANT, "the weights are not in memory: nothing was measured"
        assert peak.held <= peak.part + peak.largest + CONSTANT, shown


def test_the_source_model_is_freed(pool: Pool) -> None:
    assert all(pool.run(2, let_go, Axes(dp_shard=2, ep=2)))
    assert let_go(None)


def test_a_buffer_without_dimensions_is_saved(pool: Pool, tmp_path: Path) -> None:
    """0.5.0: IndexError on all pipelines of a mesh but the first, which waited for them."""
    pool.run(2, saved, Axes(dp_shard=2), str(tmp_path / "saved"))
    held = load_file(tmp_path / "saved" / "model.safetensors")
    assert float(held.pop("model.norm.seen")) == 0.5
    expected = tiny_model("llama").state_dict()
    assert held.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in held.items())


@pytest.mark.sweep
def test_parallelize_fn_gets_values(pool: Pool) -> None:
    for given, loss, expected in pool.run(4, wrapped, Axes(dp_shard=2, tp=2)):
        assert given
        assert loss == pytest.approx(expected, rel=1e-10)


def test_a_dtype_that_some_weights_keep_is_kept(tmp_path: Path) -> None:
    """transformers reads the norms of this one in float32 where the rest is float16."""
    tiny_model("gpt_oss").save_pretrained(tmp_path)
    auto = AutoPipeline(ranks=2, microbatches=2, dtype=torch.float16)
    plan = auto.build_plan(tmp_path)
    whole, part = plan.model_of(0), plan.model_of(0, values=False)
    plan.source.fill(whole, auto.seed)
    weights.check(part, plan.source.files, ())
    given = write_through(part)
    materialize(part, torch.device("cpu"))
    plan.source.fill(given, auto.seed)
    expected, found = dict(whole.named_parameters()), dict(part.named_parameters())
    assert {p.dtype for p in expected.values()} == {torch.float16, torch.float32}
    assert all(found[name].dtype == value.dtype for name, value in expected.items())
    assert all(torch.equal(found[name], value) for name, value in expected.items())
