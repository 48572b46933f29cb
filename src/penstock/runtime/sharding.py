"""FSDP2 around a stage."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


class Sharding:
    """What FSDP2 does with the gradients of `module`, if it was applied to any part of it."""

    def __init__(self, module: nn.Module) -> None:
        fsdp = sys.modules.get("torch.distributed.fsdp")  # who has not imported it does not use it
        parts = [] if fsdp is None else [p for p in module.modules() if isinstance(p, fsdp.FSDPModule)]
        self._states = [part._get_fsdp_state() for part in parts]
        self._parts = parts
        self._groups = [group for state in self._states for group in state._fsdp_param_groups]

    @property
    def reduces_in_backward(self) -> bool:
        """Whether it reduces gradients within each backward, and so before W has added its own.

        Such a stage takes whole backwards, until `set_requires_gradient_sync(False)` puts the reduction off.
        """
        return any(group.reduce_grads for group in self._groups)

    @property
    def any(self) -> bool:
        return bool(self._parts)

    @property
    def is_whole(self) -> bool:
        """Whether its weights are gathered and stay so: neither forwards nor backwards exchange any."""
        return all(
            group.is_unsharded
            and group.post_forward_mesh_info is None
            and not group.reshard_after_backward
            and not group.reduce_grads
            for group in self._groups
        )

    @property
    def is_plain(self) -> bool:
        """Whether its hooks do nothing to inputs, outputs and gradients but gather weights."""
        return all(
            not any((state._mp_policy.param_dtype, state._mp_policy.reduce_dtype,
                     state._mp_policy.output_dtype))
            for state in self._states
        )  # fmt: skip

    @contextmanager
    def unheeded(self) -> Iterator[None]:
        """A forward under this passes FSDP2's hooks by, which a whole and plain module can do without.

        They keep where one forward or backward stands in variables of the module. With a backward of the same
        module in another thread, each would take the other's for its own.
        """
        before = [(part, part._forward_pre_hooks, part._forward_hooks) for part in self._parts]
        for state, (part, pre, post) in zip(self._states, before, strict=True):
            part._forward_pre_hooks = _without(pre, state._pre_forward_hook_handle)
            part._forward_hooks = _without(post, state._post_forward_hook_handle)
        try:
            yield
        finally:
            for part, pre, post in before:
                part._forward_pre_hooks, part._forward_hooks = pre, post


def _without(hooks: OrderedDict[int, Any], handle: Any) -> OrderedDict[int, Any]:
    return OrderedDict((key, hook) for key, hook in hooks.items() if key != handle.id)
