"""What the styles of tensor parallelism take of a model's values."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from penstock.errors import BatchError
from penstock.parallel.tensor.shard import tensor_parallel
from support.planned_models import build
from support.pool import Pool
from support.sharded_matrices import batch_of, loss_of, tp_mesh, verdict


def refused_length() -> str:
    model = build("llama")
    tensor_parallel(model, tp_mesh(), sequence_parallel=True)
    with pytest.raises(BatchError) as refused:
        loss_of(model, batch_of(11))
    return str(refused.value)


def out_of_the_vocabulary() -> list[bool]:
    """Whether this rank saw that an id below, or above, has no vector."""
    model, mesh = build("llama"), tp_mesh()
    tensor_parallel(model, mesh)
    seen = []
    for wrong in (-1, 64):
        try:
            model.model.embed_tokens(torch.tensor([[wrong, 3]]))
        except IndexError:
            seen.append(True)
            dist.all_reduce(torch.zeros(1, 2, 32), group=mesh.get_group())  # the other rank's sum
        else:
            seen.append(False)
    return seen


def test_a_length_that_tp_does_not_divide_is_refused_on_every_rank(pool: Pool) -> None:
    for refused in pool.run(2, refused_length):
        assert refused.startswith("a sequence of 11 tokens with sequence_parallel over tp=2")
        assert "Pad to a length of 12" in refused


def test_a_module_that_flattens_tokens_is_refused(pool: Pool) -> None:
    """llama4's mixtures give rows and tokens in one dimension: their second one is the width."""
    for found in pool.run(2, verdict, "llama4_text", True):
        assert found.startswith("fails: ModelError: the result of a Llama4TextMoe, of shape [24, 32]")


def test_ids_out_of_the_vocabulary_raise_as_without_tp(pool: Pool) -> None:
    """They are an error, as without tensor parallelism, and not zeros."""
    assert pool.run(2, out_of_the_vocabulary) == [[True, False], [False, True]]
