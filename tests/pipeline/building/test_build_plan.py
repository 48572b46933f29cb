"""Plans before any weight is read: balanced layouts, and microbatches that a memory limit recomputes."""

from __future__ import annotations

import functools
import gc
from collections import Counter
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from penstock import AutoPipeline, Axes, Checkpointing
from penstock.errors import ConfigError, PartitionError
from penstock.models.split.activation_sizes import stage_sizes
from penstock.models.split.balanced_split import LayerCosts
from penstock.models.tracing import chain
from penstock.models.tracing.provenance import Provenance
from penstock.pipeline.building import memory
from penstock.pipeline.building.build_plan import BuildPlan, balance
from penstock.pipeline.building.memory import Account, estimated_memory
from penstock.schedule import build, simulate
from support.families import ragged_batch, tiny_config, tiny_model
from support.refusals import refuses


def plan_of(**changes: Any) -> BuildPlan:
    return AutoPipeline(ranks=4, microbatches=4).build_plan(tiny_config("llama", layers=8, **changes))


def counts(plan: BuildPlan) -> list[int]:
    return [len(stage.layers) for stage in plan.stages]


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("on", [True, False])
def test_a_build_leaves_the_garbage_collector_as_it_was(on: bool, frozen: bool) -> None:
    before = gc.isenabled()
    gc.unfreeze()
    try:
        (gc.enable if on else gc.disable)()
        if frozen:
            gc.freeze()
        plan_of()
        assert gc.isenabled() == on
        with pytest.raises(PartitionError):
            AutoPipeline(ranks=9, microbatches=4).build_plan(tiny_config("llama", layers=8))
        assert (gc.isenabled(), gc.get_freeze_count() > 0) == (on, frozen)
    finally:
        (gc.enable if before else gc.disable)()
        gc.freeze()  # as conftest.py does


def work_of_a_build(layers: int) -> Counter[str]:
    """How often the parts of a build that cost time run, up to what the first forward asks for."""
    met = Counter[str]()

    def count(patch: pytest.MonkeyPatch, owner: Any, name: str, what: str) -> None:
        real = getattr(owner, name)

        @functools.wraps(real)
        def counted(*args: Any, **kwargs: Any) -> Any:
            met[what] += 1
            return real(*args, **kwargs)

        patch.setattr(owner, name, counted)

    with pytest.MonkeyPatch.context() as patch:
        count(patch, LlamaDecoderLayer, "forward", "forwards of layers")
        count(patch, LlamaDecoderLayer, "__init__", "layers made")
        count(patch, Provenance, "__torch_dispatch__", "ops followed")
        count(patch, chain, "built_alike", "keys")
        plan = plan_of(num_hidden_layers=layers, hidden_size=48)
        assert plan.completer().shape_questions == 1
    return met


def test_the_proof_of_a_deep_model_runs_no_more_layers_than_that_of_a_shallow_one() -> None:
    """0.5.0: the first step of each pipeline ran every layer once more without values, to count what the
    model asks about its masks: .6 s of processor time for 50 layers, and 3 s for 200, on each rank."""
    shallow, deep, again = (work_of_a_build(layers) for layers in (8, 24, 24))
    assert (shallow["layers made"], deep["layers made"], again["layers made"]) == (8, 24, 24)
    assert shallow["forwards of layers"] == deep["forwards of layers"] <= 7  # 4 of a kind, 1 for 3 lengths
    assert deep["ops followed"] - shallow["ops followed"] <= 2 * (24 - 8)  # what placeholders return
    assert deep["ops followed"] <= 1200
    assert (again["forwards of layers"], again["ops followed"]) == (0, 0)
    assert max(deep["keys"], again["keys"]) <= 3  # chain, loss, questions


def test_a_small_schedule_does_not_walk_what_is_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    """To count frozen objects takes time for each of them: a simulation took 80 ms after gc.freeze()."""
    monkeypatch.setattr(gc, "get_freeze_count", lambda: pytest.fail("it walks all that is frozen"))
    simulate(build("1f1b", ranks=4, microbatches=8))


def test_the_default_split_weighs_the_head() -> None:
    """Version 0.5.0 counted embedding and head as a layer each: a step of Qwen3-0.6B took a third longer."""
    auto = AutoPipeline(ranks=4, microbatches=4, sequence_length=8)
    layer = 32 * 32 + 2 * 16 * 32 + 32 * 32 + 3 * 32 * 48 + 8 * 32  # for a token, attention last
    for tied in (True, False):
        config = tiny_config("llama", layers=8, vocab_size=3 * layer // 32, tie_word_embeddings=tied)
        assert counts(auto.build_plan(config)) == [2, 3, 3, 0]
        assert counts(replace(auto, sequence_length=2048).build_plan(config)) == [2, 2, 2, 2]
    assert counts(replace(auto, head_weight=2).build_plan(config)) == [2, 2, 3, 1]


def test_a_row_has_a_token_at_least() -> None:
    with refuses(ConfigError, "sequence_length=0", remedy="Give 1"):
        AutoPipeline(ranks=2, microbatches=2, sequence_length=0).build_plan(tiny_config("llama"))


def test_balance_gives_a_layout_that_runs() -> None:
    assert balance(plan_of()) == "E(tt|)*3ttL"
    measured = LayerCosts([5, 1, 1, 1, 1, 1, 1, 4], embedding=1, head=0)
    assert balance(plan_of(), measured) == "E|t|t*5|ttL"
    model = tiny_model("llama", layers=8)
    AutoPipeline(ranks=4, microbatches=2, layout="E|t|t*5|ttL").build(model).verify_against(
        model, ragged_batch()
    )
    with refuses(ConfigError, "costs of 2 layers", "model has 8"):
        balance(plan_of(), LayerCosts([1, 2]))


def test_frozen_layers_have_no_gradients_and_keep_less() -> None:
    """Layers of one kind were taken to hold as much, whatever part of them was frozen."""
    model = tiny_model("llama", layers=4)
    model.get_submodule("model.layers.1").requires_grad_(False)
    held = estimated_memory(AutoPipeline(ranks=2, microbatches=2).build_plan(model), 1e9, (4, 64))
    assert held.weights[1] * 4 == held.weights[0] == held.weights[2]
    assert held.activations[1] < held.activations[0] == held.activations[2]


def test_balance_within_memory() -> None:
    """1F1B holds as many microbatches as there are stages to come: early stages get fewer layers."""
    plan = plan_of()
    plenty = estimated_memory(plan, 1e9, (4, 64))
    assert list(plenty.live) == [4, 3, 2, 1]
    assert plenty.weights[0] == 4 * 4 * sum(
        parameter.numel() for parameter in plan.source.model.get_submodule("model.layers.0").parameters()
    )
    assert min(plenty.activations) > 4 * 64 * 32 * 4
    assert balance(plan, memory=plenty) == "E(tt|)*3ttL"
    with refuses(PartitionError, "memory.limit=10,000.0", "some stage holds") as caught:
        balance(plan, memory=replace(plenty, limit=1e4))
    least = float(caught.value.remedy.split()[1].replace(",", ""))
    assert balance(plan, memory=replace(plenty, limit=least)) == "Et|t|tt|t*4L"


@pytest.mark.long
@pytest.mark.parametrize("share", [0.5, pytest.param(0.95, marks=pytest.mark.sweep)])
def test_recomputation_keeps_the_memory_limit(monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    """1.0: three splits were measured, though they were one and the same."""
    measured = mock.Mock(side_effect=stage_sizes)
    monkeypatch.setattr(memory, "stage_sizes", measured)
    model, shape = tiny_model("llama", layers=4, hidden_size=64), (4, 64)
    free = AutoPipeline(ranks=2, microbatches=8).build_plan(model)
    everything = simulate(free.schedule, Account(free).costs(shape)).peak_memory
    limit = Account(free).ranks()[0].fixed + share * max(everything)
    how = Checkpointing(memory_limit=limit, shape=shape)
    auto = AutoPipeline(ranks=2, microbatches=8, activation_checkpointing=how)
    measured.reset_mock()
    plan = auto.build_plan(model)
    assert measured.call_count == 2 * 2  # each stage, with all layers kept and with all run again
    predicted = simulate(plan.schedule, auto.memory_costs(plan, shape)).peak_memory
    for rank, held in enumerate(predicted):
        assert held + Account(plan).ranks()[rank].fixed <= limit * (1 + 1e-9)
    too_small = Checkpointing(memory_limit=2**19, shape=shape)
    with refuses(ConfigError, "memory_limit=0.5 MiB", "rank 0 takes"):
        AutoPipeline(ranks=2, microbatches=8, activation_checkpointing=too_small).build_plan(model)


@pytest.mark.sweep
@pytest.mark.long
def test_the_default_split_keeps_the_memory_limit() -> None:
    """The embedding and five layers are as fast as the head and three, and hold more."""
    config, shape = tiny_config("llama", layers=8, vocab_size=300), (2, 32)
    auto = AutoPipeline(ranks=2, microbatches=8, sequence_length=32)
    assert counts(auto.build_plan(config)) == [5, 3]
    limit = 0.95 * 2**20
    how = Checkpointing(memory_limit=limit, shape=shape)
    limited = replace(auto, activation_checkpointing=how)
    plan = limited.build_plan(config)
    assert counts(plan) == [4, 4]
    assert max(rank.total for rank in limited.account(plan).ranks(shape)) <= limit
    with refuses(ConfigError, "memory_limit=1 MiB", "rank 0 takes"):  # what was asked for stays
        replace(limited, layout="Et*5|t*3L").build_plan(config)
    how = Checkpointing(memory_limit=2**19, shape=shape)
    with refuses(ConfigError, "memory_limit=0.5 MiB", "takes", "Give 1 MiB or more"):
        replace(auto, activation_checkpointing=how).build_plan(config)


def test_a_memory_limit_splits_for_what_runs_again() -> None:
    """1.0: the layers were split as if none ran again, which makes the head's rank wait for the others."""
    config, shape = tiny_config("llama", layers=4, vocab_size=900), (2, 32)
    auto = AutoPipeline(ranks=2, microbatches=8, sequence_length=32)
    free = auto.build_plan(config)
    everything = replace(auto, activation_checkpointing=True)
    most, least = (max(rank.total for rank in one.account(free).ranks(shape)) for one in (auto, everything))
    limit = least + 0.3 * (most - least)
    how = Checkpointing(memory_limit=limit, shape=shape)
    limited = replace(auto, activation_checkpointing=how)
    plan = limited.build_plan(config)
    assert (counts(free), counts(plan)) == ([4, 0], [3, 1])
    accounts = [limited.account(one) for one in (free, plan)]
    times = [simulate(one.schedule, account.timed(shape)).makespan
             for one, account in zip((free, plan), accounts, strict=True)]  # fmt: skip
    assert times[1] < 0.97 * times[0]
    assert max(rank.total for rank in accounts[1].ranks(shape)) <= limit * (1 + 1e-9)


def test_an_estimate_holds_no_gradients_of_what_is_sent() -> None:
    """Estimates count a packing mask that steps do not make: the same one on each stage."""
    model = tiny_model("llama", layers=4)
    auto = AutoPipeline(ranks=2, microbatches=2)
    estimated: Any = auto.memory_costs(auto.build_plan(model), (1, 16))
    pipe = auto.build(model)
    ids = torch.zeros(2, 16, dtype=torch.long)
    pipe.step({"input_ids": ids, "labels": ids})
    measured: Any = pipe.costs()
    pairs = zip(estimated.activation, measured.activation, strict=True)
    first, last = (guess - held[0] for guess, held in pairs)
    assert abs(first - last) <= 4  # the loss


def test_an_estimate_leaves_autocast_out() -> None:
    """0.5.0: within a region it counted the weights' casts with each microbatch."""
    auto = AutoPipeline(ranks=2, microbatches=2)
    outside = auto.memory_costs(auto.build_plan(tiny_model("llama")), (1, 16))
    with torch.autocast("cpu", torch.bfloat16):
        assert auto.memory_costs(auto.build_plan(tiny_model("llama")), (1, 16)) == outside


def test_a_memory_limit_counts_shards() -> None:
    """0.5.0: what fits with dp_shard or cp was refused, as if a rank held a whole stage and all tokens."""
    model, shape = tiny_model("llama", layers=2, hidden_size=64), (4, 64)
    whole = Account(AutoPipeline(ranks=2, microbatches=8).build_plan(model)).ranks()[0].fixed
    for axes, part in ((Axes(dp_shard=8), 1 / 8 + 1 / 2), (Axes(cp=2), 1 / 2 + 1 / 2)):
        auto = AutoPipeline(ranks=2, microbatches=8, axes=axes)
        plan = auto.build_plan(model)
        ranks = auto.account(plan).ranks(shape)
        assert ranks[0].fixed == pytest.approx(part * whole, rel=1e-4)
        limit = max(rank.total for rank in ranks)
        how = Checkpointing(memory_limit=limit, shape=shape)
        limited = replace(auto, activation_checkpointing=how)
        assert limited.account(limited.build_plan(model)).recomputed() == frozenset()


@pytest.mark.parametrize(
    ("family", "how"),
    [("llama", Checkpointing(every=2)), pytest.param("gemma2", None, marks=pytest.mark.sweep)],
)
def test_stages_that_are_alike_are_traced_once_and_hold_as_much(
    monkeypatch: pytest.MonkeyPatch, family: str, how: Checkpointing | None
) -> None:
    """In gemma2 every second layer attends within a window."""
    config, traced = tiny_config(family, layers=8), []

    def estimated() -> Any:
        auto = AutoPipeline(ranks=8, microbatches=8, activation_checkpointing=how or False)
        return auto.memory_costs(auto.build_plan(config), (2, 16))

    def traces(model: Any, *rest: Any, **options: Any) -> Any:
        traced.append(model)
        return stage_sizes(model, *rest, **options)

    monkeypatch.setattr(memory, "stage_sizes", traces)
    found, few = estimated(), len(traced)
    monkeypatch.setattr(memory, "layer_kind", id)  # no two are alike
    assert estimated() == found
    assert 2 * few <= len(traced) - few
