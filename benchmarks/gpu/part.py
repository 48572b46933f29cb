"""One part of the suite: its rows with their bars, each on the disk as soon as it is measured.

A row is one of

- met, or MISSED: the bar was tried on this machine
- "not run" and why: this machine cannot try it, or the part's time has ended. That is never counted as met
- "not judged on a CPU": a time, or a size of a GPU's memory, in the small form of a part
- without a bar: a number to look at

An error within a measurement is a missed row, and the part goes on with the next one.
"""

from __future__ import annotations

import ctypes
import gc
import json
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from rich.console import Console

from benchmarks import report
from benchmarks.report import Found, Row
from benchmarks.rounds import Interval

T = TypeVar("T")
BUDGET = 480.0  # seconds of a part
WIDTH = 170  # of the table where the output is no terminal
NOT_JUDGED = "not judged on a CPU"
TEMPORARY = "temporary"  # the folder in the scratch folder that is removed behind a part, however it ends
_NEVER = float("nan")  # the number of a row that was not measured


class Part:
    """The rows of a part, and where they go.

    Args:
        name: "A" to "D"
        title: of the table
        out: folder for gpu_<name>.json
        scratch: folder for Chrome traces, and for models and checkpoints while they are needed
        command: that started the part
        budget: seconds, after which no measurement begins, and the one under way ends
    """

    def __init__(
        self,
        name: str,
        title: str,
        device: torch.device,
        out: Path,
        scratch: Path,
        command: str,
        budget: float = BUDGET,
    ) -> None:
        self.name, self.title, self.device, self.out, self.scratch = name, title, device, out, scratch
        self.rows: list[Row] = []
        self.notes: list[str] = []
        self.raw: dict[str, Any] = {}
        self._command, self._began, self._budget = command, time.monotonic(), budget
        self._machine, self._commit = machine(device), report.commit_of_code()

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def found(self) -> Found:
        return Found(f"gpu_{self.name.lower()}", self.title, self.rows, self.notes, self.raw)

    # ---- rows

    def add(
        self,
        case: str,
        what: str,
        number: float,
        unit: str = "",
        *,
        at_most: float | None = None,
        at_least: float | None = None,
        timing: bool = False,
        quartiles: Interval | None = None,
        other: float | None = None,
        why: str = "",
    ) -> None:
        """Add a row, judged by its bar if it has one.

        Args:
            timing: whether the number depends on the machine, so that a CPU's is not judged
            quartiles: of the measurements that `number` is the median of
            other: the same of a plain loop, or of another library
            why: what it is missed by, where it is
        """
        bar, met = bar_of(at_most, at_least), None
        if bar and timing and not self.on_gpu:
            why = NOT_JUDGED
        elif bar:  # a number that is none is a miss
            met = bool(number <= at_most) if at_most is not None else bool(number >= (at_least or 0.0))
        low, high = (None, None) if quartiles is None else (quartiles.low, quartiles.high)
        why = "" if met else why
        self.rows.append(Row(case, what, number, unit, other, bar, met, low=low, high=high, why=why))

    def not_run(self, case: str, what: str, why: str, bar: str = "") -> None:
        """A row for what this machine cannot try."""
        self.rows.append(Row(case, what, _NEVER, bar=bar, why=f"not run: {why}"))

    def failed(self, case: str, why: str) -> None:
        self.rows.append(failure(case, why))

    # ---- measurements

    def measure(self, case: str, seconds: float, run: Callable[[], T]) -> T | None:
        """Call `run`, which measures `case`, for `seconds` at most. Returns what it does.

        None after an error, which becomes a missed row, and where the part's time ends: then the case is not
        run. Behind it the GPU's memory is free, and the part is on the disk.
        """
        left = self._began + self._budget - time.monotonic()
        if left <= 0:
            self._not_in_budget(case)
            self.write()
            return None
        self.raw["under way"] = case
        self.write()
        began, result = time.monotonic(), None
        try:
            with time_limit(min(seconds, left)):
                result = run()
        except Exception as error:
            if isinstance(error, TimeLimitError) and left < seconds:
                self._not_in_budget(case)
            else:
                traceback.print_exception(error)
                text = next(iter(str(error).splitlines()), "")
                self.failed(case, f"{type(error).__name__}: {text}"[:300])
            traceback.clear_frames(error.__traceback__)  # they hold tensors
        with suppress(Exception):  # after an error of CUDA every call raises it again
            self.free()
        del self.raw["under way"]
        took = self.raw.setdefault("seconds", {})[case] = round(time.monotonic() - began, 2)
        self.write()
        print(f"{self.name}  {took:6.1f} s  {case}", flush=True)
        return result

    def _not_in_budget(self, case: str) -> None:
        self.not_run(case, "the measurement", f"the part's budget of {self._budget:g} s ended before it")

    def free(self) -> None:
        """Give back the GPU's memory that nobody holds any more."""
        if self.on_gpu:
            gc.collect()
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()

    # ---- files

    def write(self) -> None:
        took = time.monotonic() - self._began
        report.write(self.found, self._command, took, self.out, self._machine, self._commit)


def bar_of(at_most: float | None, at_least: float | None) -> str:
    """The bar in words; empty without one."""
    if at_most is not None:
        return f"at most {at_most:g}"
    return "" if at_least is None else f"at least {at_least:g}"


class TimeLimitError(Exception):
    """A measurement has taken longer than it may."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeLimitError in the block, which the main thread runs, after `seconds`.

    By a signal, which also ends a wait in Python's own calls. A call into CUDA that hangs is ended by the
    process that started the part. Not SIGALRM, which pytest-timeout uses.
    """

    def end(*_: object) -> None:
        raise TimeLimitError(f"it took longer than {seconds:g} s")

    before = signal.signal(signal.SIGUSR1, end)
    timer = threading.Timer(seconds, signal.pthread_kill, (threading.get_ident(), signal.SIGUSR1))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()  # from here on no signal comes
        signal.signal(signal.SIGUSR1, before)


def machine(device: torch.device) -> dict[str, str]:
    """What the results depend on."""
    found = report.machine()
    if device.type != "cuda":
        return found
    facts = torch.cuda.get_device_properties(device)
    return found | {
        "gpu": facts.name, "gpu_memory": f"{facts.total_memory / 2**30:.1f} GiB",
        "cuda": str(torch.version.cuda), "nccl": ".".join(map(str, nccl_version())),
    }  # fmt: skip


def nccl_version() -> tuple[int, ...]:
    """The version of the NCCL that is loaded, not of the one that torch was built with; none without it."""
    if not dist.is_nccl_available():
        return ()
    number = ctypes.c_int()
    if ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(number)):
        raise RuntimeError("NCCL does not say its version")
    return number.value // 10_000, number.value // 100 % 100, number.value % 100


def show(found: Found) -> None:
    """Print the table: what is missed first."""
    console = Console()
    report.show(found, console if console.is_terminal else Console(width=WIDTH))


def failure(case: str, why: str) -> Row:
    """A missed row for a measurement that did not come to its end."""
    return Row(case, "the measurement", _NEVER, bar="ends", met=False, why=why)


def read(file: Path) -> Found:
    """What a part has written."""
    content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    rows = [Row(**{**row, "ours": _NEVER if row["ours"] is None else row["ours"]}) for row in content["rows"]]
    return Found(content["name"], content["title"], rows, content["notes"], content["raw"])
