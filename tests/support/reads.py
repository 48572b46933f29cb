"""A GPU on the CPU, as far as its values are concerned: finds where a host would wait for it to read one."""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from penstock.batch import placement
from penstock.models.huggingface import masks
from penstock.pipeline.steps import runner
from penstock.runtime import executor
from penstock.runtime.device import stream

# the host needs the values of an argument, or the size of the result depends on them
_BY_VALUE = {
    *("_local_scalar_dense", "nonzero", "masked_select", "equal", "bincount", "_unique2", "unique_dim"),
    *("unique_consecutive", "repeat_interleave"),
}
_READ = {Tensor.tolist: "tolist", Tensor.numpy: "numpy", Tensor.cpu: "cpu"}
# of transformers, where torch has no grouped product for the CPU
_ON_CPU_ALONE = "_grouped_mm_fallback"


class Reads(TorchDispatchMode):
    """Follows which tensors are on the GPU: those that were put there, what is made of them, and what an op
    makes of nothing.

    Attributes:
        found: of each wait, the op that the rank was in, or None, and where in the source
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[tuple[str | None, str]] = []
        self.op: str | None = None
        self._there: dict[int, Any] = {}  # storages, which keep their addresses to themselves

    def put(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        self._there[storage._cdata] = storage
        return tensor

    def holds(self, *values: Any) -> bool:
        tensors = (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor))
        return any(tensor.untyped_storage()._cdata in self._there for tensor in tensors)

    def wait(self, what: str) -> None:
        frames = traceback.extract_stack()
        if any(frame.name.startswith(_ON_CPU_ALONE) for frame in frames):
            return
        ours = [f for f in frames if "/penstock/" in f.filename or "/transformers/" in f.filename]
        where = f"{ours[-1].filename.rpartition('/')[2]}:{ours[-1].lineno} {ours[-1].name}" if ours else "?"
        self.found.append((self.op, f"{what} in {where}"))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs, name, there = dict(kwargs or {}), func.overloadpacket.__name__, self.holds(args, kwargs)
        indices = args[1] if name in ("index", "index_put", "index_put_") else ()
        masks = any(isinstance(each, Tensor) and each.dtype == torch.bool for each in indices)
        if there and (masks or (name in _BY_VALUE and "output_size" not in kwargs)):
            self.wait(name)
        result = func(*args, **kwargs)
        of_nothing = not any(isinstance(leaf, Tensor) for leaf in tree_leaves((args, kwargs)))
        for leaf in tree_leaves(result) if there or (of_nothing and self.op is not None) else ():
            if isinstance(leaf, Tensor):
                self.put(leaf)
        return result


class _Copies(TorchFunctionMode):
    """Reads that no op shows. A copy on the host is there."""

    def __init__(self, reads: Reads) -> None:
        super().__init__()
        self._reads = reads

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READ and self._reads.holds(args[0]):
            self._reads.wait(_READ[func])
            if func is Tensor.cpu:
                return torch.from_numpy(args[0].detach().numpy().copy())
        return func(*args, **(kwargs or {}))


class _Stream:
    """What is queued is over once the host has waited for anything after it."""

    runs_behind = True

    def __init__(self, reads: Reads) -> None:
        self._reads = reads

    def begin_step(self) -> None:
        """There is one."""

    def now(self) -> _Moment:
        return _Moment(self._reads)

    def anchor(self) -> tuple[float, _Moment]:
        return time.perf_counter(), self.now()

    def hold(self, seconds: float) -> None:
        raise AssertionError("nobody measures it")


class _Moment:
    def __init__(self, reads: Reads) -> None:
        self._reads, self._before = reads, len(reads.found)
        self._at = self.queued = time.perf_counter()

    def query(self) -> bool:
        return len(self._reads.found) > self._before

    def synchronize(self) -> None:
        self._reads.wait("event")

    def elapsed_time(self, end: Any) -> float:
        return float(end._at - self._at) * 1e3


@contextmanager
def watched() -> Iterator[Reads]:
    """Inside, pipelines on the CPU behave as on a GPU that the host has to wait for."""
    reads, gpu, real, compute = Reads(), torch.device("meta"), placement.placed, executor.Executor.compute

    def to_device(tensor: Tensor, device: torch.device) -> Tensor:
        return reads.put(tensor.clone())

    def traced(self: Any, action: Any, given: Any) -> None:
        reads.op = str(action.op)
        compute(self, action, given)
        reads.op = None

    with pytest.MonkeyPatch.context() as patch:
        for module in (placement, masks):
            patch.setattr(module, "to_device", to_device)
        patch.setattr(runner, "placed", lambda microbatches, device: real(microbatches, gpu))
        patch.setattr(stream, "stream_of", lambda device: _Stream(reads))
        patch.setattr(executor.Executor, "compute", traced)
        with reads, _Copies(reads):
            yield reads
