"""The options of a pipeline of a Hugging Face model, and the loss and memory that follow from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from penstock.batch.loss import Loss, NextToken, OwnLoss, TokenLabels
from penstock.errors import ConfigError, ModelError
from penstock.models.adapters import LoraConfig
from penstock.models.auto_class import is_language_model
from penstock.models.huggingface.own_loss import own_loss
from penstock.models.quantized import Quantize
from penstock.models.split.balanced_split import LayerCosts
from penstock.models.tracing.chain import Chain, find_chain
from penstock.options import ModelOptions, RoutingOptions, SplitOptions
from penstock.parallel.axes import Axes
from penstock.pipeline.building.build_plan import BuildPlan
from penstock.pipeline.building.compiling import as_compile, compiled_loss
from penstock.pipeline.building.memory import Account
from penstock.pipeline.options import Options


@dataclass(frozen=True)
class AutoOptions(RoutingOptions, ModelOptions, SplitOptions, Options):
    """The options of AutoPipeline: those of `Options`, and of a model and its split (penstock.options).

    Args:
        sequence_length: number of tokens in a row, for which multiply-adds are counted; None takes 4096, or
            the model's maximum number of positions if that is less
        image_tokens: number of image tokens in a row, which sets the cost of a vision tower on stage 0. None
            takes a quarter of sequence_length
        module_fqns_per_stage: torch's name for modules_per_stage
        balance: cost of each layer, as Pipeline.layer_costs measures it, in place of multiply-adds
        adapter: a LoraConfig of PEFT: the pipeline of a folder or a config trains a new adapter, and the rest
            is frozen. A model object brings its own: give get_peft_model(model, config).
        quantize: "nf4" puts the matrices under the adapter in 4 bits (QLoRA, by torchao). Not with other
            axes.
    """

    dtype: torch.dtype | None = None
    sequence_length: int | None = None
    image_tokens: int | None = None
    module_fqns_per_stage: Sequence[Sequence[str]] | None = None
    balance: LayerCosts | Sequence[float] | None = None
    adapter: LoraConfig = None
    quantize: Quantize | None = None

    def loss_of(self, model: PreTrainedModel, chain: Chain | None = None) -> Loss:
        """The loss of a pipeline of `model`: without a loss_fn, the model's own. chain: if it is known

        Raises ModelError for a model's own loss that penstock does not compute; ConfigError for options that
        the loss does not support.
        """
        loss = self.loss()
        if type(loss) is not NextToken:
            return loss
        try:
            model_loss = own_loss(model, chain or find_chain(model))
        except ModelError:
            if self.loss_fn is None:
                raise
            return loss
        if isinstance(model_loss, NextToken):
            return loss.as_own() if model_loss.of_model and loss.penalties == model_loss.penalties else loss
        if self.loss_fn is not None:
            return loss
        self._check_own(model, model_loss)
        return compiled_loss(model_loss.counting(), as_compile(self.compile))

    def _check_own(self, model: PreTrainedModel, loss: OwnLoss) -> None:
        """Raise ConfigError for options that only the next-token loss supports."""
        axes, kind = self.axes or Axes(), type(model).__name__
        if (axes.cp, axes.tp) != (1, 1):
            labelled = "tokens" if isinstance(loss, TokenLabels) else "rows"
            raise ConfigError(
                f"the axes {axes} for {kind}",
                f"its own loss has labels of {labelled}, and only the next-token loss supports cp and tp",
                "Leave out cp and tp, or give a loss_fn",
            )
        if self.padding() is not None and not is_language_model(model):
            raise ConfigError(
                f"shapes='padded' for {kind}",
                "its tokens may see padding, or its head may look for the last token of a row",
                "Take shapes='inferred', which pads nothing",
            )

    def account(self, plan: BuildPlan, axes: Axes | None = None) -> Account:
        """An estimate of the memory of `plan` on each rank. axes: replace its own, if these have a -1"""
        return Account(
            plan,
            axes or self.axes or Axes(),
            self.parallel_options(),
            self.checkpointing(),
            self.own_loss and self.chunked_loss,
            self.offloading(),
            sequence_length=self.sequence_length,
            image_tokens=self.image_tokens,
        )
