"""penstock: pipeline-parallel training for PyTorch.

`penstock.schedule` needs no torch, so the names below are looked up when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.auto import AutoPipeline
    from penstock.checkpoint import CheckpointWriter, load_checkpoint, save_checkpoint
    from penstock.evaluation import Evaluation
    from penstock.models.balance import LayerCosts
    from penstock.models.checkpointing import Checkpointing
    from penstock.models.layer_list import register_chain
    from penstock.models.protocol import StageInfo, distribute_layers
    from penstock.parallel.data import Sharded
    from penstock.pipeline import Pipeline
    from penstock.runtime.axes import Axes
    from penstock.runtime.padding import Padding
    from penstock.runtime.parcel import TensorSpec
    from penstock.steps import StepResult

__version__ = "0.5.0"
__all__ = [
    "AutoPipeline",
    "Axes",
    "CheckpointWriter",
    "Checkpointing",
    "Evaluation",
    "LayerCosts",
    "Padding",
    "Pipeline",
    "Sharded",
    "StageInfo",
    "StepResult",
    "TensorSpec",
    "__version__",
    "distribute_layers",
    "load_checkpoint",
    "register_chain",
    "save_checkpoint",
]

_HOMES = {
    "AutoPipeline": "penstock.auto",
    "Axes": "penstock.runtime.axes",
    "CheckpointWriter": "penstock.checkpoint",
    "Checkpointing": "penstock.models.checkpointing",
    "Evaluation": "penstock.evaluation",
    "LayerCosts": "penstock.models.balance",
    "Padding": "penstock.runtime.padding",
    "Pipeline": "penstock.pipeline",
    "Sharded": "penstock.parallel.data",
    "StageInfo": "penstock.models.protocol",
    "StepResult": "penstock.steps",
    "TensorSpec": "penstock.runtime.parcel",
    "distribute_layers": "penstock.models.protocol",
    "load_checkpoint": "penstock.checkpoint",
    "register_chain": "penstock.models.layer_list",
    "save_checkpoint": "penstock.checkpoint",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
