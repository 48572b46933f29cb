"""penstock: pipeline-parallel training for PyTorch.

`penstock.schedule` needs no torch, so the names below are looked up when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.auto import AutoPipeline
    from penstock.pipeline import Pipeline, StepResult

__version__ = "0.2.0"
__all__ = ["AutoPipeline", "Pipeline", "StepResult", "__version__"]

_HOMES = {"AutoPipeline": "penstock.auto", "Pipeline": "penstock.pipeline", "StepResult": "penstock.pipeline"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
