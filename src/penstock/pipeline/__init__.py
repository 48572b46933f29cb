"""Pipelines: build one from a Hugging Face model or a user's own modules, step it, compare it.

AutoPipeline and Pipeline are the usual way. The other functions are single steps of a build, for custom
models and loops: name the modules of each stage, split a module, make a stage ready to run.
"""

from penstock.pipeline.auto_pipeline import AutoPipeline
from penstock.pipeline.building.build_plan import BuildPlan, StagePlan, balance
from penstock.pipeline.building.compiling import Compile
from penstock.pipeline.building.memory import Account, RankMemory, estimated_memory
from penstock.pipeline.building.split_module import (
    layers_of,
    module_names,
    names_per_stage,
    provider_of,
    split,
)
from penstock.pipeline.building.stages import StageFacts, make_stage, own_stages, stage_parts
from penstock.pipeline.compare import Compared, Report
from penstock.pipeline.options import Options
from penstock.pipeline.pipeline import Pipeline
from penstock.pipeline.steps.evaluate import Evaluation
from penstock.pipeline.steps.step import StepResult
from penstock.pipeline.whole_step import WholeStepLoss
from penstock.schedule.choose import chosen_schedule as make_schedule

__all__ = [
    "Account",
    "AutoPipeline",
    "BuildPlan",
    "Compared",
    "Compile",
    "Evaluation",
    "Options",
    "Pipeline",
    "RankMemory",
    "Report",
    "StageFacts",
    "StagePlan",
    "StepResult",
    "WholeStepLoss",
    "balance",
    "estimated_memory",
    "layers_of",
    "make_schedule",
    "make_stage",
    "module_names",
    "names_per_stage",
    "own_stages",
    "provider_of",
    "split",
    "stage_parts",
]
