"""benchmarks/validation/tables: the halves follow their rule, and docs/validation.md shows every row."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
from benchmarks.validation import models, published
from benchmarks.validation.predict import (
    FITTED,
    Constants,
    Predicted,
    _change,
    fit,
    fitting,
    fitting_names,
    library,
    predict,
    read_constants,
)
from benchmarks.validation.runs import Run, Table, tables

TABLES = tables()
SMALL = Run(
    name="small", half="blind", value=2.0, family="gpt", vocabulary=512, layers=4, hidden=64, heads=4,
    length=64, batch=8, rows=1, pp=2,
)  # fmt: skip


@pytest.mark.parametrize("table", TABLES.values(), ids=list(TABLES))
def test_printed_rows_fit_and_are_blind_in_turn(table: Table) -> None:
    """A printed row may have several figures, which are of one model: 22 B full, 22 B selective."""
    if len(table.runs) == 1:
        assert table.runs[0].half == "blind"
        return
    printed = [list(rows) for _, rows in groupby(table.runs, lambda run: _printed_row(table, run))]
    assert [{run.half for run in rows} for rows in printed] == [
        {("fit", "blind")[place % 2]} for place in range(len(printed))
    ]


def _printed_row(table: Table, run: Run) -> str:
    return run.name.rpartition(" ")[0] if "2205.05198" in table.source else run.name


@pytest.mark.parametrize("table", TABLES.values(), ids=list(TABLES))
def test_a_run_fills_whole_hosts_and_its_batch(table: Table) -> None:
    for run in table.runs:
        assert run.batch == run.candidate.batch
        assert run.candidate.devices == table.hardware(run).world
        assert sum(run.split) in {0, run.layers}
        assert run.memory is None or table.memory_of


def test_constants_name_the_rows_that_fit_them_and_no_blind_one() -> None:
    fitted = json.loads(FITTED.read_text(encoding="utf-8"))
    names = {name: fitting_names(TABLES, name) for name in fitted}
    assert {name: keys["fitted_on"] for name, keys in fitted.items()} == names
    assert fitted.keys() == {table.constants for table in TABLES.values()}
    assert read_constants().keys() == fitted.keys()


def test_the_page_shows_every_row_with_what_was_measured() -> None:
    page = published.PAGE.read_text(encoding="utf-8")
    for table in TABLES.values():
        assert f"### {table.source}: {table.table}" in page
        for run in table.runs:
            if run.unpredicted:
                assert f"{run.name} ({run.half}): {run.unpredicted}" in page
            elif table.measured == "seconds":
                assert f"| {run.name} | {run.half} | {run.value:.2f} |" in page
            else:
                assert f"| {run.name} | {run.half} | " in page


def test_writing_keeps_the_other_sections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    monkeypatch.setattr(published, "PAGE", page)
    page.write_text("# Page\n\n## First\n\ntext\n")
    published.write(f"{published.TITLE}\n\nold\n")
    published.write(f"{published.TITLE}\n\nnew\n")
    assert page.read_text() == f"# Page\n\n## First\n\ntext\n\n{published.TITLE}\n\nnew\n"


def test_a_step_time_follows_from_what_was_published() -> None:
    """96 B s l h^2 (1 + s / 6h + V / 16lh), arXiv 2104.04473 (3)."""
    devices, rows, s, layers, h, vocabulary = 2, 8, 64, 4, 64, 512
    formula = 96 * rows * s * layers * h**2 * (1 + s / (6 * h) + vocabulary / (16 * layers * h))
    assert models.seconds(SMALL, "tflops_recomputed") == pytest.approx(formula / (2e12 * devices))
    assert models.seconds(SMALL, "tokens_per_device") == rows * s / (2 * devices)
    assert models.seconds(SMALL, "seconds") == 2.0
    masked = models.gpt_flops(SMALL, recomputed=False, mask=True)
    assert models.flops(SMALL) == pytest.approx(masked)
    assert models.seconds(SMALL, "tflops") == pytest.approx(masked / (2e12 * devices))


def test_constants_change_what_they_name() -> None:
    table = replace_cluster(TABLES["megatron_sc21"])
    plain = library(table.hardware(SMALL))
    first = predict(table, SMALL, plain).seconds
    assert predict(table, SMALL, replace(plain, matmul=plain.matmul / 4)).seconds > first
    assert predict(table, SMALL, replace(plain, traffic=4.0)).seconds > first
    apart = SMALL.model_copy(update={"fused": False})
    assert predict(table, apart, replace(plain, traffic=4.0)).seconds == pytest.approx(first)
    assert predict(table, SMALL, replace(plain, float8=plain.float8 / 4)).seconds == pytest.approx(first)


def test_a_fit_finds_the_constants_that_made_its_rows() -> None:
    """Two rows that the planner made with other constants."""
    table = replace_cluster(TABLES["megatron_sc21"])
    known = library(table.hardware(SMALL))
    made = replace(known, matmul=known.matmul / 2)
    # so that products, and not launches, take the time
    long = {"length": 4096, "heads": 16, "half": "fit", "hidden": 4096}
    runs = [SMALL.model_copy(update={**long, "batch": batch}) for batch in (8, 16)]
    measured = table.model_copy(update={"measured": "seconds"})
    rows = [run.model_copy(update={"value": predict(measured, run, made).seconds}) for run in runs]
    fitted = fit([(measured, run) for run in rows], "H100")
    for run in rows:
        assert predict(measured, run, known).error < -0.2
        assert abs(predict(measured, run, fitted).error) < 0.04
    several = measured.model_copy(update={"runs": (*rows, SMALL)})
    assert [run for _, run in fitting({"": several}, table.constants)] == rows


def test_a_constant_at_its_limit_stays_and_the_others_fit_without_it() -> None:
    """Both misses want the first constant raised; what it leaves, the second takes, in halves of the rows."""
    slopes, misses = np.array([[-1.0, 0.2], [-1.0, 1.0]]), np.array([0.5, 0.5])
    free = _change(slopes, misses, np.array([False, False]))
    held = _change(slopes, misses, np.array([True, False]))
    assert free[0] > 0.3 > abs(free[1])
    assert held[0] == 0
    alone = np.linalg.lstsq(np.vstack([slopes[:, 1:], [[0.05]]]), np.array([-0.5, -0.5, 0.0]), rcond=None)[0]
    assert held[1] == pytest.approx(alone[0])
    assert not _change(slopes, misses, np.array([True, True]))[0]


def test_layers_that_are_left_over_go_where_the_framework_puts_them() -> None:
    run = SMALL.model_copy(update={"layers": 6, "pp": 4})
    assert run.split == (1, 2, 2, 1)
    assert run.model_copy(update={"first_more": True}).split == (2, 2, 1, 1)


def test_processors_that_exchange_compute_no_products() -> None:
    table = replace_cluster(TABLES["megatron_sc21"])
    known = library(table.hardware(SMALL))
    half = predict(table, SMALL.model_copy(update={"computing": 0.5}), known)
    slower = replace(known, matmul=known.matmul / 2, attention=known.attention / 2)
    assert half.seconds == predict(table, SMALL, slower).seconds


def test_an_op_takes_a_launch_more_where_the_host_waits_for_it() -> None:
    table = replace_cluster(TABLES["bloom"]).model_copy(update={"constants": "H100", "measured": "seconds"})
    known = library(table.hardware(SMALL))
    blocking = SMALL.model_copy(update={"blocking": True, "half": "fit"})
    assert predict(table, blocking, known).seconds == predict(table, SMALL, known).seconds
    slow = replace(known, launch=50e-6)
    assert predict(table, SMALL, slow).seconds == predict(table, SMALL, known).seconds
    measured = predict(table, blocking, slow).seconds
    assert measured > 5 * predict(table, blocking, known).seconds
    row = blocking.model_copy(update={"value": measured})
    assert fit([(table, row)], "H100").launch == pytest.approx(50e-6, rel=0.05)


def test_a_drivers_memory_is_more_than_that_of_tensors_by_what_rows_fit() -> None:
    """Two rows hold 1.2 and 1.3 times their tensors, beside what the table adds."""
    table = replace_cluster(TABLES["bloom"]).model_copy(update={"measured": "seconds", "memory_more": 1e9})
    known = library(table.hardware(SMALL))
    run = SMALL.model_copy(update={"memory": 1.0})
    tensors = predict(table, run, known).memory
    assert tensors is not None
    rows = [(table, run.model_copy(update={"memory": (tensors - 1e9) * times + 1e9})) for times in (1.2, 1.3)]
    reserve = fit(rows, "H100").reserve
    assert reserve == pytest.approx((1.2 * 1.3) ** 0.5)
    counted = predict(table, run, replace(known, reserve=reserve)).memory
    assert counted == pytest.approx((tensors - 1e9) * reserve + 1e9)
    tight = table.model_copy(update={"reserved": False})
    assert predict(tight, run, replace(known, reserve=reserve)).memory == tensors


def replace_cluster(table: Table) -> Table:
    return table.model_copy(update={"cluster": {"host": "DGX H100", "devices": 2}})


def test_bars_count_blind_rows_alone() -> None:
    table = replace_cluster(TABLES["bloom"]).model_copy(update={"one_model": True})
    row = predict(table, SMALL, Constants(0.8, 0.8, 0.5, 1.0, 3e-6))
    blind = replace(row, seconds=2.2, memory=None)
    fit = replace(row, run=SMALL.model_copy(update={"half": "fit"}), measured=1.0, seconds=9.0)
    results = {"bloom": [blind, fit, replace(blind, seconds=1.8, memory=1.05, run=_with_memory())]}
    median, worst, memory, order = published.bars({"bloom": table}, results)
    assert (median.figures, worst.figures, memory.figures, order.figures) == (2, 2, 1, 3)
    assert median.result == "10.0%"
    assert worst.met
    assert memory.met
    assert not order.met


def _with_memory() -> Run:
    return SMALL.model_copy(update={"memory": 1.0})


def test_every_second_product_of_a_layer_runs_again() -> None:
    """Of q, k, v, o, gate, up and down these are k, o and up."""
    changes = {"family": "llama", "key_heads": 2, "inner": 96, "recomputed": "selective", "pp": 1}
    plain = SMALL.model_copy(update=changes)
    second = plain.model_copy(update={"every_second": True})
    (all_kept,), (half_kept,) = (models.workload(run).work(run.candidate).kinds for run in (plain, second))
    tokens, inputs, outputs = SMALL.length, (64, 64, 64), (32, 64, 96)
    less = all_kept.nbytes.recomputed_activation - half_kept.nbytes.recomputed_activation
    assert less == 2 * tokens * sum(outputs)
    assert half_kept.nbytes.recomputed_backward_peak == all_kept.nbytes.recomputed_backward_peak
    assert half_kept.forward == all_kept.forward
    again = [op for op in half_kept.recomputed if op.kind == "matmul"]
    assert not [op for op in all_kept.recomputed if op.kind == "matmul"]
    pairs = zip(inputs, outputs, strict=True)
    assert [op.flops for op in again] == [2 * tokens * inner * outer for inner, outer in pairs]
    assert {op.flops for op in again} <= {op.flops for op in half_kept.forward if op.kind == "matmul"}


def test_an_error_has_a_sign() -> None:
    assert Predicted(SMALL, 2.0, 1.0, None, 0.0).error == -0.5
