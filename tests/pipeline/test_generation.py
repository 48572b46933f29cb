"""Generation over stages: the tokens of transformers' `generate` in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from penstock import AutoPipeline
from support.generated import NEW, in_processes, middle_token, over_stages, prompts, whole
from support.pool import Pool
from support.families import FAMILIES, tiny_model


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (2, {}),
        (2, {"transport": "gloo"}),
        (3, {}),
        (2, {"schedule": "interleaved_1f1b"}),
        (2, {"schedule": "zb_v"}),
    ],
)
def test_over_processes(pool: Pool, ranks: int, options: dict[str, Any]) -> None:
    common = {"pipeline": options}
    cases = [common, {**common, "ends": True, "split": 3}, {**common, "split": 1, "ends": True},
             {**common, "split": 5, "prompts": {"padded": False}}]
    for of_rank in pool.run(ranks, in_processes, ranks, cases):
        for tokens, expected in of_rank:
            assert torch.equal(tokens, expected)
