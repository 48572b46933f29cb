"""PipelineSFTTrainer: TRL's SFTTrainer over a pipeline.

TRL prepares the data: chat templates, prompts that the loss leaves out, truncation, packing. PipelineTrainer
computes. TRL's own loss measures entropy and token accuracy on the logits of each batch; a pipeline's last
stage alone has logits, in pieces, so that these two are not logged.
"""

from __future__ import annotations

from typing import Any

from trl import SFTConfig, SFTTrainer

from penstock.errors import ConfigError
from penstock.integrations.trainer import PipelineTrainer
from penstock.pipeline.pipeline import Pipeline


class PipelineSFTTrainer(PipelineTrainer, SFTTrainer):  # type: ignore[misc]  # trl is not followed
    """TRL's SFTTrainer, as PipelineTrainer is transformers' Trainer.

    SFTConfig sets bf16=True and activation_checkpointing=True where they are left out. A pipeline has both
    from its build: give bf16=False, or build with autocast, and activation_checkpointing=False.
    """

    def __init__(self, model: Pipeline, args: SFTConfig, **options: Any) -> None:
        """Collective.

        Args:
            model, args: as for PipelineTrainer
            options: as for SFTTrainer. processing_class is needed.

        Raises what PipelineTrainer raises, and ConfigError for a loss other than "nll".
        """
        if args.loss_type != "nll":
            rule = "the pipeline computes the loss"
            raise ConfigError(f"loss_type={args.loss_type!r}", rule, "Take 'nll', or build it with a loss_fn")
        if args.activation_offloading:
            rule = "the trainer would apply it to a model without values"
            raise ConfigError("activation_offloading=True", rule, "Build it with activation_offloading")
        super().__init__(model, args, **options)
