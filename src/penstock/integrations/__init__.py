"""Pipelines in other libraries' trainers: transformers' Trainer and TRL's SFTTrainer.

The trainers need accelerate, and the second one TRL, so the names below are looked up when they are first
used.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.integrations.sft import PipelineSFTTrainer
    from penstock.integrations.trainer import PipelineTrainer

__all__ = ["PipelineSFTTrainer", "PipelineTrainer"]

# by name: its file, and the libraries that it needs
_HOMES = {
    "PipelineTrainer": ("penstock.integrations.trainer", ("accelerate",)),
    "PipelineSFTTrainer": ("penstock.integrations.sft", ("accelerate", "trl", "datasets")),
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'penstock.integrations' has no attribute {name!r}")
    home, libraries = _HOMES[name]
    if missing := [library for library in libraries if find_spec(library) is None]:
        rule = f"it needs {' and '.join(missing)}, which is not installed"
        raise ConfigError(name, rule, "Install it: pip install 'penstock[trainer]'")
    return getattr(import_module(home), name)
