"""One table of what a model's parts cost in F, I, W and where they run again; splits and predictions read it.

From multiply_adds.py, and with what only the run decides: a head whose logits are never whole computes them
once more in I, and its weight's gradient in I as well; Liger computes both gradients in F.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from penstock.batch.head_logits import are_large
from penstock.batch.liger import Chunked
from penstock.models.split.balanced_split import LayerCosts
from penstock.models.split.counting import ProductCounts
from penstock.models.split.multiply_adds import row_of, works_of_ops
from penstock.models.tracing.chain import Chain


@dataclass(frozen=True)
class ModelCosts:
    """The multiply-adds of one row in all parts of a model.

    trained: of each layer, whether it has a weight that trains; then those of the embedding and the head
    """

    layers: Sequence[ProductCounts]
    embedding: ProductCounts
    head: ProductCounts
    trained: Sequence[bool]

    def of_step(self, again: float = 0.0, *, trains: bool = True) -> LayerCosts:
        """The cost of each part in a step, for a split.

        Args:
            again: the share of microbatches whose layers run again in the backward
            trains: whether there are backwards
        """

        def cost(part: ProductCounts) -> float:
            backward = part.input_grad + part.weight_grad + again * part.again
            return part.forward + backward * trains

        return LayerCosts([cost(part) for part in self.layers], cost(self.embedding), cost(self.head))

    def of_stages(self, split: Sequence[range]) -> list[ProductCounts]:
        """The costs of each stage. No backward reaches the stages before the first that trains something."""
        stages, reached = [], False
        for stage, layers in enumerate(split):
            parts, trained = [self.layers[n] for n in layers], [self.trained[n] for n in layers]
            if stage == 0:
                parts, trained = [self.embedding, *parts], [self.trained[-2], *trained]
            if stage == len(split) - 1:
                parts, trained = [*parts, self.head], [*trained, self.trained[-1]]
            reached = reached or any(trained)
            total = ProductCounts()
            for part in parts:
                total = total.plus(part)
            stages.append(total if reached else ProductCounts(total.forward))
        return stages


def model_costs(
    model: PreTrainedModel,
    chain: Chain,
    sequence: int | None = None,
    image_tokens: int | None = None,
    *,
    together: int | None = None,
    chunked: Chunked = False,
    save: tuple[str, ...] = (),
    every: int = 1,
) -> ModelCosts:
    """The costs of each part of `model` for a row, in multiply-adds.

    Args:
        sequence, image_tokens: as for `multiply_adds`
        together: tokens of a microbatch, which say whether its logits are large; None: those of one row
        chunked: as in Options: whether large logits are never whole
        save, every: as in Checkpointing: what a checkpointed layer keeps, and which layers are checkpointed

    Raises ConfigError as `multiply_adds` does.
    """
    tokens, seen = row_of(model, sequence, image_tokens)
    works = works_of_ops(model, chain, save)
    costs = [ProductCounts(*(work.of(tokens, tokens**2) for work in part)) for part in works]
    *layers, embedding, head = costs
    towers = works[-2].forward
    more = ProductCounts(towers.image * seen, towers.trained * seen, towers.trained * seen)
    layers = [part if index % every == 0 else part._replace(again=0.0) for index, part in enumerate(layers)]
    head = _deferred(model, chain, head, tokens, together or tokens, chunked)
    return ModelCosts(
        layers, embedding.plus(more)._replace(again=0.0), head._replace(again=0.0), _trained(model, chain)
    )


def _deferred(
    model: PreTrainedModel, chain: Chain, head: ProductCounts, tokens: int, together: int, chunked: Chunked
) -> ProductCounts:
    """The head whose logits are computed block by block, where the loss does that."""
    output = model.get_output_embeddings()
    if type(output) is not nn.Linear or not chunked:
        return head
    product = float(output.weight.numel() * tokens * (1 + chain.prediction_layers))
    of_weight = product * output.weight.requires_grad
    forward, input_grad, weight_grad, _ = head
    if chunked == "liger":
        return ProductCounts(forward + product + of_weight, input_grad - product, weight_grad - of_weight)
    if are_large(together, output.out_features):
        return ProductCounts(forward, input_grad + product + of_weight, weight_grad - of_weight)
    return head


def _trained(model: PreTrainedModel, chain: Chain) -> list[bool]:
    def trains(modules: Sequence[nn.Module]) -> bool:
        return any(parameter.requires_grad for module in modules for parameter in module.parameters())

    layers = model.get_submodule(chain.layers).children()
    ends = ([model.get_submodule(name) for name in names] for names in (chain.before, chain.after))
    return [*(trains([layer]) for layer in layers), *map(trains, ends)]
