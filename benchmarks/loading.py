"""A model's folder, read and written by penstock, and by transformers.

Like with like: one process that loads the whole model, by each library; and four ranks at the same time, on
as many cores as there are, whose peaks are added up and whose slowest counts. A peak is what a process held
at most less what it held before it loaded. Its excess is what it held beyond the weights that it keeps.

The bytes' own time stands beside a load: a loop that reads each tensor into memory fresh from the kernel, by
as many processes, each a part of the files; for a folder that penstock wrote it hashes them, too, as a load
does. A load has the kernel make a tensor's pages at once, and not one by one as they are written to. So there
is a second loop that does this too, with the same bar.

The files are in the page cache. transformers maps the files and reads a weight when it is first looked at, so
that its time and memory are taken with one value read in each page.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import shutil
import struct
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.memory import peak_rss, reset_peak
from benchmarks.pool import Pool, Rank
from benchmarks.report import Found, Row, measured
from benchmarks.rounds import Numbers, Rounds, rounds_of
from penstock import AutoPipeline, Axes
from penstock.runtime.sharded_weights import local_shard

RANKS, MIB = 4, 2**20
SIZES = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 8, "num_attention_heads": 16,
         "num_key_value_heads": 16, "vocab_size": 16000, "tie_word_embeddings": False}  # fmt: skip
SHARD = "200MB"
AT_MOST = 16  # MiB over stage and one tensor: Python's own, and messages


def make(_: Rank, folder: str) -> None:
    AutoModelForCausalLM.from_config(LlamaConfig(**SIZES)).save_pretrained(folder, max_shard_size=SHARD)


class Loaded(NamedTuple):
    """Seconds, and MiB: of the peak, of the weights that are kept, and of the largest of them."""

    seconds: float
    peak: float
    kept: float
    largest: float

    @property
    def excess(self) -> float:
        return self.peak - self.kept


def load(rank: Rank, folder: str, sharded: bool = False) -> Loaded:
    """This rank's stage; or, sharded, its share of the one stage, which FSDP2 divides among all ranks."""
    axes = Axes(dp_shard=rank.count) if sharded else None
    auto = AutoPipeline(ranks=1 if sharded else rank.count, microbatches=rank.count, axes=axes)
    rank.kept.pop("pipe", None)
    auto.build_plan(folder)  # what it imports does not count
    if rank.count > 1:
        dist.barrier()
    before, start = reset_peak(), time.perf_counter()
    pipe = rank.kept["pipe"] = auto.build(folder)
    took, most = time.perf_counter() - start, peak_rss() - before
    weights = [parameter.detach() for parameter in pipe.parameters()]
    kept = sum(local_shard(weight).nbytes for weight in weights)
    largest = max(weight.numel() * weight.itemsize for weight in weights)
    return Loaded(took, most, kept / MIB, largest / MIB)


def read_share(rank: Rank, folder: str, hashed: bool = False, at_once: bool = False) -> float:
    """Seconds to read a part of the files, each tensor into memory fresh from the kernel, and to hash it.

    at_once: the kernel makes a tensor's pages at once, and not as they are written to
    """
    flags = mmap.MAP_PRIVATE | (mmap.MAP_POPULATE if at_once else 0)
    files = sorted(Path(folder).glob("*.safetensors"))[rank.index :: rank.count]
    rank.kept.pop("pipe", None)
    if rank.count > 1:
        dist.barrier()
    start, held = time.perf_counter(), []
    for file in files:
        digest = hashlib.sha256()
        with file.open("rb", buffering=0) as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            header = json.loads(opened.read(length))
            header.pop("__metadata__", None)
            for begin, end in sorted(tensor["data_offsets"] for tensor in header.values()):
                held.append(mmap.mmap(-1, end - begin, flags=flags))
                left = memoryview(held[-1])
                while left:  # a read has 2 GiB at most
                    left = left[opened.readinto(left) :]
                if hashed:
                    digest.update(held[-1])
    return time.perf_counter() - start


def load_by_transformers(rank: Rank, folder: str) -> Loaded:
    rank.kept.pop("model", None)
    before, start = reset_peak(), time.perf_counter()
    model = rank.kept["model"] = AutoModelForCausalLM.from_pretrained(folder)
    for parameter in model.parameters():
        parameter.data.view(-1)[::1024].sum()
    took, most = time.perf_counter() - start, peak_rss() - before
    sizes = [parameter.nbytes / MIB for parameter in model.parameters()]
    return Loaded(took, most, sum(sizes), max(sizes))


def save(rank: Rank, what: str, folder: str) -> float:
    start = time.perf_counter()
    rank.kept[what].save_pretrained(folder)
    return time.perf_counter() - start


class Turn(NamedTuple):
    """One round. Lists: by rank."""

    one: Loaded
    whole: Loaded
    stages: list[Loaded]
    shares: list[Loaded]
    again: list[Loaded]
    read_one: float
    read_stages: float
    read_again: float
    at_once_one: float
    at_once_stages: float
    at_once_again: float
    save_one: float
    save_ranks: float
    save_whole: float


def turn(mine: Pool, other: Pool, pool: Pool, source: str, target: Path) -> Turn:
    """mine, other: a process each for the whole model by penstock and by transformers; pool: the ranks"""

    def saved(by: Pool, what: str) -> float:
        took: float = max(by.run(save, what, str(target)))
        if by is not pool:
            shutil.rmtree(target)
        return took

    one, whole = mine.run(load, source)[0], other.run(load_by_transformers, source)[0]
    shares, stages = pool.run(load, source, True), pool.run(load, source)
    by_ranks = saved(pool, "pipe")
    again, read_again = pool.run(load, str(target)), max(pool.run(read_share, str(target), True))
    at_once_again = max(pool.run(read_share, str(target), True, True))
    shutil.rmtree(target)
    by_one, by_other = saved(mine, "pipe"), saved(other, "model")
    read_one, read_stages = max(mine.run(read_share, source)), max(pool.run(read_share, source))
    at_once_one = max(mine.run(read_share, source, False, True))
    at_once_stages = max(pool.run(read_share, source, False, True))
    return Turn(one, whole, stages, shares, again, read_one, read_stages, read_again, at_once_one,
                at_once_stages, at_once_again, by_one, by_ranks, by_other)  # fmt: skip


def measure(repeats: int) -> Found:
    turns: list[Turn] = []
    with (
        tempfile.TemporaryDirectory() as scratch, Pool(1, join=False) as mine, Pool(1, join=False) as other,
        Pool(RANKS) as pool,
    ):  # fmt: skip
        source = f"{scratch}/source"
        other.run(make, source)

        def take(_: int) -> Numbers:
            turns.append(turn(mine, other, pool, source, Path(scratch, "target")))
            return numbers(turns[-1])

        rounds = rounds_of(take, repeats)
    last = turns[-1]
    rows = [_compared(*names, rounds) for names in COMPARED]
    for case, found in (("its stage", last.stages), (f"its share, dp_shard={RANKS}", last.shares)):
        for rank, loaded in enumerate(found):
            name = f"{'rank' if found is last.stages else 'share'} {rank}"
            limit = loaded.kept + loaded.largest + AT_MOST
            rows += [
                Row(f"rank {rank}, {case}", "weights kept", loaded.kept, "MiB"),
                measured(f"rank {rank}, {case}", "peak, over its weights, one tensor and "
                         f"{AT_MOST} MiB", rounds[f"{name}: peak"].scaled(1 / limit), at_most=1.0),
            ]  # fmt: skip
    for case, name in READ.items():
        taken, own, at_once = f"{name}: load", f"{name}: read", f"{name}: at once"
        rows += [
            measured(case, "the bytes' own time", rounds[own], "s"),
            measured(case, "load", rounds[taken], "s"),
            measured(case, "load / the bytes' own time", rounds.ratio(taken, own), at_most=1.2),
            measured(
                case, "load / the same loop, pages made at once", rounds.ratio(taken, at_once), at_most=1.2
            ),
        ]
    notes = (
        f"Llama, 8 layers of 2048, float32, {last.whole.kept:.0f} MiB, in shards of {SHARD[:-2]} MB; one "
        f"thread a process; {rounds}",
        "other: transformers' from_pretrained in one process, with one value read in each page of its "
        "weights, and save_pretrained",
        "the bytes' own time: a loop that reads each tensor into memory fresh from the kernel, by as many "
        "processes, each some of the files; for the folder that penstock wrote it hashes them",
        "pages made at once: the kernel makes all pages of a tensor in one call, as in penstock's load, and "
        "not one by one as the loop writes to them",
        "peak: VmHWM less VmRSS before, files mapped into the process included; excess: less the weights "
        "that are kept; of ranks: the sum over them, or the slowest",
        "penstock's save also hashes each file and waits until the disk has it; transformers' does not",
    )
    title = f"Loading and saving: one process, and P={RANKS}"
    return Found("loading", title, rows, notes, {"turns": [turn._asdict() for turn in turns]})


# cases whose load has a bar, and the names of their numbers
READ = {
    "one process, the whole model": "one",
    f"{RANKS} ranks, a stage each": "stages",
    f"dp_shard={RANKS}, a share of the one stage each": "shares",
    f"{RANKS} ranks, a folder that penstock wrote, hashed": "again",
}

# case, quantity, unit, penstock's number, transformers'
COMPARED = (
    ("one process, the whole model", "peak", "MiB", "one: peak", "whole: peak"),
    ("one process, the whole model", "excess", "MiB", "one: excess", "whole: excess"),
    ("one process, the whole model", "load", "s", "one: load", "whole: load"),
    ("one process, the whole model", "save", "s", "one: save", "whole: save"),
    (f"{RANKS} ranks, a stage each", "peak, sum", "MiB", "stages: peak", "whole: peak"),
    (f"{RANKS} ranks, a stage each", "excess, sum", "MiB", "stages: excess", "whole: excess"),
    (f"{RANKS} ranks, a stage each", "load, slowest", "s", "stages: load", "whole: load"),
    (f"{RANKS} ranks, a stage each", "save", "s", "stages: save", "whole: save"),
    (f"dp_shard={RANKS}, a share of the one stage each", "peak, sum", "MiB", "shares: peak", "whole: peak"),
    (f"dp_shard={RANKS}, a share of the one stage each", "load, slowest", "s", "shares: load", "whole: load"),
)


def _compared(case: str, what: str, unit: str, mine: str, other: str, rounds: Rounds) -> Row:
    return measured(case, what, rounds.ratio(mine, other), unit, ours=rounds[mine].middle,
                    torch=rounds[other].middle)  # fmt: skip


def numbers(turn: Turn) -> Numbers:
    found = {
        "one: read": turn.read_one, "stages: read": turn.read_stages, "again: read": turn.read_again,
        "one: at once": turn.at_once_one, "stages: at once": turn.at_once_stages,
        "shares: read": turn.read_stages, "shares: at once": turn.at_once_stages,
        "again: at once": turn.at_once_again,
        "again: load": max(each.seconds for each in turn.again),
        "one: save": turn.save_one, "stages: save": turn.save_ranks, "whole: save": turn.save_whole,
    }  # fmt: skip
    groups = {"one": [turn.one], "whole": [turn.whole], "stages": turn.stages, "shares": turn.shares}
    for name, of in groups.items():
        found[f"{name}: peak"] = sum(each.peak for each in of)
        found[f"{name}: excess"] = sum(each.excess for each in of)
        found[f"{name}: load"] = max(each.seconds for each in of)
    for name, of in (("rank", turn.stages), ("share", turn.shares)):
        found |= {f"{name} {rank}: peak": each.peak for rank, each in enumerate(of)}
    return found
