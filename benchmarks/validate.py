"""Predict published runs, and print what was measured beside it: ``python -m benchmarks.validate``.

--fit finds the constants anew from the rows that are there for it, and writes them to constants.json first.
--write puts the tables into docs/validation.md.
"""

from __future__ import annotations

import argparse

from benchmarks.validation import published
from benchmarks.validation.predict import fit, fitting, predict, read_constants, write_constants
from benchmarks.validation.runs import tables


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.validate", description=__doc__)
    parser.add_argument(
        "--fit", action="store_true", help="find the constants anew, before anything is predicted"
    )
    parser.add_argument("--write", action="store_true", help="write the section of docs/validation.md")
    arguments = parser.parse_args()
    known = tables()
    if arguments.fit:
        names = sorted({table.constants for table in known.values()})
        write_constants({name: fit(fitting(known, name), name) for name in names}, known)
    constants = read_constants()
    results = {
        stem: [predict(table, run, constants[table.constants]) for run in table.runs if not run.unpredicted]
        for stem, table in known.items()
    }
    text = published.section(known, results, constants)
    print(text)
    if arguments.write:
        published.write(text)


if __name__ == "__main__":
    main()
