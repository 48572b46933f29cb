"""The arguments of a trainer that a pipeline cannot keep: each is refused by name, with what to do instead.

An argument that the trainer would apply to its model is refused, because the model's values are elsewhere: it
would change nothing. The pipeline has an option of its own for most of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from transformers import TrainingArguments

from penstock.errors import ConfigError
from penstock.pipeline.pipeline import Pipeline

# optimizers that treat each entry of a weight alike, so that they are the same over any split of the weights
_OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop")


class Refusal(NamedTuple):
    """An argument that is refused where `applies` is true of its value."""

    name: str
    rule: str
    remedy: str
    applies: Callable[[Any], bool] = bool


_ON_THE_MODEL = "the trainer would apply it to a model without values; the pipeline has an option for it"
_OTHER_SHARDING = "the pipeline shards the model itself"
_BUILT_BEFORE = "the pipeline is built before the trainer"
_PARTIAL = "the state of a pipeline is saved as a whole, so that it is complete or absent"

REFUSALS = (
    Refusal("deepspeed", _OTHER_SHARDING, "Give the pipeline axes, as Axes(dp_shard=2)"),
    Refusal("fsdp", _OTHER_SHARDING, "Give the pipeline axes, as Axes(dp_shard=2)"),
    Refusal("parallelism_config", _OTHER_SHARDING, "Give the pipeline axes, as Axes(dp_replicate=2)"),
    Refusal("fp16", "a pipeline has no gradient scaler", "Build it with autocast=torch.bfloat16"),
    Refusal("fp16_full_eval", "the pipeline evaluates as it trains", "Leave it out"),
    Refusal("bf16_full_eval", "the pipeline evaluates as it trains", "Leave it out"),
    Refusal("activation_checkpointing", _ON_THE_MODEL, "Build it with activation_checkpointing=True"),
    Refusal("torch_compile", _ON_THE_MODEL, "Build it with compile=True"),
    Refusal("use_liger_kernel", _ON_THE_MODEL, "Build it with chunked_loss='liger'"),
    Refusal(
        "label_smoothing_factor",
        "the pipeline computes the loss",
        "Build it with loss_fn=NextToken(label_smoothing=0.1), of penstock.batch.loss",
    ),
    Refusal("neftune_noise_alpha", "it hooks an embedding without values", "Leave it out"),
    Refusal("auto_find_batch_size", "the ranks would not shrink a batch together", "Give the batch size"),
    Refusal("torch_empty_cache_steps", "the pipeline keeps its buffers from step to step", "Leave it out"),
    Refusal("save_only_model", _PARTIAL, "Leave it out, and call save_model() for a model's folder"),
    Refusal("save_on_each_node", "all hosts write one checkpoint, on a shared file system", "Leave it out"),
    Refusal("enable_jit_checkpoint", _PARTIAL, "Give save_steps"),
    Refusal("debug", "its hooks are for a model with values", "Leave it out"),
    Refusal(
        "optim",
        f"on parts of a model, these are known to be exact: {', '.join(_OPTIMIZERS)}",
        "Take one, or give optimizers=(optimizer over pipe.parameters(), None)",
        lambda optim: str(getattr(optim, "value", optim)) not in _OPTIMIZERS,
    ),
    Refusal(
        "train_sampling_strategy",
        "all ranks must draw the same rows, and this one draws from each rank's own random state",
        "Take 'random' or 'sequential'",
        lambda strategy: strategy not in ("random", "sequential"),
    ),
    Refusal(
        "accelerator_config",
        "all ranks read the same rows by themselves, in an order that follows from the seed",
        "Leave out dispatch_batches, split_batches and use_seedable_sampler",
        lambda given: bool(given.dispatch_batches or given.split_batches or not given.use_seedable_sampler),
    ),
)  # fmt: skip

# what a trainer takes beside its arguments
OPTIONS = (
    Refusal("model_init", _BUILT_BEFORE, "Give the pipeline as model"),
    Refusal("compute_loss_func", "the pipeline computes the loss", "Build it with a loss_fn"),
    Refusal("peft_config", _BUILT_BEFORE, "Build it with adapter=LoraConfig(...)"),
    Refusal("quantization_config", _BUILT_BEFORE, "Build it with quantize='nf4'"),
)  # fmt: skip


def check_arguments(args: TrainingArguments, pipe: Pipeline, optim: bool = True) -> None:
    """Raise ConfigError for an argument that a pipeline cannot keep.

    optim: whether the trainer makes the optimizer, as args say
    """
    for refusal in REFUSALS:
        value = getattr(args, refusal.name, None)
        if (optim or refusal.name != "optim") and value is not None and refusal.applies(value):
            raise ConfigError(f"{refusal.name}={_short(value)}", refusal.rule, refusal.remedy)
    _check_precision(args, pipe)
    _check_batches(args, pipe)


def check_options(options: dict[str, Any], pipe: Pipeline) -> None:
    """Raise ConfigError for an option of the trainer's own that a pipeline cannot keep."""
    for refusal in OPTIONS:
        if options.get(refusal.name) is not None:
            raise ConfigError(refusal.name, refusal.rule, refusal.remedy)
    parts = pipe.batch_part[1]
    if options.get("compute_metrics") is not None and parts > 1:
        rule = f"it needs all logits, and each of {parts} data-parallel parts has its own"
        raise ConfigError("compute_metrics", rule, "Evaluate the saved model in another process")


def _short(value: Any) -> str:
    value = getattr(value, "value", value)
    return repr(value) if isinstance(value, str | int | float | list) else type(value).__name__


def _check_precision(args: TrainingArguments, pipe: Pipeline) -> None:
    if args.bf16 and pipe.autocast != torch.bfloat16:
        rule = "a pipeline has its precision from its build"
        raise ConfigError("bf16=True", rule, "Build it with autocast=torch.bfloat16, or give bf16=False")
    if not args.bf16 and pipe.autocast is not None:
        rule = f"the pipeline was built with autocast={pipe.autocast}"
        raise ConfigError("bf16=False", rule, "Give bf16=True, or build it without autocast")
    if args.device.type != pipe.device.type:
        rule = f"the pipeline is on {pipe.device}"
        remedy = "Build it with device='cpu', or leave use_cpu out"
        raise ConfigError(f"use_cpu={args.use_cpu}", rule, remedy)


def _check_batches(args: TrainingArguments, pipe: Pipeline) -> None:
    steps, count = args.gradient_accumulation_steps, pipe.schedule.microbatches
    if count % steps:
        rule = f"a step is {steps} batches in {count} microbatches of the pipeline, equally many for each"
        remedy = f"Take a divisor of {count}, such as 1 or {count}, or build with microbatches={steps}"
        raise ConfigError(f"gradient_accumulation_steps={steps}", rule, remedy)
    rows = args.per_device_train_batch_size * steps
    if rows < count:
        rule = f"a step has {rows} rows for {count} microbatches"
        remedy = f"Give {count // steps} rows or more, or fewer microbatches"
        raise ConfigError(f"per_device_train_batch_size={rows // steps}", rule, remedy)
    if not args.average_tokens_across_devices and pipe.batch_part[1] > 1:
        rule = "the loss of a pipeline is the mean over the tokens of all data-parallel parts"
        raise ConfigError("average_tokens_across_devices=False", rule, "Leave it out")
