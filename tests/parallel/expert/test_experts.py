"""Experts distributed over ranks: the gradients of one process, and a refusal where that cannot be."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from penstock.errors import ConfigError, ModelError
from penstock.parallel.expert.experts import check, expert_parallel, mixtures, takes_grouped
from support import zoo
from support.families import ragged_batch
from support.mixtures import (
    Batch,
    differences,
    ep_mesh,
    gathered,
    mixture,
    none_wrong,
    own_rows,
    total_loss,
    valid,
)
from support.pool import Pool
from support.reference import TOLERANCE, Gradients, plain_steps
from support.refusals import refuses


def distributed(model: PreTrainedModel) -> dict[str, torch.nn.Parameter]:
    named = ((name, part.named_parameters(recurse=False)) for name, part in mixtures(model).items())
    return {f"{name}.{key}": parameter for name, parameters in named for key, parameter in parameters}


def own_step(
    label: str, model: PreTrainedModel, batch: Batch, expected: tuple[float, Gradients], tolerance: float
) -> list[str]:
    """Where the sums over the ranks of loss and gradients of their own rows differ from those expected."""
    own = total_loss(model, own_rows(batch, dist.get_rank(), dist.get_world_size())) / valid(batch)
    own.backward()  # type: ignore[no-untyped-call]
    return differences(label, own, expected[0], gathered(model), expected[1], tolerance)


def equivalence(cases: list[tuple[str, torch.dtype, dict[str, Any]]]) -> list[str]:
    """Model type, dtype and options of each case: loss and gradients compared with a plain process's."""
    wrong = []
    mesh, ranks = ep_mesh(), dist.get_world_size()
    for model_type, dtype, options in cases:
        options = dict(options)
        implementation = options.pop("experts_implementation", None)
        by_slices = options.pop("by_slices", False)
        model = mixture(model_type, dtype, **options)
        batch = zoo.tiny_batch(model_type, rows=8)
        slices = [own_rows(batch, rank, ranks) for rank in range(ranks)] if by_slices else [batch]
        expected = plain_steps(model, slices)
        if implementation:
            model.set_experts_implementation(implementation)
        names = set(dict(model.named_parameters()))
        held = expert_parallel(model, mesh)
        assert held
        assert names == set(dict(model.named_parameters()))
        sharded = distributed(model)
        assert all(name.rpartition(".")[0] in held and isinstance(p, DTensor) for name, p in sharded.items())
        label = f"{model_type} {dtype} {implementation or ''} ep={ranks}"
        wrong += own_step(label, model, batch, expected, TOLERANCE[dtype])
    return wrong


def starved(checkpointed: bool) -> list[str]:
    """Experts of the last rank get no token at all."""
    model = mixture("gpt_oss", torch.float32)
    with torch.no_grad():  # every token chooses among the first two experts
        for name, parameter in model.named_parameters():
            if name.endswith("router.bias"):
                parameter[:2] += 1000.0
    expected = plain_steps(model, [ragged_batch()])
    expert_parallel(model, ep_mesh())
    if checkpointed:
        model.activation_checkpointing_enable({"use_reentrant": False})
    wrong = own_step(f"starved {checkpointed=}", model, ragged_batch(), expected, 1e-5)
    if dist.get_rank() == dist.get_world_size() - 1:
        for name, parameter in distributed(model).items():
            assert isinstance(parameter.grad, DTensor), name
            local = parameter.grad.to_local()
            assert local.shape[0] == 4 // dist.get_world_size()
            assert not local.any(), name
    return wrong


Case = tuple[str, torch.dtype, dict[str, Any]]
# with the same slices of the rows run one after the other, where a part is float32 whatever the model's dtype
DOUBLE: dict[str, dict[str, Any]] = {
    "mixtral": {},
    "qwen3_moe": {},
    "olmoe": {},
    "deepseek_v3": {"by_slices": True},  # its router
    "gpt_oss": {"by_slices": True},  # its norms
}


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.parallel)])
def test_gradients_of_the_ranks_tokens_are_those_of_one_process(pool: Pool, ranks: int) -> None:
    cases: list[Case] = [(model_type, torch.float32, {}) for model_type in DOUBLE]
    cases += [(model_type, torch.float64, options) for model_type, options in DOUBLE.items()]
    cases += [("mixtral", torch.float32, {"experts_implementation": "grouped_mm"}),
              ("gpt_oss", torch.float32, {"experts_implementation": "grouped_mm"}),
              ("qwen3_moe", torch.float64, {"experts_implementation": "grouped_mm"})]  # fmt: skip
    none_wrong(pool.run(ranks, equivalence, cases))


@pytest.mark.parametrize("checkpointed", [False, True])
def test_experts_without_a_token_have_gradients_of_zero(pool: Pool, checkpointed: bool) -> None:
    """Checkpointed: the rank without tokens saves less, and must run again as far as the other."""
    none_wrong(pool.run(2, starved, checkpointed))


def test_experts_that_ranks_do_not_divide_are_refused() -> None:
    with refuses(ConfigError, "ep=3 with the 4 experts of model.layers.0.mlp.experts", remedy="1, 2, 4"):
        check(mixture("mixtral", torch.float32), 3)


@pytest.mark.parametrize("model_type", ["llama4_text", "jetmoe", "longcat_flash"])
def test_a_mixture_of_another_form_is_refused(one_process: None, model_type: str) -> None:
    model = zoo.tiny_model(model_type)
    with refuses(ModelError, rule="expert"):
        expert_parallel(model, ep_mesh())


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_mixture_that_does_not_add_up_is_refused(one_process: None, device: str) -> None:
    """It has the marks of the registry's form, and computes something else; with values or without."""
    model = mixture("mixtral", torch.float32).to(device)
    mesh = ep_mesh()
    assert expert_parallel(copy.deepcopy(model), mesh)
    experts = next(iter(mixtures(model).values()))
    plain = type(experts).forward

    def normalised(self: nn.Module, *given: torch.Tensor) -> torch.Tensor:
        return nn.functional.normalize(plain(self, *given), dim=-1)

    for part in mixtures(model).values():
        part.__class__ = type("Odd", (type(experts),), {"forward": normalised})
    with refuses(ModelError, "Odd"):
        expert_parallel(model, mesh)


def test_a_dense_model_stays_as_it_is(one_process: None) -> None:
    model = zoo.tiny_model("llama")
    assert expert_parallel(model, ep_mesh()) == []
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())


def test_which_dtypes_have_a_grouped_product() -> None:
    assert takes_grouped(torch.float32, "cpu")
    assert not takes_grouped(torch.float64, "cpu")


def with_mixtures() -> list[str]:
    """The model types whose tiny model has experts of the registry's form."""
    found = []
    for model_type in zoo.TYPES:
        if model_type in zoo.SKIPPED or not zoo.class_of(model_type)._can_set_experts_implementation():
            continue
        with torch.device("meta"):
            try:
                mixed = mixtures(zoo.class_of(model_type)(zoo.tiny_config(model_type)))
            except Exception:
                continue
        if mixed:
            found.append(model_type)
    return found


# these compute a part of their experts in float32 whatever the dtype, or run in no other
FLOAT32 = ("beam", "inkling2_text", "nemotron_h")
# what the zoo's tiny model has none of
MIXED = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16}
MORE: dict[str, dict[str, Any]] = {"gemma4_text": MIXED}


@pytest.mark.sweep
@pytest.mark.timeout(1800)
def test_every_type_of_the_registry(pool: Pool) -> None:
    double: dict[str, Any] = {"layers": 4, "by_slices": True}
    types = [*with_mixtures(), *MORE]
    cases: list[Case] = [(t, torch.float32, {}) for t in types if t in FLOAT32]
    cases += [(t, torch.float64, double | MORE.get(t, {})) for t in types if t not in FLOAT32]
    assert len(cases) > 30
    wrong = []
    for case in cases:
        try:
            none_wrong(pool.run(2, equivalence, [case]))
        except AssertionError as error:
            wrong.append(f"{case[0]}: {str(error).splitlines()[-1]}")
    assert not wrong, "\n".join(wrong)
