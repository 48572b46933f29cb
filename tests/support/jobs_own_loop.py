"""What the pool's workers run of a loop of one's own."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from penstock import AutoPipeline, Pipeline
from penstock.errors import ConfigError, PenstockError
from support.families import ragged_batch, tiny_model
from support.own_chain import Piece, squares, x_batch


def compiled(part: nn.Module) -> nn.Module:
    """Each layer by itself, in place."""
    for module in part.modules():
        if type(module).__name__ == "LlamaDecoderLayer":
            module.compile(backend="eager")
    return part


def trained(schedule: str) -> dict[str, torch.Tensor]:
    """This rank's weights after three steps, each of two that are accumulated, with compiled layers."""
    pipe = AutoPipeline(
        ranks=2, schedule=schedule, microbatches=4, timeout=30, parallelize_fn=compiled
    ).build(tiny_model("llama", torch.float64, tied=True))
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
    for step in range(3):
        for half in range(2):
            pipe.step(ragged_batch(8, 10 + 2 * step + half))
        pipe.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach() for name, parameter in pipe.named_parameters(remove_duplicate=False)}


def evaluated(schedule: str) -> list[Any]:
    """As this rank sees them: logits on their owner and on all, a callback's results, and without labels."""
    pipe = AutoPipeline(ranks=2, schedule=schedule, microbatches=4, timeout=30).build(tiny_model("llama"))
    batch = ragged_batch()
    unlabelled = {"input_ids": batch["input_ids"]}

    def best(logits: torch.Tensor, number: int) -> dict[str, Any]:
        return {"number": number, "best": logits.argmax(-1), "above": logits[:, 0] > 0}

    alone: Any
    try:
        alone = pipe.evaluate(batch, outputs=True)
    except ConfigError as error:
        alone = str(error)
    return [
        alone,
        pipe.evaluate(batch, outputs=True, everywhere=True),
        pipe.evaluate(batch, outputs=best, everywhere=True),
        pipe.evaluate(unlabelled, outputs=True, everywhere=True),
        refused(pipe),
        [facts[1:] for facts in pipe.info],
        str(pipe),
    ]


def refused(pipe: Pipeline) -> str:
    """What cannot be sent is refused by all ranks, and the next evaluation goes well."""
    try:
        pipe.evaluate(ragged_batch(), outputs=lambda logits, number: {1, 2}, everywhere=True)
    except PenstockError as error:
        assert pipe.evaluate(ragged_batch(), outputs=True, everywhere=True).outputs is not None
        return str(error)
    return "no error"


def measured() -> Any:
    """Costs of the layers, the same on every rank, and gradients that are left as they were."""
    pipe = Pipeline.from_provider(
        Piece, schedule="1f1b", ranks=2, microbatches=4, loss_fn=squares, timeout=30
    )
    pipe.step(x_batch())
    before = [parameter.grad for parameter in pipe.parameters()]
    costs = pipe.layer_costs(x_batch())
    assert all(p.grad is grad for p, grad in zip(pipe.parameters(), before, strict=True))
    return costs.layers, costs.embedding, costs.head
