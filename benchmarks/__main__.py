"""Run the benchmarks: ``python -m benchmarks [--only NAME ...] [--repeats N]``.

Writes benchmarks/results/NAME.json after each, and docs/benchmarks.md from all of them. A run that was
interrupted goes on with ``--only`` and the names that are left: on the same commit and machine it is one run.
"""

from __future__ import annotations

import argparse
import time

from rich.console import Console

from benchmarks import (
    corpus,
    default_split,
    generation,
    hooks,
    host,
    in_memory,
    loading,
    local_plans,
    memory,
    meshes,
    networks,
    overhead,
    page,
    ragged,
    recording,
    report,
    scale,
    searched,
    split,
    startup,
    steptime,
    throughput,
    trainer,
)

# in the order of a run: what matters most first
BENCHMARKS = {
    "throughput": throughput.measure,
    "steptime": steptime.measure,
    "overhead": overhead.measure,
    "host": host.measure,
    "trainer": trainer.measure,
    "memory": memory.measure,
    "networks": networks.measure,
    "recording": recording.measure,
    "in_memory": in_memory.measure,
    "ragged": ragged.measure,
    "split": split.measure,
    "scale": scale.measure,
    "searched": searched.measure,
    "loading": loading.measure,
    "startup": startup.measure,
    "hooks": hooks.measure,
    "meshes": meshes.measure,
    "default_split": default_split.measure,
    "corpus": corpus.measure,
    "local_plans": local_plans.measure,
    "generation": generation.measure,
}
WIDTH = 150  # of the tables where the output is no terminal


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--only", choices=BENCHMARKS, action="append", help="may be given more than once")
    parser.add_argument("--repeats", type=int, default=7, help="measurements a number is the median of")
    options = parser.parse_args()
    if options.repeats < 1:
        parser.error(f"--repeats {options.repeats}: give 1 or more")
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    missed = 0
    for name in BENCHMARKS:
        if options.only and name not in options.only:
            continue
        start = time.monotonic()
        found = BENCHMARKS[name](options.repeats)
        took = time.monotonic() - start
        report.show(found, console)
        command = f"python -m benchmarks --only {name} --repeats {options.repeats}"
        report.write(found, command, took)
        page.write()
        console.print(f"{name}: {took / 60:.1f} minutes")
        missed += found.missed
    console.print(f"{missed} bars missed" if missed else "every bar met")


if __name__ == "__main__":
    main()
