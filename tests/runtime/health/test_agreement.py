"""Ranks that were started on different things say so before anything else, field by field."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from penstock import AutoPipeline, Axes
from penstock.errors import BatchError, HandshakeError, InputError, PenstockError, ScheduleError
from penstock.runtime.health import agreement
from penstock.runtime.health.agreement import (
    differences,
    facts_of_process,
    facts_of_schedule,
    flat,
    named,
    number_of,
)
from penstock.runtime.ranks import Ranks, call_number, first_error, in_words
from penstock.schedule import build
from support.families import tiny_config, tiny_model
from support.pool import Pool
from support.ranks import GatheringRanks


class Rank(GatheringRanks):
    """One of two ranks, with the facts of the other."""

    index, count = 0, 2

    def __init__(self, other: dict[str, str], call: str = "build()") -> None:
        self._other, self._other_call, self.gathered = other, call, 0

    def gather(self, value: Any) -> list[Any]:
        self.gathered += 1
        if isinstance(value[0], str):
            return [value, [self._other_call, self._other]]
        return [value, [call_number(self._other_call), number_of(self._other)]]


def test_an_error_that_takes_more_than_words_becomes_its_base_on_the_other_ranks() -> None:
    """0.5.0: TypeError, as ScheduleError is made of a name and violations."""
    refused = ScheduleError("own", ["0F0 comes after 0B0"])
    error = first_error({0: None, 1: in_words(refused)}, "rank")
    assert type(error) is InputError
    assert str(error) == str(refused).replace("'own'", "'own', rank 1")
    assert type(first_error({0: in_words(BatchError("x", "y", "z"))}, "rank")) is BatchError


def test_ranks_that_agree_gather_once() -> None:
    rank = Rank({"schedule": "1f1b", "microbatches": "4"})
    rank.same("build()", {"microbatches": "4", "schedule": "1f1b"})
    assert rank.gathered == 1
    Ranks().same("build()", {"schedule": "1f1b"})


def test_the_differing_facts_alone_are_named() -> None:
    rank = Rank({"schedule": "1f1b", "microbatches": "8", "dtype": "bfloat16"})
    with pytest.raises(HandshakeError) as error:
        rank.same("build()", {"schedule": "1f1b", "microbatches": "4", "dtype": "float32"})
    assert rank.gathered == 2
    assert str(error.value).splitlines() == [
        "ranks that were started on different things: all ranks of a pipeline run the same",
        "  microbatches: 4 on rank 0; 8 on rank 1",
        "  dtype: float32 on rank 0; bfloat16 on rank 1. ",
        "Start every rank with the same versions, config and arguments",
    ]


@pytest.mark.parametrize(
    ("values", "line"),
    [
        (["4", "4", "4", "4", "8"], "a: 4 on rank 0-3; 8 on rank 4"),
        (["4", "8", "4", "8"], "a: 4 on rank 0, 2; 8 on rank 1, 3"),
        (["4", "4", "8", "4", "4", "4"], "a: 4 on rank 0, 1, 3-5; 8 on rank 2"),
        (["4", None], "a: 4 on rank 0; nothing on rank 1"),
    ],
)
def test_ranks_are_grouped_by_value(values: Sequence[str | None], line: str) -> None:
    assert differences([{} if value is None else {"a": value} for value in values]) == [line]


def test_the_facts_of_a_schedule() -> None:
    one, other = (facts_of_schedule(build("1f1b", ranks=2, microbatches=m)) for m in (4, 5))
    assert {key for key in one if one[key] != other[key]} == {"microbatches", "order of ops"}
    gpipe = facts_of_schedule(build("gpipe", ranks=2, microbatches=4))
    assert {key for key in one if one[key] != gpipe[key]} == {"schedule", "order of ops"}
    assert set(facts_of_process()) == {"penstock", "torch", "python"}


def test_other_facts() -> None:
    assert flat("config", {"a": 1, "rope": {"base": 2.5}}) == {"config.a": "1", "config.rope.base": "2.5"}
    assert flat("dtype", None) == {"dtype": "None"}
    assert named(SimpleNamespace()) == "types.SimpleNamespace"
    assert named(outcome) == f"{__name__}.outcome"


DIFFERING = {  # what process 3 has, and the lines that name it
    "learning": ["common.optimizer.lr: 0.2 on rank 0-2; 0.1 on rank 3"],
    "microbatches": ["microbatches: 4 on rank 0-2; 5 on rank 3"],
    "stages": [
        "schedule: 1f1b on rank 0-2; interleaved_1f1b on rank 3",
        "stages: 2 on rank 0-2; 4 on rank 3",
    ],
    "ranks": ["ranks: 2 on rank 0-2; 4 on rank 3", "axes: dp_shard=2 on rank 0-2; none on rank 3"],
    "sizes": ["axes: dp_shard=2 on rank 0-2; dp_replicate=2 on rank 3"],
    "transport": ["transport: None on rank 0-2; gloo on rank 3"],
    "none": ["axes: dp_shard=2 on rank 0-2; None on rank 3"],
    "dtype": ["dtype: torch.float32 on rank 0-2; torch.float64 on rank 3"],
    "seed": ["values: seed 0 on rank 0-2; seed 1 on rank 3"],
    "split": ["layers of the stages: 0-2 2-4 on rank 0-2; 0-1 1-4 on rank 3"],
    "entries": ["sharding: by rows on rank 0-2; labels: 1 on rank 3"],
    "model": ["config.intermediate_size: 24 on rank 0-2; 48 on rank 3"],
    "version": [f"penstock: {version('penstock')} on rank 0-2; 0.1.0 on rank 3"],
}


ORDER, PLACES = "order of ops", "placement of stages"
FOLLOWS = {  # from what differs
    "microbatches": {ORDER},
    "dtype": {"config.dtype"},
    "stages": {ORDER, PLACES, "layers of the stages"},
    "ranks": {"stages", ORDER, PLACES, "layers of the stages"},
}


@pytest.mark.sweep
def test_processes_of_a_mesh_that_differ(pool: Pool) -> None:
    """Before any group is made: with other numbers of channels they would hang in making them.

    0.5.0: they were compared along the pipeline only, so that process 0 and 2 of 2 x 2 noticed nothing of
    what was wrong with 3, and hung in the first gathering of weights.
    """
    found = pool.run(4, differ, [*DIFFERING])
    assert all(said == found[0] for said in found)
    for (what, lines), said in zip(DIFFERING.items(), found[0], strict=True):
        assert said.startswith("HandshakeError: "), (what, said)
        there = [text.strip().removesuffix(".").strip() for text in said.splitlines()]
        assert set(lines) <= set(there), (what, said)
        names = {line.partition(":")[0] for line in there[1:-1]}
        assert names - {line.partition(":")[0] for line in lines} == FOLLOWS.get(what, set()), said


def test_models_with_other_values(pool: Pool) -> None:
    """0.5.0: copies that began apart were trained apart, gradients summed. Process 2 has the last stage,
    as 3 has, and nothing of the first one."""
    last, first = "model.layers.3.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"
    found = pool.run(4, other_values, last)
    assert len(set(found)) == 1
    assert found[0].startswith("HandshakeError: ranks whose models have different values: ")
    assert re.search(rf"sum of {last}: \w+ on rank 2; \w+ on rank 3\. \n", found[0])
    assert pool.run(4, other_values, first) == ["no error"] * 4


@pytest.mark.parametrize("schedule", ["1f1b", "dualpipe"])
def test_copies_of_a_weight_with_other_values(pool: Pool, schedule: str) -> None:
    """0.5.0: a tied embedding and its head, or the two copies of DualPipe, began apart and stayed so."""
    found = pool.run(2, other_copies, schedule)
    assert len(set(found)) == 1
    assert re.search(r"sum of model\.embed_tokens\.weight: \w+ on rank 0; \w+ on rank 1", found[0])
    untied = pool.run(2, other_copies, schedule, False)
    assert (untied == ["no error"] * 2) == (schedule == "1f1b")


def test_a_process_that_never_comes(pool: Pool) -> None:
    """0.5.0: "some of them did not come"."""
    waiting = r"rank \d waiting for the handshake from the other ranks"
    stalled, lost = f"StalledPeerError: {waiting}: ", f"PeerLostError: {waiting}: rank 3 failed first: it "
    message = rf"({stalled}(rank \d and )*rank 3 |{lost})ha(s|ve) been silent for"
    for words in pool.run(4, late)[:3]:
        assert re.match(message, words), words


OTHER: dict[str, dict[str, Any]] = {
    "transport": {"transport": "gloo"},
    "learning": {"common": {"optimizer": {"lr": 0.1, "betas": [0.9, 0.95]}}},
    "microbatches": {"microbatches": 5},
    "stages": {"schedule": "interleaved_1f1b"},
    "ranks": {"ranks": 4, "axes": Axes()},
    "sizes": {"axes": Axes(dp_replicate=2)},
    "none": {"axes": None},
    "dtype": {"dtype": torch.float64},
    "seed": {"seed": 1},
    "split": {"layers_per_stage": [1, 3]},
    "entries": {"sharding": {"labels": 1}},
    "model": {},
    "version": {},
}


def outcome(options: AutoPipeline, model: Any) -> str:
    """The typed error that the build ends in, in words."""
    try:
        options.build(model).close()
    except PenstockError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def differ(whats: list[str]) -> list[str]:
    """The outcome of 2 x 2 processes where process 3 alone differs, by what it differs in."""
    found = []
    for what in whats:
        options: dict[str, Any] = {
            "ranks": 2, "schedule": "1f1b", "microbatches": 4, "dtype": torch.float32, "timeout": 20,
            "axes": Axes(dp_shard=2), "common": {"optimizer": {"lr": 0.2, "betas": [0.9, 0.95]}},
        }  # fmt: skip
        other = dist.get_rank() == 3
        size = 48 if what == "model" and other else 24
        with pytest.MonkeyPatch.context() as patch:
            if what == "version" and other:
                patch.setattr(agreement, "version_of_penstock", lambda: "0.1.0")
            auto = AutoPipeline(**{**options, **(OTHER[what] if other else {})})
            found.append(outcome(auto, tiny_config("llama", layers=4, intermediate_size=size)))
    return found


def other_values(parameter: str) -> str:
    """What 2 x 2 processes say of models of which that of process 2 has another value in one parameter."""
    model = tiny_model("llama", torch.float64, layers=4)
    if dist.get_rank() == 2:
        with torch.no_grad():
            model.get_parameter(parameter).view(-1)[1] += 1e-3
    auto = AutoPipeline(ranks=2, schedule="1f1b", microbatches=2, timeout=20, axes=Axes(dp_replicate=2))
    return outcome(auto, model)


def other_copies(schedule: str, tied: bool = True) -> str:
    """What a pipeline says whose ranks were given models that each made by itself."""
    torch.manual_seed(dist.get_rank())
    model = AutoModelForCausalLM.from_config(tiny_config("llama", layers=2, tied=tied))
    return outcome(AutoPipeline(ranks=2, schedule=schedule, microbatches=4, timeout=20), model)


def late() -> str:
    """What three of four processes raise where the last one never comes; it stays until they have."""
    store, last = dist.distributed_c10d._get_default_store(), dist.get_world_size() - 1
    if dist.get_rank() == last:
        store.wait([f"said-{rank}" for rank in range(last)])
        return ""
    auto = AutoPipeline(ranks=2, schedule="1f1b", microbatches=4, timeout=1, axes=Axes(dp_shard=2))
    try:
        return outcome(auto, tiny_config("llama", layers=2))
    finally:
        store.set(f"said-{dist.get_rank()}", "")
