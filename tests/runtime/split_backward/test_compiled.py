"""Layers compiled around their products: the same gradients, deferred, and compiled once."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from penstock import compile_around_products
from penstock.errors import ConfigError
from support.covering import every
from support.families import pipeline, ragged_batch, tiny_model
from support.reference import TOLERANCE, assert_gradients, gradients_of, plain_step
from support.refusals import refuses

LAYERS = {"llama": "LlamaDecoderLayer", "gpt2": "GPT2Block", "mixtral": "MixtralDecoderLayer"}
DENSE = ("llama", "gpt2")
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute"),  # which dynamo looks at while it traces
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`"),
]


@pytest.fixture(autouse=True)
def compiler() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def around(family: str) -> Callable[[nn.Module], nn.Module]:
    def compiled(stage: nn.Module) -> nn.Module:
        for module in [*stage.modules()]:
            if type(module).__name__ == LAYERS[family]:
                compile_around_products(module, backend="aot_eager")
        return stage

    return compiled


def graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


@pytest.mark.filterwarnings("error:Stage")  # says that little was deferred
@pytest.mark.sweep
@pytest.mark.parametrize(("family", "schedule"), every(5, [(f, s) for f in DENSE for s in ("zb_h1", "zb_v")]))
def test_gradients_are_exact_and_deferred(family: str, schedule: str) -> None:
    model, batch = tiny_model(family, torch.float64), ragged_batch()
    loss, expected = plain_step(model, batch)
    pipe = pipeline(model, schedule=schedule, parallelize_fn=around(family))
    compiled = []
    for _ in range(3):
        pipe.zero_grad()
        assert pipe.step(batch).loss == pytest.approx(loss, rel=1e-10)
        assert_gradients(gradients_of(pipe), expected, TOLERANCE[torch.float64])
        compiled.append(graphs())
    assert compiled[0] > 0
    assert compiled[1:] == [compiled[0]] * 2, "nothing is compiled after the first step"


@pytest.mark.sweep
def test_layers_of_a_kind_share_what_is_compiled() -> None:
    found = []
    for layers in (2, 6):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        pipe = pipeline(tiny_model("llama", layers=layers), schedule="zb_h1", parallelize_fn=around("llama"))
        pipe.step(ragged_batch())
        found.append(graphs())
    assert found[0] == found[1] > 0


def test_names_and_kinds_stay_and_a_second_call_changes_nothing() -> None:
    layer = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
    names = [name for name, _ in layer.named_parameters()]
    compile_around_products(layer, backend="eager")
    kinds = [type(module) for module in layer]
    compile_around_products(layer, backend="eager")
    assert [type(module) for module in layer] == kinds
    assert [name for name, _ in layer.named_parameters()] == names
    assert isinstance(layer[0], nn.Linear)
    assert kinds[0] is kinds[2]
    assert kinds[1] is nn.GELU


def test_what_does_not_go_in_pieces_is_refused() -> None:
    with refuses(ConfigError, "fullgraph=True in compile_around_products of a Linear", "each product"):
        compile_around_products(nn.Linear(2, 2), fullgraph=True)
    with refuses(ConfigError, "LlamaDecoderLayer with activation checkpointing"):
        pipeline(tiny_model("llama"), parallelize_fn=around("llama"), activation_checkpointing=True)
    with refuses(ConfigError, "MixtralDecoderLayer with a bank of experts"):
        pipeline(tiny_model("mixtral"), parallelize_fn=around("mixtral"))
