"""Dropout on a mesh: the same microbatches draw the same as in one process that accumulates over them."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from penstock import Axes, Pipeline
from penstock.errors import BatchError
from penstock.train.config.sections import TrainConfig
from penstock.train.preflight import preflight
from penstock.train.run import run
from support import jobs_train
from support.covering import every
from support.families import tiny_model
from support.mesh import batch, build_whole, later, own_part
from support.pool import Pool
from support.tiny import tree

STEPS = 2


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
    """The losses of some steps of AdamW, of an evaluation after them, and the norm of the last gradient."""
    model = tiny_model(family, torch.float64, layers=4, **DROPPING[family])
    common: dict[str, Any] = {"microbatches": microbatches, **options}
    if family == "llama":
        common["parallelize_fn"] = adapted
    pipe = build_whole(model, ranks, axes, **common)
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

    def forward(self, x: Tensor) -> Tensor:
        dropped: Tensor = self.drop(x * self.weight)
        return dropped


def square(output: Tensor, microbatch: Any) -> Tensor:
    return output.square().mean()


def own_pipe(microbatches: int = 2, axes: Axes | None = None, loss_fn: Any = square) -> Pipeline:
    return Pipeline.from_provider(
        lambda info: Dropping(info.stage), ranks=2, schedule="1f1b", microbatches=microbatches, timeout=30,
        axes=axes, loss_fn=loss_fn,
    )  # fmt: skip


def own_batch(rows: int = 8) -> dict[str, Tensor]:
    return {"x": torch.arange(1, 6.0 * rows + 1, dtype=torch.float64).view(rows, 6)}


def same_next_number() -> bool:
    """Whether the next number of torch's generator is the same on all ranks."""
    everyone = [0.0] * dist.get_world_size()
    dist.all_gather_object(everyone, float(torch.rand(())))
    return len(set(everyone)) == 1


def provided(axes: Axes | None, microbatches: int, seeds: list[int]) -> float:
    """The loss of two stages of one's own, of which each rank is seeded by its one of `seeds`."""
    pipe = own_pipe(microbatches, axes)
    torch.manual_seed(seeds[pipe.processes.index])
    loss = pipe.step(own_part(own_batch(), *pipe.batch_part)).loss
    assert not dist.is_initialized() or len(set(seeds)) > 1 or same_next_number()
    pipe.close()
    return loss


def one_in_evaluation() -> tuple[bool, bool]:
    """Whether the ranks' generators are equal after a step with the last rank in evaluation mode, and stay as
    they were in one with all of them there."""
    model = tiny_model("qwen3", torch.float64, layers=2, **DROPPING["qwen3"])
    pipe = build_whole(model, 1, Axes(dp_replicate=2))
    mine = own_part(batch(), *pipe.batch_part)
    torch.manual_seed(4)
    if dist.get_rank():
        pipe.modules[0].eval()
    pipe.step(mine)
    equal = same_next_number()
    before = torch.get_rng_state()
    pipe.modules[0].eval()
    pipe.step(mine)
    unchanged = torch.equal(before, torch.get_rng_state())
    pipe.close()
    return equal, unchanged


def refused_on_one() -> list[bool]:
    """Whether the generators are equal after a batch that has too few rows on one rank, and a good one."""
    pipe = own_pipe(4)
    torch.manual_seed(4)
    with pytest.raises(BatchError):
        pipe.step(own_batch(8 if pipe.processes.index else 2))
    found = [same_next_number()]
    pipe.step(own_batch())
    found.append(same_next_number())
    pipe.close()
    return found


def replicated_gradients() -> list[float]:
    """With tp=2 and each rank seeded by its own number: the sums of the gradients of which both hold all."""
    model = tiny_model("gpt_neox", torch.float64, layers=2, **DROPPING["gpt_neox"])
    pipe = build_whole(model, 1, Axes(tp=2))
    torch.manual_seed(dist.get_rank())
    pipe.step(batch())
    gradients = [p.grad for p in pipe.parameters() if isinstance(p.grad, DTensor)]
    found = [float(each.to_local().sum()) for each in gradients if each.placements == (Replicate(),)]
    pipe.close()
    return found


WHOLE = 4  # microbatches of the whole batch
Case = tuple[str, int, Axes | None, dict[str, Any]]
CASES: list[Case] = [
    ("qwen3", 2, None, {"schedule": "dualpipe_v", "activation_checkpointing": True}),
    ("qwen3", 2, Axes(dp_shard=2), {"activation_checkpointing": "selective"}),
    ("gpt2", 2, Axes(dp_replicate=2), {"layout": "E|ttttL"}),
    ("gpt2", 4, None, {"schedule": "zb_h1", "layout": "Et|tt|t|L"}),
    ("gpt_neox", 2, Axes(tp=2), {}),
    ("llama", 2, Axes(dp_shard=2), {}),
    ("gpt2", 2, None, {"schedule": "dualpipe"}),
]


@functools.cache
def in_one_process(family: str, seed: int = 7) -> list[float]:
    with torch.random.fork_rng(devices=[]):
        return steps_of(family, 1, None, WHOLE, {}, seed)


@pytest.mark.parametrize(("family", "ranks", "axes", "options"), [*CASES[:2], *later(*CASES[2:])], ids=str)
def test_a_mesh_draws_the_numbers_of_one_process(
    pool: Pool, family: str, ranks: int, axes: Axes | None, options: dict[str, Any]
) -> None:
    parts = 1 if axes is None else axes.batch_parts
    world = ranks * (1 if axes is None else axes.ranks_per_stage)
    expected = in_one_process(family)
    for found in pool.run(world, steps_of, family, ranks, axes, WHOLE // parts, options):
        assert found == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("family", every(2, DROPPING))
def test_another_seed_gives_other_losses(family: str) -> None:
    assert abs(in_one_process(family)[0] - in_one_process(family, seed=8)[0]) > 1e-4


def test_tp_ranks_with_other_seeds_drop_the_same(pool: Pool) -> None:
    """Else they would drop different values of what both hold whole."""
    one, other = pool.run(2, replicated_gradients)
    assert len(one) > 4
    assert one == pytest.approx(other, rel=1e-9, abs=1e-12)


def test_pipeline_ranks_with_other_seeds_agree_on_one(pool: Pool) -> None:
    """0.5.0 agreed on a seed where axes were given only."""
    with torch.random.fork_rng(devices=[]):
        apart = [provided(None, 2, [seed]) for seed in (3, 2)]
    one, other = pool.run(2, provided, None, 2, [3, 2])
    assert one == other
    assert one in apart


def test_a_stage_in_evaluation_mode_on_one_rank_holds_up_no_other(pool: Pool) -> None:
    """0.5.0 left the others waiting for it. And where all are, torch's generator stays as it was."""
    assert pool.run(2, one_in_evaluation) == [(True, True)] * 2


def test_a_batch_that_one_rank_refuses_leaves_the_generators_equal(pool: Pool) -> None:
    assert pool.run(2, refused_on_one) == [[True, True]] * 2


def test_a_providers_stages_draw_different_numbers() -> None:
    """In 0.5.0 both dropped the same, and a half was left."""
    kept: list[Tensor] = []

    def loss(output: Tensor, microbatch: Any) -> Tensor:
        kept.append(output.detach() != 0)
        return output.mean()

    pipe = own_pipe(loss_fn=loss)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        pipe.step(own_batch(1000))
    assert abs(float(torch.cat(kept).double().mean()) - 0.25) < 0.03


def test_a_providers_stages_on_a_mesh_draw_the_numbers_of_one_process(pool: Pool) -> None:
    """And torch's generator goes on equally on all ranks."""
    with torch.random.fork_rng(devices=[]):
        expected = provided(None, WHOLE, [3])
    found = pool.run(4, provided, Axes(dp_shard=2), WHOLE // 2, [3] * 2)
    assert found == [pytest.approx(expected, rel=1e-12)] * 4


@pytest.mark.sweep
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
    ended = pool.run(4, jobs_train.trained, other)
    assert [each["error"] for each in ended] == [""] * 4
    found = [losses(Path(made["output"]["folder"])), losses(tmp_path / "one")]
    assert len(found[0]) == 4
    assert found[0] == pytest.approx(found[1], rel=1e-9)


def losses(output: Path) -> list[float]:
    rows = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
    kept = [row for row in rows if row["step"] and "checkpoint" not in row]
    return [row.get("loss", row.get("held_out_loss")) for row in kept]
