"""Steps whose number of microbatches changes from call to call, and gradients that add up over calls."""

from __future__ import annotations

import gc
import random
import re
import weakref
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock import AutoPipeline, Axes, Pipeline
from penstock.batch.padding import Padding
from penstock.errors import BatchError, ConfigError
from penstock.models.activation_checkpointing import Checkpointing
from penstock.pipeline.steps import schedules
from penstock.runtime import step_memory
from penstock.runtime.plan import Compute
from penstock.schedule import build, dump, verify
from support.adapted import PREFIX, adapted, lora
from support.counted import assert_exact, made
from support.covering import every
from support.families import ragged_batch, tiny_model
from support.mesh import build_whole, error_of, model_of, own_part, same_on_all, worst_gradient
from support.own_chain import Piece, squares, x_batch
from support.pool import Pool
from support.ragged import Microbatches, ragged, tokens
from support.reference import assert_every_gradient, assert_gradients, gradients_of, plain_step, plain_steps
from support.refusals import refuses
from support.schedules import FORMS, takes

COUNTS = (4, 1, 6, 3, 6)  # the pipeline is built for 4


# _training: the schedule of the last step, which `schedule` is not
def check_counts(form: str, layers: int = 4, **options: Any) -> None:
    """Each count is exact, holds as many activations as its own schedule is proven to, and runs its ops."""
    model = tiny_model("llama", torch.float64, layers=layers)
    pipe = made(model, FORMS[form], **options)
    for turn, count in enumerate(COUNTS):
        if not takes(form, 2, count):
            continue
        assert_exact(pipe, model, ragged(count, seed=turn))
        proof = verify(pipe._training.schedule)
        assert proof.schedule.microbatches == count
        assert pipe.timeline.peak_live == proof.peak_live
        for rank in range(2):
            assert tuple(span.op for span in pipe.timeline.of_rank(rank)) == proof.schedule.programs[rank]
        assert pipe.evaluate(ragged(3, seed=turn)).tokens > 0
    assert (pipe.schedule.microbatches, pipe.proof.schedule) == (4, pipe.schedule)
    assert f"{len(pipe.costs().activation[0])} microbatches; last step" in str(pipe)  # type: ignore[index, arg-type]
    pipe.close()


MOST = [form for form in FORMS if "searched" not in form]


@pytest.mark.parametrize(
    ("form", "options"),
    [
        ("interleaved_zero_bubble", {}),
        ("dualpipe", {"shapes": "padded"}),
        pytest.param(
            "dualpipe_v",
            {"activation_checkpointing": Checkpointing(in_flight=(2, 0))},
            marks=pytest.mark.sweep,
        ),
    ],
)
def test_steps_are_exact_whatever_their_count(form: str, options: dict[str, Any]) -> None:
    check_counts(form, **options)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"activation_checkpointing": Checkpointing(in_flight=(2, 0))},
    {"shapes": "exchanged"},
    {"shapes": Padding(length=20), "activation_checkpointing": "selective"},
]


@pytest.mark.sweep
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("form", MOST)
def test_every_schedule_is_exact_for_every_count(form: str, options: dict[str, Any]) -> None:
    check_counts(form, layers=8, **options)


def test_a_stage_that_trains_nothing_has_no_w_whatever_the_count() -> None:
    peft = adapted(
        tiny_model("llama", torch.float64, layers=4),
        lora(layers_to_transform=[2, 3], target_modules=["q_proj"]),
    )
    pipe = AutoPipeline(ranks=2, schedule="zb_h1", microbatches=4).build(peft)
    for count in (4, 6, 2):
        given = ragged(count, seed=count)
        loss, expected = plain_steps(peft, given)
        pipe.zero_grad()
        assert pipe.step(given).loss == pytest.approx(loss, abs=1e-10)
        assert_gradients(gradients_of(pipe), {n.removeprefix(PREFIX): g for n, g in expected.items()}, 1e-10)
        kinds = [{span.op.kind for span in pipe.timeline.of_rank(rank)} for rank in range(2)]
        assert kinds == [{"F", "B"}, {"F", "I", "W"}]
    pipe.close()


# _training: the plan of the last step is in no public result
@pytest.mark.sweep
def test_a_memory_limit_chooses_anew_for_each_count() -> None:
    """The model that the limit is computed from does not live on: the caller's may be dropped."""
    model = tiny_model("llama", torch.float64, layers=4)
    limit = Checkpointing(memory_limit=1.6 * 2**20, shape=(3, 12))
    with refuses(ConfigError, "memory_limit=", "rank 1 takes"):
        made(model, "gpipe", activation_checkpointing=replace(limit, memory_limit=1000.0))
    pipe = made(model, "gpipe", activation_checkpointing=limit)
    again = []
    for count in (4, 12, 2):
        assert_exact(pipe, model, ragged(count))
        actions = pipe._training.executors[0].plan.actions
        again.append(sum(isinstance(action, Compute) and action.how.recompute for action in actions))
    assert again[2] <= again[0] < again[1]
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None
    pipe.step(ragged(7))


def test_a_schedule_is_made_once_for_a_count_and_the_last_ones_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(schedules, "KEPT", 3)
    pipe = made(tiny_model("llama"))
    proven: list[int] = []

    def counted(schedule: Any) -> Any:
        proven.append(schedule.microbatches)
        return verify(schedule)

    monkeypatch.setattr(schedules, "verify", counted)
    for count in (4, 2, 2, 1, 4, 2, 1):
        pipe.step(ragged(count))
    assert proven == [2, 1]
    for count in (5, 2, 1, 5, 4):  # 4 has been used longest ago, and goes
        pipe.step(ragged(count))
    assert proven == [2, 1, 5, 4]
    for count in (2, 2, 7):
        pipe.evaluate(ragged(count))
    assert proven == [2, 1, 5, 4, 2, 7]


# ---- Counts that a schedule does not take


def test_a_count_that_the_schedule_does_not_take_is_refused_by_name(tmp_path: Path) -> None:
    model = tiny_model("llama", torch.float64)
    dump(build("1f1b", ranks=2, microbatches=4), tmp_path / "four.csv")
    groups = {"schedule": "1f1b", "stages_per_rank": 2, "microbatch_group_size": 4}
    for schedule, count, said in (
        ("dualpipe", 3, "ConfigError: microbatches=3: "),
        (groups, 2, "ConfigError: microbatch_group_size=4: with 2 ranks and 2 microbatches it is 2"),
        (build("zb_h1", ranks=2, microbatches=4), 5,
         "ConfigError: a step of 5 microbatches: schedule 'zb_h1' was given as it is, for 4. Give 4, or"),
        ({"schedule": "file", "path": str(tmp_path / "four.csv")}, 3,
         "ConfigError: a step of 3 microbatches: schedule 'four' was given as it is, for 4. Give 4, or"),
    ):  # fmt: skip
        pipe = made(model, schedule)
        assert error_of(lambda: pipe.step(ragged(count))).startswith(said)  # noqa: B023
        assert_exact(pipe, model, ragged(4))  # and the pipeline goes on


def test_a_step_that_fails_leaves_nothing_for_one_of_another_count() -> None:
    armed: list[bool] = []

    class Moody(Piece):
        def forward(self, x: Tensor) -> Tensor:
            if armed and x.device.type != "meta":
                armed.clear()
                raise RuntimeError("out of temper")
            return super().forward(x)

    pipe = Pipeline.from_provider(Moody, schedule="zb_v", ranks=2, microbatches=4, loss_fn=squares)
    for failing, after in ((6, 2), (2, 6), (3, 3)):
        pipe.zero_grad()
        armed.append(True)
        with pytest.raises(RuntimeError, match="out of temper") as error:
            pipe.step(x_batch(), microbatches=failing)
        assert any("penstock: on rank" in note for note in error.value.__notes__)
        pipe.zero_grad()
        loss = pipe.step(x_batch(), microbatches=after).loss
        found = gradients_of(pipe)
        pipe.zero_grad()
        assert pipe.step(x_batch()).loss == pytest.approx(loss)
        assert_gradients(gradients_of(pipe), found, 1e-5)


# ---- Gradients that add up over calls


def calls_for(losses: str) -> list[Any]:
    """Parts of one step: a mapping, lists of other counts, and one in which nothing counts."""
    nothing = {"input_ids": (ids := tokens(2, 5, 9)), "labels": torch.full_like(ids, -100)}
    return [ragged_batch(5, 7), ragged(3, 1), *([[nothing]] if losses == "tokens" else []), ragged(6, 2)]


class SumOfSquares:
    """A loss of one's own, whose items are rows."""

    def weight(self, microbatch: Any) -> int:
        return len(microbatch["input_ids"])

    def total(self, output: Tensor, microbatch: Any) -> Tensor:
        return output.square().sum()


@pytest.mark.parametrize(
    ("losses", "schedule"), every(2, product(["tokens", "mean", "sum"], ["1f1b", "zb_v"]))
)
def test_calls_that_share_a_total_are_one_step(losses: str, schedule: str) -> None:
    """Against one call with all of the microbatches, and for the next-token loss a plain process."""
    model = tiny_model("llama", torch.float64, tied=True)
    loss_fn = {"tokens": None, "mean": lambda logits, _: logits.square().mean(), "sum": SumOfSquares()}[
        losses
    ]
    pipe = made(model, schedule, loss_fn=loss_fn)
    calls = calls_for(losses)
    whole = [part for call in calls for part in ([call] if isinstance(call, dict) else call)]
    expected = pipe.step(whole)
    gradients = gradients_of(pipe)
    if losses == "tokens":
        loss, gradients = plain_steps(model, whole)
        assert expected.loss == pytest.approx(loss, rel=1e-10)

    pipe.zero_grad()
    total = pipe.count_tokens(*calls)
    results = [pipe.step(call, total_tokens=total) for call in calls]
    assert total == expected.tokens == sum(result.tokens for result in results)
    assert sum(result.loss for result in results) == pytest.approx(expected.loss, rel=1e-10)
    assert_gradients(gradients_of(pipe), gradients, 1e-10)


class PerMicrobatch:
    """A mean over microbatches."""

    def weight(self, microbatch: Any) -> int:
        return 1

    def total(self, output: Any, microbatch: Any) -> Tensor:
        found: Tensor = output.square().mean()
        return found


def test_tokens_of_a_loss_of_ones_own_are_counted_by_microbatch() -> None:
    """A batch of four microbatches counted as one: gradients of its calls were four times as large."""
    pipe = made(tiny_model("llama"), loss_fn=PerMicrobatch())
    batch = dict.fromkeys(("input_ids", "labels"), tokens(8, 6, 0))
    microbatches = pipe.microbatches(batch)
    assert pipe.count_tokens(batch) == pipe.step(batch).tokens == 4
    assert pipe.count_tokens(batch, microbatches[:3]) == 7


@pytest.mark.parametrize("total", [0, -1, 2.5, True, "8"])
def test_a_total_that_nothing_can_be_divided_by_is_refused(total: Any) -> None:
    pipe = made(tiny_model("llama"))
    with refuses(ConfigError, f"total_tokens={total!r}", "divided by it"):
        pipe.step(ragged_batch(), total_tokens=total)
    with refuses(BatchError, "a batch given as NoneType"):
        pipe.count_tokens(ragged_batch(), None)  # type: ignore[arg-type]
    assert pipe.count_tokens() == 0


# ---- Over processes


def refused_on_one_rank() -> list[str]:
    """What a rank says of a step that another one asks for with another count; the next step is exact."""
    model, rank = tiny_model("llama"), dist.get_rank()
    found = []
    for schedule, shapes, counts in (
        ("1f1b", "inferred", (3, 5)),  # no rank refuses it
        ("dualpipe", "inferred", (3, 4)),  # rank 0 alone does
        ("dualpipe", "padded", (6, 5)),
    ):
        pipe = made(model, schedule, shapes=shapes)
        found.append(error_of(lambda: pipe.step(ragged(counts[rank]))))  # noqa: B023
        found.append(error_of(lambda: pipe.step(ragged(2), total_tokens=7 + rank)))  # noqa: B023
        assert_exact(pipe, model, ragged(6), 1e-5)
        pipe.close()
    return found


@pytest.mark.sweep
def test_ranks_that_disagree_on_the_count_raise_the_same_error(pool: Pool) -> None:
    said = same_on_all(pool.run(2, refused_on_one_rank))
    for words, expected in zip(
        said,
        (
            r"BatchError: rank 0: schedule \w+, 3 microbatches.*; rank 1: schedule \w+, 5 microbatches",
            total := "BatchError: rank 0: .* total_tokens=7; rank 1: .* total_tokens=8",
            r"BatchError: rank 0: it refuses its batch \(microbatches=3: .*; rank 1: schedule",
            total,
            "ConfigError: microbatches=5, on process 1: DualPipe sends half of the microbatches each way",
            total,
        ),
        strict=True,
    ):
        assert re.match(expected, words), words


def over_processes(forms: Sequence[str], steps: int) -> None:
    """Steps of any count and length, with evaluations and accumulation between them, on this rank."""
    model, rank = tiny_model("llama", layers=4 * dist.get_world_size()), dist.get_rank()
    for place, form in enumerate(forms):
        draw = random.Random(place)
        options = {"transport": (None, "gloo")[place % 2], "activation_checkpointing": place % 3 == 2}
        pipe = made(model, FORMS[form], ranks=dist.get_world_size(), **options)
        for turn in range(steps):
            count = draw.choice([n for n in (1, 2, 3, 4, 6, 7) if takes(form, 2, n)])
            assert_exact(pipe, model, ragged(count, seed=turn), 1e-5)
            assert pipe.timeline.of_rank(rank)
            pipe.evaluate(ragged(draw.randint(1, 5), seed=turn))
        calls: list[Any] = [ragged_batch(6), ragged(2, seed=5)]
        loss, expected = plain_steps(model, [calls[0], *calls[1]])
        pipe.zero_grad()
        total = pipe.count_tokens(*calls)
        assert sum(pipe.step(call, total_tokens=total).loss for call in calls) == pytest.approx(
            loss, abs=1e-5
        )
        assert_every_gradient(pipe.modules.values(), expected, 1e-5)
        pipe.close()


@pytest.mark.sweep
def test_any_count_over_processes(pool: Pool) -> None:
    """Over shared memory and gloo in turn."""
    pool.run(2, over_processes, ["1f1b", "zb_v"], 3)


@pytest.mark.sweep
@pytest.mark.parametrize("ranks", [2, 4])
def test_any_count_over_processes_in_every_schedule(pool: Pool, ranks: int) -> None:
    pool.run(ranks, over_processes, MOST, 8)


def on_a_mesh(family: str, ranks: int, axes: Axes, schedule: Any) -> list[str]:
    """Steps of changing counts, and one of several calls, against one process; then totals that differ."""
    model = model_of(family, layers=4)
    pipe = build_whole(model, ranks, axes, schedule=schedule)
    for turn, count in enumerate((2, 4, 1, 4)):
        whole = wide_batch(8, 8 + 4 * turn)
        loss, expected = plain_step(model, whole)
        pipe.zero_grad()
        mine = own_part(whole, *pipe.batch_part)
        assert pipe.step(mine, microbatches=count).loss == pytest.approx(loss, rel=1e-9)
        worst, name = worst_gradient(pipe, expected)
        assert worst < 1e-9, f"{name} differs by {worst} with {count} microbatches"
        assert pipe.evaluate(mine).loss == pytest.approx(loss, rel=1e-9)
    whole = wide_batch(12, 8)
    loss, expected = plain_step(model, whole)
    calls = [own_part({n: v[a:b] for n, v in whole.items()}, *pipe.batch_part) for a, b in ((0, 4), (4, 12))]
    pipe.zero_grad()
    total = pipe.count_tokens(*calls)
    results = [
        pipe.step(call, microbatches=n, total_tokens=total) for call, n in zip(calls, (1, 4), strict=True)
    ]
    assert sum(result.loss for result in results) == pytest.approx(loss, rel=1e-9)
    assert total == sum(result.tokens for result in results) == int((whole["labels"][:, 1:] != -100).sum())
    worst, name = worst_gradient(pipe, expected)
    assert worst < 1e-9, f"{name} differs by {worst} over two calls"
    part = pipe.batch_part[0]
    found = [error_of(lambda: pipe.step(calls[1], total_tokens=9 + part))]
    found.append(error_of(lambda: pipe.step(calls[1], microbatches=1 + part)))
    pipe.step(calls[0])
    pipe.close()
    return found


def wide_batch(rows: int, length: int) -> dict[str, Tensor]:
    ids = tokens(rows, length, rows + length)
    labels = ids.clone()
    for row in range(rows):
        labels[row, : 1 + row % 5] = -100
    return {"input_ids": ids, "labels": labels}


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("family", "ranks", "axes", "schedule"),
    [
        ("llama", 2, Axes(dp_shard=2), "1f1b"),
        ("llama", 2, Axes(cp=2), "zb_h1"),
        ("mixtral", 2, Axes(dp_shard=2, ep=2), "dualpipe_v"),
        ("llama", 2, Axes(dp_replicate=2), "gpipe"),
        ("llama", 2, Axes(tp=2), "zb_v"),
    ],
    ids=str,
)
def test_any_count_beside_other_axes(pool: Pool, family: str, ranks: int, axes: Axes, schedule: Any) -> None:
    totals, counts = same_on_all(pool.run(4, on_a_mesh, family, ranks, axes, schedule))
    if axes.batch_parts > 1:
        assert totals.startswith("BatchError: total_tokens: 9 on rank 0")
        assert counts.startswith("BatchError: microbatches: 1 on rank 0")
    else:
        assert (totals, counts) == ("accepted", "accepted")


# ---- Routers


def test_the_experts_of_the_last_step_are_those_of_its_count() -> None:
    """A microbatch may have gone through the other copy of the model in the step before."""
    model = tiny_model("mixtral", torch.float64)
    pipe = made(model, "dualpipe", replay_routing=True)
    for count in (8, 2, 6):
        ids = tokens(count, 6, count)
        pipe.step({"input_ids": ids, "labels": ids}, microbatches=count)
        found = pipe.routed_experts()
        assert isinstance(found, Tensor)
        assert found.shape == (count, 6, 4, 2)
        again = pipe.step({"input_ids": ids, "labels": ids}, microbatches=count, routed_experts=found)
        assert again.tokens == count * 5


# ---- Nothing grows


def same_tokens(count: int, length: int) -> Microbatches:
    return [{"input_ids": (ids := tokens(1, length, n)), "labels": ids} for n in range(count)]


def living() -> tuple[int, int, int]:
    """Live tensors, all objects that the collector sees, and bytes in memory."""
    gc.collect()
    everything = gc.get_objects()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * 4096
    return sum(type(each) in (Tensor, nn.Parameter) for each in everything), len(everything), resident


# _training, _world: what a step leaves behind is seen there alone
def random_calls(ranks: int, schedule: str, calls: int, most: int) -> tuple[list[int], int]:
    """What lives after random calls less what lived before, and how often anything was made or measured anew.

    most: microbatches; rows have 3 to `most` + 3 tokens. Before it, each count and each length came once
    """
    pipe, draw = made(tiny_model("llama"), schedule, ranks), random.Random(1)
    cases = [(count, length) for count in range(1, most + 1) for length in range(3, most + 4)]
    with pytest.MonkeyPatch.context() as patch:
        anew: list[str] = []
        for owner, name in ((schedules, "verify"), (schedules, "lower"), (step_memory, "measuring")):
            patch.setattr(owner, name, counted(getattr(owner, name), name, anew))

        def call(count: int, length: int) -> None:
            pipe.zero_grad()
            pipe.step(same_tokens(count, length))
            if draw.random() < 0.3:
                pipe.evaluate(same_tokens(count, length))

        for each in (*cases, *cases, *draw.choices(cases, k=calls // 10)):
            call(*each)
        for count in range(1, most + 1):
            pipe.evaluate(same_tokens(count, 3))
        before = living()
        anew.clear()
        for each in draw.choices(cases, k=calls):
            call(*each)
        grown = [after - earlier for earlier, after in zip(before, living(), strict=True)]
        left = sum(executor.left_over for executor in pipe._training.executors)
        assert left + pipe._world.transport.messages.pending == 0
    pipe.close()
    return grown, len(anew)


def counted(function: Any, name: str, calls: list[str]) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return function(*args, **kwargs)

    return call


def assert_nothing_grew(found: tuple[list[int], int], calls: int) -> None:
    (tensors, objects, resident), anew = found
    assert anew == 0
    assert tensors <= 0
    assert objects < 100 + calls // 10  # of the test's own frames, and of torch's
    assert resident < 8 * 2**20


def test_random_counts_and_lengths_leave_nothing_and_make_nothing_anew() -> None:
    assert_nothing_grew(random_calls(2, "zb_h1", 25, 3), 25)


@pytest.mark.sweep
@pytest.mark.parametrize("schedule", ["1f1b", "zb_v"])
def test_a_thousand_calls_over_processes_leave_nothing(pool: Pool, schedule: str) -> None:
    for found in pool.run(2, random_calls, 2, schedule, 1000, 6):
        assert_nothing_grew(found, 1000)
