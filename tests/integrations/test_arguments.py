"""An argument that a pipeline cannot keep is refused by name, with its value, the rule and a remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from penstock import Axes
from penstock.errors import ConfigError
from penstock.integrations import PipelineTrainer
from penstock.integrations.arguments import OPTIONS, REFUSALS
from support import trainers
from support.pool import Pool
from support.refusals import refuses

# values of arguments that are refused, by name; the rest is in test_cannot_be_given
REFUSED: dict[str, Any] = {
    "fp16_full_eval": True, "bf16_full_eval": True, "activation_checkpointing": True, "torch_compile": True,
    "use_liger_kernel": True, "label_smoothing_factor": 0.1, "neftune_noise_alpha": 5.0,
    "auto_find_batch_size": True, "torch_empty_cache_steps": 1, "save_only_model": True,
    "save_on_each_node": True, "enable_jit_checkpoint": True, "debug": "underflow_overflow",
    "optim": "adafactor", "train_sampling_strategy": "group_by_length",
    "accelerator_config": {"split_batches": True},
}  # fmt: skip
# these ask for hardware or a library when the arguments are made: the value is set afterwards
SET_AFTERWARDS: dict[str, Any] = {
    "deepspeed": {"zero_optimization": {"stage": 2}}, "fsdp": ["full_shard"], "parallelism_config": object(),
    "fp16": True,
}  # fmt: skip
OTHERS: dict[str, dict[str, Any]] = {
    "accelerator_config=AcceleratorConfig": {"accelerator_config": {"dispatch_batches": True}},
    "accelerator_config=": {"accelerator_config": {"use_seedable_sampler": False}},
    "bf16=True": {"bf16": True},
    "gradient_accumulation_steps=3": {"gradient_accumulation_steps": 3},
    "per_device_train_batch_size=1": {"per_device_train_batch_size": 1},
}


def refusal(folder: Path, late: dict[str, Any] | None = None, **more: Any) -> str:
    """The text of the error for these arguments; `late` ones are set after the arguments are made."""
    with trainers.as_launched():
        args = trainers.arguments(folder, **more)
        for name, value in (late or {}).items():
            object.__setattr__(args, name, value)
        with pytest.raises(ConfigError) as caught:
            PipelineTrainer(trainers.pipeline(), args, **trainers.options())
    assert all((caught.value.value, caught.value.rule, caught.value.remedy))
    return str(caught.value)


def test_every_refusal_has_its_case() -> None:
    assert {refusal.name for refusal in REFUSALS} == REFUSED.keys() | SET_AFTERWARDS.keys()


@pytest.mark.filterwarnings("ignore")  # transformers', of arguments that it deprecates
@pytest.mark.parametrize("name", REFUSED)
def test_is_refused_by_name(tmp_path: Path, name: str) -> None:
    assert refusal(tmp_path, **{name: REFUSED[name]}).startswith(f"{name}=")


@pytest.mark.parametrize("name", SET_AFTERWARDS)
def test_what_needs_more_hardware_is_refused_by_name(tmp_path: Path, name: str) -> None:
    assert refusal(tmp_path, {name: SET_AFTERWARDS[name]}).startswith(f"{name}=")


@pytest.mark.parametrize("start", OTHERS)
def test_what_this_pipeline_cannot_keep_is_refused(tmp_path: Path, start: str) -> None:
    assert refusal(tmp_path, **OTHERS[start]).startswith(start)


@pytest.mark.parametrize("name", [option.name for option in OPTIONS])
def test_options_that_make_another_model_are_refused(tmp_path: Path, name: str) -> None:
    with trainers.as_launched(), refuses(ConfigError, name, "the pipeline"):
        PipelineTrainer(trainers.pipeline(), trainers.arguments(tmp_path), **{name: lambda: None})


def test_precision_is_that_of_the_build(tmp_path: Path) -> None:
    with trainers.as_launched():
        pipe = trainers.pipeline(autocast=torch.bfloat16)
        with refuses(ConfigError, "bf16=False", "built with autocast"):
            PipelineTrainer(pipe, trainers.arguments(tmp_path), **trainers.options())
        trainer = PipelineTrainer(pipe, trainers.arguments(tmp_path, bf16=True), **trainers.options())
        assert trainer.train().global_step == 6


def test_ones_own_optimizer_is_taken(tmp_path: Path) -> None:
    """`optim` does not count then."""
    with trainers.as_launched():
        pipe = trainers.pipeline()
        own = torch.optim.SGD(pipe.parameters(), lr=0.1)
        args = trainers.arguments(tmp_path, optim="adafactor", max_steps=1)
        trainer = PipelineTrainer(pipe, args, optimizers=(own, None), **trainers.options())
        before = [value.detach().clone() for value in pipe.parameters()]
        trainer.train()
        assert trainer.optimizer.optimizer is own
        assert len(before) == len(list(pipe.parameters()))


def test_data_parallel_parts_have_no_common_logits(pool: Pool, tmp_path: Path) -> None:
    for text in pool.run(4, _metrics, tmp_path):
        assert "compute_metrics: it needs all logits" in text
        assert "average_tokens_across_devices=False" in text


def _metrics(folder: Path) -> str:
    texts = []
    with trainers.as_launched():
        pipe = trainers.pipeline(Axes(dp_replicate=2))
        for metrics, average in ((True, True), (False, False)):
            args = trainers.arguments(folder, average_tokens_across_devices=average)
            try:
                PipelineTrainer(pipe, args, **trainers.options(metrics=metrics))
            except ConfigError as error:
                texts.append(str(error))
        pipe.close()
    return " ".join(texts)
