"""A long run in which a rank is killed again and again: `make soak`.

    python tests/soak.py                           5,000 steps, a kill at a random step of every 200
    python tests/soak.py --steps 400 --every 100   the same, shorter

`penstock train --restarts` runs it, with in-memory checkpoints. Where a rank dies, and at which place of the
step, is drawn from a seed; the rank kills itself there. The losses of all steps, each told once, and the last
weights must be those of an undisturbed run, bit for bit. Prints what the restarts cost. Exits with 1 where a
loss differs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from datetime import datetime
from pathlib import Path
from statistics import median

import yaml

sys.path.insert(0, str(Path(__file__).parent))

from penstock.train.report.lost_time import LostTime, lost_time
from penstock.train.report.recorded import read_run
from support import tiny
from support.faults import assert_as_if_nothing_had_happened
from support.strikes import AT_STEP, environment

PLACES = ("a forward", "a backward", "the norm", "the optimizer")
OF_THE_FIRST = ("a row of metrics", "the rename of a commit")  # where only rank 0 comes


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    asked.add_argument("--steps", type=int, default=5000)
    asked.add_argument("--every", type=int, default=200, help="steps in which one kill falls")
    asked.add_argument("--checkpoint-every", type=int, default=50)
    asked.add_argument(
        "--memory-every", type=int, default=5, help="steps between in-memory checkpoints; 0: none"
    )
    asked.add_argument("--seed", type=int, default=1)
    given = asked.parse_args()
    with tempfile.TemporaryDirectory(prefix="penstock-soak-") as name:
        folder = Path(name)
        seconds, accounts = dict[str, float](), dict[str, LostTime | None]()
        for each, struck in (("undisturbed", False), ("struck", True)):
            (folder / each).mkdir()
            began = time.monotonic()
            train(folder / each, given, kills(given) if struck else {})
            seconds[each] = time.monotonic() - began
            accounts[each] = lost_time(read_run(folder / each / "out"))
        failures = [
            json.loads(line)
            for line in (folder / "struck" / "out" / "restarts.jsonl").read_text().splitlines()
        ]
        assert_as_if_nothing_had_happened(folder / "struck", folder / "undisturbed", given.steps)
        starts = read_run(folder / "struck" / "out").starts
    restarts = [
        (datetime.fromisoformat(start["at"]) - datetime.fromisoformat(start["began"])).total_seconds()
        for start in starts[1:]
    ]
    report(given.steps, failures, seconds, accounts, restarts)


def kills(given: argparse.Namespace) -> dict[int, tuple[int, str]]:
    """The rank and the place of each kill, by the step in which it happens."""
    draw, found = random.Random(given.seed), {}
    for first in range(1, given.steps, given.every):
        step = draw.randrange(first, min(first + given.every, given.steps))
        place = draw.choice((*PLACES, *OF_THE_FIRST))
        found[step] = (0 if place in OF_THE_FIRST else draw.randrange(2), place)
    return found


def train(folder: Path, given: argparse.Namespace, struck: dict[int, tuple[int, str]]) -> None:
    """Run all steps."""
    made = tiny.tree(folder)
    made["train"] |= {
        "steps": given.steps, "checkpoint_every": given.checkpoint_every, "evaluate_every": given.steps,
        "log_every": given.steps,
    }  # fmt: skip
    if given.memory_every:
        made["train"]["memory_checkpoint_every"] = given.memory_every
    made["output"] |= {"keep": {"last": 2}}
    (folder / "text").write_bytes(bytes(range(32, 127)) * 400)
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(made))
    more = {"OMP_NUM_THREADS": "1"} | environment([], folder)
    more[AT_STEP] = json.dumps({"folder": str(folder), "kills": struck})
    ended = subprocess.run(
        [sys.executable, "-P", "-m", "penstock", "train", str(file), "--restarts", "5"],
        env={**os.environ, **more}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    if ended.returncode:
        sys.exit(f"the run in {folder} ended with code {ended.returncode}:\n{ended.stderr[-3000:]}")


def report(
    steps: int,
    failures: list[dict[str, object]],
    seconds: dict[str, float],
    accounts: dict[str, LostTime | None],
    restarts: list[float],
) -> None:
    """restarts: the seconds of each from its process to its first step"""
    causes = Counter(str(each["cause"]).split(",")[0] for each in failures)
    print(f"{steps} steps, {len(failures)} failures: losses and weights are those of the undisturbed run")
    for cause, count in causes.most_common():
        print(f"  {count:3}  {cause}")
    print(f"{seconds['undisturbed']:.0f} s undisturbed, {seconds['struck']:.0f} s with the failures")
    for each, account in accounts.items():
        print(f"{each}: {account}")
    print(
        f"start-up of the restarts: {median(restarts):.2f} s, the median, and {max(restarts):.2f} s at most"
    )


if __name__ == "__main__":
    main()
