"""What each rank holds at its peak, counted in live activations and in bytes.

A stage saves one tensor of the size of the hidden state for its backward, besides the one that it received,
so that a live activation holds two (one on rank 0, which reads the batch). Bytes are counted by watching
every tensor that is made from before the pipeline is built until its second step has ended, so that buffers
that are allocated ahead are in. P = 4 over gloo, m = 8.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.pool import Pool, Rank
from benchmarks.report import Found, Row
from benchmarks.rivals import SCHEDULES, Work, ours, theirs
from penstock.schedule import build, verify

RANKS, MICROBATCHES = 4, 8
HIDDEN = (1, 1024, 1024)  # 4 MiB
UNIT = 4 * 1024 * 1024


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


class Most(dict[Any, Any]):
    """A dict that knows the most entries it ever had."""

    most = 0

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        self.most = max(self.most, len(self))


def mean(output: Tensor, target: Tensor) -> Tensor:
    return output.mean()


def peak(rank: Rank, library: str, schedule: str) -> tuple[int, int]:
    """Most live activations on this rank, and most bytes beside the batch."""
    shape = (HIDDEN[0] * MICROBATCHES, *HIDDEN[1:])
    work = Work(Curve, mean, torch.ones(shape), torch.ones(MICROBATCHES, 1), MICROBATCHES)
    with Watch() as watch:
        watch.skip(work.batch)
        if library == "penstock":
            pipe, step = ours(work, schedule, rank.count)
            step()
            step()
            return pipe.timeline.peak_live[rank.index], watch.peak
        (stage,), _, step = theirs(work, schedule, rank.index, rank.count)
        cache = stage.fwd_cache = Most()
        step()
        step()
        return cache.most, watch.peak


def measure(repeats: int) -> Found:
    """Counts, not times: once is enough, whatever `repeats` says."""
    raw = {}
    with Pool(RANKS) as pool:
        for schedule in SCHEDULES:
            for library in ("penstock", "torch"):
                raw[f"{library} {schedule}"] = pool.run(peak, library, schedule)
    rows: list[Row] = []
    for schedule in SCHEDULES:
        proven = verify(build(schedule, ranks=RANKS, microbatches=MICROBATCHES)).peak_live
        for rank in range(RANKS):
            (live, held), (live_torch, held_torch) = (
                raw[f"{lib} {schedule}"][rank] for lib in ("penstock", "torch")
            )
            saved = live * (1 if rank == 0 else 2)
            case, bar = f"{schedule}, rank {rank}", f"{proven[rank]} proven, not above torch's"
            rows += [
                Row(case, "live activations", live, "", live_torch, bar, live == proven[rank] <= live_torch),
                Row(case, "bytes at the peak", held / 2**20, "MiB", held_torch / 2**20, "not above torch's",
                    held <= held_torch),
                Row(case, "of these beside live activations", held / UNIT - saved, "states",
                    held_torch / UNIT - saved),
            ]  # fmt: skip
    notes = [
        f"a (hidden) state is {UNIT // 2**20} MiB; a live activation saves 2 of them, 1 on rank 0",
        "bytes: every tensor made while the pipeline is built and two steps run, without the batch; beside "
        "live activations: receive buffers, results on their way, and what one op needs while it runs",
        "torch is told not to keep outputs (return_outputs=False)",
    ]
    return Found("memory", f"Memory, P={RANKS}, m={MICROBATCHES}", rows, notes, raw)
