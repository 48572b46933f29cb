"""Measure penstock on one GPU: ``python -m benchmarks.gpu [--part A] [--tiny]``, or ``make gpu``.

Writes benchmarks/results/gpu_<part>.json and prints a table with each bar. Exits with 1 where a bar is missed
or a part did not come to its end. Without a GPU it says so, measures nothing and exits with 0.

Each part runs in a process of its own, so that none sees another's memory, settings or errors. It has a
budget of 8 minutes, in which what tells most comes first, and is ended after 9. What it has found is in its
file.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import traceback
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks import report
from benchmarks.gpu import part as parts
from benchmarks.gpu.part import Part

ROOT = Path(__file__).resolve().parents[2]
LIMIT = parts.BUDGET + 60.0  # seconds of a part: a call into CUDA may hang, and no budget ends it
# by part: its module, and its title
PARTS = {
    "A": ("exactness", "A: gradients in one process"),
    "B": ("processes", "B: several processes on one GPU"),
    "C": ("cost", "C: the cost of a step"),
    "D": ("large", "D: a model of 8 B parameters"),
}
ENVIRONMENT = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # else cuBLAS may add in another order from run to run
    "HF_HUB_OFFLINE": "1",  # nothing is downloaded
    "PYTHONUNBUFFERED": "1",
}


def main() -> int:
    options = _parser().parse_args()
    tiny: bool = options.tiny
    # absolute, as a part runs in the repository's folder
    out = (options.out or (ROOT / "runs" / "gpu-tiny" if tiny else report.RESULTS)).resolve()
    scratch = (options.scratch or ROOT / "runs" / ("gpu-tiny" if tiny else "gpu")).resolve()
    if options.inside:
        return inside(options.part[0], tiny=tiny, out=out, scratch=scratch)
    if not tiny and not torch.cuda.is_available():
        print("No GPU here: nothing is measured. --tiny runs the parts on the CPU, with small sizes.")
        return 0
    missed = sum(apart(name, tiny, out, scratch) for name in options.part or PARTS)
    print(f"{missed} bars missed" if missed else "no bar missed")
    return 1 if missed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--part", choices=PARTS, action="append", help="may be given more than once")
    parser.add_argument("--tiny", action="store_true", help="on the CPU, with small sizes")
    parser.add_argument("--out", type=Path, help="folder of the results")
    parser.add_argument("--scratch", type=Path, help="folder of traces, and for a time of checkpoints")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)  # in the part's own process
    return parser


def apart(name: str, tiny: bool, out: Path, scratch: Path, limit: float = LIMIT) -> int:
    """Run a part in a process of its own; returns the number of bars that it missed."""
    file = out / f"gpu_{name.lower()}.json"
    file.unlink(missing_ok=True)  # or a part that dies at once would leave an older result
    command = command_of(name, tiny, out, scratch)
    # a session of its own: what the part has started, be it stopped, is ended with it
    process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, **ENVIRONMENT}, start_new_session=True)
    why, code = "", -signal.SIGKILL
    try:
        code = process.wait(limit)
    except subprocess.TimeoutExpired:
        why = f"it took longer than {limit:g} s"
    finally:
        if code < 0:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        shutil.rmtree(scratch / parts.TEMPORARY, ignore_errors=True)
    if code < 0 and not why:
        why = f"its process was ended by {signal.Signals(-code).name}"
    if not file.is_file():
        why = why or f"it wrote nothing, with exit code {code}"
        Part(name, PARTS[name][1], torch.device("cpu"), out, scratch, shlex.join(command)).write()
    found = parts.read(file)
    if not why and code != (1 if found.missed else 0):
        why = f"exit code {code}"
    if why:
        found = cut_short(file, found, why)
    parts.show(found)
    print(f"{name}: {file}")
    return found.missed


def command_of(name: str, tiny: bool, out: Path, scratch: Path) -> list[str]:
    """To run a part in this way: `inside` of another process."""
    folders = ["--out", str(out), "--scratch", str(scratch)]
    return [sys.executable, "-m", "benchmarks.gpu", "--part", name, "--inside", *folders, *["--tiny"] * tiny]


def cut_short(file: Path, found: report.Found, why: str) -> report.Found:
    """Add to a result, and to its file, that the part did not come to its end."""
    found = replace(
        found, rows=[*found.rows, parts.failure(str(found.raw.get("under way", "the part")), why)]
    )
    content = json.loads(file.read_text(encoding="utf-8"))
    content["rows"] = [report.finite(vars(row)) for row in found.rows]
    file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return found


def inside(name: str, *, tiny: bool, out: Path, scratch: Path) -> int:
    """Run a part in this process."""
    module, title = PARTS[name]
    part = importlib.import_module(f"benchmarks.gpu.{module}")
    device = torch.device("cpu") if tiny else torch.device("cuda", 0)
    command = f"python -m benchmarks.gpu --part {name}{' --tiny' if tiny else ''}"
    scratch.mkdir(parents=True, exist_ok=True)
    if tiny:  # so small, threads wait for each other
        torch.set_num_threads(1)
    results = Part(name, title, device, out, scratch, command)
    try:
        part.run(results, part.TINY if tiny else part.FULL)
    except Exception as error:
        traceback.print_exc()
        results.failed("the part", f"{type(error).__name__}: {error}"[:300])
    results.write()
    return 1 if results.found.missed else 0


if __name__ == "__main__":
    sys.exit(main())
