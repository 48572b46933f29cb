"""Every schedule runs: exact gradients, the proven order, the proven memory, and nothing left behind."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock import AutoPipeline, Pipeline
from penstock.batch.shapes import Microbatch
from penstock.models.stage import StageInfo
from penstock.schedule import Schedule, build, dump, load
from support import jobs
from support.families import FAMILIES, ragged_batch, tiny_model
from support.pool import Pool
from support.reference import TOLERANCE, assert_gradients, plain_step
from support.schedules import FORMS, takes

WIDTH = 4
SIZES = [(ranks, m) for ranks in (1, 2, 3, 4) for m in (1, 2, 3, 4, 5, 8, 9)]
SOME = [(1, 3), (2, 1), (2, 2), (2, 4), (2, 9), (3, 2), (3, 3), (3, 8), (4, 1), (4, 4), (4, 5), (4, 8)]
LARGE = [(5, 7), (6, 12), (8, 4), (8, 20), (16, 8)]


class Part(nn.Module):
    """A residual block: two products, one whose weight is used twice, a norm, and a bias of its own."""

    def __init__(self, info: StageInfo) -> None:
        super().__init__()
        torch.manual_seed(info.stage)
        self.norm = nn.LayerNorm(WIDTH, dtype=torch.float64)
        self.wide = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.narrow = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.wide(self.norm(x)))
        result: Tensor = x + self.wide(self.narrow(hidden)) / 4
        return result


def mean_square(output: Tensor, microbatch: Microbatch) -> Tensor:
    return F.mse_loss(output, microbatch["y"], reduction="sum") / output.shape[0]


def rows(count: int) -> dict[str, Tensor]:
    x = torch.linspace(-1, 1, count * WIDTH, dtype=torch.float64).reshape(count, WIDTH)
    return {"x": x, "y": x.flip(0).sin()}


def schedule(form: str, ranks: int, microbatches: int) -> Schedule:
    config = dict(FORMS[form])
    return build(config.pop("schedule"), ranks=ranks, microbatches=microbatches, **config)


def assert_runs_exactly(schedule: Schedule, steps: int = 2) -> None:
    """Several steps in a row, each with every gradient of a plain process, in the order of the programs."""
    depth = schedule.placement.depth
    pipe = Pipeline.from_provider(Part, schedule=schedule, loss_fn=mean_square)
    reference = nn.Sequential(*(Part(StageInfo(place, depth)) for place in range(depth)))
    for step in range(steps):
        batch = rows(schedule.microbatches + step)
        loss = mean_square(reference(batch["x"]), batch)
        reference.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        pipe.zero_grad()
        assert pipe.step(batch).loss == pytest.approx(float(loss.detach()), rel=1e-12)
        for stage, module in pipe.modules.items():
            for name, parameter in module.named_parameters():
                expected = reference[stage % depth].get_parameter(name).grad
                assert parameter.grad is not None
                assert expected is not None
                difference = (parameter.grad - expected).abs().max() / expected.abs().max()
                assert difference < 1e-10, (stage, name)
        for rank, program in enumerate(schedule.programs):
            assert tuple(span.op for span in pipe.timeline.of_rank(rank)) == program
        assert pipe.timeline.peak_live == pipe.proof.peak_live
        proven = pipe.proof.peak_deferred
        assert [found > 0 for found in pipe.deferred_bytes] == [count > 0 for count in proven]


@pytest.mark.parametrize("sizes", [
    pytest.param(SOME, id="some"), pytest.param(SIZES, id="all", marks=pytest.mark.sweep)
])  # fmt: skip
@pytest.mark.parametrize("form", FORMS)
def test_in_process(form: str, sizes: list[tuple[int, int]]) -> None:
    for ranks, microbatches in sizes:
        if takes(form, ranks, microbatches):
            assert_runs_exactly(schedule(form, ranks, microbatches))


@pytest.mark.parametrize("sizes", [LARGE, pytest.param([(16, 36)], marks=pytest.mark.sweep)], ids=str)
@pytest.mark.parametrize("form", [form for form in FORMS if "searched" not in form])
def test_many_ranks_in_process(form: str, sizes: list[tuple[int, int]]) -> None:
    for ranks, microbatches in sizes:
        if takes(form, ranks, microbatches):
            assert_runs_exactly(schedule(form, ranks, microbatches), steps=1)


@pytest.mark.parametrize("ending", [".csv", ".json"])
@pytest.mark.parametrize("form", ["interleaved_zero_bubble", "zb_v", "dualpipe_v", "searched"])
def test_one_that_was_written_to_a_file(form: str, ending: str, tmp_path: Path) -> None:
    written = schedule(form, 3, 7)
    dump(written, tmp_path / f"own{ending}")
    loaded = load(tmp_path / f"own{ending}")
    assert loaded.programs == written.programs
    assert_runs_exactly(loaded)
    assert_runs_exactly(build("file", ranks=3, microbatches=7, path=str(tmp_path / f"own{ending}")))


@pytest.mark.parametrize("tied", [
    # in every run each schedule has untied models in test_ragged
    pytest.param(False, id="untied", marks=pytest.mark.sweep),
    pytest.param(True, id="tied"),
])  # fmt: skip
@pytest.mark.parametrize("form", FORMS)
def test_a_hugging_face_model_in_process(form: str, tied: bool) -> None:
    model, batch = tiny_model("llama", layers=8, tied=tied), ragged_batch()
    loss, expected = plain_step(model, batch)
    for ranks, microbatches in ((2, 4), (2, 6)):
        config = FORMS[form]
        pipe = AutoPipeline(ranks=ranks, schedule=config, microbatches=microbatches).build(model)
        found = pipe.step(batch).loss
        assert found == pytest.approx(loss, rel=1e-6)
        for index in pipe.modules:  # copies of the model bear the same names
            held = dict(pipe.modules[index].named_parameters())
            gradients = {name: p.grad for name, p in held.items() if p.grad is not None}
            assert len(gradients) == len(held)
            assert_gradients(gradients, expected, TOLERANCE[torch.float32])
        pipe.verify_against(model, batch)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_split_backward_in_every_family(family: str) -> None:
    model, batch = tiny_model(family, tied=True), ragged_batch()
    loss, expected = plain_step(model, batch)
    for config, checkpointing in ((FORMS["zb_v"], False), (FORMS["1f1b zero bubble"], True)):
        if checkpointing and not model.supports_gradient_checkpointing:
            continue
        pipe = AutoPipeline(
            ranks=2, schedule=config, microbatches=4, activation_checkpointing=checkpointing
        ).build(model)
        assert pipe.step(batch).loss == pytest.approx(loss, rel=1e-6)
        gradients = {
            name: p.grad for name, p in pipe.named_parameters(remove_duplicate=False) if p.grad is not None
        }
        assert len(gradients) == len(dict(pipe.named_parameters(remove_duplicate=False)))
        assert_gradients(gradients, expected, TOLERANCE[torch.float32])


@pytest.mark.parametrize(("ranks", "microbatches"), [
    (2, (4,)), (4, (8,)),
    pytest.param(2, (2, 8), marks=pytest.mark.sweep), pytest.param(4, (2, 4), marks=pytest.mark.sweep),
])  # fmt: skip
@pytest.mark.parametrize("form", FORMS)
def test_gloo(pool: Pool, form: str, ranks: int, microbatches: tuple[int, ...]) -> None:
    cases = [(FORMS[form], count) for count in microbatches]
    layers = max(schedule(form, ranks, 2).placement.depth, 2 * ranks)
    wrong = pool.run(ranks, jobs.equivalence, "llama", True, ranks, cases, layers)
    assert [line for rank in wrong for line in rank] == []
