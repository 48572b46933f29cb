"""What parallelize_fn may make of a stage's module: compile it, shard it, change it, wrap it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from penstock import Pipeline
from penstock.errors import ModelError
from penstock.pipeline import names_per_stage, provider_of
from support.families import each_layer, pipeline, ragged_batch, tiny_model
from support.own_chain import made, squares, x_batch
from support.reference import TOLERANCE, assert_gradients, gradients_of, plain_step, plain_steps
from support.refusals import refuses


def compiling(backend: Any) -> Callable[[nn.Module], nn.Module]:
    def compiled(part: nn.Module) -> nn.Module:
        for layer in each_layer(part):
            layer.compile(backend=backend)
        return part

    return compiled


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # which dynamo looks at while it traces
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
@pytest.mark.parametrize(
    ("backend", "schedule"), [pytest.param("aot_eager", "1f1b", marks=pytest.mark.sweep), ("eager", "zb_h1")]
)
def test_compiled_layers(backend: str, schedule: str) -> None:
    model, batch = tiny_model("llama", layers=2), ragged_batch()
    loss, expected = plain_step(model, batch)
    torch._dynamo.utils.counters.clear()
    pipe = pipeline(model, schedule=schedule, parallelize_fn=compiling(backend))
    for _ in range(2):
        pipe.zero_grad()
        assert pipe.step(batch).loss == pytest.approx(loss, rel=1e-5)
        assert_gradients(gradients_of(pipe), expected, TOLERANCE[torch.float32])
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # which dynamo looks at while it traces
def test_compiled_layers_stay_compiled() -> None:
    """Measuring what the first forward holds made torch.compile give up on it for good."""
    ran = []

    def backend(graph: torch.fx.GraphModule, examples: Any) -> Any:
        return lambda *args: (ran.append(1), graph.forward(*args))[1]  # type: ignore[func-returns-value]

    pipe = pipeline(tiny_model("llama", layers=2), microbatches=2, parallelize_fn=compiling(backend))
    for step in (1, 2):
        ran.clear()
        pipe.zero_grad()
        pipe.step(ragged_batch())
        assert len(ran) >= 4, f"step {step}"
    torch._dynamo.reset()


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # which dynamo looks at while it traces
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
def test_layers_of_many_stages_are_compiled_once() -> None:
    """0.5.0, more than 8 compiled stages in a process: the ninth ran uncompiled, with a line in the log.

    A layer where a stage begins or ends had a class of its own. torch.compile compiles a function anew for
    each class, 8 times at most.
    """
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = tiny_model("llama", layers=6)
    pipe = pipeline(model, ranks=6, microbatches=2, layers_per_stage=1, parallelize_fn=compiling("eager"))
    pipe.step(ragged_batch())
    pipe.close()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2
    torch._dynamo.reset()


class Branching(nn.Module):
    """Two branches behind a condition on values."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.weight = inner, nn.Parameter(0.3 * torch.randn(32, 32))

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.inner(x)
        chosen: Tensor = torch.cond(hidden.sum() > 0, first_branch, second_branch, (hidden, self.weight))
        return hidden + chosen


def first_branch(hidden: Tensor, weight: Tensor) -> Tensor:
    return F.linear(hidden, weight).tanh()


def second_branch(hidden: Tensor, weight: Tensor) -> Tensor:
    return F.linear(hidden, weight).sin()


BRANCHES = [
    pytest.param(schedule, how, marks=() if (schedule, how) == ("zb_h1", "full") else pytest.mark.sweep)
    for schedule in ("1f1b", "zb_h1")
    for how in (False, "full", "selective")
]


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # which dynamo looks at while it traces
@pytest.mark.parametrize(("schedule", "how"), BRANCHES)
def test_layers_with_branches_are_exact(schedule: str, how: bool | str) -> None:
    """0.5.0, torch.cond in a layer: "no rule registered for HigherOrderOperator", or dynamo's Unsupported.

    The forward without values ran it under a mode, after which dynamo skipped its code for good.
    """
    torch._dynamo.reset()
    model, batch = tiny_model("llama", layers=2), ragged_batch()
    first = next(each_layer(model))
    first.mlp = Branching(first.get_submodule("mlp"))
    pipe = pipeline(model, schedule=schedule, microbatches=2, activation_checkpointing=how)
    loss, expected = plain_steps(model, pipe.microbatches(batch))
    assert pipe.step(batch).loss == pytest.approx(loss, rel=1e-5)
    assert_gradients(gradients_of(pipe), expected, TOLERANCE[torch.float32])


compiled_branch = torch.compile(first_branch, backend="eager")


class Compiled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return compiled_branch(x, self.weight)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # which dynamo looks at while it traces
def test_a_compiled_function_of_the_model_stays_compiled() -> None:
    """0.5.0: the forward without values made torch.compile give up on it for good."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = tiny_model("llama", layers=2)
    for layer in each_layer(model):
        layer.mlp = Compiled(32, 32)
    pipeline(model, microbatches=2).step(ragged_batch())
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    torch._dynamo.reset()


def shard(part: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (1,))
    for layer in each_layer(part):
        fully_shard(layer, mesh=mesh)
    fully_shard(part, mesh=mesh)
    return part


def test_sharded_stages(one_process: None, tmp_path: Path) -> None:
    """FSDP2 over a mesh of one process: names stay, the norm is the whole one."""
    model, batch = tiny_model("llama"), ragged_batch()
    loss, expected = plain_step(model, batch)
    for name, parameter in model.named_parameters():
        parameter.grad = expected[name].clone()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    pipe = pipeline(model, transport="local", parallelize_fn=shard)
    assert pipe.step(batch).loss == pytest.approx(loss, rel=1e-5)
    found = {name: grad.full_tensor() for name, grad in gradients_of(pipe).items()}  # type: ignore[attr-defined]
    assert found.keys() == {name for name, _ in model.named_parameters()}
    assert_gradients(found, expected, TOLERANCE[torch.float32])
    assert pipe.clip_grad_norm_(0.1) == pytest.approx(float(norm), rel=1e-5)
    assert pipe.clip_grad_norm_(1.0) == pytest.approx(0.1, rel=1e-4)


class Adapted(nn.Module):
    """A linear and a narrow one that is added to it, as LoRA makes them."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base
        torch.manual_seed(base.in_features)
        self.down = nn.Linear(base.in_features, rank, bias=False, dtype=base.weight.dtype)
        self.up = nn.Linear(rank, base.out_features, bias=False, dtype=base.weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.base(x) + self.up(self.down(x))
        return result


def adapt(part: nn.Module) -> nn.Module:
    part.requires_grad_(False)
    for layer in each_layer(part):
        attention = layer.get_submodule("self_attn")
        attention.q_proj = Adapted(attention.get_submodule("q_proj"))  # type: ignore[arg-type]
    return part


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_adapters_in_the_place_of_linears(schedule: str, tmp_path: Path) -> None:
    model, batch = tiny_model("llama", torch.float64), ragged_batch()
    pipe = pipeline(model, schedule=schedule, parallelize_fn=adapt)
    reference = adapt(copy.deepcopy(model))
    loss, expected = plain_step(reference, batch)
    assert pipe.step(batch).loss == pytest.approx(loss, rel=1e-9)
    found = gradients_of(pipe)
    assert found.keys() == expected.keys()
    assert_gradients(found, expected, TOLERANCE[torch.float64])
    trained = sum(p.numel() for p in reference.parameters() if p.requires_grad)
    assert sum(facts.trainable for facts in pipe.info) == trained
    with refuses(ModelError, "layers.0.self_attn.q_proj.base.weight, which only the original"):
        pipe.save_pretrained(tmp_path / "adapted")
    assert not (tmp_path / "adapted").exists()
    for part in pipe.modules.values():
        for layer in each_layer(part):
            attention = layer.get_submodule("self_attn")
            attention.q_proj = attention.get_submodule("q_proj.base")
    pipe.save_pretrained(tmp_path / "merged")
    assert (tmp_path / "merged" / "config.json").is_file()


class Around(nn.Module):
    """A wrapper that puts `module.` before each parameter's name."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.calls = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self.module(*args, **kwargs)


def test_a_module_around_the_stage(tmp_path: Path) -> None:
    made_around: list[Around] = []

    def around(part: nn.Module) -> nn.Module:
        made_around.append(Around(part))
        return made_around[-1]

    model, batch = tiny_model("llama"), ragged_batch()
    _, expected = plain_step(model, batch)
    pipe = pipeline(model, parallelize_fn=around)
    pipe.step(batch)
    assert gradients_of(pipe).keys() == {name for name, _ in model.named_parameters()}
    assert_gradients(gradients_of(pipe), expected, TOLERANCE[torch.float32])
    assert [wrapper.calls for wrapper in made_around] == [4, 4]
    pipe.save_pretrained(tmp_path / "model")
    own = made()
    pipe = Pipeline.from_provider(provider_of(own, names_per_stage(own, 2)), ranks=2, microbatches=2,
                                  loss_fn=squares, parallelize_fn=around)  # fmt: skip
    pipe.verify_against(own, x_batch())
    assert made_around[-1].calls == 2


@pytest.mark.parametrize(
    ("returns", "value"),
    [
        (lambda part: None, "returned a NoneType for stage 0"),
        (lambda part: nn.Sequential(nn.Linear(2, 2)), "parameters such as 0.weight for stage 0"),
        (
            lambda part: Around(nn.ModuleList([part, nn.Linear(2, 2)])),
            "a module with module.1.weight in addition",
        ),
    ],
)
def test_what_parallelize_fn_may_not_return(returns: Any, value: str) -> None:
    with refuses(ModelError, value, "the stage's module, or a wrapper"):
        pipeline(tiny_model("llama"), parallelize_fn=returns)


def test_a_tied_weight_that_is_wrapped_away() -> None:
    def wrap_head(part: nn.Module) -> nn.Module:
        if next(part.get_submodule("lm_head").parameters(), None) is not None:
            part.lm_head = Around(part.get_submodule("lm_head"))
        return part

    with refuses(ModelError, "parallelize_fn, after which there is no lm_head.weight"):
        pipeline(tiny_model("llama", tied=True), parallelize_fn=wrap_head)
