"""A process that fails or stays away within a step of a mesh: every process raises, and names it."""

from __future__ import annotations

import math
import re
import socket
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from penstock import Axes
from penstock.errors import PenstockError
from penstock.parallel.fsdp import StageShards
from support.mesh import batch, build_pipe, own_part, pieces
from support.pool import Pool

HOST = socket.gethostname()


def limits(cases: list[tuple[int, Axes]]) -> list[dict[str, float]]:
    """For each mesh, by its use, the time limit of each process group of several ranks, in seconds."""
    found = []
    for ranks, axes in cases:
        before = set(dist.distributed_c10d._world.pg_map)
        pipe = build_pipe("mixtral", ranks, axes, {"timeout": 17.0})
        groups = [g for g in set(dist.distributed_c10d._world.pg_map) - before if dist.get_world_size(g) > 1]
        backends = {group.group_desc: group._get_backend(torch.device("cpu")) for group in groups}
        found.append({use: backend.options._timeout.total_seconds() for use, backend in backends.items()})
        pipe.close()
    return found


@pytest.mark.sweep
def test_every_group_has_the_pipelines_time_limit(pool: Pool) -> None:
    """0.5.0: torch's 30 minutes, but for those of ep; and an axis over all processes used the job's own."""
    cases = [(2, Axes(dp_shard=2, ep=2)), (1, Axes(dp_shard=4, ep=4)), (1, Axes(dp_replicate=2, cp=2))]
    for found in (each for rank in pool.run(4, limits, cases) for each in rank):
        assert set(found.values()) == {17.0}, found


def failing_step(ranks: int, axes: Axes, how: str) -> str:
    """What this process says of a step that the last one does not finish.

    how: it "raises" in its first layer, or stays away as weights are "gathered" or gradients "reduced"
    """
    pipe = build_pipe("llama", ranks, axes, {"timeout": 2.0})
    good = own_part(batch(), *pipe.batch_part)
    pipe.step(good)
    store, last = dist.distributed_c10d._get_default_store(), dist.get_world_size() - 1

    def fail(*_: Any) -> None:
        if how == "raises":
            raise ValueError("this layer gave up")
        store.wait([f"said-{rank}" for rank in range(last)])

    if dist.get_rank() == last and how == "reduced":
        pipe.stages[0].part(StageShards).reduce = fail  # type: ignore[union-attr, method-assign]
    elif dist.get_rank() == last:
        layers = (
            part for part in pipe.stages[0].module.modules() if isinstance(part, GradientCheckpointingLayer)
        )
        next(layers).register_forward_pre_hook(fail)
    words = "no error"
    try:
        pipe.step(good)
    except (PenstockError, ValueError) as error:
        words = f"{type(error).__name__}: {error}"
    store.set(f"said-{dist.get_rank()}", "")
    if how == "raises":  # it lives on until all have said
        store.wait([f"said-{rank}" for rank in range(last + 1)])
    pipe.close()
    return words


@pytest.mark.parametrize(
    ("how", "what"),
    [("gathered", "0F0"), pytest.param("reduced", "the reduction of stage 0", marks=pytest.mark.sweep)],
)
def test_a_rank_that_stays_away_within_a_step_is_named(pool: Pool, how: str, what: str) -> None:
    """Who notices closes its connections, so that the others may lose those before their time is up."""
    *others, _ = pool.run(4, failing_step, 1, Axes(dp_shard=4), how)
    for words in others:
        waiting = f"rank 0 waiting for what {what} exchanges from the other ranks: "
        lost = f"PeerLostError: {waiting}process \\d on {HOST} waiting for .*: "
        assert re.match(f"(StalledPeerError: {waiting}|{lost})some rank has been silent for", words), words
    assert any(words.startswith("StalledPeerError") for words in others)


@pytest.mark.parametrize(
    ("ranks", "axes"), [pytest.param(1, Axes(dp_shard=4), marks=pytest.mark.sweep), (2, Axes(dp_replicate=2))]
)
def test_all_pipelines_of_a_mesh_name_the_first_failure(pool: Pool, ranks: int, axes: Axes) -> None:
    """0.5.0: those of other pipelines said that the others had been silent, or had died."""
    *others, last = pool.run(4, failing_step, ranks, axes, "raises")
    assert last == "ValueError: this layer gave up"
    for words in others:
        assert re.search(
            rf"(process 3|rank 1) on {HOST} failed first: .*ValueError: this layer gave up", words
        ), words


def spoiled_norm() -> tuple[float, str, str]:
    """The norm, who is named, and with which gradient, where one of rank 0 is not finite."""
    pipe = build_pipe("llama", 2, None, {"timeout": 20.0})
    pipe.step(batch())
    if dist.get_rank() == 0:
        gradients = [parameter.grad for parameter in pipe.parameters() if parameter.grad is not None]
        gradients[0].view(-1)[0] = math.nan
    norm = pipe.clip_grad_norm_(1.0)
    named, found = pipe.not_finite, pipe.find_not_finite()
    pipe.zero_grad()
    pipe.step(batch())
    pipe.clip_grad_norm_(1.0)
    assert pipe.not_finite == ""
    pipe.close()
    return norm, named, found


@pytest.mark.fault("a number is spoilt in memory", "a gradient of one rank, in a loop of your own")
def test_the_rank_whose_gradient_is_not_finite_is_named_on_all(pool: Pool) -> None:
    """0.5.0: the summary gave the number of the rank that was the first to say so."""
    for norm, named, found in pool.run(2, spoiled_norm):
        assert math.isnan(norm)
        assert named == f"rank 0 on {HOST}"
        assert found == f"rank 0 on {HOST} (model.embed_tokens.weight)"


def after_a_failure(axes: Axes) -> list[str]:
    """What each of two steps says on this process, where the loss fails on the first one in the first."""
    failing = [dist.get_rank() == 0]

    def loss(output: Tensor, part: Any) -> Tensor:
        if failing[0]:
            raise ValueError("no loss today")
        return output.square().mean()

    pipe = pieces(1, axes, {"loss_fn": loss, "timeout": 2.0})
    given = own_part({"x": torch.ones(16, 4, dtype=torch.float64)}, *pipe.batch_part)
    found = []
    for _ in range(2):
        try:
            pipe.step(given)
            found.append("no error")
        except Exception as error:
            found.append(type(error).__name__)
        failing[0] = False
    pipe.close()
    return found


def test_no_step_follows_one_that_failed_on_another_process(pool: Pool) -> None:
    """0.5.0: where the pipeline has one rank a second one went ahead, into the collectives of the first."""
    first, other = pool.run(2, after_a_failure, Axes(dp_replicate=2))
    assert first == ["ValueError", "RunError"]
    assert other == ["PeerLostError", "RunError"]
