"""penstock: pipeline-parallel training for PyTorch.

`penstock.schedule` needs no torch, so the names below are looked up when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.batch.microbatches import PerRow, split_batch
    from penstock.batch.padding import Padding
    from penstock.batch.payload import TensorSpec
    from penstock.checkpoint.save_load import CheckpointWriter, load_checkpoint, save_checkpoint
    from penstock.models.activation_checkpointing import Checkpointing
    from penstock.models.activation_offloading import Offloading
    from penstock.models.mtp import with_mtp
    from penstock.models.split.balanced_split import LayerCosts
    from penstock.models.stage import StageInfo, distribute_layers
    from penstock.models.tracing.probe import register_chain
    from penstock.parallel.axes import Axes
    from penstock.parallel.fsdp import Sharded
    from penstock.pipeline.auto_pipeline import AutoPipeline
    from penstock.pipeline.pipeline import Pipeline
    from penstock.pipeline.steps.evaluate import Evaluation
    from penstock.pipeline.steps.step import StepResult
    from penstock.runtime.split_backward.compiled import compile_around_products

__version__ = "0.5.0"
__all__ = [
    "AutoPipeline",
    "Axes",
    "CheckpointWriter",
    "Checkpointing",
    "Evaluation",
    "LayerCosts",
    "Offloading",
    "Padding",
    "PerRow",
    "Pipeline",
    "Sharded",
    "StageInfo",
    "StepResult",
    "TensorSpec",
    "__version__",
    "compile_around_products",
    "distribute_layers",
    "load_checkpoint",
    "register_chain",
    "save_checkpoint",
    "split_batch",
    "with_mtp",
]

_HOMES = {
    "AutoPipeline": "penstock.pipeline.auto_pipeline",
    "Axes": "penstock.parallel.axes",
    "CheckpointWriter": "penstock.checkpoint.save_load",
    "Checkpointing": "penstock.models.activation_checkpointing",
    "Evaluation": "penstock.pipeline.steps.evaluate",
    "LayerCosts": "penstock.models.split.balanced_split",
    "Offloading": "penstock.models.activation_offloading",
    "Padding": "penstock.batch.padding",
    "PerRow": "penstock.batch.microbatches",
    "Pipeline": "penstock.pipeline.pipeline",
    "Sharded": "penstock.parallel.fsdp",
    "StageInfo": "penstock.models.stage",
    "StepResult": "penstock.pipeline.steps.step",
    "TensorSpec": "penstock.batch.payload",
    "compile_around_products": "penstock.runtime.split_backward.compiled",
    "distribute_layers": "penstock.models.stage",
    "load_checkpoint": "penstock.checkpoint.save_load",
    "register_chain": "penstock.models.tracing.probe",
    "save_checkpoint": "penstock.checkpoint.save_load",
    "split_batch": "penstock.batch.microbatches",
    "with_mtp": "penstock.models.mtp",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
