"""Experts dealt out over ranks: the gradients of one process, and a refusal where that cannot be."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from penstock.errors import ConfigError, ModelError
from penstock.parallel.expert.dispatch import Directions, combine, dispatch, plan_route
from penstock.parallel.expert.experts import expert_parallel, mixtures, takes_grouped
from support import jobs_expert as jobs
from support import zoo
from support.pool import Pool

Case = tuple[str, str, dict[str, Any]]

FIVE = ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "olmoe")
# with the same slices of the rows run one after the other, where a part is float32 whatever the model's dtype
DOUBLE: dict[str, dict[str, Any]] = {
    "mixtral": {},
    "qwen3_moe": {},
    "olmoe": {},
    "deepseek_v3": {"by_slices": True},  # its router
    "gpt_oss": {"by_slices": True},  # its norms
}


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.parallel)])
def test_every_rank_s_own_tokens(pool: Pool, ranks: int) -> None:
    cases: list[Case] = [(model_type, "float32", {}) for model_type in FIVE]
    cases += [(model_type, "float64", options) for model_type, options in DOUBLE.items()]
    cases += [("mixtral", "float32", {"experts_implementation": "grouped_mm"}),
              ("gpt_oss", "float32", {"experts_implementation": "grouped_mm"}),
              ("qwen3_moe", "float64", {"experts_implementation": "grouped_mm"})]  # fmt: skip
    assert not jobs.told(pool.run(ranks, jobs.equivalence, cases))


@pytest.mark.parametrize("checkpointed", [False, True])
def test_experts_without_a_token_have_gradients_of_zero(pool: Pool, checkpointed: bool) -> None:
    """Checkpointed: the rank without tokens saves less, and must run again as far as the other."""
    assert not jobs.told(pool.run(2, jobs.starved, checkpointed))


def test_inside_fully_shard(pool: Pool) -> None:
    assert not jobs.told(pool.run(2, jobs.under_fsdp, "deepseek_v3"))


@pytest.mark.parametrize("masked", [True])
@pytest.mark.parametrize("model_type", ["mixtral", pytest.param("qwen3_moe", marks=pytest.mark.parallel)])
def test_the_auxiliary_loss_is_that_of_all_tokens(pool: Pool, model_type: str, masked: bool) -> None:
    assert not jobs.told(pool.run(2, jobs.balanced, model_type, masked))


def test_a_forward_and_a_backward_side_by_side(pool: Pool) -> None:
    assert not jobs.told(pool.run(2, jobs.in_two_threads, 20))


def test_experts_that_do_not_divide(pool: Pool) -> None:
    for text, untouched in pool.run(3, jobs.refused, "mixtral", {}, ConfigError):
        assert "ep=3" in text
        assert "4 experts" in text
        assert "1, 2, 4" in text
        assert untouched


@pytest.mark.parametrize("model_type", ["llama4_text", "jetmoe", "longcat_flash"])
def test_a_mixture_of_another_form_is_refused(one_process: None, model_type: str) -> None:
    model = zoo.tiny_model(model_type)
    with pytest.raises(ModelError, match=r"expert"):
        expert_parallel(model, init_device_mesh("cpu", (1,), mesh_dim_names=("ep",)))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_mixture_that_does_not_add_up_is_refused(one_process: None, device: str) -> None:
    """It has the marks of the registry's form, and computes something else; with values or without."""
    model = jobs.mixture("mixtral", torch.float32).to(device)
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("ep",))
    assert expert_parallel(copy.deepcopy(model), mesh)
    experts = next(iter(mixtures(model).values()))
    plain = type(experts).forward

    def normalised(self: nn.Module, *given: torch.Tensor) -> torch.Tensor:
        return nn.functional.normalize(plain(self, *given), dim=-1)

    for part in mixtures(model).values():
        part.__class__ = type("Odd", (type(experts),), {"forward": normalised})
    with pytest.raises(ModelError, match="Odd"):
        expert_parallel(model, mesh)


def test_twice_is_refused(one_process: None) -> None:
    model, mesh = jobs.mixture("olmoe", torch.float32), init_device_mesh("cpu", (1,), mesh_dim_names=("ep",))
    expert_parallel(model, mesh)
    with pytest.raises(ModelError, match="DTensors"):
        expert_parallel(model, mesh)


def test_a_dense_model_stays_as_it_is(one_process: None) -> None:
    model = zoo.tiny_model("llama")
    assert expert_parallel(model, init_device_mesh("cpu", (1,), mesh_dim_names=("ep",))) == []
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())


def test_where_only_shapes_are_asked_for_nothing_travels(one_process: None) -> None:
    model = jobs.mixture("mixtral", torch.float32)
    expert_parallel(model, init_device_mesh("cpu", (1,), mesh_dim_names=("ep",)))
    experts = next(iter(mixtures(model).values()))
    with torch.device("meta"):
        assert experts(torch.ones(6, 32), torch.ones(6, 2), torch.ones(6, 2)).shape == (6, 32)
    with FakeTensorMode():
        assert experts(torch.ones(6, 32), torch.ones(6, 2), torch.ones(6, 2)).shape == (6, 32)


def test_choices_of_no_expert_are_not_sent(one_process: None) -> None:
    """Some routers write the number of experts where a token skips one."""
    group = init_device_mesh("cpu", (1,), mesh_dim_names=("ep",)).get_group()
    hidden = torch.ones(3, 2, requires_grad=True)
    chosen, weights = torch.tensor([[0, 4], [4, 4], [3, 1]]), torch.ones(3, 2)
    route = plan_route(chosen, 4, Directions(group, group))
    assert route.experts.tolist() == [0, 1, 3]
    rows, row_weights = dispatch(route, hidden, weights)
    result = combine(route, rows * row_weights, 3, 2)
    assert result.tolist() == [[1, 1], [0, 0], [2, 2]]
    result.sum().backward()  # type: ignore[no-untyped-call]
    assert hidden.grad is not None
    assert hidden.grad[:, 0].tolist() == [1, 0, 2]


def test_no_token_at_all(one_process: None) -> None:
    group = init_device_mesh("cpu", (1,), mesh_dim_names=("ep",)).get_group()
    route = plan_route(torch.zeros(0, 2, dtype=torch.int64), 4, Directions(group, group))
    rows, _ = dispatch(route, torch.ones(0, 3), torch.ones(0, 2))
    assert combine(route, rows, 0, 2).shape == (0, 3)


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
    cases: list[Case] = [(t, "float32", {}) for t in types if t in FLOAT32]
    cases += [(t, "float64", double | MORE.get(t, {})) for t in types if t not in FLOAT32]
    assert len(cases) > 30
    wrong = []
    for case in cases:
        try:
            wrong += jobs.told(pool.run(2, jobs.equivalence, [case]))
        except AssertionError as error:
            wrong.append(f"{case[0]}: {str(error).splitlines()[-1]}")
    assert not wrong, "\n".join(wrong)
