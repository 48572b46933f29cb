"""FSDP2 around a stage."""

from __future__ import annotations

import sys

from torch import nn


class Sharding:
    """What FSDP2 does with the gradients of `module`, if it was applied to any part of it."""

    def __init__(self, module: nn.Module) -> None:
        fsdp = sys.modules.get("torch.distributed.fsdp")  # who has not imported it does not use it
        parts = [] if fsdp is None else [p for p in module.modules() if isinstance(p, fsdp.FSDPModule)]
        self._groups = [group for p in parts for group in p._get_fsdp_state()._fsdp_param_groups]

    @property
    def reduces_in_backward(self) -> bool:
        """Whether it reduces gradients within each backward, and so before W has added its own.

        Such a stage takes whole backwards, until `set_requires_gradient_sync(False)` puts the reduction off.
        """
        return any(group.reduce_grads for group in self._groups)
