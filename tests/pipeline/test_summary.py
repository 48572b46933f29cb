"""What a pipeline knows of itself: stages, a table, and the costs of its layers."""

from __future__ import annotations

import time
from typing import Any

import pytest
from torch import nn

from penstock import AutoPipeline, Pipeline, StageInfo
from penstock.pipeline import names_per_stage, provider_of
from support.families import each_layer, pipeline, ragged_batch, tiny_model
from support.own_chain import Piece, made, squares, x_batch
from support.pool import Pool


def test_info_stages_and_modules() -> None:
    model = tiny_model("llama")
    pipe = pipeline(model, layers_per_stage=[1, 3])
    assert [facts.layers for facts in pipe.info] == [(0,), (1, 2, 3)]
    assert [(facts.info, facts.rank) for facts in pipe.info] == [(StageInfo(0, 2), 0), (StageInfo(1, 2), 1)]
    assert sum(facts.parameters for facts in pipe.info) == sum(p.numel() for p in model.parameters())
    assert [facts.bytes for facts in pipe.info] == [4 * facts.parameters for facts in pipe.info]
    assert [stage.index for stage in pipe.stages] == [0, 1]
    assert list(pipe.modules) == [0, 1]
    with pytest.warns(DeprecationWarning, match=r"use Pipeline\.modules\.values"):
        assert list(pipe.parts) == list(pipe.modules.values())
    zigzag = pipeline(tiny_model("llama"), schedule="zb_v")
    assert [facts.rank for facts in zigzag.info] == [0, 1, 1, 0]
    assert list(zigzag.modules) == [0, 1, 2, 3]
    own = Pipeline.from_provider(provider_of(made(), names_per_stage(made(), 2)), ranks=2, microbatches=2)
    assert [facts.layers for facts in own.info] == [(0, 1), (2, 3)]


def test_the_summary() -> None:
    pipe = pipeline(tiny_model("llama"), schedule="zb_v", layers_per_stage=[1, 2, 0, 1])
    before = str(pipe).splitlines()
    assert before[0] == "zb_v, 4 stages on 2 ranks, 4 microbatches"
    assert before[1].split() == ["stage", "rank", "layers", "parameters", "memory", "time"]
    assert [line.split()[:3] for line in before[3:7]] == [
        ["0", "0", "0"], ["1", "1", "1-2"], ["2", "1", "-"], ["3", "0", "3"]
    ]  # fmt: skip
    pipe.step(ragged_batch())
    after = pipe.summary().splitlines()
    assert "last step" in after[0]
    shares = [float(line.split()[-1].rstrip("%")) for line in after[3:7]]
    assert sum(shares) == pytest.approx(100, abs=0.3)
    assert max(map(len, after)) <= 100
    assert "KiB" in after[3]
    assert "KiB" not in after[6]  # of rank 0, whose memory stands at its first stage
    assert before[3].split()[4:6] != after[3].split()[4:6]


@pytest.mark.parametrize(("tied", "schedule"), [(True, "1f1b"), (False, "dualpipe"), (True, "dualpipe")])
def test_the_summary_counts_a_weight_once(tied: bool, schedule: str) -> None:
    model = tiny_model("llama", tied=tied)
    pipe = pipeline(model, schedule=schedule)
    *_, total, _, legend = str(pipe).splitlines()
    assert total.split()[:3] == ["all", "2", f"{sum(p.numel() for p in model.parameters()):,}"]
    assert legend == "all: a weight that several stages hold is counted once"
    assert "counted once" not in str(pipeline(tiny_model("llama")))


def test_the_costs_of_layers_balance_the_model() -> None:
    model = tiny_model("llama")
    pipe = pipeline(model, ranks=2, microbatches=2)

    def slow(module: nn.Module, args: Any) -> None:
        time.sleep(0.1)  # a hundred times what a layer takes

    next(iter(each_layer(pipe.modules[0]))).register_forward_pre_hook(slow)
    types = [type(layer) for part in pipe.modules.values() for layer in each_layer(part)]
    costs = pipe.layer_costs(ragged_batch())
    assert len(costs.layers) == 4
    assert costs.layers[0] > 3 * max(costs.layers[1:])
    assert costs.embedding >= 0
    assert costs.head >= 0
    assert types == [type(layer) for part in pipe.modules.values() for layer in each_layer(part)]
    balanced = AutoPipeline(ranks=2, microbatches=2, balance=costs).build_plan(model)
    assert [len(stage.layers) for stage in balanced.stages] == [1, 3]


def test_the_costs_are_the_same_on_all_ranks(pool: Pool) -> None:
    answers = pool.run(2, measured)
    assert answers[0] == answers[1]
    assert len(answers[0][0]) == 1  # the stages' one layer each, both numbered 0


def measured() -> Any:
    """Costs of the layers, the same on every rank, and gradients that are left as they were."""
    pipe = Pipeline.from_provider(Piece, ranks=2, microbatches=4, loss_fn=squares, timeout=30)
    pipe.step(x_batch())
    before = [parameter.grad for parameter in pipe.parameters()]
    costs = pipe.layer_costs(x_batch())
    assert all(p.grad is grad for p, grad in zip(pipe.parameters(), before, strict=True))
    return costs.layers, costs.embedding, costs.head


def test_the_summary_says_that_the_auxiliary_loss_depends_on_the_microbatches() -> None:
    """0.5.0: the loss changed with their number, and nothing said so."""
    said = "auxiliary loss is each microbatch's own, so it changes with their number"
    assert said in str(pipeline(tiny_model("mixtral", output_router_logits=True)))
    assert said not in str(pipeline(tiny_model("mixtral")))
