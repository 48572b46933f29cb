"""Prompts, and what transformers generates after them in one process."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock import AutoPipeline, Axes
from support.families import tiny_model

ROWS, LENGTH, NEW, PAD = 5, 6, 12, 3


def prompts(rows: int = ROWS, padded: bool = True, length: int = LENGTH) -> dict[str, Tensor]:
    """Prompts of several lengths, padded on the left."""
    ids = torch.randint(4, 64, (rows, length), generator=torch.Generator().manual_seed(rows))
    mask = torch.ones_like(ids)
    if padded:
        mask[0, : length // 2] = 0
        mask[-1, :1] = 0
        ids[mask == 0] = PAD
    return {"input_ids": ids, "attention_mask": mask}


def whole(model: Any, batch: dict[str, Any], **options: Any) -> Tensor:
    """The tokens that transformers generates in one process, without an end unless `options` have one."""
    training = model.training
    options = {"max_new_tokens": NEW, "pad_token_id": PAD, "eos_token_id": None, **options}
    try:
        tokens: Tensor = model.eval().generate(**batch, **options)
    finally:
        model.train(training)
    return tokens


def over_stages(pipe: Any, batch: dict[str, Any], **options: Any) -> Tensor:
    """The tokens that the pipeline generates with the same options."""
    tokens: Tensor = pipe.generate(
        **batch, **{"max_new_tokens": NEW, "pad_token_id": PAD, "eos_token_id": None, **options}
    )
    return tokens


def middle_token(tokens: Tensor, prompt: int = LENGTH) -> int:
    """A generated token, as the end, with which some rows end early and some later or not at all."""
    new = tokens[:, prompt:]
    for token in new[:, NEW // 3 : NEW // 2].flatten().tolist():
        first = [row.index(token) if token in row else NEW for row in new.tolist()]
        if len(set(first)) > 1 and max(first) > min(first) + 1:
            return int(token)
    raise AssertionError("no token ends the rows at different times")


def in_processes(
    ranks: int,
    cases: list[dict[str, Any]],
    axes: Axes | None = None,
    family: str = "llama",
    **options: Any,
) -> list[Any]:
    """For each case, the tokens of this rank's pipeline and those of transformers. options: of AutoPipeline

    A case has options of the prompts as "prompts", and of generate; "split", the number of microbatches;
    "ends", for an end in the middle of the rows.
    """
    options = {"schedule": "1f1b", "microbatches": 4, "timeout": 30.0, **options}
    model = tiny_model(family)
    pipe = AutoPipeline(ranks=ranks, axes=axes, **options).build(model)
    index, count = pipe.batch_part
    results = []
    for case in cases:
        case = dict(case)
        batch = {n: value.chunk(count)[index] for n, value in prompts(**case.pop("prompts", {})).items()}
        if case.pop("ends", False):
            case["eos_token_id"] = middle_token(whole(model, batch))
        split = case.pop("split", None)
        tokens = over_stages(pipe, batch, microbatches=split, **case)
        case.pop("seed", None)
        results.append((tokens, whole(model, batch, **case)))
    pipe.close()
    assert dist.is_initialized()
    return results
