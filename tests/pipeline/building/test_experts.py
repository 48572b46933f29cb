"""A mixture's experts by transformers' names: the same gradients by each, and errors that list the names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from penstock import AutoPipeline
from penstock.errors import ConfigError
from penstock.pipeline.building.experts import known_experts
from penstock.train.preflight import dry_run, preflight
from penstock.train.run import run
from penstock.train.settings import check_machine, make_auto
from support.families import pipeline, ragged_batch, tiny_config, tiny_model
from support.reference import TOLERANCE, assert_gradients, gradients_of, plain_step
from support.refusals import refuses
from support.tiny import QWEN3, config

MIXTURE = {**QWEN3, "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2,
           "moe_intermediate_size": 16}  # fmt: skip


def implementations(pipe: Any) -> set[str]:
    return {module.config._experts_implementation for module in pipe.modules.values()}


@pytest.mark.parametrize("schedule", [pytest.param("1f1b", marks=pytest.mark.sweep), "zb_h1"])
def test_each_has_the_gradients_of_the_plain_model(schedule: str) -> None:
    given, batch = tiny_config("mixtral"), ragged_batch()
    found = []
    for name in ("eager", "batched_mm", "grouped_mm"):
        pipe = AutoPipeline(ranks=2, microbatches=4, schedule=schedule, experts=name).build(given)
        assert implementations(pipe) == {name}
        whole = AutoPipeline(ranks=1, microbatches=1, experts="eager").build(given).modules[0]
        loss, expected = plain_step(whole, batch)
        assert pipe.step(batch).loss == pytest.approx(loss, rel=1e-5)
        assert_gradients(gradients_of(pipe), expected, TOLERANCE[torch.float32])
        found.append(loss)
    assert len(set(found)) == 1


def test_a_model_object_is_taken_as_it_is() -> None:
    model = tiny_model("mixtral", layers=2)
    assert implementations(pipeline(model, experts="eager")) == {"eager"}
    with refuses(ConfigError, "experts='batched_mm' for a model object with 'eager'"):
        pipeline(model, experts="batched_mm")
    assert model.config._experts_implementation == "eager"


def test_names_that_transformers_does_not_know() -> None:
    known = known_experts()
    assert known[0] == "eager"
    assert {"grouped_mm", "batched_mm"} <= set(known)
    rule = f"transformers {transformers.__version__} knows {', '.join(known)}"
    with refuses(ConfigError, "experts='triton'") as refused:
        pipeline(tiny_model("mixtral", layers=2), experts="triton")
    assert rule in str(refused.value)
    with refuses(ConfigError, "experts='group_mm'", remedy="you mean 'grouped_mm'"):
        pipeline(tiny_model("mixtral", layers=2), experts="group_mm")
    with refuses(ConfigError, "experts='eager' for LlamaForCausalLM", "none of its layers has a mixture"):
        pipeline(tiny_model("llama", layers=2), experts="eager")


def test_the_key_of_the_trainer(tmp_path: Path) -> None:
    given = config(tmp_path, MIXTURE, {"model.experts": "batched_mm"}, steps=2)
    assert make_auto(given).experts == "batched_mm"
    assert dry_run(given).plan.source.model.config._experts_implementation == "batched_mm"
    prepared = preflight(given)
    assert implementations(prepared.auto.build(prepared.model)) == {"batched_mm"}
    run(prepared)
    for name, rule in (("fast", f"knows {known_experts()[0]}, "), ("sonicmoe", "kernels for GPUs")):
        with refuses(ConfigError, name, rule):
            check_machine(config(tmp_path, MIXTURE, {"model.experts": name}))
