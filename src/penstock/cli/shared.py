"""Shared by the commands: the options that choose a schedule and the costs of its ops, and tables."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from penstock.errors import ConfigError
from penstock.launch.failures import exit_code
from penstock.reading import path_fault
from penstock.schedule import Costs, Schedule
from penstock.schedule.builders import BUILDERS
from penstock.schedule.choose import canonical, chosen_schedule, named_twice, options_of
from penstock.schedule.files import load
from penstock.schedule.ops import check_numbers

T = TypeVar("T")

_BROKEN_PIPE = 141  # the exit code of a command whose pipe was closed


def taking(**makers: Callable[..., Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace a parameter of a command by the options of the function that makes its value.

    So each option is declared once, for every command that has it.
    """

    def replace(command: Callable[..., None]) -> Callable[..., None]:
        taken = {name: inspect.signature(maker, eval_str=True) for name, maker in makers.items()}
        parameters: list[inspect.Parameter] = []
        for name, parameter in inspect.signature(command, eval_str=True).parameters.items():
            parameters += taken[name].parameters.values() if name in taken else [parameter]
        parameters = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]

        @functools.wraps(command)
        def run(**values: Any) -> None:
            with ending_quietly():
                for name, maker in makers.items():
                    values[name] = maker(**{key: values.pop(key) for key in taken[name].parameters})
                command(**values)

        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        del run.__wrapped__
        return run

    return replace


def open_streams() -> None:
    """Give a command that was started with closed standard streams empty ones. Call it first.

    Else the first files that it opens get their numbers, and what it prints goes there, or fails.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is not None:
            continue
        try:
            os.fstat(number)
            stream = open(os.devnull, mode)  # noqa: SIM115  its number is another file's by now
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
            os.set_inheritable(opened, True)
            stream = open(opened, mode, closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)


@contextmanager
def ending_quietly() -> Iterator[None]:
    """End a command without a traceback on Ctrl-C, and when its pipe is closed (``| head``)."""
    try:
        yield
        sys.stdout.flush()
    except KeyboardInterrupt as error:
        print("penstock: interrupted", file=sys.stderr)
        raise typer.Exit(exit_code(error)) from error
    except BrokenPipeError as error:
        # otherwise the interpreter would fail to flush the rest
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(_BROKEN_PIPE) from error


def usable(path: T) -> T:
    """A path of the command line, with the home folder for ~. Raises ConfigError if no file can have it."""
    if path is None:
        return path
    if fault := path_fault(str(path)):
        raise ConfigError(f"path {str(path)[:60]!r}", fault, "Write the path out")
    kind: Callable[[str], Any] = type(path)
    expanded: T = kind(os.path.expanduser(str(path)))  # in --out=~/merged the shell leaves the ~
    return expanded


def check_new(out: Path) -> None:
    """Raise ConfigError where a first config would replace a file, which may be somebody's work."""
    if out.exists():
        raise ConfigError(f"--out {out}", "there is a file with this name", "Name another one, or remove it")


@dataclass(frozen=True)
class ScheduleChoice:
    """The schedule that the command line names."""

    name: str
    ranks: int | None
    microbatches: int | None
    options: dict[str, Any]

    def schedule(self, costs: Costs | None = None) -> Schedule:
        """Build or load it. costs: for the schedules that depend on them. Raises ConfigError."""
        if Path(self.name).suffix or "/" in self.name:  # no schedule's name has a dot in it
            return self._load()
        if "schedule" in self.options:
            raise named_twice(self.name, self.options["schedule"])
        config: dict[str, Any] = {**self.options, "schedule": self.name}
        if costs not in (None, Costs()) and "costs" in options_of(canonical(self.name)):
            config.setdefault("costs", costs)
        return chosen_schedule(config, self.ranks, self.microbatches)

    def _load(self) -> Schedule:
        schedule = check_numbers(load(self.name), self.ranks, self.microbatches)
        for option, value in self.options.items():
            rule = "options shape a schedule that is built by name, and this one comes from a file"
            raise ConfigError(f"{option}={value!r} with {self.name!r}", rule, "Leave it out")
        return schedule


def chosen(
    schedule: Annotated[str, typer.Argument(
        metavar="SCHEDULE", help=f"A name ({', '.join(BUILDERS)}), or a .csv or .json file.")],
    ranks: Annotated[int | None, typer.Option("--ranks", "-r", help="Number of ranks.")] = None,
    microbatches: Annotated[int | None, typer.Option(
        "--microbatches", "-m", help="Microbatches a step.")] = None,
    stages_per_rank: Annotated[int | None, typer.Option(help="For schedules that have it.")] = None,
    zero_bubble: Annotated[bool | None, typer.Option(
        "--zero-bubble/--no-zero-bubble", help="Split backwards in two.")] = None,
    microbatch_group_size: Annotated[int | None, typer.Option(
        help="Microbatches that run in turn on one of a rank's stages.")] = None,
    waves: Annotated[int | None, typer.Option(help="For hanayo.")] = None,
    option: Annotated[list[str] | None, typer.Option(
        metavar="KEY=VALUE", help="Any other option of the schedule. May be repeated.")] = None,
) -> ScheduleChoice:  # fmt: skip
    named = {
        "stages_per_rank": stages_per_rank,
        "zero_bubble": zero_bubble,
        "microbatch_group_size": microbatch_group_size,
        "waves": waves,
    }
    options: dict[str, Any] = {name: value for name, value in named.items() if value is not None}
    for pair in option or ():
        key, equals, value = pair.partition("=")
        if not equals or not key.strip():
            rule = "an option is a key and a value"
            raise ConfigError(f"--option {pair!r}", rule, "Write it like --option stages_per_rank=2")
        options[key.strip().replace("-", "_")] = _value(value.strip())
    return ScheduleChoice(schedule, ranks, microbatches, options)


def _value(text: str) -> int | float | str:
    """The text as the type that it looks like."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text


_A_STAGE = "a number, or one for each stage with commas between"


def costs_of(
    forward: Annotated[str, typer.Option(help=f"Duration of F: {_A_STAGE}.")] = "1",
    input_grad: Annotated[str, typer.Option(help="Duration of I, likewise. B takes I + W.")] = "1",
    weight_grad: Annotated[str, typer.Option(help="Duration of W, likewise.")] = "1",
    communication: Annotated[float, typer.Option(help="Latency of an edge between two ranks.")] = 0.0,
    sent: Annotated[str, typer.Option("--bytes", help="Size of the message behind each stage.")] = "0",
    bandwidth: Annotated[float | None, typer.Option(help="Bytes per unit of time, of each edge.")] = None,
    activation: Annotated[str, typer.Option(help="Held from F to the end of I or B.")] = "1",
    held_for_weight: Annotated[str | None, typer.Option(
        help="Held from then to the end of W; by default as much.")] = None,
    exchange: Annotated[str, typer.Option(
        help="The part of F in which it waits for other ranks, as for experts; pairs hide it.")] = "0",
    exchange_in_backward: Annotated[str | None, typer.Option(
        help="The same part of B or I; by default as much.")] = None,
    gather: Annotated[str, typer.Option(
        help="How much longer a stage's first F of a step takes, for weights that FSDP gathers.")] = "0",
    reduction: Annotated[str, typer.Option(
        help="How long a rank sums a stage's gradients over the mesh, after the last of them.")] = "0",
) -> Costs:  # fmt: skip
    texts = {
        "forward": forward, "input_grad": input_grad, "weight_grad": weight_grad, "bytes": sent,
        "activation": activation, "held_for_weight": held_for_weight, "exchange": exchange,
        "exchange_in_backward": exchange_in_backward, "gather": gather, "reduction": reduction,
    }  # fmt: skip
    numbers: dict[str, Any] = {name: _cost(name, text) for name, text in texts.items() if text is not None}
    return Costs(communication=communication, bandwidth=bandwidth, **numbers)


def _cost(name: str, text: str) -> float | list[float]:
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        flag = f"--{name.replace('_', '-')}"
        remedy = f"Write {flag} 1 or {flag} 1,1.5,2"
        raise ConfigError(f"{flag} {text!r}", f"a cost is {_A_STAGE}", remedy) from None
    return numbers[0] if len(numbers) == 1 else numbers


_WIDE = 500  # characters, more than any table has: a narrow terminal then breaks lines, not cells


def table(
    heads: Sequence[str], rows: Iterable[Sequence[object]], left: Sequence[str] = (), gap: int = 2
) -> Table:
    """A table whose columns are aligned to the right, except those called `left`. gap: between columns"""
    columns = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, gap - 1), pad_edge=False, show_edge=False)
    for head in heads:
        columns.add_column(head, justify="left" if head in left else "right", overflow="fold")
    for row in rows:
        columns.add_row(*(cell if isinstance(cell, Text) else Text(str(cell)) for cell in row))
    return columns


def echo(*parts: RenderableType) -> None:
    """Print each part on its own lines, without folding text."""
    console = Console(highlight=False, width=_WIDE)
    for part in parts:
        if isinstance(part, str):
            print(part)
            continue
        with console.capture() as captured:  # `print` then raises for a closed pipe
            console.print(part)
        print("\n".join(line.rstrip() for line in captured.get().splitlines()))
