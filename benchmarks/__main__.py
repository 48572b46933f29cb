"""Run the benchmarks: ``python -m benchmarks [--only NAME ...] [--repeats N]``.

Writes benchmarks/results/NAME.json, and docs/benchmarks.md from all of them.
"""

from __future__ import annotations

import argparse

from rich.console import Console

from benchmarks import (
    default_split,
    hooks,
    loading,
    memory,
    meshes,
    networks,
    overhead,
    page,
    paired,
    ragged,
    recording,
    report,
    searched,
    split,
    startup,
    steptime,
    throughput,
)

BENCHMARKS = {
    "steptime": steptime.measure,
    "networks": networks.measure,
    "overhead": overhead.measure,
    "recording": recording.measure,
    "memory": memory.measure,
    "throughput": throughput.measure,
    "ragged": ragged.measure,
    "split": split.measure,
    "searched": searched.measure,
    "loading": loading.measure,
    "startup": startup.measure,
    "hooks": hooks.measure,
    "paired": paired.measure,
    "meshes": meshes.measure,
    "default_split": default_split.measure,
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
    for name in options.only or BENCHMARKS:
        found = BENCHMARKS[name](options.repeats)
        report.show(found, console)
        report.write(found, options.repeats)
        missed += found.missed
    page.write()
    console.print(f"{missed} bars missed" if missed else "every bar met")


if __name__ == "__main__":
    main()
