"""A model without values: its forward runs at full size and takes neither memory nor time.

Fake tensors know shape, dtype and device. transformers knows them too, so that its mask code, which
looks at values on the plain meta device, does not ask for any.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

M = TypeVar("M", bound=nn.Module)


@contextmanager
def shadow(model: M, replaced: Mapping[int, Any] | None = None) -> Iterator[M]:
    """A copy of `model` with fake tensors on the CPU for its parameters and buffers.

    replaced: copies to take in place of those made here, by the id of the original. Tensors that are made
    inside the context are fake too.
    """
    with FakeTensorMode(), _not_told():
        memo: dict[int, Any] = {}
        for module in _kept(model, replaced or {}):
            for parameter in module.parameters(recurse=False):
                if id(parameter) not in memo:
                    values = torch.empty(parameter.shape, dtype=parameter.dtype)
                    memo[id(parameter)] = nn.Parameter(values, parameter.requires_grad)
            for buffer in module.buffers(recurse=False):
                memo[id(buffer)] = torch.empty(buffer.shape, dtype=buffer.dtype)
        memo |= replaced or {}
        yield copy.deepcopy(model, memo)


@contextmanager
def _not_told() -> Iterator[None]:
    """torch logs an error, with its traceback, for each op that fails without values. Whoever asked is told
    by the exception, and may do without: a grouped product in float32 says that it takes bfloat16 only.
    """
    log = logging.getLogger(FakeTensorMode.__module__)
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def _kept(module: nn.Module, replaced: Mapping[int, Any]) -> Iterator[nn.Module]:
    """Its modules, but for those that are replaced and what is in them."""
    if id(module) not in replaced:
        yield module
        for child in module.children():
            yield from _kept(child, replaced)
