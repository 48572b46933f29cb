"""Activation offloading in a pipeline: the same bits, less memory, and copies beside the ops."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock import AutoPipeline, Axes, Checkpointing, Offloading, Pipeline, Sharded
from penstock.batch.shapes import Microbatch
from penstock.errors import ConfigError
from penstock.models.stage import StageInfo
from penstock.runtime.executor import Executor
from penstock.schedule import simulate
from support.families import each_layer, tiny_model
from support.host_link import LateLink, OpCount, SlowLink, exact_in_a_late_link, use_link
from support.mesh import later
from support.pool import Pool
from support.ragged import ragged
from support.reference import assert_every_gradient, gradients_of, plain_steps
from support.refusals import refuses
from support.schedules import FORMS, built

ALL = Offloading(min_bytes=0)
Bits = tuple[float, dict[str, Tensor]]


def pipeline(
    form: str, offloading: Any, *, ranks: int = 4, family: str = "llama", **options: Any
) -> Pipeline:
    """With 8 microbatches. Of a schedule with one stage a rank, each has two layers."""
    auto = AutoPipeline(
        ranks=ranks, schedule=FORMS[form], microbatches=8, activation_offloading=offloading, **options
    )
    layers = built(form, ranks, 8).placement.depth
    return auto.build(tiny_model(family, layers=max(2 * ranks, layers)))


def batch(rows: int = 16, length: int = 12) -> dict[str, Tensor]:
    ids = torch.randint(64, (rows, length), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def stepped(pipe: Pipeline, given: Any = None, steps: int = 2) -> Bits:
    """Loss and gradients of the last of some steps."""
    for _ in range(steps):
        pipe.zero_grad()
        loss = pipe.step(batch() if given is None else given).loss
    assert pipe.timeline.peak_live == pipe.proof.peak_live
    return loss, gradients_of(pipe)


def assert_same_bits(found: Bits, expected: Bits) -> None:
    assert found[0] == expected[0]
    assert found[1].keys() == expected[1].keys()
    assert [name for name in found[1] if not torch.equal(found[1][name], expected[1][name])] == []


def activations(pipe: Pipeline) -> list[int]:
    return [held.activations for held in pipe.memory]


# whole backwards; split ones, with several stages a rank, and two copies of the model
DEFAULT = ("1f1b", "dualpipe")


# _built: what stages still hold after a step is seen there alone
@pytest.mark.parametrize("form", [
    pytest.param(form, marks=() if form in DEFAULT else pytest.mark.sweep) for form in FORMS
])  # fmt: skip
def test_every_bit_in_every_schedule(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing stays behind, in a link whose copies come as late as can be."""
    expected = stepped(pipeline(form, False))
    use_link(monkeypatch, LateLink)
    pipe = pipeline(form, ALL)
    assert_same_bits(stepped(pipe), expected)
    assert sum(stage.left_over for stage in pipe._built.stages) == 0


def test_gradients_are_those_of_one_process() -> None:
    rows = ragged(8)
    model = tiny_model("llama", torch.float64, layers=8, tied=True)
    loss, expected = plain_steps(model, rows)
    auto = AutoPipeline(ranks=4, schedule="zb_h1", microbatches=8, activation_offloading=ALL)
    pipe = auto.build(model)
    for given in (rows, rows[::-1]):  # of other lengths in other places
        pipe.zero_grad()
        assert pipe.step(given).loss == pytest.approx(loss, rel=1e-12)
        assert_every_gradient(pipe.modules.values(), expected, 1e-10)


def compile_layers(module: nn.Module) -> nn.Module:
    for layer in each_layer(module):
        layer.compile(backend="aot_eager")
    return module


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # which dynamo looks at while it traces
@pytest.mark.parametrize(("offloading", "options"), [
    (ALL, {"activation_checkpointing": Checkpointing(every=2, save=("matmul",), in_flight=2)}),
    (Offloading(("self_attn",), layers=1, ahead=2, min_bytes=64), {}),
    *later((ALL, {"activation_checkpointing": "full"}),
           (Offloading(("mlp", "*_layernorm"), min_bytes=0),
            {"activation_checkpointing": Checkpointing(every=2)}),
           (ALL, {"autocast": torch.bfloat16}),
           (ALL, {"family": "mixtral", "replay_routing": True, "activation_checkpointing": "full"}),
           (ALL, {"parallelize_fn": compile_layers}), mark=pytest.mark.sweep),
], ids=["some again", "few", "again", "modules", "autocast", "routed", "compiled"])  # fmt: skip
def test_every_bit_with_other_options(
    offloading: Offloading, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = stepped(pipeline("zb_h1", False, **options))
    use_link(monkeypatch, LateLink)
    pipe = pipeline("zb_h1", offloading, **options)
    assert_same_bits(stepped(pipe), expected)
    rows: Any = pipe.costs().offloaded
    assert sorted(rows[0])[1] > 0  # of the first stage all microbatches leave, or all but one


@pytest.mark.parametrize("form", [pytest.param("gpipe", marks=pytest.mark.sweep), "1f1b"])
def test_the_account_the_simulation_and_a_step_agree(form: str) -> None:
    """Three microbatches lie on the device whole: one that runs, and one on its way in each direction."""
    without = pipeline(form, False)
    stepped(without)
    pipe = pipeline(form, ALL)
    stepped(pipe)
    live = pipe.proof.peak_live[0]
    whole = activations(without)[0] / live
    assert activations(pipe)[0] == pytest.approx(3 * whole, rel=0.03)
    predicted = simulate(pipe.schedule, pipe.costs())
    for rank, held in enumerate(pipe.memory):
        assert predicted.peak_memory[rank] == pytest.approx(held.total, rel=0.05)
    auto = AutoPipeline(ranks=4, schedule=form, microbatches=8, activation_offloading=ALL)
    plan = auto.build_plan(tiny_model("llama", layers=8))
    estimated = auto.memory_costs(plan, (2, 12))
    assert estimated is not None
    between_ops = replace(estimated, held_in_forward=None, held_in_backward=None)
    predicted = simulate(plan.schedule, between_ops)
    for rank, held in enumerate(pipe.memory):
        assert predicted.peak_memory[rank] == pytest.approx(held.total, rel=0.1)


def one_rank(offloading: bool | Offloading) -> Pipeline:
    return pipeline("gpipe", offloading, ranks=1)


def test_copies_run_beside_the_next_op_and_late_ones_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy ends once its rank has begun another op: never, if the rank waited for it before."""
    expected, ops, links = stepped(one_rank(False), steps=1), OpCount(), list[SlowLink]()
    compute = Executor.compute

    def counted(self: Executor, *args: Any) -> None:
        ops.begin()
        compute(self, *args)

    def link() -> SlowLink:
        links.append(SlowLink(1e8, ops))
        return links[-1]

    monkeypatch.setattr(Executor, "compute", counted)
    use_link(monkeypatch, link)
    assert_same_bits(stepped(one_rank(ALL), steps=1), expected)
    assert [found.copied for found in links] == [{"down": 8, "up": 8}]


SHARDED = Axes(dp_shard=2)


@pytest.mark.parametrize(("family", "axes", "options"), [
    ("llama", SHARDED, {"sharded": Sharded(reshard_after_forward=True)}),
    ("llama", SHARDED, {"activation_checkpointing": True}),
    ("llama", Axes(cp=2), {"context": "ring"}),
    ("llama", Axes(cp=2), {}),
    ("llama", Axes(tp=2), {"sequence_parallel": True}),
    ("mixtral", Axes(dp_shard=2, ep=2), {}),
    ("llama", Axes(dp_replicate=2), {"tied": True}),
])  # fmt: skip
@pytest.mark.parallel
def test_gradients_on_a_mesh(pool: Pool, family: str, axes: Axes, options: dict[str, Any]) -> None:
    schedule = {"schedule": "looped_bfs", "stages_per_rank": 2}
    given = {"microbatches": 4, "activation_offloading": ALL, **options}
    found = pool.run(4, exact_in_a_late_link, family, 2, axes, schedule, given)
    assert all(copied > 0 for copied in found)


# ---- stages of one's own


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.act = nn.Linear(8, 32, dtype=torch.float64), nn.GELU()
        self.narrow = nn.Linear(32, 8, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.narrow(self.act(self.wide(x)))
        return result


class Part(nn.Module):
    def __init__(self, info: StageInfo) -> None:
        super().__init__()
        torch.manual_seed(info.stage)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.blocks[1](self.blocks[0](x))
        return result


class Spoils(Part):
    """Changes in place what a product saved."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        result: Tensor = self.blocks[1](x)
        with torch.no_grad():
            x.add_(1)
        return result


def mean_square(output: Tensor, microbatch: Microbatch) -> Tensor:
    return F.mse_loss(output, microbatch["y"])


def provided(part: Any, offloading: bool | Offloading, **options: Any) -> Pipeline:
    given = {"schedule": "gpipe", "ranks": 2, "microbatches": 6, **options}
    return Pipeline.from_provider(part, loss_fn=mean_square, activation_offloading=offloading, **given)


def of_numbers() -> dict[str, Tensor]:
    x = torch.linspace(-1, 1, 12 * 8, dtype=torch.float64).reshape(12, 8)
    return {"x": x, "y": x.flip(0)}


def test_stages_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = stepped(provided(Part, False), of_numbers())
    use_link(monkeypatch, LateLink)
    for chosen in (ALL, Offloading(("act",), min_bytes=0)):
        pipe = provided(Part, chosen)
        assert_same_bits(stepped(pipe, of_numbers()), expected)
    assert pipe.costs().offloaded == [[2 * 2 * 32 * 8] * 6] * 2  # two blocks, 2 rows of what enters `act`


# _built: what stages still hold after a step is seen there alone
@pytest.mark.parametrize("offloading", [False, ALL])
def test_what_a_stage_changes_in_place_is_an_error_with_and_without(offloading: bool | Offloading) -> None:
    pipe = provided(Spoils, offloading)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        pipe.step(of_numbers())
    assert sum(stage.left_over for stage in pipe._built.stages) == 0


# ---- refusals


def compile_whole(module: nn.Module) -> nn.Module:
    compiled: nn.Module = torch.compile(module, backend="eager")  # type: ignore[assignment]
    return compiled


@pytest.mark.parametrize(("made", "value", "rule"), [
    (lambda: pipeline("1f1b", Offloading(("mpl",))),
     "modules='mpl'", "they have input_layernorm, mlp, "),
    (lambda: provided(Part, Offloading(("mlp",))), "modules='mlp'", "they have act, narrow, wide"),
    (lambda: pipeline("1f1b", ALL, ranks=2), "2 ranks", "fewer than 3 other ops"),
    (lambda: pipeline("1f1b", Offloading(ahead=2), ranks=3), "3 ranks", "fewer than 5 other ops"),
    (lambda: pipeline("1f1b", Offloading(("mlp",)), activation_checkpointing=True),
     "modules=('mlp',)", "every layer runs again"),
    (lambda: provided(Part, Offloading(("act",)), parallelize_fn=compile_whole),
     "act within the stage, which is compiled", "hides the modules"),
    (lambda: pipeline("1f1b", Offloading(("mlp",)), compile=True),
     "modules=('mlp',)", "compiles whole layers"),
    (lambda: Offloading("mlp"), "modules='mlp'", "names of modules"),
    (lambda: Offloading(layers=0), "layers=0", "whole number from 1"),
    (lambda: Offloading(ahead=0), "ahead=0", "whole number from 1"),
    (lambda: Offloading(min_bytes=-1), "min_bytes=-1", "whole number from 0"),
    (lambda: pipeline("gpipe", "host"), "activation_offloading='host'", "true or false"),
])  # fmt: skip
def test_what_is_refused(made: Any, value: str, rule: str) -> None:
    with refuses(ConfigError, value, rule):
        made()
