"""D: a model of 8 B parameters in bfloat16, from a folder to a checkpoint and back.

- load: bytes of the weights over the seconds of `build`, planning included. Host memory: what the process
  held at most less what it held before, and less the weights that stay on the host, of which a GPU has none.
- peak: of training steps, the optimizer's included, over weights, gradients, optimizer state and live
  activations as `AutoPipeline.account` predicts them
- model FLOPs utilisation: the model's FLOPs over the seconds of a training step, over the rate of a matrix
  product of 8192. FLOPs are those of `torch.utils.flop_counter` for forward and backward, without what a
  layer or a head computes twice; attention counts in full.
- save: bytes of the checkpoint over the seconds from the call to its name on the disk, while training goes
  on. Stall: how long training stands, in the call and before the next change of the weights.
- resume: a pipeline is built from the checkpoint, loads it, and repeats the steps that followed the save,
  with deterministic kernels. No weight and no loss may differ in a bit.

The optimizer is AdamW where the disk has room for its state, else SGD with momentum. A rate that the disk
itself does not reach is "not run".
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from benchmarks.gpu.exactness import deterministic
from benchmarks.gpu.models import Size, attention, batch_of, predicted_live, qwen3, seconds, wait_for
from benchmarks.gpu.part import TEMPORARY, Part
from benchmarks.memory import peak_rss, reset_peak
from penstock import AutoPipeline, CheckpointWriter, Pipeline, load_checkpoint

GB = 1e9
LOAD, SAVE, COPY = 2.0, 1.0, 10.0  # GB/s
HOST, PEAK, UTILISATION = 2.0, 0.05, 0.45  # GB; shares
MATMUL, PROBE = 8192, 2**30  # of a matrix; bytes written to learn what the disk takes
SHARD = 4 * 2**30  # bytes of a file of the model
WARM, TIMED, AFTER = 1, 3, 2  # steps: before the measured ones, measured, after the save
BATCHES = WARM + TIMED + AFTER


class Sizes(NamedTuple):
    model: Size


FULL = Sizes(Size(36, 4096, 12288, 32, 8, 128, 151936, 1, 2048, 16, 2))
TINY = Sizes(Size(4, 32, 48, 4, 2, 8, 64, 1, 12, 4, 2))


class Run:
    """A pipeline of the model, its optimizer, and the batches of its steps."""

    def __init__(self, part: Part, size: Size, source: Path, moments: int) -> None:
        self.part, self.size, self.moments = part, size, moments
        self.auto = options(part, size)
        self.pipe: Pipeline = self.auto.build(source)
        weights = list(self.pipe.parameters())
        self.optimizer: Optimizer
        if moments == 2:
            self.optimizer = AdamW(weights, lr=1e-4, fused=part.on_gpu)
        else:
            self.optimizer = SGD(weights, lr=1e-3, momentum=0.9, fused=part.on_gpu)

    def step(self, number: int, settle: Callable[[], None] = lambda: None) -> float:
        """The loss of training step `number`. settle: called before the weights change"""
        batch = batch_of(self.size, self.part.device, seed=number)
        # not around the build, which runs the model without values, where this kernel may not exist
        with attention(SDPBackend.FLASH_ATTENTION if self.part.on_gpu else None):
            loss = self.pipe.step(batch).loss
        settle()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def after_save(self, settle: Callable[[], None] = lambda: None) -> list[float]:
        """The losses of the steps that follow the save."""
        with deterministic_but_quick():
            return [self.step(WARM + TIMED + number, settle) for number in range(AFTER)]


def options(part: Part, size: Size) -> AutoPipeline:
    return AutoPipeline(
        ranks=size.ranks, schedule="1f1b", microbatches=size.microbatches, device=part.device,
        dtype=torch.bfloat16,
    )  # fmt: skip


@contextmanager
def deterministic_but_quick() -> Iterator[None]:
    """Without NaN in all new memory."""
    settings: Any = torch.utils.deterministic
    before, settings.fill_uninitialized_memory = settings.fill_uninitialized_memory, False
    try:
        with deterministic():
            yield
    finally:
        settings.fill_uninitialized_memory = before


def run(part: Part, sizes: Sizes) -> None:
    size = sizes.model
    part.notes.append(str(size))
    folder = part.scratch / TEMPORARY
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        _measure(part, size, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _measure(part: Part, size: Size, folder: Path) -> None:
    source, checkpoint = folder / "model", folder / "checkpoint"
    made = part.measure("the model's folder", 120, partial(write_model, part, size, source))
    if not made:
        return  # the row that says why is there
    rate = disk_rate(folder, PROBE if part.on_gpu else 2**20)
    part.raw["GB/s that the disk takes"] = rate
    part.raw["GB/s that a plain read gives"] = read_rate(source)
    moments = moments_that_fit(folder, made)
    part.notes.append(
        "AdamW" if moments == 2 else "SGD with momentum, as the disk has no room for AdamW's state"
    )
    trained = part.measure("load", 120, partial(_load, part, size, source, made, moments))
    if trained is None:
        return
    part.measure("train", 120, partial(_train, part, trained))
    shutil.rmtree(source)  # the disk has not room for both
    if not moments:
        part.not_run("save", "GB/s", f"{free(folder) / GB:.0f} GB free on the disk", f"at least {SAVE:g}")
        return
    part.measure("save and resume", 300, partial(_save_and_resume, part, trained, checkpoint, rate))


# ---- the model's folder


def write_model(part: Part, size: Size, folder: Path) -> float:
    """Write random weights as safetensors, and return their bytes. Made on the GPU, one shard at a time."""
    folder.mkdir()
    config = qwen3(size)
    config.dtype = torch.bfloat16
    config.save_pretrained(folder)
    with torch.device("meta"):
        shapes = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).state_dict()
    torch.manual_seed(0)
    shard: dict[str, Tensor] = {}
    held, files, total = 0, dict[str, str](), 0

    def flush() -> None:
        name = f"model-{len(set(files.values())) + 1:05d}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        files.update(dict.fromkeys(shard, name))
        shard.clear()

    for name, shape in shapes.items():
        value = torch.empty(shape.shape, dtype=torch.bfloat16, device=part.device)
        value = value.fill_(1.0) if value.dim() == 1 else value.normal_(0.0, 0.02)
        shard[name] = value.cpu()
        held += value.nbytes
        total += value.nbytes
        if held > SHARD:
            flush()
            held = 0
    if shard:
        flush()
    index = {"metadata": {"total_size": total}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return float(total)


def disk_rate(folder: Path, nbytes: int) -> float:
    """GB/s of a plain write, until the disk has it."""
    file, block = folder / "probe", os.urandom(min(nbytes, 2**24))
    start = time.perf_counter()
    with file.open("wb") as opened:
        for _ in range(nbytes // len(block)):
            opened.write(block)
        opened.flush()
        os.fsync(opened.fileno())
    rate = nbytes / GB / (time.perf_counter() - start)
    file.unlink()
    return rate


def read_rate(folder: Path) -> float:
    """GB/s of a plain read of the first shard, which mostly is in the page cache, as all of them."""
    file, buffer = next(iter(sorted(folder.glob("*.safetensors")))), memoryview(bytearray(2**24))
    start = time.perf_counter()
    with file.open("rb", buffering=0) as opened:
        while opened.readinto(buffer):
            pass
    return file.stat().st_size / GB / (time.perf_counter() - start)


def free(folder: Path) -> int:
    """Bytes on the disk."""
    return shutil.disk_usage(folder).free


def moments_that_fit(folder: Path, weights: float) -> int:
    """Tensors of each parameter that the optimizer may keep. The model's folder is gone by the save."""
    room = free(folder) + weights
    return next((moments for moments in (2, 1) if room > (1 + moments) * weights * 1.05), 0)


# ---- load, train


def _load(part: Part, size: Size, source: Path, nbytes: float, moments: int) -> Run:
    options(part, size).build_plan(source)  # what it imports does not count
    part.free()
    torch.ones(1, device=part.device).sum().item()
    before = reset_peak()
    run: list[Run] = []
    took = seconds(part.device, lambda: run.append(Run(part, size, source, moments or 1)))
    stays = 0.0 if part.on_gpu else nbytes
    beyond = (peak_rss() - before) * 2**20 - stays
    plain = part.raw["GB/s that a plain read gives"]
    rate = nbytes / GB / took
    if rate < LOAD and part.on_gpu and plain < LOAD:
        part.not_run("load", "GB/s", f"a plain read gives {plain:.2f}", f"at least {LOAD:g}")
    else:
        part.add("load", "weights", rate, "GB/s", at_least=LOAD, timing=True)
    part.add("load", "host memory beyond the model", beyond / GB, "GB", at_most=HOST)
    part.raw["load"] = {"bytes": nbytes, "seconds": took}
    return run[0]


def _train(part: Part, run: Run) -> None:
    if part.on_gpu:
        torch.cuda.reset_peak_memory_stats(part.device)
    for number in range(WARM):
        run.step(number)
    times = [seconds(part.device, lambda n=number: run.step(WARM + n)) for number in range(TIMED)]  # type: ignore[misc]
    took = sorted(times)[len(times) // 2]
    part.raw["train"] = {"seconds of a step": times}
    _peak(part, run)
    flops = model_flops(run.size)
    part.add("train", "step", took, "s")
    part.add("train", "model FLOPs", flops / took / 1e12, "TFLOP/s")
    if not part.on_gpu:
        part.not_run("train", "of a matrix product's rate", "without a GPU", f"at least {UTILISATION:g}")
        return
    product = matmul_rate(part.device)
    part.add("train", f"a matrix product of {MATMUL}", product / 1e12, "TFLOP/s")
    part.add("train", "of a matrix product's rate", flops / took / product, at_least=UTILISATION)


def _peak(part: Part, run: Run) -> None:
    plan = run.auto.build_plan(run.pipe.config)
    account, shape = run.auto.account(plan), run.size.shape
    costs = account.costs(shape)
    assert costs is not None
    count = run.moments or 1
    held = account.ranks(None, lambda name, parameter, entries: count * parameter.itemsize * entries)
    fixed = sum(rank.fixed for rank in held)
    predicted = fixed + predicted_live(run.pipe.timeline, run.pipe.schedule, costs)
    part.raw["train"] |= {"predicted peak": predicted, "of it weights, gradients and optimizer": fixed}
    what = "peak / predicted, less 1"
    if not part.on_gpu:
        part.not_run("train", what, "a CPU's allocator keeps no peak", f"at most {PEAK:g}")
        return
    peak = torch.cuda.max_memory_allocated(part.device)
    part.raw["train"]["peak"] = peak
    part.add("train", "peak", peak / GB, "GB")
    part.add("train", what, abs(peak / predicted - 1), at_most=PEAK)


def model_flops(size: Size) -> float:
    """Of the forward and the backward of a step: twice the forward's for the backward."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(qwen3(size), dtype=torch.bfloat16)
        ids = torch.zeros(size.shape, dtype=torch.long)
    with FlopCounterMode(display=False) as counter, torch.no_grad(), attention(SDPBackend.MATH):
        # the mask that it would make itself, by a look at values: none, as each row is one document
        model(input_ids=ids, attention_mask={"full_attention": None}, use_cache=False)
    forward: int = counter.get_total_flops()
    return 3.0 * forward * size.microbatches


def matmul_rate(device: torch.device, repeats: int = 20) -> float:
    """FLOPs a second of a product of random matrices in bfloat16."""
    left, right = (torch.randn(MATMUL, MATMUL, device=device, dtype=torch.bfloat16) for _ in range(2))
    result = torch.empty_like(left)

    def products() -> None:
        for _ in range(repeats):
            torch.mm(left, right, out=result)

    products()
    return 2.0 * MATMUL**3 * repeats / seconds(device, products)


# ---- save, resume


def _save_and_resume(part: Part, run: Run, checkpoint: Path, disk: float) -> None:
    device = part.device
    named: list[float] = []
    wait_for(device)
    with CheckpointWriter(run.pipe) as writer:
        start = time.perf_counter()
        writer.save(
            checkpoint, run.optimizer, {"step": WARM + TIMED}, then=lambda: named.append(time.perf_counter())
        )
        stalls = [time.perf_counter() - start]

        def settle() -> None:
            wait_for(device)  # what is computed does not count
            begin = time.perf_counter()
            writer.settle()
            stalls.append(time.perf_counter() - begin)

        expected = run.after_save(settle)
    stall = sum(stalls)
    took = named[0] - start
    nbytes = sum(file.stat().st_size for file in checkpoint.iterdir())
    part.raw["save"] = {"bytes": nbytes, "seconds": took, "stall": stall, "stalls": stalls}
    if nbytes / GB / took < SAVE and disk < SAVE and part.on_gpu:
        part.not_run("save", "GB/s", f"the disk takes {disk:.2f}", f"at least {SAVE:g}")
    else:
        part.add("save", "checkpoint", nbytes / GB / took, "GB/s", at_least=SAVE, timing=True)
    part.add("save", "stall / (bytes / 10 GB/s)", stall / (nbytes / GB / COPY), at_most=1.0, timing=True)
    weights = {name: value.detach().cpu() for name, value in run.pipe.named_parameters()}
    size, moments = run.size, run.moments
    run.pipe.close()
    _empty(run)
    part.free()
    again = Run(part, size, checkpoint, moments)
    start = time.perf_counter()
    state = load_checkpoint(checkpoint, again.pipe, again.optimizer)
    wait_for(device)
    rate = nbytes / GB / (time.perf_counter() - start)
    part.add("resume", "load_checkpoint", rate, "GB/s", at_least=LOAD, timing=True)
    if state != {"step": WARM + TIMED}:
        raise RuntimeError(f"the loop's state came back as {state}")
    losses = again.after_save()
    differing = [
        name for name, value in again.pipe.named_parameters() if not _same_bits(value.detach(), weights[name])
    ]
    part.add(
        "resume", "weights that differ in any bit", len(differing), at_most=0, why=", ".join(differing[:1])
    )
    different = sum(one != other for one, other in zip(losses, expected, strict=True))
    part.add("resume", "losses that differ", different, at_most=0, why=f"{losses} and {expected}")
    again.pipe.close()


def _same_bits(value: Tensor, other: Tensor) -> bool:
    """Also where both are not a number."""
    return torch.equal(value.view(torch.int16), other.to(value.device).view(torch.int16))


def _empty(run: Run) -> None:
    """Let go of all of its tensors, whoever still holds it."""
    for value in run.pipe.parameters():
        value.grad = None
        value.data = torch.empty(0, dtype=value.dtype, device=value.device)
    run.optimizer.state.clear()
    gc.collect()
