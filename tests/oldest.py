"""Print the oldest versions that pyproject.toml promises, for pip. `make oldest` installs them.

python tests/oldest.py dependencies dev      torch==2.11 for torch>=2.11, and so on; the names are of extras
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

PYPROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"


def oldest(*groups: str) -> list[str]:
    """The requirements of these groups at their lower bounds; one without a bound as it stands."""
    project = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]
    known = {"dependencies": project["dependencies"], **project["optional-dependencies"]}
    return [re.sub(r">=([\d.]+)$", r"==\1", line) for group in groups for line in known[group]]


if __name__ == "__main__":
    print("\n".join(oldest(*sys.argv[1:])))
