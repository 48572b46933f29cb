"""Every schedule runs: exact gradients, the proven order, the proven memory, and nothing left behind.

The products of schedules, families, sizes and options are taken as covering arrays (support/covering.py):
in the default run every pair of a form and one of a few sizes occurs on plain stages, and every pair of one
of a few families and an option. `make sweep` has every pair of all, and the full product of forms and sizes.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock import AutoPipeline, Pipeline
from penstock.batch.packing import refuse_packed
from penstock.batch.padding import Padding
from penstock.batch.shapes import Microbatch
from penstock.errors import ModelError
from penstock.models.activation_checkpointing import Checkpointing
from penstock.models.stage import StageInfo
from penstock.schedule import Schedule, build, dump
from support import jobs
from support.covering import Row, every, pairs
from support.families import FAMILIES, FLOAT32_INSIDE, ragged_batch, tiny_model
from support.pool import Pool
from support.ragged import apart, documents, packed, ragged
from support.reference import TOLERANCE, assert_every_gradient, plain_steps
from support.refusals import refuses
from support.schedules import FORMS, built, takes

WIDTH = 4
SIZES = {"form": list(FORMS), "ranks": (1, 2, 3, 4), "microbatches": (1, 2, 3, 5, 8)}
FEWER_SIZES = SIZES | {"ranks": (1, 3, 4), "microbatches": (1, 3, 8)}  # the sweep has the product of SIZES
LARGE = ((5, 7), (6, 12), (8, 4), (8, 20), (16, 8))


def named(row: Row) -> str:
    return "-".join(str(value) for value in row.values())


def exists(row: Row) -> bool:
    """Is there such a schedule? Only as far as the row is known."""
    even = [row[name] % 2 == 0 for name in ("ranks", "microbatches") if name in row]
    return row.get("form") != "dualpipe" or all(even)


def all_rows(factors: dict[str, Any]) -> list[Row]:
    """The full product."""
    rows = [dict(zip(factors, values, strict=True)) for values in product(*factors.values())]
    return [row for row in rows if exists(row)]


# ---- stages of one's own


class Part(nn.Module):
    """A residual block: two products, one whose weight is used twice, a norm, and a bias."""

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


def rows_of(count: int) -> dict[str, Tensor]:
    x = torch.linspace(-1, 1, count * WIDTH, dtype=torch.float64).reshape(count, WIDTH)
    return {"x": x, "y": x.flip(0).sin()}


def assert_runs_exactly(schedule: Schedule, steps: int = 2) -> None:
    """Several steps in a row, each with every gradient of a plain process, in the order of the programs."""
    depth = schedule.placement.depth
    pipe = Pipeline.from_provider(Part, schedule=schedule, loss_fn=mean_square)
    reference = nn.Sequential(*(Part(StageInfo(place, depth)) for place in range(depth)))
    for step in range(steps):
        batch = rows_of(schedule.microbatches + step)
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


@pytest.mark.parametrize("row", pairs(FEWER_SIZES, exists), ids=named)
def test_in_process(row: Row) -> None:
    assert_runs_exactly(built(**row))


@pytest.mark.sweep
@pytest.mark.parametrize("row", all_rows(SIZES), ids=named)
def test_in_process_in_every_size(row: Row) -> None:
    assert_runs_exactly(built(**row))


NOT_SEARCHED = [form for form in FORMS if "searched" not in form]


@pytest.mark.parametrize(("turn", "form"), every(3, enumerate(NOT_SEARCHED)))
def test_many_ranks_in_process(turn: int, form: str) -> None:
    ranks, microbatches = (6, 12) if form == "dualpipe" else LARGE[turn % 5]
    assert_runs_exactly(built(form, ranks, microbatches), steps=1)


@pytest.mark.sweep
@pytest.mark.parametrize(("ranks", "microbatches"), [*LARGE, (16, 36)])
@pytest.mark.parametrize("form", NOT_SEARCHED)
def test_many_ranks_in_every_size(form: str, ranks: int, microbatches: int) -> None:
    if takes(form, ranks, microbatches):
        assert_runs_exactly(built(form, ranks, microbatches), steps=1)


@pytest.mark.parametrize(("form", "ending"), [("zb_v", ".csv"), ("searched", ".json")])
def test_one_that_was_written_to_a_file(form: str, ending: str, tmp_path: Path) -> None:
    written, path = built(form, 3, 7), tmp_path / f"own{ending}"
    dump(written, path)
    loaded = build("file", ranks=3, microbatches=7, path=str(path))
    assert loaded.programs == written.programs
    assert_runs_exactly(loaded)


# ---- Hugging Face models, all ranks in this process

OPTIONS: dict[str, Any] = {
    "form": list(FORMS),
    "family": list(FAMILIES),
    "microbatches": (2, 4, 5),
    "checkpointing": (
        False, "full", "selective", Checkpointing(every=2, save=("attention",), in_flight=1),
    ),
    "shapes": ("inferred", "exchanged", Padding(buckets=(8, 16), multiple=4), Padding(length=20)),
    "ranks": (2, 3, 4),
    "batch": ("rows", "ragged", "packed"),
    "tied": (True, False),
    "dtype": (torch.float64, torch.float32),
}  # fmt: skip


def keeps_documents_apart(family: str) -> bool:
    try:
        refuse_packed(tiny_model(family))
    except ModelError:
        return False
    return True


TOGETHER = ("opt", "gpt_oss")  # written down: all models would be built to collect the tests


@pytest.mark.parametrize("family", FAMILIES)
def test_which_families_keep_packed_documents_apart(family: str) -> None:
    assert keeps_documents_apart(family) == (family not in TOGETHER)


def runs(row: Row) -> bool:
    """May these options meet? Only as far as the row is known."""
    if row.get("batch") == "packed" and row.get("family") in TOGETHER:
        return False
    if "searched" in row.get("form", "") and row.get("ranks", 0) > 2:  # test_in_process has them
        return False
    return exists(row)


def row_name(row: Row) -> str:
    """With the long options as their numbers in `OPTIONS`."""
    checkpointing, shapes = (OPTIONS[name].index(row[name]) for name in ("checkpointing", "shapes"))
    bits = 64 if row["dtype"] == torch.float64 else 32
    return (
        f"{row['form']}-P{row['ranks']}-m{row['microbatches']}-{row['family']}-{row['batch']}"
        f"-checkpointing{checkpointing}-shapes{shapes}-{'tied' if row['tied'] else 'untied'}-float{bits}"
    )


def assert_model_is_exact(row: Row) -> None:
    """One step, and one with the shapes in another order in the same pipeline."""
    count, dtype, family = row["microbatches"], row["dtype"], row["family"]
    schedule = built(row["form"], row["ranks"], count)
    model = tiny_model(family, dtype, layers=max(4, schedule.placement.depth), tied=row["tied"])
    batch, microbatches, texts = ragged_batch(), ragged(count), documents(count)
    # what the pipeline gets, and what the plain process
    given: Any = {"rows": [batch], "ragged": [microbatches, microbatches[::-1]], "packed": [packed(texts)]}
    alone = {"rows": [batch], "ragged": microbatches, "packed": apart(texts)}
    loss, expected = plain_steps(model, alone[row["batch"]])
    inside = dtype == torch.float64 and family in FLOAT32_INSIDE
    tolerance = TOLERANCE[torch.float32 if inside else dtype]
    pipe = AutoPipeline(
        ranks=row["ranks"], schedule=schedule, microbatches=count, shapes=row["shapes"],
        activation_checkpointing=row["checkpointing"],
    ).build(model)  # fmt: skip
    for step in given[row["batch"]]:
        pipe.zero_grad()
        assert pipe.step(step).loss == pytest.approx(loss, rel=max(tolerance / 10, 1e-12))
        assert_every_gradient(pipe.modules.values(), expected, tolerance)
        assert pipe.timeline.peak_live == pipe.proof.peak_live
    if inside and row["batch"] == "rows":
        # to 1e-10 against the same microbatches in a row, which round in the same places
        pipe.verify_against(model, batch)


# the sweep adds families and sizes, inferred shapes, which most other tests have, rows of one fixed length,
# every second layer, and each pair with a form
FEWER = OPTIONS | {
    "family": ["llama", "mixtral", "gpt2"],
    "microbatches": (4, 5),
    "ranks": (2, 3),
    "shapes": OPTIONS["shapes"][1:3],
    "checkpointing": OPTIONS["checkpointing"][:3],
}
APART_FROM_FORM = [("form", name) for name in FEWER if name != "form"]  # each form occurs, in turn


@pytest.mark.parametrize("row", pairs(FEWER, runs, apart=APART_FROM_FORM), ids=row_name)
def test_a_hugging_face_model_in_process(row: Row) -> None:
    assert_model_is_exact(row)


@pytest.mark.sweep
@pytest.mark.parametrize("row", pairs(OPTIONS, runs), ids=row_name)
def test_every_family_in_every_schedule(row: Row) -> None:
    assert_model_is_exact(row)


@pytest.mark.parametrize("family", TOGETHER)
def test_packed_documents_are_refused_where_they_would_meet(family: str) -> None:
    rows = documents(5)
    pipe = AutoPipeline(ranks=2, microbatches=5).build(tiny_model(family))
    with refuses(ModelError, "packed documents"):
        pipe.step(packed(rows))
    pipe.step(apart(rows)[:5])  # nothing was sent, and other batches may follow


# ---- Hugging Face models over real processes


@pytest.mark.parametrize(("form", "ranks", "microbatches"), [
    # in every run some forms once, on two or four ranks; GPipe and 1F1B are in pipeline/test_equivalence.py
    pytest.param(form, ranks, counts, marks=() if counts == (2 * ranks,) and turn else pytest.mark.sweep)
    for number, form in enumerate(FORMS)
    for ranks, turn in ((2, number % 6 == 1), (4, number % 8 == 3))
    for counts in ((2 * ranks,), (2, 8 if ranks == 2 else 4))
])  # fmt: skip
def test_over_processes(pool: Pool, form: str, ranks: int, microbatches: tuple[int, ...]) -> None:
    # on two ranks each searches by itself, and must find the same schedule
    cases = [(FORMS[form] if ranks == 2 else built(form, ranks, count), count) for count in microbatches]
    layers = max(built(form, ranks, 2).placement.depth, 2 * ranks)
    pool.run(ranks, jobs.equivalence, "llama", True, ranks, cases, layers)
