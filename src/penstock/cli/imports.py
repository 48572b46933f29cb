"""`penstock import`: a config of another trainer as one of ours."""

from __future__ import annotations

import shlex
from pathlib import Path

from penstock.cli.shared import check_new
from penstock.errors import ConfigError
from penstock.reading import read_text
from penstock.schedule.files import write_text
from penstock.train.config.imported import flags, imported
from penstock.yaml_reader import read_yaml

_YAML = (".yaml", ".yml", ".json")


def show(file: Path, gpus: int, out: Path | None) -> None:
    """Read `file`, and print our config or write it to `out`. Raises ConfigError."""
    tree = read_yaml(file, "config") if file.suffix in _YAML else flags(_words(file))
    if not isinstance(tree, dict):
        rule = "it holds keys, as the YAML file or the command line of axolotl, LLaMA-Factory or TRL"
        raise ConfigError(f"config {file}", rule, "Give one of these")
    ours = imported({str(key): value for key, value in tree.items()}, gpus)
    text = ours.text(file.name)
    if out is None:
        print(text, end="")
        return
    check_new(out)
    write_text(out, text, "config")
    for left in ours.left:
        print(f"no counterpart: {left.key}: {left.value}   {left.why}".rstrip())
    print(f"wrote {out}, from {ours.trainer}; next: penstock train {out} --dry-run")


def _words(file: Path) -> list[str]:
    """The words of a command line, which may go on over several lines."""
    value = f"command line {file}"
    try:
        return shlex.split(read_text(file).replace("\\\n", " "), comments=True)
    except OSError as error:
        raise ConfigError(value, f"it cannot be read ({error.strerror})", "Give the path of a file") from None
    except ValueError as error:  # also of a text that is not UTF-8
        raise ConfigError(value, f"no shell reads it: {error}", "Close its quotes") from None
