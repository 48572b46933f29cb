"""The suite for a GPU, on the CPU: each part with small sizes, and what becomes of bars, errors and deaths.

What does not depend on the machine is judged here too: gradients, what is resumed, errors.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from benchmarks.gpu import __main__ as suite
from benchmarks.gpu import cost, exactness, large, processes, profiles
from benchmarks.gpu import part as parts
from benchmarks.gpu.models import (
    batch_of,
    gradients,
    microbatches_of,
    model_of,
    plain_step,
    qwen3,
    valid_tokens,
)
from benchmarks.gpu.part import NOT_JUDGED, Part, TimeLimitError, time_limit
from benchmarks.pool import Pool, Rank
from benchmarks.report import Row
from torch import Tensor
from torch.overrides import TorchFunctionMode

from penstock import AutoPipeline
from penstock.checkpoint.save_load import load_checkpoint
from support.pool import PRELOADED

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    transformers.logging.disable_progress_bar()
    yield
    transformers.logging.enable_progress_bar()


@pytest.fixture
def part(tmp_path: Path) -> Part:
    (tmp_path / "scratch").mkdir()
    return Part("A", "a part", CPU, tmp_path, tmp_path / "scratch", "a command")


def written(part: Part) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((part.out / "gpu_a.json").read_text())["rows"]
    return rows


def bars_met(part: Part) -> list[Row]:
    """The rows of a part in which all bars that were judged are met."""
    assert [(row.case, row.what, row.ours, row.why) for row in part.rows if row.met is False] == []
    return [row for row in part.rows if row.met]


def prepare_pool(patch: pytest.MonkeyPatch) -> None:
    patch.setenv("OMP_NUM_THREADS", "1")  # the pool sets both, for good
    patch.setenv("GLOO_SOCKET_IFNAME", "lo")
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)


# ---- the parts; of A and C without compiled layers, and of A with a setting of each precision


@pytest.mark.long
def test_part_a_with_few_settings(part: Part, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = (
        exactness.Setting("float32", dropout=exactness.DROPOUT), exactness.Setting("autocast", "flash"),
        exactness.Setting("bfloat16", "math", checkpointing=True),
        exactness.Setting("bfloat16", experts=exactness.EXPERTS), exactness.Setting("float32", "efficient"),
    )  # fmt: skip
    monkeypatch.setattr(exactness, "SETTINGS", settings)
    monkeypatch.setattr(exactness, "SCHEDULES", ("zb_v",))
    exactness.run(part, exactness.TINY._replace(every=1, repeats=2))
    assert len(bars_met(part)) == 4 + 1 + len(exactness.OFFLOADED)  # one of repeats
    assert len([row for row in part.rows if row.why.startswith("not run")]) == 1


@pytest.mark.sweep
@pytest.mark.long
def test_part_c_without_compiled_layers(part: Part, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "_compiled", lambda *_: None)
    cost.run(part, cost.TINY)
    named = [row.case for row in bars_met(part) if row.what.startswith("ops without a name")]
    assert named == ["1f1b", "zb_h1"]
    timed = [row for row in part.rows if row.why == NOT_JUDGED]
    assert {row.what for row in timed} >= {"step / plain loop", "(I + W) / B", "an op over the plain loop"}


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # which dynamo looks at while it traces
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
def test_part_a(part: Part) -> None:
    exactness.run(part, exactness.TINY)
    cases = {row.case for row in bars_met(part)}
    for word in (*exactness.SCHEDULES, "autocast", "checkpointing", "dropout", "mixture", "compiled", "math"):
        assert any(word in case for case in cases), word
    not_run = [row for row in part.rows if row.why.startswith("not run")]
    assert {"efficient" in row.case for row in not_run} == {True}


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
def test_every_case_of_part_a(part: Part) -> None:
    exactness.run(part, exactness.TINY._replace(every=1))
    repeated = len(exactness.SCHEDULES) + len(exactness.OFFLOADED)
    judged = len(exactness.SETTINGS) * len(exactness.SCHEDULES) + repeated + 1
    assert len(bars_met(part)) == judged - 3 * len(exactness.SCHEDULES)  # no efficient attention on a CPU


@pytest.mark.sweep
@pytest.mark.long
def test_part_b(part: Part, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare_pool(monkeypatch)
    processes.run(part, processes.TINY)
    errors = [row.case for row in bars_met(part) if row.what == "to the error"]
    assert errors == ["gloo: kill one of two processes", "gloo: stop one of two processes"]
    assert [row.case for row in part.rows if "gloo, 4 processes" in row.case] == ["gloo, 4 processes: zb_v"]
    assert [row.why for row in part.rows if row.case.startswith("NCCL")] == ["not run: NCCL needs a GPU"] * 4


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
def test_part_c(part: Part) -> None:
    cost.run(part, cost.TINY)
    met = {(row.case, row.what) for row in bars_met(part)}
    assert ("1f1b, compiled layers", "recompilations after step 2") in met
    timed = [row for row in part.rows if row.why == NOT_JUDGED]
    assert {row.what for row in timed} >= {"step / plain loop", "(I + W) / B", "an op over the plain loop"}
    assert (part.scratch / "step-1f1b.json.gz").is_file()


@pytest.mark.sweep
def test_part_d(part: Part) -> None:
    large.run(part, large.TINY)
    met = {row.what for row in bars_met(part)}
    assert met >= {"weights that differ in any bit", "losses that differ", "host memory beyond the model"}
    assert not (part.scratch / parts.TEMPORARY).exists()


@pytest.mark.long
def test_a_step_next_to_torchs(part: Part, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its stages are made on the device that is asked for, and without values too."""
    prepare_pool(monkeypatch)
    with Pool(2, join=False, method="forkserver") as pool:
        processes._next_to_torch(part, processes.TINY, pool, "gloo")
    case = f"gloo: {processes.NEXT}"
    assert [(row.case, row.what, row.why) for row in part.rows] == [
        (case, "step / torch's", NOT_JUDGED), (case, "step", ""),
    ]  # fmt: skip
    assert len(part.raw[case]) == processes.TINY.beside.rounds


class AnswersOf:
    """A pool whose processes answer this."""

    def __init__(self, *answers: Any) -> None:
        self._answers = list(answers)

    def run(self, *_: Any, **__: Any) -> list[Any]:
        return self._answers


def test_part_b_misses_other_bits_other_errors_and_late_ones(
    part: Part, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool: Any = AnswersOf(("gloo", {"a": "one", "b": "two"}), ("gloo", {"c": "three"}))
    monkeypatch.setattr(processes, "digests_of", lambda job: {"a": "one", "b": "other", "c": "three"})
    processes._several(part, processes.TINY, pool, "gloo", "gloo")
    assert {(row.ours, row.met, row.why) for row in part.rows} == {(1, False, "such as b")}
    part.rows.clear()

    class Struck(AnswersOf):
        def run(self, _: Any, job: Any, **__: Any) -> list[Any]:
            Path(job.folder, "struck").write_text("100.0")
            return self._answers

    late = 100.0 + processes.TINY.timeout + processes.AFTER + 0.1
    pool = Struck(("PeerLostError", "", late))
    processes._faults(part, processes.TINY, pool, "gloo", "gloo")
    # the right error for the one that was killed, not for the one that was stopped; late for both
    assert [row.met for row in part.rows] == [True, False, False, False]


@pytest.mark.sweep
@pytest.mark.long
def test_part_d_misses_what_a_checkpoint_has_lost(part: Part, monkeypatch: pytest.MonkeyPatch) -> None:

    def forgetful(path: Path, pipe: Any, optimizer: Any) -> Any:
        found = load_checkpoint(path, pipe, optimizer)
        optimizer.state.clear()
        return found

    monkeypatch.setattr(large, "load_checkpoint", forgetful)
    large.run(part, large.TINY)
    assert {row.what for row in part.rows if row.met is False} >= {"weights that differ in any bit"}


class AsOnGPU(Part):
    """Takes the ways that only a GPU has, on the CPU."""

    on_gpu = True


@pytest.fixture
def as_on_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Part:
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    for name, nbytes in (("memory_allocated", 0), ("max_memory_allocated", 10**6)):
        monkeypatch.setattr(torch.cuda, name, lambda *_, nbytes=nbytes: nbytes)
    (tmp_path / "scratch").mkdir()
    return AsOnGPU("A", "a part", CPU, tmp_path, tmp_path / "scratch", "a command")


def unfinished(part: Part) -> list[tuple[str, str]]:
    return [(row.case, row.why) for row in part.rows if row.what == "the measurement"]


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
def test_the_ways_of_part_c_on_a_gpu(as_on_gpu: Part, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its numbers mean nothing here."""
    monkeypatch.setattr(cost, "profiled", lambda *args, host=True: profiles.profiled(*args))
    cost.run(as_on_gpu, cost.TINY)
    assert unfinished(as_on_gpu) == []
    judged = {row.what for row in as_on_gpu.rows if row.met is not None}
    assert judged >= {
        "timeline's busy time / profiler's, less 1", "waits of the host for the GPU, a step",
        "the same, an op", "peak less weights, gradients and predicted live / peak", "step / plain loop",
    }  # fmt: skip


@pytest.mark.sweep
def test_the_ways_of_part_d_on_a_gpu(as_on_gpu: Part, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its numbers mean nothing here."""
    monkeypatch.setattr(large, "MATMUL", 64)
    for name in ("disk_rate", "read_rate"):  # of a disk that is quick enough
        monkeypatch.setattr(large, name, lambda *_: 9.0)
    large.run(as_on_gpu, large.TINY)
    assert unfinished(as_on_gpu) == []
    judged = {row.what for row in as_on_gpu.rows if row.met is not None}
    assert judged >= {"of a matrix product's rate", "peak / predicted, less 1", "weights", "checkpoint"}


# ---- what a part judges can fail


def test_a_gradient_that_differs_is_missed(part: Part, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = exactness.of_pipeline

    def wrong(*args: Any, **options: Any) -> list[dict[str, Tensor]]:
        found = plain(*args, **options)
        found[-1]["lm_head.weight"][0, 0] *= 1.2
        return found

    monkeypatch.setattr(exactness, "of_pipeline", wrong)
    monkeypatch.setattr(exactness, "SETTINGS", (exactness.Setting("float32"), exactness.Setting("bfloat16")))
    monkeypatch.setattr(exactness, "SCHEDULES", ("1f1b",))
    sizes = exactness.TINY._replace(every=1, repeats=1)
    exactness.run(part, sizes)
    missed = [(row.case, row.why) for row in part.rows if row.met is False]
    assert missed == [(f"{kind}: 1f1b", "of lm_head.weight") for kind in ("float32", "bfloat16")]


def test_a_lost_microbatch_is_outside_of_the_spread(part: Part) -> None:
    sizes, setting = exactness.TINY, exactness.Setting("bfloat16")
    model, batch = exactness.whole_model(sizes, setting), batch_of(sizes.model, CPU, ignored=True)
    reference = exactness.of_plain_runs(part, sizes, setting, model, batch)
    parts_of_step = microbatches_of(batch, sizes.model.microbatches)
    plain_step(model, parts_of_step[:-1], valid_tokens(batch))
    lost = gradients(model)
    for name, value in lost.items():
        only = exactness.Reference({name: reference.gradients[name]}, reference.scales)
        assert exactness.worst([{name: value}], only)[0] > 2 * exactness.SPREADS, name


@pytest.mark.parametrize("lost", [{}, {"weight": torch.tensor([float("nan")])}], ids=["missing", "nan"])
def test_a_gradient_that_is_none_is_infinitely_wrong(lost: dict[str, Tensor]) -> None:
    reference = exactness.Reference({"weight": torch.ones(1)}, {"weight": 1.0})
    assert exactness.worst([lost], reference) == (float("inf"), "weight")


def test_a_stage_asks_for_causal_attention_without_a_mask() -> None:
    """A GPU's flash attention takes no mask, where a CPU's does."""
    asked = []

    class Seen(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is F.scaled_dot_product_attention:
                asked.append((kwargs["attn_mask"], kwargs["is_causal"]))
            return func(*args, **(kwargs or {}))

    size = exactness.TINY.model
    model = model_of(qwen3(size), torch.bfloat16)
    pipe = AutoPipeline(ranks=size.ranks, schedule="zb_v", microbatches=size.microbatches).build(model)
    with Seen():
        pipe.step(batch_of(size, CPU, ignored=True))
    assert asked == [(None, True)] * size.layers * size.microbatches
    pipe.close()


def test_a_profile_counts_waits_within_the_step_and_busy_time_once() -> None:
    def event(category: str, name: str, start: float, end: float) -> dict[str, Any]:
        return {"cat": category, "name": name, "ts": start, "dur": end - start}

    seen = profiles.Profile([
        event("user_annotation", profiles.WINDOW, 100, 200),
        event("user_annotation", "penstock 0F1", 110, 120),
        event("cuda_runtime", "cudaStreamSynchronize", 150, 160),
        event("cuda_runtime", "cudaDeviceSynchronize", 210, 220),
        event("kernel", "gemm 1F0", 120, 140), event("kernel", "gemm", 130, 150),
        event("gpu_memcpy", "copy", 190, 230),
    ])  # fmt: skip
    assert seen.synchronisations == 1
    assert seen.busy == pytest.approx(70e-6)
    assert seen.ops == {"0F1"}


def late(rank: Rank, seconds: float, fails: bool) -> str:
    if fails and rank.is_first:
        raise ValueError("it broke")
    time.sleep(seconds * rank.index)
    return f"after {seconds:g} s"


@pytest.mark.long
def test_a_call_after_one_that_failed_has_its_own_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a call that raised on one rank, another's answer was taken for that of the next call."""
    prepare_pool(monkeypatch)
    with Pool(2, join=False, method="forkserver") as pool:
        with pytest.raises(RuntimeError, match="it broke"):
            pool.run(late, 0.5, True)
        assert pool.run(late, 0.0, False) == ["after 0 s"] * 2


def test_model_flops_are_those_of_products_and_attention() -> None:
    size = large.TINY.model
    model = model_of(qwen3(size), torch.float32)
    matrices = sum(p.numel() for n, p in model.named_parameters() if p.dim() == 2 and "embed" not in n)
    attention = 2 * size.layers * size.heads * size.head_dim * size.sequence  # scores, and sums of values
    assert large.model_flops(size) == 3 * 2 * (matrices + attention) * size.tokens


# ---- bars, limits, deaths


def test_the_bars_are_those_of_the_page() -> None:
    page = " ".join((suite.ROOT / "docs" / "gpu.md").read_text(encoding="utf-8").split())
    for text in (
        f"a budget of {parts.BUDGET / 60:g} minutes and ends after {suite.LIMIT / 60:g} minutes at most",
        f"in the same two processes, on one GPU or two | {processes.NEXT_TO_TORCH} |",
        f"raises `PeerLostError` within {processes.AFTER:g} s |",
        f"float32, without TF32 | a difference of {exactness.TOLERANCE:.0e}".replace("e-0", "e-"),
        f"repeats a step {exactness.FULL.repeats} times",
        f"NCCL, one process | build, step, save and close in {processes.WORLD_OF_ONE:g} s |",
        f"within {processes.AFTER:g} s of its timeout |",
        f"`1f1b`, `zb_v` | {cost.STEP['1f1b']}, {cost.STEP['zb_v']} |",
        f"(I + W) / B | {cost.HALVES} |",
        f"live activations, over the peak | {100 * cost.EXCESS:g} % |",
        f"busy time against the profiler's | {100 * cost.BUSY:g} % |",
        f"recompilations after step 2 | {cost.COMPILED}; 0 |",
        f"the host's time for an op over the plain loop | {cost.HOST:g} µs,",
        f"waits for the GPU | {cost.SYNCHRONISATIONS} a step, 0 an op |",
        f"load | {large.LOAD:g} GB/s, and {large.HOST:g} GB of host memory |",
        f"background | {large.SAVE:g} GB/s; it holds up training for bytes / ({large.COPY:g} GB/s) |",
        f"peak over the predicted one | within {100 * large.PEAK:g} % |",
        f"of the rate of a matrix product | {100 * large.UTILISATION:g} % |",
    ):
        assert text in page


def test_times_are_judged_on_a_gpu(as_on_gpu: Part) -> None:
    whole = {"B": {0: 2.0, 1: 4.0}}
    for weight in (1.05, 1.2):
        split = {"I": {0: 1.0, 1: 2.0}, "W": {0: weight, 1: 2 * weight}}
        cost._halves(as_on_gpu, {"zb_h1": split, "1f1b": whole})
    assert [row.met for row in as_on_gpu.rows] == [True, False]


@pytest.mark.parametrize(
    ("version", "obstacle"),
    [((2, 29, 3), "NCCL 2.29.3; several ranks on one GPU need 2.30"), ((2, 30, 0), None)],
)
def test_several_ranks_of_nccl_share_a_gpu_where_nccl_can(
    version: tuple[int, ...], obstacle: str | None, as_on_gpu: Part, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "nccl_version", lambda: version)
    assert processes.no_shared_gpu(as_on_gpu) == obstacle


def test_bars(part: Part) -> None:
    part.add("a", "x", 1.0, at_most=1.0)
    part.add("b", "x", 1.1, at_most=1.0, why="of it")
    part.add("c", "x", float("nan"), at_least=1.0)
    part.add("d", "x", 9.0, at_most=1.0, timing=True)
    part.add("e", "x", 9.0)
    part.not_run("f", "x", "no GPU", "at most 1")
    verdicts = [row.verdict for row in part.rows]
    assert verdicts == ["met", "MISSED: of it", "MISSED", NOT_JUDGED, "", "not run: no GPU"]
    assert part.found.missed == 2
    part.write()
    assert [row["ours"] for row in written(part)] == [1.0, 1.1, None, 9.0, 9.0, None]
    assert [row.met for row in parts.read(part.out / "gpu_a.json").rows] == [
        True,
        False,
        False,
        None,
        None,
        None,
    ]


def test_an_error_is_a_missed_row_and_the_part_goes_on(part: Part) -> None:

    def breaks() -> None:
        raise ValueError("it broke")

    part.measure("first", 60, breaks)
    part.measure("second", 60, partial(part.add, "second", "x", 1.0))
    assert [(row["case"], row["met"], row["why"]) for row in written(part)] == [
        ("first", False, "ValueError: it broke"), ("second", None, ""),
    ]  # fmt: skip


def test_what_does_not_fit_into_the_budget_is_not_run(tmp_path: Path) -> None:
    """0.5.0: on a slow host a part was ended by force, with its most telling rows still to come."""
    part = Part("A", "a part", CPU, tmp_path, tmp_path, "a command", budget=0.3)
    assert part.measure("first", 60, lambda: "made") == "made"
    for case in ("under way", "last"):
        part.measure(case, 60, partial(time.sleep, 30))
    assert [(row["case"], row["met"]) for row in written(part)] == [("under way", None), ("last", None)]
    assert {row.why for row in part.rows} == {"not run: the part's budget of 0.3 s ended before it"}
    assert suite.LIMIT > parts.BUDGET


def test_every_part_ends_within_its_budget_whatever_is_left_to_do(part: Part) -> None:
    part._budget = 0.0
    exactness.run(part, exactness.TINY)
    processes.run(part, processes.TINY)
    cost.run(part, cost.TINY)
    large.run(part, large.TINY)
    assert len(part.rows) > 20
    assert {row.met for row in part.rows} == {None}


def test_a_measurement_ends_at_its_limit() -> None:
    began = time.monotonic()
    with pytest.raises(TimeLimitError, match=r"longer than 0\.2 s"), time_limit(0.2):
        time.sleep(30)
    assert time.monotonic() - began < 10
    with time_limit(0.2):
        pass
    time.sleep(0.3)  # nothing comes after the block


@pytest.mark.parametrize(("end", "why"), [
    ("kill -KILL $$", "its process was ended by SIGKILL"), ("sleep 60", "it took longer than 1 s"),
    ("exit 1", "exit code 1"),
])  # fmt: skip
def test_a_part_that_dies_keeps_what_it_found_and_is_missed(
    end: str, why: str, part: Part, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part.add("a", "x", 1.0, at_most=2.0)
    part.raw["under way"] = "the end"
    part.write()
    (tmp_path / "gpu_a.json").rename(tmp_path / "found")
    checkpoint = tmp_path / parts.TEMPORARY / "checkpoint"
    script = f"cp {tmp_path}/found {tmp_path}/gpu_a.json; mkdir -p {checkpoint}; {end}"
    monkeypatch.setattr(suite, "command_of", lambda *_: ["sh", "-c", script])
    assert suite.apart("A", True, tmp_path, tmp_path, limit=1.0) == 1
    assert [(row["case"], row["met"], row["why"]) for row in written(part)] == [
        ("a", True, ""), ("the end", False, why),
    ]  # fmt: skip
    assert not checkpoint.exists()


def test_a_part_that_writes_nothing_is_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "command_of", lambda *_: ["false"])
    assert suite.apart("B", True, tmp_path, tmp_path) == 1
    (row,) = json.loads((tmp_path / "gpu_b.json").read_text())["rows"]
    assert (row["met"], row["why"]) == (False, "it wrote nothing, with exit code 1")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu", "--out", str(tmp_path)])
    assert suite.main() == 0
    assert "No GPU here: nothing is measured" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_a_missed_bar_is_exit_code_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu", "--tiny", "--out", str(tmp_path)])
    missed = {"A": 0, "B": 2, "C": 0, "D": 0}
    monkeypatch.setattr(suite, "apart", lambda name, *_: missed[name])
    assert suite.main() == 1
    missed["B"] = 0
    assert suite.main() == 0
