"""What layers cost and hold, told from the model alone; what was measured is better where there is any."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from transformers import PreTrainedModel

from penstock.batch.loss import NextToken
from penstock.batch.payload import Payload
from penstock.errors import ModelError
from penstock.models.huggingface.stages import HFCall, HFEdges, cut
from penstock.models.partition import LayerCosts, Memory
from penstock.models.stage import StageInfo
from penstock.models.tracing.chain import Chain
from penstock.models.tracing.meta import shadow
from penstock.runtime.memory import Measured, Sizes, footprint
from penstock.runtime.stage import Stage

COPIES = 4  # of the weights: themselves, their gradients, AdamW's two moments


def parameter_costs(model: PreTrainedModel, chain: Chain) -> LayerCosts:
    """Each part costs as many units as it has parameters, but for embeddings, which are looked up.

    Right for dense layers of any size. A layer of experts costs less, as only some of them work on a token.
    """
    layers = [_parameters(layer) for layer in model.get_submodule(chain.layers).children()]
    embedding = sum(_parameters(model.get_submodule(name), looked_up=False) for name in chain.before)
    return LayerCosts(layers, embedding, sum(_parameters(model.get_submodule(name)) for name in chain.after))


def stage_sizes(
    part: PreTrainedModel, info: StageInfo, edges: HFEdges, shape: tuple[int, int], split: bool = False
) -> Sizes | None:
    """What one microbatch of `shape` (rows, sequence) holds on a stage made by `cut`.

    Told by a forward and the first half of a backward without values, the next-token loss included. It is an
    upper estimate: where transformers sees no values it makes masks as if documents were packed. None where
    the model's forward looks at values, so that only a real run can tell.
    split: whether backwards are split, and something is held for W
    """
    if not edges.known:
        return None
    with shadow(part) as model:
        tokens = torch.zeros(shape, dtype=torch.long)
        microbatch = {"input_ids": tokens, "labels": tokens}
        edge = edges(info.stage, microbatch)
        incoming = Payload(tuple(torch.empty(s.shape, dtype=s.dtype) for s in edge.tensors), edge)
        received = None if info.is_first else incoming
        stage = Stage(info.stage, model.train(), HFCall(model, info))
        try:
            with Measured() as measured:
                if info.is_last:
                    stage.forward_loss(0, received, microbatch, NextToken(), split)
                    sent = None
                else:
                    sent = stage.forward(0, received, microbatch, edge, split)
        except Exception:  # a forward that looks at values
            return None
        left = footprint(measured.nbytes, stage.live[0].inputs, () if sent is None else sent.tensors)
        back = [torch.ones(())] if sent is None else [torch.empty_like(tensor) for tensor in sent.tensors]
        stage.input_backward(0, back)
        return Sizes(left.activation, left.output, incoming.nbytes, stage.deferred[0].nbytes)


def stage_memory(
    model: PreTrainedModel, chain: Chain, shape: tuple[int, int], limit: float, live: Sequence[int]
) -> Memory:
    """What parts hold, in bytes: weights, gradients, AdamW's moments, and activations of one microbatch.

    shape: rows and sequence of a microbatch; limit: bytes that a stage may hold; live: see Memory
    Raises ModelError where the model's forward looks at values, so that only a run tells its activations.
    """
    edges = HFEdges(model, chain)

    def held(layers: range, stage: int) -> int:
        info = StageInfo(stage, 3)  # a stage for the embedding, one for the layers, one for the head
        found = stage_sizes(cut(model, chain, layers, info), info, edges, shape)
        if found is None:
            raise ModelError(
                f"the activations of {type(model).__name__}",
                "its forward looks at values, and an estimate has none",
                "Measure them, and give balance a Memory of your own",
            )
        return found.activation

    first, last = range(0), range(chain.count, chain.count)
    return Memory(
        limit,
        [COPIES * _bytes(layer) for layer in model.get_submodule(chain.layers).children()],
        [held(range(layer, layer + 1), 1) for layer in range(chain.count)],
        live,
        (COPIES * sum(_bytes(model.get_submodule(name)) for name in chain.before), held(first, 0)),
        (COPIES * sum(_bytes(model.get_submodule(name)) for name in chain.after), held(last, 2)),
    )


def _parameters(module: nn.Module, looked_up: bool = True) -> int:
    kept = [part for part in module.modules() if looked_up or not isinstance(part, nn.Embedding)]
    return sum(parameter.numel() for part in kept for parameter in part.parameters(recurse=False))


def _bytes(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())
