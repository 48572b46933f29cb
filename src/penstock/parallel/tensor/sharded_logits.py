"""The vocabulary-parallel loss: each rank of tp computes its shard of the logits, and no rank gathers them.

    hidden (whole) -> the rank's rows of the head -> ShardedLogits -> sums of each token over the rank's shard
    -> all-gather over tp: two or three numbers a token -> loss (whole, equal on every rank)

Backward, each rank has the gradient of its own logits without communication; that of the hidden states is
summed over tp, as for every projection with sharded outputs.

torch's `loss_parallel` computes this loss without label smoothing, without z-loss and of logits that exist:
penstock's loss has the first two, and computes large logits block by block (HeadLogits).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.utils.hooks import RemovableHandle

from penstock.batch.deferred_logits import DeferredLogits, LogitsStep
from penstock.batch.head_logits import HeadLogits
from penstock.batch.hits import Hits
from penstock.batch.logit_sums import LogitSums, Penalties, Wanted, part_sums
from penstock.parallel.tensor.plan import TPPlan, logits_plan
from penstock.parallel.tensor.styles import COLUMNS_GATHERED, WHOLE, SharedInput, Wrapper, redistributed


class ShardedLogits(DeferredLogits):
    """Logits (rows, sequence, vocabulary) of which each rank of `mesh` has an equal part of the vocabulary.

    Args:
        part: this rank's, computed or not.
        mesh: the `tp` axis alone.

    `whole` and `cross_entropy` are collective.
    """

    part: Tensor
    mesh: DeviceMesh

    @staticmethod
    def __new__(cls, part: Tensor, mesh: DeviceMesh) -> ShardedLogits:
        shape = (*part.shape[:-1], part.shape[-1] * mesh.size())
        made = cls._made(shape, part.dtype, part.device, part.requires_grad)
        made.part, made.mesh = part, mesh
        return made

    def stepped(self, step: LogitsStep) -> ShardedLogits:
        part = self.part
        return ShardedLogits(part.stepped(step) if isinstance(part, HeadLogits) else step(part), self.mesh)

    def sliced(self, index: Any) -> ShardedLogits:
        part = self.part
        return ShardedLogits(part.sliced(index) if isinstance(part, HeadLogits) else part[index], self.mesh)

    def hooked(self, hook: Callable[[Tensor], Tensor | None]) -> RemovableHandle | None:
        return self.part.register_hook(hook) if _is_of_fsdp(hook) else None  # type: ignore[no-untyped-call]

    def _computed(self) -> Tensor:
        part = self.part.whole() if isinstance(self.part, HeadLogits) else self.part
        return redistributed(part, self.mesh, Shard(part.ndim - 1), WHOLE)

    def cross_entropy(self, labels: Tensor, ignored: int, penalties: Penalties, hits: Hits) -> Tensor:
        labels, wanted = labels.reshape(-1), Wanted(bool(penalties.smoothing), hits.wanted)
        sums = self._gathered(self._own_sums(labels, wanted), wanted)
        hits.add(sums.at_label, sums.greatest, labels, ignored)
        return sums.cross_entropy(labels, ignored, penalties, self.shape[-1])

    def _own_sums(self, labels: Tensor, wanted: Wanted) -> LogitSums:
        count = self.part.shape[-1]
        start = self.mesh.get_local_rank() * count
        if isinstance(self.part, HeadLogits):
            return self.part.sums(labels, start, wanted)
        return part_sums(self.part.reshape(-1, count), labels, start, wanted)

    def _gathered(self, own: LogitSums, wanted: Wanted) -> LogitSums:
        """The sums over the whole vocabulary: one all-gather of those of each token that are wanted."""
        sent = [name for name in own._fields if getattr(wanted, name, True)]
        stacked = torch.stack([getattr(own, name) for name in sent])[None]
        gathered = redistributed(stacked, self.mesh, Shard(0), WHOLE)  # (ranks, sums, tokens)
        of_parts = dict(zip(sent, gathered.unbind(1), strict=True))
        whole = {name: _OVER_PARTS[name](parts) for name, parts in of_parts.items()}
        return own._replace(**whole)


_OVER_PARTS: dict[str, Callable[[Tensor], Tensor]] = {
    "log_sum": lambda parts: parts.logsumexp(0),
    "at_label": lambda parts: parts.sum(0),
    "total": lambda parts: parts.sum(0),
    "greatest": lambda parts: parts.detach().amax(0),
}


def sharded_head(module: nn.Module, mesh: DeviceMesh, plan: TPPlan) -> str | None:
    """The head whose logits stay sharded; None where one rank's `logits_plan` has them whole. Collective."""
    head = logits_plan(module, plan).head
    if any(style == COLUMNS_GATHERED for style in plan.values()):  # on every rank: hooks may differ
        agreed = torch.tensor(head is not None, dtype=torch.int32, device=mesh.device_type)
        dist.all_reduce(agreed, dist.ReduceOp.MIN, mesh.get_group())
        head = head if agreed.item() else None
    return head


def _is_of_fsdp(hook: object) -> bool:
    """Whether a hook of a gradient is FSDP2's, which gathers the weights and does not read the gradient."""
    from penstock.private import FSDPState

    return getattr(hook, "__func__", None) is FSDPState._pre_backward


def sharded_logits(
    mesh: DeviceMesh, shared: SharedInput, module: nn.Module, call: Wrapper, x: Tensor
) -> Tensor:
    """Around a head whose outputs, the logits, are sharded: they stay so."""
    y: Tensor = call(shared.enter(x))
    if torch.compiler.is_compiling():
        return redistributed(y, mesh, Shard(y.ndim - 1), WHOLE)
    return ShardedLogits(y, mesh)
