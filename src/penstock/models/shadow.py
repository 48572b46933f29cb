"""A model without values: its forward runs at full size and takes neither memory nor time.

Fake tensors know shape, dtype and device. transformers knows them too, so that its mask code, which
looks at values on the plain meta device, does not ask for any.
"""

from __future__ import annotations

import copy
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
    with FakeTensorMode():
        memo: dict[int, Any] = {}
        for parameter in model.parameters():
            values = torch.empty(parameter.shape, dtype=parameter.dtype)
            memo[id(parameter)] = nn.Parameter(values, parameter.requires_grad)
        for buffer in model.buffers():
            memo[id(buffer)] = torch.empty(buffer.shape, dtype=buffer.dtype)
        memo |= replaced or {}
        yield copy.deepcopy(model, memo)
