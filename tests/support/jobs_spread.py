"""Stages that are spread over a mesh while they are built: their values, and what a rank holds meanwhile."""

from __future__ import annotations

import ctypes
import gc
import weakref
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, PreTrainedConfig

from penstock import AutoPipeline, Axes
from penstock.runtime.sharded_weights import local_shard
from support.families import tiny_config, tiny_model
from support.jobs_mesh import batch, full, own_part
from support.reference import plain_step

Values = dict[str, Tensor]
KINDS = ("model", "config", "folder")


def source(kind: str, family: str, folder: str, tied: bool) -> Any:
    """The same model, in one of the ways in which it may be given."""
    if kind == "folder":
        return folder
    return tiny_config(family, tied=tied) if kind == "config" else tiny_model(family, tied=tied)


def values(pipe: Any) -> Values:
    """Of this process's parameters and buffers, whole."""
    found: Values = {}
    for module in pipe.modules.values():
        named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers()]
        found |= {name: full(value.detach()).clone() for name, value in named}
    return found


def built(
    ranks: int, axes: Axes, family: str, folder: str, tied: bool, options: dict[str, Any]
) -> dict[str, Values]:
    """By source, what this rank's stages have after building."""
    torch.set_num_threads(1)
    found = {}
    for kind in KINDS:
        pipe = AutoPipeline(ranks=ranks, microbatches=2, timeout=30, axes=axes, seed=3, **options).build(
            source(kind, family, folder, tied)
        )
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
    """Layers of 1 MiB, and no tensor of more than half of one: the allocator keeps some of what is let go."""
    sizes = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 1024,
             "tie_word_embeddings": False, "num_hidden_layers": layers}  # fmt: skip
    if family == "llama":
        return LlamaConfig(**sizes, intermediate_size=512)
    return MixtralConfig(**sizes, intermediate_size=128, num_local_experts=4)


def peaks(axes: Axes, family: str, layers: int, folders: tuple[str, str]) -> dict[str, Peak]:
    """By source, what this rank held at most while a model of so many layers was built.

    folders: of a small model, by which everything is imported, and of the model
    """
    torch.set_num_threads(1)
    found = {}
    for kind in KINDS:
        for depth, folder in zip((2, layers), folders, strict=True):
            config = config_of(family, depth)
            torch.manual_seed(depth)  # the same on every rank
            given = {"folder": folder, "config": config}.get(kind) or AutoModelForCausalLM.from_config(config)
            found[kind] = _peak(axes, given)
    return found


def _peak(axes: Axes, given: Any) -> Peak:
    auto = AutoPipeline(ranks=1, microbatches=2, timeout=30, axes=axes)
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = _status("VmRSS")
    pipe = auto.build(given)
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
    torch.set_num_threads(1)
    model = tiny_model("llama")
    model.model.norm.register_buffer("seen", torch.tensor(0.5))
    pipe = AutoPipeline(ranks=1, microbatches=2, timeout=30, axes=axes).build(model)
    pipe.save_pretrained(folder)
    pipe.close()


def let_go(axes: Axes | None) -> bool:
    """Whether the weights of the model that a pipeline was built of are gone while the pipeline lives."""
    torch.set_num_threads(1)
    model = tiny_model("mixtral")
    weights = [weakref.ref(parameter) for parameter in model.parameters()]
    pipe = AutoPipeline(ranks=1, microbatches=2, timeout=30, axes=axes).build(model)
    del model
    gc.collect()
    gone = all(weight() is None for weight in weights)
    pipe.close()
    return gone


def wrapped(axes: Axes) -> tuple[bool, float, float]:
    """Whether parallelize_fn was given values; the loss of a step, and that of one process."""
    torch.set_num_threads(1)
    model, whole = tiny_model("llama", torch.float64), batch()
    given: list[bool] = []

    def look(module: nn.Module) -> nn.Module:
        given.extend(bool(local_shard(parameter.detach()).any()) for parameter in module.parameters())
        return module

    pipe = AutoPipeline(ranks=1, microbatches=2, timeout=30, axes=axes, parallelize_fn=look).build(model)
    loss = pipe.step(own_part(whole, *pipe.batch_part)).loss
    pipe.close()
    return all(given), loss, plain_step(model, whole)[0]
