"""Dropout on a mesh: the same microbatches draw the same as in one process that accumulates over them."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from penstock import AutoPipeline, Axes, Pipeline
from penstock.errors import BatchError
from penstock.train.config.sections import TrainConfig
from penstock.train.run import preflight, run
from support import jobs_train
from support.families import tiny_model
from support.mesh import batch, own_part
from support.pool import Pool
from support.tiny import tree

STEPS = 3


def adapted(module: nn.Module) -> nn.Module:
    """As adapters do: what each MLP gives is dropped on its way to the sum."""
    for part in list(module.modules()):
        if (down := getattr(part, "down_proj", None)) is not None:
            part.register_module("down_proj", nn.Sequential(down, nn.Dropout(0.3)))
    return module


# family, and its ways of dropping
DROPPING: dict[str, dict[str, Any]] = {
    "qwen3": {"attention_dropout": 0.3},
    "gpt2": {"attn_pdrop": 0.2, "resid_pdrop": 0.2, "embd_pdrop": 0.2},
    "gpt_neox": {"hidden_dropout": 0.3},
    "llama": {},  # by what is put into it
}


def steps_of(
    family: str, ranks: int, axes: Axes | None, microbatches: int, options: dict[str, Any], seed: int = 7
) -> list[float]:
    """Of some steps of AdamW, and of an evaluation and the norm of the last gradient."""
    model = tiny_model(family, torch.float64, layers=4, **DROPPING[family])
    common: dict[str, Any] = {"schedule": "1f1b", "timeout": 30.0, **options}
    if family == "llama":
        common["parallelize_fn"] = adapted
    pipe = AutoPipeline(ranks=ranks, axes=axes, microbatches=microbatches, **common).build(model)
    mine = own_part(batch(), *pipe.batch_part)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
    torch.manual_seed(seed)
    found = []
    for _ in range(STEPS):
        pipe.zero_grad()
        found.append(pipe.step(mine).loss)
        norm = pipe.clip_grad_norm_(1.0)
        optimizer.step()
    found += [pipe.evaluate(mine).loss, norm]
    pipe.close()
    return found


class Dropping(nn.Module):
    """A stage of one's own."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)
        self.weight = nn.Parameter(torch.full((6,), 1.0 + number, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dropped: torch.Tensor = self.drop(x * self.weight)
        return dropped


def provided(axes: Axes | None, microbatches: int) -> tuple[float, bool]:
    """The loss of a step of stages of one's own, and whether torch's generator went on alike on all ranks."""
    pipe = Pipeline.from_provider(
        lambda info: Dropping(info.stage), ranks=2, schedule="1f1b", microbatches=microbatches, timeout=30,
        axes=axes, loss_fn=lambda output, part: output.square().mean(),
    )  # fmt: skip
    torch.manual_seed(3)
    whole = {"x": torch.arange(48, dtype=torch.float64).view(8, 6)}
    loss = pipe.step(own_part(whole, *pipe.batch_part)).loss
    drawn = float(torch.rand(()))
    everyone = [drawn]
    if dist.is_initialized():
        everyone = [0.0] * dist.get_world_size()
        dist.all_gather_object(everyone, drawn)
    pipe.close()
    return loss, len(set(everyone)) == 1


def own_pipe(microbatches: int = 2) -> Pipeline:
    return Pipeline.from_provider(
        lambda info: Dropping(info.stage), ranks=2, schedule="1f1b", microbatches=microbatches, timeout=30,
        loss_fn=lambda output, part: output.square().mean(),
    )  # fmt: skip


def own_batch(rows: int = 8) -> dict[str, torch.Tensor]:
    return {"x": torch.arange(6.0 * rows, dtype=torch.float64).view(rows, 6)}


def seeded_by_rank(seeds: list[int]) -> float:
    """The loss of two stages, of which each rank is seeded by its own one of `seeds`."""
    pipe = own_pipe()
    torch.manual_seed(seeds[pipe.processes.index])
    loss = pipe.step(own_batch()).loss
    pipe.close()
    return loss


def one_in_evaluation() -> tuple[bool, bool]:
    """Whether the ranks' generators are alike after a step with the last rank in evaluation mode, and stay as
    they were in one with all of them there."""
    pipe = AutoPipeline(
        ranks=1, schedule="1f1b", microbatches=2, timeout=10, axes=Axes(dp_replicate=2)
    ).build(tiny_model("qwen3", torch.float64, layers=2, **DROPPING["qwen3"]))  # fmt: skip
    mine = own_part(batch(), *pipe.batch_part)
    torch.manual_seed(4)
    if dist.get_rank():
        pipe.modules[0].eval()
    pipe.step(mine)
    alike = all_alike()
    before = torch.get_rng_state()
    pipe.modules[0].eval()
    pipe.step(mine)
    same = torch.equal(before, torch.get_rng_state())
    pipe.close()
    return alike, same


def refused_on_one() -> bool:
    """Whether the generators are alike after a batch that has too few rows on one rank."""
    pipe = own_pipe(4)
    torch.manual_seed(4)
    try:
        pipe.step(own_batch(8 if pipe.processes.index else 2))
    except BatchError:
        alike = all_alike()
    pipe.step(own_batch())
    alike &= all_alike()
    pipe.close()
    return alike


def all_alike() -> bool:
    """Whether the next number of torch's generator is the same everywhere."""
    everyone = [0.0] * dist.get_world_size()
    dist.all_gather_object(everyone, float(torch.rand(())))
    return len(set(everyone)) == 1


def kept_by_two() -> float:
    """The share of entries that two stages of nothing but dropout let through."""
    found: list[torch.Tensor] = []

    def loss(output: torch.Tensor, part: Any) -> torch.Tensor:
        found.append(output.detach())
        return output.sum()

    pipe = Pipeline.from_provider(
        lambda info: nn.Sequential(Scale(), nn.Dropout(0.5)), ranks=2, schedule="1f1b", microbatches=2,
        timeout=30, loss_fn=loss,
    )  # fmt: skip
    pipe.step({"input": torch.ones(8, 1000)})
    pipe.close()
    return float((torch.cat(found) != 0).double().mean())


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.by


def alike_by_rank() -> list[float]:
    """With tp=2 and each rank seeded by its own number: of what both hold alike, the gradients' sums."""
    model = tiny_model("gpt_neox", torch.float64, layers=2, **DROPPING["gpt_neox"])
    pipe = AutoPipeline(ranks=1, schedule="1f1b", microbatches=2, timeout=30, axes=Axes(tp=2)).build(model)
    torch.manual_seed(dist.get_rank())
    pipe.step(batch())
    gradients = [p.grad for p in pipe.parameters() if isinstance(p.grad, DTensor)]
    found = [float(each.to_local().sum()) for each in gradients if each.placements == (Replicate(),)]
    pipe.close()
    return found


WHOLE = 4  # microbatches of the whole batch
Case = tuple[str, int, Axes | None, dict[str, Any]]
CASES: list[Case] = [
    ("qwen3", 2, None, {"schedule": "zb_h1"}),
    ("qwen3", 2, None, {"schedule": "dualpipe_v", "activation_checkpointing": True}),
    ("qwen3", 2, Axes(dp_shard=2), {"activation_checkpointing": "selective"}),
    ("gpt2", 2, Axes(dp_replicate=2), {"layout": "E|ttttL"}),
    ("gpt2", 4, None, {"layout": "Et|tt|t|L"}),
    ("gpt_neox", 2, Axes(tp=2), {}),
    ("llama", 2, Axes(dp_shard=2), {}),
    ("gpt2", 2, None, {"schedule": "dualpipe"}),
]


@functools.cache
def in_one_process(family: str) -> list[float]:
    with torch.random.fork_rng(devices=[]):
        return steps_of(family, 1, None, WHOLE, {})


@pytest.mark.parametrize(("family", "ranks", "axes", "options"), CASES, ids=str)
def test_a_mesh_draws_the_numbers_of_one_process(
    pool: Pool, family: str, ranks: int, axes: Axes | None, options: dict[str, Any]
) -> None:
    parts = 1 if axes is None else axes.batch_parts
    world = ranks * (1 if axes is None else axes.ranks_per_stage)
    expected = in_one_process(family)
    for found in pool.run(world, steps_of, family, ranks, axes, WHOLE // parts, options):
        assert found == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("family", [*DROPPING])
def test_another_seed_gives_other_losses(family: str) -> None:
    """Another seed gives other losses."""
    with torch.random.fork_rng(devices=[]):
        again = steps_of(family, 1, None, WHOLE, {})
        other = steps_of(family, 1, None, WHOLE, {}, seed=8)
    assert again == in_one_process(family)
    assert abs(again[0] - other[0]) > 1e-4


def test_tp_ranks_with_other_seeds_drop_the_same(pool: Pool) -> None:
    """Those of tp would else drop different values of what they hold alike."""
    one, other = pool.run(2, alike_by_rank)
    assert len(one) > 4
    assert one == pytest.approx(other, rel=1e-9, abs=1e-12)


def test_pipeline_ranks_with_other_seeds_agree_on_one(pool: Pool) -> None:
    """0.5.0 agreed on a seed where axes were given only."""
    with torch.random.fork_rng(devices=[]):
        apart = [seeded_by_rank([seed]) for seed in (3, 2)]
    one, other = pool.run(2, seeded_by_rank, [3, 2])
    assert one == other
    assert one in apart


def test_a_stage_in_evaluation_mode_on_one_rank_holds_up_no_other(pool: Pool) -> None:
    """0.5.0 left the others waiting for it. And where all are, torch's generator stays as it was."""
    assert pool.run(2, one_in_evaluation) == [(True, True)] * 2


def test_a_batch_that_one_rank_refuses_leaves_the_generators_alike(pool: Pool) -> None:
    assert pool.run(2, refused_on_one) == [True] * 2


def test_a_providers_stages_draw_different_numbers() -> None:
    """In 0.5.0 both dropped the same, and a half was left."""
    with torch.random.fork_rng(devices=[]):
        assert abs(kept_by_two() - 0.25) < 0.03


def test_modules_of_ones_own(pool: Pool) -> None:
    with torch.random.fork_rng(devices=[]):
        expected, _ = provided(None, WHOLE)
    found = pool.run(4, provided, Axes(dp_shard=2), WHOLE // 2)
    assert all(alike for _, alike in found)
    assert [loss for loss, _ in found] == [pytest.approx(expected, rel=1e-12)] * 4


@pytest.mark.parametrize("packing", ["stream", "best_fit"])
def test_the_trainer_needs_no_option_for_it(pool: Pool, tmp_path: Path, packing: str) -> None:
    """Rows of one length, dealt out in order; and microbatches that go round the parts by their length."""
    made = tree(tmp_path)
    made["model"] = {"config": {**made["model"]["config"], "attention_dropout": 0.3}, "dtype": "float64"}
    made["train"] |= {"steps": 3, "batch_size": 8, "evaluate_every": 3, "check": "off"}
    made["data"]["packing"] = packing
    one = {**made, "pipeline": {**made["pipeline"], "ranks": 1, "microbatches": 4}}
    one["output"] = {"folder": str(tmp_path / "one")}
    other = {**made, "pipeline": {**made["pipeline"], "ranks": 2, "microbatches": 2}}
    other["parallel"] = {"dp_shard": 2}
    with torch.random.fork_rng(devices=[]):
        run(preflight(TrainConfig.model_validate(one)))
    told = pool.run(4, jobs_train.trained, other)
    assert [each["error"] for each in told] == [""] * 4
    found = [losses(Path(made["output"]["folder"])), losses(tmp_path / "one")]
    assert len(found[0]) == 4
    assert found[0] == pytest.approx(found[1], rel=1e-9)


def losses(output: Path) -> list[float]:
    rows = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
    return [row.get("loss", row.get("held_out_loss")) for row in rows if row["step"]]
