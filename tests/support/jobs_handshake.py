"""Pipelines that one rank builds otherwise than the others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from penstock import AutoPipeline
from penstock.errors import PenstockError
from penstock.runtime import handshake
from support.families import tiny_config

OTHER: dict[str, dict[str, Any]] = {
    "microbatches": {"microbatches": 5},
    "schedule": {"schedule": "gpipe"},
    "placement": {"schedule": "interleaved_1f1b", "microbatches": 6},
    "dtype": {"dtype": torch.bfloat16},
    "model": {},
    "version": {},
}


def differ(what: str) -> str:
    """The typed error that a pipeline of 3 ranks ends in where rank 1 differs in `what`, in words."""
    options: dict[str, Any] = {"schedule": "1f1b", "microbatches": 4, "dtype": torch.float32}
    size = 24
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            options |= OTHER[what]
            if what == "model":
                size = 48
            if what == "version":
                patch.setattr(handshake, "version", lambda name: "0.1.0")
        auto = AutoPipeline(ranks=3, timeout=10, **options)
        try:
            auto.build(tiny_config("llama", layers=6, intermediate_size=size))
        except PenstockError as error:
            return f"{type(error).__name__}: {error}"
    return "no error"
