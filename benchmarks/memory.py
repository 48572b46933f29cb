"""What each rank holds at its peak, counted in live activations and in bytes, beside torch and on paper.

Two kinds of stages. A curve saves one tensor of the size of the hidden state for its backward, besides the
one that it received, so that a live activation holds two (one on rank 0, which reads the batch). A stage of
layers is close to real: norms, linears, GELU and residuals.

Bytes are counted by watching every tensor that is made from before the pipeline is built until its second
step has ended, so that buffers that are allocated ahead are in; weights and their gradients are taken off.
P = 4 over gloo, m = 8.
"""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.pool import Pool, Rank
from benchmarks.report import Found, Row
from benchmarks.rivals import SCHEDULES, TORCH, Block, Work, ours, theirs
from penstock import Pipeline
from penstock.schedule import simulate, verify
from penstock.schedule.choose import chosen_schedule

RANKS, MICROBATCHES = 4, 8
STATE = {"curve": (1, 1024, 1024), "layers": (1, 512, 256)}  # rows, sequence, width
AIM, CLOSE = 0.7, 0.05
LAYERS = 2  # of a stage
LIMIT = 150.0  # seconds: more than a pipeline waits before it says what for


def rss(line: str = "VmRSS") -> float:
    """A line of /proc/self/status, in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(each.split()[1]) / 1024 for each in lines if each.startswith(f"{line}:"))


def peak_rss() -> float:
    return rss("VmHWM")


def reset_peak() -> float:
    """What is held now, without what was freed before and the allocator keeps. The peak starts from it."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return rss()


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of the storages that are made under it, until they are gone."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._known: dict[int, int] = {}  # by address, as long as the storage lives

    def skip(self, tensor: Tensor) -> None:
        """Not to be counted: it was there before."""
        self._known[tensor.untyped_storage()._cdata] = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.device.type == "cpu":
                self._note(leaf.untyped_storage())
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self._known:
            return
        self._known[storage._cdata] = storage.nbytes()
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, storage._cdata)

    def _forget(self, address: int) -> None:
        self.now -= self._known.pop(address)


class Curve(nn.Module):
    """Saves its input for the multiplication, and the product for the sine."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale).sin()


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(STATE["layers"][-1]) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


MODULES: dict[str, Callable[[], nn.Module]] = {"curve": Curve, "layers": Layers}


class Tally:
    """How many there are, and the most there ever were."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def add(self, count: int) -> None:
        self.now += count
        self.most = max(self.most, self.now)


class Counted(dict[Any, Any]):
    """A dict whose entries are counted together with those of others."""

    def __init__(self, tally: Tally) -> None:
        super().__init__()
        self._tally = tally

    def __setitem__(self, key: Any, value: Any) -> None:
        self._tally.add(key not in self)
        super().__setitem__(key, value)

    def pop(self, key: Any, *default: Any) -> Any:
        self._tally.add(-(key in self))
        return super().pop(key, *default)

    def clear(self) -> None:
        self._tally.add(-len(self))
        super().clear()


class Peak(NamedTuple):
    """Of one rank.

    live: activations; held: bytes, beside the batch, weights and gradients
    told, predicted: bytes as Pipeline.memory has them, and as `simulate` does; 0 for torch
    """

    live: int
    held: int
    told: int = 0
    predicted: float = 0.0


def mean(output: Tensor, target: Tensor) -> Tensor:
    return output.mean()


def peak(rank: Rank, library: str, schedule: str, kind: str, again: bool) -> Peak:
    """again: with full activation checkpointing"""
    rows, *rest = STATE[kind]
    batch = torch.ones(rows * MICROBATCHES, *rest)
    work = Work(MODULES[kind], mean, batch, torch.ones(MICROBATCHES, 1), MICROBATCHES)
    gc.collect()  # what the one before has left must not fall into this one's count
    with Watch() as watch:
        watch.skip(work.batch)
        if library == "penstock":
            pipe, step = ours(work, schedule, rank.count, activation_checkpointing=again, transport="gloo")
            step()
            step()
        else:
            stages, _, step = theirs(work, schedule, rank.index, rank.count)
            live = Tally()
            for stage in stages:
                stage.fwd_cache, stage.backward_state = Counted(live), Counted(live)
            step()
            step()
    if library == "torch":
        return Peak(live.most, watch.peak - weights(stage.submod for stage in stages))
    return _of_penstock(rank, pipe, watch.peak - weights(pipe.modules.values()))


def _of_penstock(rank: Rank, pipe: Pipeline, held: int) -> Peak:
    predicted = simulate(pipe.schedule, pipe.costs()).peak_memory[rank.index]
    found = Peak(pipe.timeline.peak_live[rank.index], held, pipe.memory[rank.index].total, predicted)
    pipe.close()
    return found


def weights(modules: Iterable[nn.Module]) -> int:
    """Bytes of weights and their gradients."""
    parameters = [parameter for module in modules for parameter in module.parameters()]
    return sum(p.nbytes + (0 if p.grad is None else p.grad.nbytes) for p in parameters)


def measure(repeats: int) -> Found:
    """Counts, not times: once is enough, whatever `repeats` says."""
    found: dict[str, list[Peak]] = {}
    with Pool(RANKS) as pool:
        for kind in MODULES:
            for schedule in TORCH:
                for library in ("penstock", "torch"):
                    found[f"{kind} {library} {schedule}"] = pool.run(
                        peak, library, schedule, kind, False, timeout=LIMIT
                    )
        for schedule in TORCH:
            found[f"layers again {schedule}"] = pool.run(
                peak, "penstock", schedule, "layers", True, timeout=LIMIT
            )
    rows: list[Row] = []
    for kind in MODULES:
        for schedule in TORCH:
            mine, other = (found[f"{kind} {library} {schedule}"] for library in ("penstock", "torch"))
            again = found[f"layers again {schedule}"] if kind == "layers" else None
            rows += _rows(kind, schedule, mine, other, again)
    notes = [
        "a hidden state: " + ", ".join(f"{unit(kind) / 2**20:g} MiB ({kind})" for kind in MODULES)
        + f"; a stage of layers has {LAYERS} of them: x + down(gelu(up(norm(x)))), four times as wide inside",
        "a live activation of a curve saves 2 states, 1 on rank 0",
        "bytes: every tensor made while the pipeline is built and two steps run, without the batch, weights "
        "and gradients; beside live activations: receive buffers, results on their way, and what one op "
        "needs while it runs, which neither Pipeline.memory nor `simulate` counts",
        "full activation checkpointing: penstock's; torch.distributed.pipelining has none of its own",
        "torch is told not to keep outputs (return_outputs=False); orders of the ops differ between the "
        "libraries but for gpipe and 1f1b",
        f"simulate: of Pipeline.costs(), peak of the rank that is furthest from what was measured; aim: the "
        f"ranks at {AIM} of torch's bytes or less",
    ]  # fmt: skip
    raw = {name: [peak._asdict() for peak in ranks] for name, ranks in found.items()}
    return Found("memory", f"Memory, P={RANKS}, m={MICROBATCHES}", rows, notes, raw)


def unit(kind: str) -> int:
    """Bytes of a hidden state."""
    return 4 * torch.Size(STATE[kind]).numel()


def _rows(
    kind: str, schedule: str, mine: list[Peak], other: list[Peak], again: list[Peak] | None
) -> list[Row]:
    proven = verify(chosen_schedule(schedule, RANKS, MICROBATCHES)).peak_live
    rows = []
    for rank, (own, its) in enumerate(zip(mine, other, strict=True)):
        case, size = f"{kind}: {schedule}, rank {rank}", unit(kind)
        bar = f"{proven[rank]} proven, not above torch's"
        if kind == "curve":
            rows.append(Row(case, "live activations", own.live, "", its.live, bar,
                            own.live == proven[rank] <= its.live))  # fmt: skip
        rows.append(Row(case, "bytes at the peak", own.held / 2**20, "MiB", its.held / 2**20,
                        "not above torch's", own.held <= its.held))  # fmt: skip
        if kind == "curve" and schedule in SCHEDULES:
            each = 1 if rank == 0 else 2
            rows.append(Row(case, "of these, without live activations", own.held / size - own.live * each,
                            "states", its.held / size - its.live * each))  # fmt: skip
        if again is not None:
            rows.append(Row(case, "the same with full activation checkpointing", again[rank].held / 2**20,
                            "MiB"))  # fmt: skip
    case = f"{kind}: {schedule}"
    ratios = [own.held / its.held for own, its in zip(mine, other, strict=True)]
    rows.append(Row(case, f"ranks at {AIM} of torch's bytes or less", sum(r <= AIM for r in ratios), "",
                    None, f"aim: {RANKS}"))  # fmt: skip
    rows += _predictions(case, mine)
    return rows if again is None else [*rows, *_predictions(f"{case}, checkpointed", again)]


def _predictions(case: str, found: list[Peak]) -> list[Row]:
    rows = []
    for what, measured in (("Pipeline.memory", [of.told for of in found]),
                           ("counted from outside", [of.held for of in found])):  # fmt: skip
        ratios = [of.predicted / there for of, there in zip(found, measured, strict=True)]
        worst = max(ratios, key=lambda ratio: abs(ratio - 1))
        rows.append(Row(case, f"simulate / {what}", worst, "", None, f"within {CLOSE:.0%} on every rank",
                        abs(worst - 1) <= CLOSE))  # fmt: skip
    return rows
