"""Run a plan for a few steps on this machine, and read how long they took and what they held.

    plan -> a config without checkpoints -> penstock train -> metrics.jsonl, timeline.json

The run is ended as soon as its files have what is asked for. Its weights are random: none is read.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import yaml

from penstock.errors import PenstockError
from penstock.planner.candidate import Candidate
from penstock.planner.corrections import MeasuredRun
from penstock.planner.estimate import Estimate, Trial
from penstock.planner.hardware import Cluster
from penstock.planner.run_config import run_config
from penstock.planner.workload import Workload
from penstock.reading import read_json
from penstock.schedule import Timeline, simulate
from penstock.train.records.record import TIMELINE
from penstock.train.report.recorded import read_run

STEPS, WARM_UP = 6, 2  # of a run, and those of them that do not count: shapes are new, threads start
_LEAST_SECONDS = 300.0  # that a run may take: a start imports torch and builds the model
_LATE = 10  # times its predicted steps, beyond that
_LOOKS = 0.05  # seconds between two looks at its files
_ENDS = 30.0  # seconds for the ranks of a killed run to end
_OF_TORCHRUN = (
    "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "WORLD_SIZE", "LOCAL_WORLD_SIZE",
    "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip


def measured_run(
    model: Workload,
    run: Estimate,
    cluster: Cluster,
    named: dict[str, Any],
    *,
    on_cpu: bool,
    steps: int = STEPS,
    transport: str = "auto",
    limit: float | None = None,
) -> MeasuredRun:
    """Run a plan on this machine. An error of the run is a part of the result.

    Args:
        cluster: for which `run` was predicted
        named: the model's keys of a config's section `model`
        on_cpu: whether its devices are processes on the CPU
        steps: how many; the first `WARM_UP` do not count
        transport: as pipeline.transport
        limit: seconds that it may take; None allows ten times its prediction, and minutes for its start
    """
    with tempfile.TemporaryDirectory(prefix="penstock-measure-", ignore_cleanup_errors=True) as name:
        folder, config = Path(name, "run"), Path(name, "config.yaml")
        tree = few_steps(run.candidate, named, folder, on_cpu=on_cpu, steps=steps)
        tree["pipeline"]["transport"] = transport
        config.write_text(yaml.safe_dump(tree), encoding="utf-8")
        limit = _LEAST_SECONDS + _LATE * steps * run.seconds if limit is None else limit
        if error := _until_recorded(config, folder, steps, limit):
            return MeasuredRun(run, error=error)
        measured = _read(run, folder)
    if not on_cpu:
        return replace(measured, predicted_kept=run.nbytes)
    return replace(measured, predicted_kept=between_ops(Trial.of(model, run.candidate, cluster)))


def what_is_kept(*, on_cpu: bool) -> str:
    """What `kept` of a measured run counts, in words."""
    if on_cpu:
        return "live activations and messages between ops, as the ranks count them"
    return "the peak of all tensors, as torch's allocator counts them"


def few_steps(
    candidate: Candidate, named: dict[str, Any], folder: Path, *, on_cpu: bool, steps: int
) -> dict[str, Any]:
    """The config of a run whose timeline is written after `steps` steps; no checkpoint is due before."""
    tree = run_config(candidate, {**named, "weights": "random"})
    tree["train"] |= {
        "steps": 1000 * steps,
        "evaluate_every": steps,
        "evaluate_batches": 1,
        "log_every": steps,
        "check": "off",
        "device": "cpu" if on_cpu else "cuda",
    }
    return {**tree, "output": {"folder": str(folder)}}


def between_ops(trial: Trial) -> float:
    """Predicted bytes of live activations and messages on the fullest rank, without what an op needs."""
    costs = replace(trial.costs(), held_in_forward=None, held_in_backward=None)
    return max(simulate(trial.proof, costs).peak_memory)


def _until_recorded(config: Path, folder: Path, steps: int, limit: float) -> str:
    """Train until the steps are recorded, and end the run. Returns why they were not, or nothing."""
    output: list[str] = []
    with _started(config) as child:
        reader = Thread(target=lambda pipe: output.append(pipe.read()), args=[child.stdout], daemon=True)
        reader.start()
        try:
            recorded, code = False, None
            end = time.monotonic() + limit
            while not (recorded := _recorded(folder, steps)) and code is None and time.monotonic() < end:
                time.sleep(_LOOKS)
                code = child.poll()
        finally:
            child.kill()  # its ranks end with it, and close the pipe
            child.wait()  # which `with` leaves out where Ctrl-C ends it
            reader.join(_ENDS)
    if recorded:
        return ""
    return f"it took more than {limit:.3g} s" if code is None else _cause("".join(output), code)


def _started(config: Path) -> subprocess.Popen[str]:
    """Start `penstock train` as a command of its own, also from a rank of torchrun."""
    environment = {
        key: value
        for key, value in os.environ.items()
        if key not in _OF_TORCHRUN and not key.startswith("TORCHELASTIC_")
    }
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "penstock", "train", str(config)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=environment,
        start_new_session=True,  # Ctrl-C comes to this process alone, which then ends the run
    )


def _recorded(folder: Path, steps: int) -> bool:
    """Whether the timeline and the rows of the steps are written; a thread of the run writes the rows."""
    return (folder / TIMELINE).exists() and len(read_run(folder).steps) >= steps


def _cause(output: str, code: int) -> str:
    """Why a run failed: its error, or else its last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    mark = "penstock: error: "
    error = next((line.removeprefix(mark) for line in lines if line.startswith(mark)), None)
    return error or (lines[-1] if lines else f"it ended with code {code}")


def _read(run: Estimate, folder: Path) -> MeasuredRun:
    try:
        content = read_json(folder / TIMELINE)
        timeline, at = Timeline.from_data(content["measured"]), content["step"]
        rows = {row["step"]: row for row in read_run(folder).steps if row["step"] <= at}
        ops = sum(span.end - span.start for span in timeline.spans) / timeline.ranks
        steps = tuple(float(row["seconds"]) for step, row in rows.items() if step > WARM_UP)
        kept = rows[at].get("peak_allocated") or content["held"]
        return MeasuredRun(run, steps, ops / rows[at]["seconds"], int(max(kept)))
    except (OSError, PenstockError, KeyError, TypeError, ValueError) as error:
        return MeasuredRun(run, error=f"its files cannot be read: {error!r}")
