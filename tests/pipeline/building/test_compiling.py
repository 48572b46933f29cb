"""The option `compile`: layers and loss through torch.compile, as exact as without it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from penstock import AutoPipeline, Axes, Pipeline
from penstock.errors import ConfigError, InputError
from penstock.pipeline import Compile, names_per_stage, provider_of
from penstock.pipeline.options import Options
from penstock.runtime.around import is_around
from penstock.runtime.split_backward.modules import is_compiled
from support.families import pipeline, ragged_batch, tiny_model
from support.own_chain import made, squares, x_batch
from support.pool import Pool
from support.reference import TOLERANCE, assert_gradients, gradients_of, plain_step
from support.refusals import refuses

PLAIN = Compile(backend="aot_eager")
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


def graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


# _layers: compiled layers are in no public list
def layers_of(pipe: Pipeline) -> list[nn.Module]:
    return [layer for numbered in pipe._layers.values() for _, layer in numbered]


def in_pieces(pipe: Pipeline) -> bool:
    parts = (part for layer in layers_of(pipe) for part in layer.modules())
    return any(is_around(torch.compiler.disable, part) for part in parts)


def assert_exact(model: Any, pipe: Pipeline, batch: Any, tolerance: float, steps: int = 2) -> None:
    loss, expected = plain_step(model, batch)
    for _ in range(steps):
        pipe.zero_grad()
        assert pipe.step(batch).loss == pytest.approx(loss, rel=tolerance)
        assert_gradients(gradients_of(pipe), expected, tolerance)


@pytest.mark.long
@pytest.mark.filterwarnings("error:Stage")  # says that little was deferred
@pytest.mark.parametrize("schedule", [pytest.param("1f1b", marks=pytest.mark.sweep), "zb_h1"])
def test_layers_and_loss_are_exact_and_compiled_once(schedule: str) -> None:
    model, batch = tiny_model("llama", torch.float64, layers=2), ragged_batch()
    pipe = pipeline(model, schedule=schedule, compile=PLAIN)
    assert_exact(model, pipe, batch, TOLERANCE[torch.float64], 1)
    before = graphs()
    assert all(map(is_compiled, layers_of(pipe)))
    assert in_pieces(pipe) == (schedule == "zb_h1")  # around products where backwards are split
    assert before > 1
    assert_exact(model, pipe, batch, TOLERANCE[torch.float64], 1)
    assert graphs() == before


def test_the_loss_alone() -> None:
    model, batch = tiny_model("gpt2", torch.float64, layers=2), ragged_batch()
    pipe = pipeline(model, microbatches=2, compile=Compile(layers="none", backend="aot_eager"))
    assert_exact(model, pipe, batch, TOLERANCE[torch.float64], 1)
    assert not any(map(is_compiled, layers_of(pipe)))
    assert graphs() == 1


@pytest.mark.filterwarnings("ignore:Stage")
def test_layers_that_do_not_go_in_pieces_are_compiled_whole() -> None:
    """Recomputed ones, and those with experts; asked for by name they are refused."""
    for family, more in (("llama", {"activation_checkpointing": True}), ("mixtral", {})):
        pipe = pipeline(tiny_model(family, layers=2), schedule="zb_h1", compile=PLAIN, **more)
        assert all(map(is_compiled, layers_of(pipe)))
        assert not in_pieces(pipe)
        how = Compile(layers="products", backend="aot_eager")
        with refuses(ConfigError, "compile_around_products of a"):
            pipeline(tiny_model(family, layers=2), schedule="zb_h1", compile=how, **more)


CASES = [
    ("llama", "zb_h1", True), ("llama", "1f1b", "selective"), ("mixtral", "1f1b", False),
    ("mixtral", "zb_v", True), ("granite", "1f1b", True), ("gpt2", "zb_v", False),
    ("phi3", "interleaved_1f1b", False), ("llama", "dualpipe_v", False),
]  # fmt: skip


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore:Stage")
@pytest.mark.parametrize(("family", "schedule", "how"), CASES)
def test_with_recomputation_and_other_families(family: str, schedule: str, how: bool | str) -> None:
    model, batch = tiny_model(family, torch.float64), ragged_batch()
    pipe = pipeline(model, schedule=schedule, compile=PLAIN, activation_checkpointing=how)
    assert_exact(model, pipe, batch, TOLERANCE[torch.float64])
    assert graphs() > 0


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore:`torch.jit.script")  # which inductor's own import uses
@pytest.mark.parametrize(("schedule", "how"), [("1f1b", False), ("1f1b", True), ("zb_h1", False)])
def test_by_inductor(schedule: str, how: bool) -> None:
    """What compile=True means: C++ on a CPU."""
    model, batch = tiny_model("llama", layers=2), ragged_batch()
    pipe = pipeline(model, schedule=schedule, compile=True, activation_checkpointing=how)
    assert_exact(model, pipe, batch, TOLERANCE[torch.float32])
    assert graphs() > 0


def test_modules_of_ones_own() -> None:
    model = made()
    provider = provider_of(model, names_per_stage(model, 2))
    pipe = Pipeline.from_provider(provider, ranks=2, microbatches=2, loss_fn=squares, compile=PLAIN)
    pipe.verify_against(model, x_batch())
    assert graphs() > 0


def with_axes(axes: Axes, schedule: str) -> tuple[str, int]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model, batch = tiny_model("llama", torch.float64), ragged_batch()
    try:
        pipe = AutoPipeline(
            ranks=2, schedule=schedule, microbatches=2, axes=axes, compile=PLAIN, timeout=60
        ).build(model)
        report = pipe.compare(model, batch)
    except InputError as error:
        return str(error), 0
    pipe.close()
    return "; ".join(report.problems()), graphs()


@pytest.mark.sweep
@pytest.mark.parametrize("axes", [Axes(dp_shard=2), Axes(dp_replicate=2), Axes(tp=2)])
@pytest.mark.parametrize("schedule", ["1f1b", "zb_v"])
def test_with_other_axes(pool: Pool, axes: Axes, schedule: str) -> None:
    for problems, count in pool.run(4, with_axes, axes, schedule):
        assert problems == ""
        assert count > 0


def refused(make: Callable[[], object]) -> str:
    with pytest.raises(ConfigError) as caught:
        make()
    return str(caught.value)


def test_what_cannot_be_compiled_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama", layers=2)
    assert "compile.layers='all': it is one of 'auto', 'whole'" in refused(lambda: Compile(layers="all"))  # type: ignore[arg-type]
    assert "neither" in refused(lambda: Compile(layers="none", loss=False))
    assert "compile=3" in refused(lambda: pipeline(model, compile=3))
    assert "torch knows aot_eager," in refused(lambda: pipeline(model, compile=Compile(backend="fast")))
    assert "torch knows default," in refused(lambda: pipeline(model, compile=Compile(mode="fast")))
    routed = tiny_model("mixtral", layers=2)
    assert "replay_routing=True" in refused(
        lambda: pipeline(routed, compile=PLAIN, replay_routing=True, activation_checkpointing=True)
    )
    assert "quantize='nf4'" in refused(lambda: pipeline(model, compile=PLAIN, quantize="nf4"))
    from torch._inductor import cpp_builder, exc

    def none_found() -> str:
        raise exc.InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", none_found)
    assert "Install g++" in refused(lambda: pipeline(model, compile=True))


def test_ranks_agree_on_it() -> None:
    assert Options(compile=True).facts()["compile"] == str(Compile())
    assert Options().facts()["compile"] == "None"


def test_a_loss_of_ones_own_stays_as_it_is() -> None:
    model, batch = tiny_model("llama", layers=2), ragged_batch()
    how = Compile(layers="none", backend="aot_eager")
    pipe = pipeline(model, microbatches=2, compile=how, loss_fn=lambda output, _: output.square().mean())
    pipe.step(batch)
    assert graphs() == 0
