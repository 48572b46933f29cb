"""The memory of a rank beside the size of its corpus, and how long the corpus takes to tokenise.

JSONL of random words, in bytes as tokens, packed into rows of 1,024 tokens. A process loads it into an empty
cache, as the command does that starts the ranks; then a fresh one, a rank, loads it again and makes batches
of 64 rows from all over it.
`python -m benchmarks.corpus FILE CACHE` is such a process.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report import Found, Row

SIZES = (16, 256, 2048)  # MB of JSONL
BATCHES = 200
ALLOWED = 64  # MB that the largest corpus may take more than the smallest
_DOCUMENTS = 4096  # different ones


def write(file: Path, megabytes: int) -> None:
    """Documents of 100 to 6,000 characters, repeated until the file is large enough."""
    draw = np.random.default_rng(0)
    words = ["".join(map(chr, draw.integers(97, 123, length))) for length in draw.integers(2, 12, 5000)]
    lines = [
        json.dumps({"text": " ".join(draw.choice(words, count))})
        for count in draw.integers(15, 800, _DOCUMENTS)
    ]
    block = "\n".join(lines) + "\n"
    with file.open("w") as opened:
        while opened.tell() < megabytes * 10**6:
            opened.write(block)


def rank(file: str, cache: str) -> dict[str, float]:
    """Seconds to load, and MB of this process before and after: its own, and pages of files."""
    from penstock.train.config.sections import TrainConfig
    from penstock.train.data.loading import load_data, tokenizer_of

    data = {"path": file, "kind": "jsonl", "tokenizer": "bytes", "sequence_length": 1024,
            "packing": "best_fit", "cache": cache, "held_out": 0.001}  # fmt: skip
    config = TrainConfig.model_validate({
        "model": {"config": {"model_type": "qwen3"}}, "data": data,
        "train": {"batch_size": 64, "steps": 10**5},
    })  # fmt: skip
    before, start = memory(), time.perf_counter()
    loaded = load_data(config, tokenizer_of(config), 256)
    seconds = time.perf_counter() - start
    for step in range(1, BATCHES + 1):
        loaded.batch(step)
    after = memory()
    return {"seconds": seconds, **{name: after[name] - before[name] for name in after}}


def memory() -> dict[str, float]:
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {line[0].rstrip(":"): int(line[1]) / 1024 for line in lines if line[0] in ("RssAnon:", "RssFile:")}


def fresh(file: Path, cache: str) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.corpus", str(file), cache]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, timeout=900)
    found: dict[str, float] = json.loads(ran.stdout.splitlines()[-1])
    return found


def measure(repeats: int) -> Found:
    found: dict[int, dict[str, dict[str, float]]] = {}
    for size in SIZES:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "a.jsonl"
            write(file, size)
            found[size] = {who: fresh(file, f"{folder}/cache") for who in ("builds", "maps")}
    rows: list[Row] = []
    least = sum(found[SIZES[0]]["maps"][name] for name in ("RssAnon", "RssFile"))
    for size, turns in found.items():
        built, mapped = turns["builds"], turns["maps"]
        own = mapped["RssAnon"] + mapped["RssFile"]
        bar: dict[str, Any] = {}
        if size == SIZES[-1]:
            bar = {"bar": f"at most {ALLOWED} above {SIZES[0]} MB", "met": own <= least + ALLOWED}
        rows += [
            Row(f"{size} MB of JSONL", "memory of a rank, more than before loading", own, "MB", **bar),
            Row(f"{size} MB of JSONL", "tokenise, pack and write", built["seconds"], "s"),
            Row(f"{size} MB of JSONL", "load from the cache", mapped["seconds"], "s"),
        ]
    notes = (
        f"bytes as tokens, best_fit, rows of 1,024; {BATCHES} batches of 64 rows from all over the corpus",
        "memory: RssAnon and RssFile of /proc/self/status, after the batches less before loading",
    )
    return Found(
        "corpus",
        "The memory of a rank and its corpus",
        rows,
        notes,
        {f"{size} MB": each for size, each in found.items()},
    )


if __name__ == "__main__":
    print(json.dumps(rank(*sys.argv[1:])))
