"""A stage whose I puts little off says so once, with the share and the cause."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import Axes, Pipeline
from penstock.batch import head_logits
from penstock.batch.shapes import Microbatch
from penstock.models.stage import StageInfo
from penstock.runtime.split_backward.deferred import Deferral
from support import pictures
from support.families import each_layer, pipeline, ragged_batch, tiny_model
from support.mesh import batch as mesh_batch
from support.mesh import build_pipe, own_part
from support.pool import Pool

Prepare = Callable[[nn.Module], nn.Module]
NARROW, WIDE = 32 * 32, 32 * 128


class TwoProducts(nn.Module):
    """Two products with weights, a fifth and four fifths of the FLOPs, and parameters without one."""

    def __init__(self, info: StageInfo) -> None:
        super().__init__()
        self.narrow, self.wide = nn.Linear(32, 32), nn.Linear(32, 128)
        self.norm, self.position = nn.LayerNorm(128), nn.Embedding(4, 128)

    def forward(self, x: Tensor) -> Tensor:
        wide: Tensor = self.norm(self.wide(self.narrow(x)) + self.position.weight[0])
        return wide.view(*x.shape[:-1], 4, 32).sum(-2)


def squares(output: Tensor, microbatch: Microbatch) -> Tensor:
    return output.square().sum()


def two_products(schedule: str = "zb_h1", prepare: Prepare | None = None) -> Pipeline:
    options: dict[str, Any] = {} if prepare is None else {"parallelize_fn": prepare}
    return Pipeline.from_provider(
        TwoProducts, schedule=schedule, ranks=2, microbatches=4, loss_fn=squares, **options
    )


def batch() -> dict[str, Tensor]:
    return {"x": torch.randn(8, 5, 32)}


def hooked(name: str) -> Prepare:
    def prepare(module: nn.Module) -> nn.Module:
        weight = module.get_parameter(f"{name}.weight")
        weight.register_hook(lambda gradient: gradient)  # type: ignore[no-untyped-call]
        return module

    return prepare


# _whole_backwards: its counts are in no public result
def deferrals(pipe: Pipeline) -> list[Deferral | None]:
    """How much the I of each stage left for W in the first step."""
    return [counter.deferral for counter in pipe._whole_backwards.counters]


def said(pipe: Pipeline, batch: Any) -> list[str]:
    """The warnings of the first of two steps; the second has none."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        warnings.filterwarnings("always", "Stage . defers")
        pipe.step(batch)
    pipe.step(batch)
    assert all(each.filename == __file__ for each in caught), "it names the caller's line"
    return [str(each.message) for each in caught]


def test_plain_products_are_deferred_and_nothing_is_said() -> None:
    pipe = two_products()
    assert said(pipe, batch()) == []
    for deferral in deferrals(pipe):
        assert deferral is not None
        assert (deferral.rows, deferral.total) == (10, 2 * 10 * (NARROW + WIDE))


@pytest.mark.parametrize(("name", "share"), [("narrow", None), ("wide", "20%")])
def test_less_than_four_fifths_is_said_with_its_cause(name: str, share: str | None) -> None:
    found = said(two_products(prepare=hooked(name)), batch())
    if share is None:  # four fifths are deferred
        assert found == []
        return
    assert len(found) == 2, "one for each stage"
    causes = "hooks on gradients 80%. .* To gain more, take a schedule .* such as 1f1b."
    pattern = f"Stage 1 defers {share} of .* at once: {causes}"
    assert re.fullmatch(pattern, found[1])


def test_a_warning_that_is_an_error_is_raised_once() -> None:
    """Not by each step again: a caller may go on after it."""
    pipe = two_products(prepare=hooked("wide"))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Stage . defers")
        with pytest.raises(UserWarning, match="Stage 0 defers"):
            pipe.step(batch())
        for _ in range(2):
            assert pipe.step(batch()).tokens > 0


def test_whole_backwards_have_nothing_to_defer() -> None:
    assert said(two_products("1f1b", hooked("wide")), batch()) == []


def test_frozen_weights_count_for_nothing() -> None:
    def prepare(module: nn.Module) -> nn.Module:
        module.get_parameter("wide.weight").requires_grad_(False)
        return module

    assert said(two_products(prepare=prepare), batch()) == []


class OwnProduct(torch.autograd.Function):
    """A product as Transformer Engine has them: in a function of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradients[0] @ weight, gradients[0].flatten(0, -2).t() @ x.flatten(0, -2)


class OwnLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        result: Tensor = OwnProduct.apply(input, self.weight)  # type: ignore[no-untyped-call]
        return result


def test_a_product_in_a_function_of_its_own_is_named_by_its_module() -> None:
    def prepare(module: nn.Module) -> nn.Module:
        module.wide = OwnLinear(32, 128, bias=False)
        return module

    assert "OwnLinear 80%" in said(two_products(prepare=prepare), batch())[0]


@pytest.mark.parametrize(
    ("schedule", "layers"), [("zb_h1", 2), pytest.param("zb_v", 4, marks=pytest.mark.sweep)]
)
def test_compiled_layers_are_named(schedule: str, layers: int) -> None:
    def compiled(part: nn.Module) -> nn.Module:
        for layer in each_layer(part):
            layer.compile(backend="aot_eager")
        return part

    pipe = pipeline(tiny_model("llama", layers=layers), schedule=schedule, parallelize_fn=compiled)
    found = said(pipe, ragged_batch())
    assert found
    assert all("at once: torch.compile " in each for each in found)
    torch._dynamo.reset()


def test_a_head_that_the_loss_runs_in_blocks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_logits, "HELD_BYTES", 4 * 64 * 100)
    model = tiny_model("llama", layers=4, vocab_size=512)
    found = said(pipeline(model, schedule="zb_h1"), ragged_batch())
    assert len(found) == 1
    assert re.search(r"at once: the chunked loss \d+%\..* To gain more, set chunked_loss=False if", found[0])
    whole = pipeline(model, schedule="zb_h1", chunked_loss=False)
    assert said(whole, ragged_batch()) == []


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_plain_models_say_nothing(family: str) -> None:
    pipe = pipeline(tiny_model(family, tied=family == "gpt2"), schedule="zb_h1")
    assert said(pipe, ragged_batch()) == []


def on_a_mesh(family: str, axes: Axes) -> list[tuple[float, list[str]]]:
    """The share that each stage of this process defers by its own count, and what is said."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        warnings.filterwarnings("always", "Stage . defers")
        pipe = build_pipe(family, 2, axes, {"schedule": "zb_h1"})
        pipe.step(own_part(mesh_batch(), *pipe.batch_part))
    totals = [0 if deferral is None else deferral.total for deferral in deferrals(pipe)]
    pipe.close()
    return [(total, [str(each.message) for each in caught]) for total in totals]


@pytest.mark.parametrize(
    ("family", "axes"),
    [("llama", Axes(dp_shard=2)), ("llama", Axes(tp=2)), ("mixtral", Axes(dp_shard=2, ep=2))],
    ids=str,
)
def test_gathered_and_split_weights_are_deferred_too(pool: Pool, family: str, axes: Axes) -> None:
    for stages in pool.run(4, on_a_mesh, family, axes):
        for total, found in stages:
            assert total > 0
            assert found == []


def test_weights_that_a_later_microbatch_uses_first_are_deferred_too() -> None:
    """0.5.0: where the first microbatch had no images, its tower was said to be computed at once."""
    model = pictures.tiny_model("smolvlm")
    seen = pictures.microbatches(model)
    text = [each for each in seen if "pixel_values" not in each]
    pipe = pipeline(model, schedule="zb_h1")
    assert said(pipe, [*text, *(each for each in seen if "pixel_values" in each)]) == []
    tower = pipe.modules[0].get_submodule("model.vision_model")
    used = {id(each) for each in tower.parameters()}
    deferral = deferrals(pipe)[0]
    assert deferral is not None
    assert used & deferral.flops.keys()
