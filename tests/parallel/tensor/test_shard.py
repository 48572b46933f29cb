"""Tensor parallelism compared with one plain process: loss and every parameter's gradient."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from penstock.errors import BatchError, PenstockError
from penstock.parallel.tensor.plan import check
from penstock.parallel.tensor.shard import complete_gradients, tensor_parallel
from support import census, zoo
from support.families import FAMILIES, FLOAT32_INSIDE, ragged_batch
from support.mesh import later
from support.planned_models import OTHERS, SINKS, build
from support.pool import Pool
from support.reference import TOLERANCE, Gradients, assert_gradients, plain_step


def tp_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))


def batch_of(length: int = 12) -> dict[str, Tensor]:
    batch = ragged_batch(4, length)
    batch["input_ids"][1, 3:5] = 0  # of some families the padding, whose row gets no gradient
    return batch


def loss_of(model: PreTrainedModel, batch: Mapping[str, Tensor]) -> Tensor:
    """The mean over the valid tokens."""
    logits = model(input_ids=batch["input_ids"], use_cache=False).logits
    assert type(logits) is Tensor
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100)


def gathered(model: PreTrainedModel) -> Gradients:
    """Every gradient whole; a parameter without one is left out, as by the plain process."""
    found: Gradients = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        assert isinstance(parameter, DTensor), f"{name} is no DTensor"
        if parameter.grad is not None:
            assert isinstance(parameter.grad, DTensor), f"the gradient of {name} is no DTensor"
            assert parameter.grad.placements == parameter.placements, (
                f"the gradient of {name} is not complete"
            )
            found[name] = parameter.grad.full_tensor().clone()
    return found


def exact(family: str, dtype: torch.dtype, sequence_parallel: bool, changes: dict[str, Any]) -> list[str]:
    """One step compared with the plain process; the parameters of which each rank has a piece."""
    model, batch = build(family, dtype, **changes), batch_of()
    values = {name: p.detach().clone() for name, p in model.named_parameters(remove_duplicate=False)}
    expected_loss, expected = plain_step(model, batch)
    tensor_parallel(model, tp_mesh(), sequence_parallel=sequence_parallel)
    made = dict(model.named_parameters(remove_duplicate=False))
    assert [*made] == [*values]
    assert all(torch.equal(p.full_tensor(), values[name]) for name, p in made.items())
    loss = loss_of(model, batch)
    loss.backward()  # type: ignore[no-untyped-call]
    complete_gradients(model)
    tolerance = TOLERANCE[torch.float32 if family in FLOAT32_INSIDE else dtype]
    assert abs(float(loss) - expected_loss) <= tolerance * abs(expected_loss)
    found = gathered(model)
    assert found.keys() == expected.keys()
    assert_gradients(found, expected, tolerance)
    return [name for name, p in made.items() if p.placements[0].is_shard()]


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


def verdict(model_type: str, sequence_parallel: bool) -> str:
    """Whether a tiny model of the type is "exact", is refused, differs, or fails."""
    dist.barrier()  # a rank that is refused is gone before others have met it
    model, batch = zoo.tiny_model(model_type, torch.float64), zoo.tiny_batch(model_type)
    try:
        check(model, 2, sequence_parallel=sequence_parallel)
    except PenstockError as refused:
        return f"refused: {refused}"
    try:
        loss, expected = census.plain(model, batch)
    except RuntimeError:  # a type whose own code mixes dtypes
        loss, expected = census.plain(model.float(), batch)
    tensor_parallel(model, tp_mesh(), sequence_parallel=sequence_parallel)
    try:
        again, gradients = census.plain(model, batch)
    except Exception as failed:
        return f"fails: {type(failed).__name__}: {str(failed)[:200]}"
    found = {name: gradient.full_tensor() for name, gradient in gradients.items()}  # type: ignore[attr-defined]
    if abs(again - loss) > 1e-5 * abs(loss) or found.keys() != expected.keys():
        return f"differs: {again} {loss} {found.keys() ^ expected.keys()}"
    try:
        assert_gradients(found, expected, 1e-5)  # many types compute parts in float32 whatever their dtype
    except AssertionError as wrong:
        return f"differs: {wrong}"
    return "exact"


WITHOUT_A_PLAN = {"gpt2", "opt", "gpt_oss"}
PLANNED = [family for family in FAMILIES if family not in WITHOUT_A_PLAN]
FLOAT32, FLOAT64 = torch.float32, torch.float64
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}
Case = tuple[str, int, torch.dtype, bool, dict[str, Any]]
EVERY_RUN: list[Case] = [
    ("llama", 4, FLOAT64, True, {**HEADS, "tied": True}),
    ("qwen2", 2, FLOAT64, False, {"tied": True}),  # biases of columns
    ("qwen3", 2, FLOAT64, False, {}),  # norms of each head
    ("qwen3", 2, FLOAT64, True, {}),
    ("gpt_neox", 2, FLOAT64, True, {}),  # fused projections, biases of rows, norms with biases
    ("phi3", 2, FLOAT64, False, {}),  # whole between columns and rows, and a padding row
    ("mixtral", 2, FLOAT64, True, {}),
    ("gpt_oss", 2, FLOAT32, False, {"plan": SINKS}),
    ("gemma3_text", 2, FLOAT32, True, {"tied": True}),
    ("deepseek_v3", 2, FLOAT64, False, {}),
]
SWEPT: list[Case] = [
    *((family, 2, dtype, sequence, {"tied": tied})
      for family in PLANNED for dtype in (FLOAT32, FLOAT64)
      for sequence in (False, True) for tied in (False, True)),
    *((family, 4, FLOAT64, sequence, HEADS) for family in PLANNED for sequence in (False, True)),
    *((family, 2, FLOAT64, sequence, {}) for family in OTHERS for sequence in (False, True)),
    ("deepseek_v3", 2, FLOAT64, True, {"q_lora_rank": None}),
    ("llama", 2, FLOAT64, True, {"attention_bias": True, "mlp_bias": True}),
    ("llama", 2, FLOAT64, False, {"attention_bias": True, "mlp_bias": True}),
    ("llama", 2, FLOAT64, False, {"vocab_size": 65, "tied": True}),
    ("gpt_oss", 2, FLOAT32, True, {"plan": SINKS}),
    ("gpt_oss", 2, FLOAT64, False, {"plan": SINKS}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("family", "tp", "dtype", "sequence", "changes"),
    [*EVERY_RUN, *later(*SWEPT, mark=pytest.mark.sweep)],
    ids=str,
)
def test_equal_to_one_process(
    pool: Pool, family: str, tp: int, dtype: torch.dtype, sequence: bool, changes: dict[str, Any]
) -> None:
    pool.run(tp, exact, family, dtype, sequence, changes)


def test_the_planned_weights_are_sharded(pool: Pool) -> None:
    """What the plan names, a tied weight under both of its names; norms are whole."""
    found = pool.run(2, exact, "llama", FLOAT32, False, {"tied": True, "layers": 1})[0]
    projections = [f"self_attn.{n}_proj" for n in "qkvo"] + [f"mlp.{n}_proj" for n in ("gate", "up", "down")]
    assert found == [
        "model.embed_tokens.weight",
        *(f"model.layers.0.{name}.weight" for name in projections),
        "lm_head.weight",
    ]


@pytest.mark.parametrize("family", ["gpt_neox", "llama"])
def test_tied_weights_stay_whole_where_one_end_is_not_planned(pool: Pool, family: str) -> None:
    """The head is planned and the embedding is not; or both are, and their rows do not divide."""
    changes = {"tied": True, "layers": 1, **({"vocab_size": 65} if family == "llama" else {})}
    found = pool.run(2, exact, family, FLOAT64, False, changes)[0]
    assert found
    assert not any("embed" in name or "lm_head" in name for name in found)


def test_experts_stay_whole(pool: Pool) -> None:
    found = pool.run(2, exact, "mixtral", FLOAT64, False, {"layers": 1})[0]
    assert not any("experts" in name for name in found)
    assert "model.layers.0.self_attn.q_proj.weight" in found


def test_an_embedding_may_be_read_by_another_module(pool: Pool) -> None:
    """0.5.0: gemma4 takes the padding token's row of it in its own forward, which met a DTensor there."""
    assert pool.run(2, verdict, "gemma4", False) == ["exact"] * 2


@pytest.mark.sweep
@pytest.mark.timeout(900)
@pytest.mark.parametrize("sequence", [False, True])
def test_every_type_is_exact_or_refused(pool: Pool, sequence: bool) -> None:
    """Or fails on both ranks: no type has a gradient that is wrong."""
    found = {model_type: pool.run(2, verdict, model_type, sequence)
             for model_type in zoo.TYPES if model_type not in zoo.SKIPPED}  # fmt: skip
    assert {each for verdicts in found.values() for each in verdicts if each.startswith("differs")} == set()
    assert sum(one == "exact" for one, _ in found.values()) >= 90
    for model_type, (one, other) in found.items():
        assert one == other, model_type


def test_a_length_that_tp_does_not_divide_is_refused_on_every_rank(pool: Pool) -> None:
    for refused in pool.run(2, refused_length):
        assert refused.startswith("a sequence of 11 tokens with sequence_parallel over tp=2")
        assert "Pad to a length of 12" in refused


def test_a_module_that_flattens_tokens_is_refused(pool: Pool) -> None:
    """llama4's mixtures give rows and tokens in one dimension: their second one is the width."""
    for found in pool.run(2, verdict, "llama4_text", True):
        assert found.startswith("fails: ModelError: what a Llama4TextMoe returns, of shape [24, 32]")


def test_ids_out_of_the_vocabulary_raise_as_without_tp(pool: Pool) -> None:
    """They are an error, as without tensor parallelism, and not zeros."""
    assert pool.run(2, out_of_the_vocabulary) == [[True, False], [False, True]]
