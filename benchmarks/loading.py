"""A model's folder, read and written by four ranks, beside the whole model in one process.

Time and peak of host memory. The ranks run at the same time, each in a process of its own, on as many cores
as there are; the files are in the page cache. transformers maps the files and reads a weight when it is first
looked at, so that its time and memory are taken with every weight looked at once.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import shutil
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.pool import Pool, Rank
from benchmarks.report import Found, Row
from penstock import AutoPipeline, Axes
from penstock.runtime.sharded_weights import local_shard

RANKS, MIB = 4, 2**20
SIZES = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8, "num_attention_heads": 16,
         "num_key_value_heads": 16, "vocab_size": 16000, "tie_word_embeddings": False}  # fmt: skip
SHARD = "100MB"
AT_MOST = 16  # MiB beside stage and one tensor: Python's own, and messages


def held(what: str) -> float:
    """A line of /proc/self/status, in MiB: VmRSS, or VmHWM for its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{what}:"))


def reset_peak() -> float:
    """What is held now, without what the repeat before has freed and the allocator keeps."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return held("VmRSS")


def make(_: Rank, folder: str) -> None:
    AutoModelForCausalLM.from_config(LlamaConfig(**SIZES)).save_pretrained(folder, max_shard_size=SHARD)


def load_stage(rank: Rank, folder: str) -> tuple[float, float, float, float]:
    """Seconds, and MiB of the peak, of the stage and of its largest weight."""
    auto = AutoPipeline(ranks=rank.count, microbatches=rank.count)
    rank.kept.pop("pipe", None)
    auto.build_plan(folder)  # what is imported by it does not count
    dist.barrier()
    before, start = reset_peak(), time.perf_counter()
    pipe = rank.kept["pipe"] = auto.build(folder)
    took = time.perf_counter() - start
    sizes = [parameter.nbytes / MIB for parameter in pipe.parameters()]
    return took, held("VmHWM") - before, sum(sizes), max(sizes)


def load_spread(rank: Rank, folder: str) -> tuple[float, float, float, float]:
    """The same of one stage that FSDP2 spreads over all ranks: with MiB of this rank's part of it."""
    auto = AutoPipeline(ranks=1, microbatches=rank.count, axes=Axes(dp_shard=rank.count))
    rank.kept.pop("pipe", None)
    auto.build_plan(folder)
    dist.barrier()
    before, start = reset_peak(), time.perf_counter()
    pipe = rank.kept["pipe"] = auto.build(folder)
    took = time.perf_counter() - start
    weights = [parameter.detach() for parameter in pipe.parameters()]
    part = sum(local_shard(weight).nbytes for weight in weights)
    largest = max(weight.numel() * weight.itemsize for weight in weights)
    return took, held("VmHWM") - before, part / MIB, largest / MIB


def read_share(rank: Rank, folder: str) -> float:
    """Seconds to read and to hash a part of the files, without anything else."""
    files = sorted(Path(folder).glob("*.safetensors"))[rank.index :: rank.count]
    dist.barrier()
    start = time.perf_counter()
    for file in files:
        with file.open("rb") as opened:
            hashlib.file_digest(opened, "sha256")
    return time.perf_counter() - start


def load_whole(rank: Rank, folder: str) -> tuple[float, float]:
    rank.kept.pop("model", None)
    before, start = reset_peak(), time.perf_counter()
    model = rank.kept["model"] = AutoModelForCausalLM.from_pretrained(folder)
    for parameter in model.parameters():
        parameter.data.view(-1)[::1024].sum()
    return time.perf_counter() - start, held("VmHWM") - before


def save(rank: Rank, what: str, folder: str) -> float:
    start = time.perf_counter()
    rank.kept[what].save_pretrained(folder)
    return time.perf_counter() - start


def measure(repeats: int) -> Found:
    with tempfile.TemporaryDirectory() as scratch:
        source, target = f"{scratch}/source", Path(scratch, "target")
        parts: list[list[tuple[float, float, float, float]]] = []
        shares: list[list[tuple[float, float, float, float]]] = []
        wholes, ours, theirs = [], [], []
        written: list[float] = []
        reads: list[float] = []
        with Pool(1, join=False) as one, Pool(RANKS) as pool:
            one.run(make, source)
            for number in range(repeats + 1):
                spread = pool.run(load_spread, source)
                part, whole = pool.run(load_stage, source), one.run(load_whole, source)[0]
                saved = max(pool.run(save, "pipe", str(target)))
                own = max(entry[0] for entry in pool.run(load_stage, str(target)))
                read = max(pool.run(read_share, str(target)))
                shutil.rmtree(target)
                other = one.run(save, "model", str(target))[0]
                shutil.rmtree(target)
                if number:  # the first one warms up
                    parts.append(part)
                    shares.append(spread)
                    wholes.append(whole)
                    ours.append(saved)
                    written.append(own)
                    reads.append(read)
                    theirs.append(other)
        return _found(parts, shares, wholes, ours, theirs, written, reads)


def _found(
    parts: Any, shares: Any, wholes: Any, ours: list[float], theirs: list[float],
    written: list[float], reads: list[float],
) -> Found:  # fmt: skip
    rows = []
    for rank in range(RANKS):
        of_rank = [part[rank] for part in parts]
        peak, stage, largest = (median(entry[place] for entry in of_rank) for place in (1, 2, 3))
        rows += [
            Row(f"rank {rank}", "its stage", stage, "MiB"),
            Row(f"rank {rank}", "peak while loading", peak, "MiB", median(w[1] for w in wholes),
                f"at most its stage, one tensor and {AT_MOST} MiB", peak <= stage + largest + AT_MOST),
        ]  # fmt: skip
    most = max(range(RANKS), key=lambda rank: median(entry[rank][1] for entry in shares))
    took, peak, share, largest = (median(entry[most][place] for entry in shares) for place in range(4))
    rows += [
        Row(f"dp_shard={RANKS}", "a rank's part of the one stage", share, "MiB"),
        Row(f"dp_shard={RANKS}", "peak while loading, of the rank with most", peak, "MiB",
            median(w[1] for w in wholes), f"at most its part, one tensor and {AT_MOST} MiB",
            peak <= share + largest + AT_MOST),
        Row(f"dp_shard={RANKS}", "load, that rank", took, "s", median(w[0] for w in wholes)),
    ]  # fmt: skip
    slowest = median(max(entry[0] for entry in part) for part in parts)
    rows += [
        Row("slowest rank", "load", slowest, "s", median(w[0] for w in wholes)),
        Row("slowest rank", "load a folder that penstock wrote, with its files hashed", median(written), "s"),
        Row("slowest rank", "read its share of the bytes, and hash them", median(reads), "s"),
        Row("all ranks", "save", median(ours), "s", median(theirs)),
    ]
    return Found(
        "loading",
        f"Loading and saving, P={RANKS}, and the whole model in one process by transformers",
        rows,
        (
            "Llama, 8 layers of 1024, float32, in shards of 100 MB; ranks at the same time, one thread each; "
            f"median of {len(ours)}",
            "under torch: transformers' from_pretrained, with every weight looked at, and save_pretrained",
            "peak: VmHWM above VmRSS before, files mapped into the process included",
            "penstock's save also hashes each file and waits until the disk has it; transformers' does not",
        ),
        {
            "loads": parts,
            "spread loads": shares,
            "wholes": wholes,
            "saves": ours,
            "whole saves": theirs,
            "loads of our own": written,
            "reads": reads,
        },
    )
