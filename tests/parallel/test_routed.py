"""Pipelines that record and replay what their routers choose, and take choices that are given."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from penstock import AutoPipeline, Axes
from penstock.errors import ConfigError, ModelError
from penstock.train.config.load import load_config
from penstock.train.settings import make_auto
from support import jobs_routed as jobs
from support import zoo
from support.families import tiny_model
from support.jobs_axes import model_of
from support.jobs_routed import Case
from support.pool import Pool

CHECKPOINTED = {"activation_checkpointing": True}
RING, PADDED = {"context": "ring"}, {"shapes": "padded"}
EXPERTS_BESIDE = Axes(dp_shard=2, ep=2)

# ---- what is run again

# processes, case, by how much routers differ; gpt_oss chooses in float64, the others in float32
FLIPS: list[Any] = [
    (2, ("gpt_oss", 2, None, "zb_h1", {}), 1e-13),
    (2, ("qwen3_moe", 2, None, "1f1b", {}), 1e-6),
    pytest.param(4, ("mixtral", 2, EXPERTS_BESIDE, "dualpipe_v", {}), 1e-6, marks=pytest.mark.parallel),
]


@pytest.mark.parametrize(("processes", "case", "size"), FLIPS)
def test_routers_that_flip(pool: Pool, processes: int, case: Case, size: float) -> None:
    """With replay gradients are those of a run without checkpointing, but for what routers differ by; without
    it they are others."""
    alone = case[2] is None  # else shapes differ, of what was sent too, which ends in an error
    for found in pool.run(processes, jobs.recomputed, case, size, alone):
        assert found["True"] == ["", ""]
        assert not alone or all("differs by" in told for told in found["False"])


def test_a_step_that_fails_leaves_nothing_behind() -> None:
    found = jobs.broken(("mixtral", 2, None, "zb_h1", {}))
    assert found["same"]
    assert not found["wrong"]
    assert found["loss"] == pytest.approx(found["expected"], rel=1e-10)


# ---- choices that are given

GIVEN: list[tuple[int, Case, int]] = [
    (2, ("qwen3_moe", 2, None, "zb_h1", CHECKPOINTED), 12),
    (4, ("mixtral", 2, Axes(cp=2), "1f1b", {**RING, **CHECKPOINTED}), 13),
    (4, ("qwen3_moe", 2, EXPERTS_BESIDE, "dualpipe_v", CHECKPOINTED), 12),
    (2, ("olmoe", 2, None, "dualpipe", CHECKPOINTED), 12),
    (4, ("mixtral", 2, Axes(tp=2), "zb_v", CHECKPOINTED), 12),
    (4, ("mixtral", 2, Axes(tp=2), "1f1b", {"sequence_parallel": True}), 12),
    (4, ("qwen3_moe", 1, Axes(dp_replicate=2, cp=2, ep=2), "1f1b", CHECKPOINTED), 12),
    (2, ("mixtral", 2, None, "dualpipe_v", {**CHECKPOINTED, "shapes": "exchanged"}), 12),
    (4, ("mixtral", 2, Axes(dp_shard=2), "interleaved_1f1b", {"exchange": "batched"}), 12),
]
RAGGED: list[tuple[int, Case]] = [
    (2, ("mixtral", 2, None, "zb_h1", {**CHECKPOINTED, **PADDED})),
    (2, ("mixtral", 2, None, "1f1b", CHECKPOINTED)),
    (4, ("qwen3_moe", 2, Axes(cp=2), "1f1b", PADDED)),
    (4, ("mixtral", 2, EXPERTS_BESIDE, "dualpipe_v", {**CHECKPOINTED, **PADDED})),
]


def check_given(pool: Pool, processes: int, case: Case, length: int) -> None:
    for found in pool.run(processes, jobs.replayed, case, length):
        assert not found["wrong"]
        told, free = (pytest.approx(loss, rel=1e-10) for loss in found["expected"])
        assert found["losses"] == [(told, told), (free, free), (told, told)]
        if case[3] == "dualpipe_v" and case[2] is not None:  # the last step's pairs ran side by side
            assert min(found["ran"]) > 0


@pytest.mark.parametrize(("processes", "case", "length"), GIVEN[:2])
def test_given_choices(pool: Pool, processes: int, case: Case, length: int) -> None:
    """As one plain process whose routers are told the same; and its own are told in the same form."""
    check_given(pool, processes, case, length)


@pytest.mark.parallel
@pytest.mark.parametrize(("processes", "case", "length"), GIVEN[2:])
def test_given_choices_in_more_ways(pool: Pool, processes: int, case: Case, length: int) -> None:
    check_given(pool, processes, case, length)


def check_ragged(pool: Pool, processes: int, case: Case) -> None:
    parts = 1 if case[2] is None else case[2].batch_parts
    for found in pool.run(processes, jobs.ragged, case, parts):
        assert not found["wrong"]
        assert found["loss"] == pytest.approx(found["expected"], rel=1e-10)


@pytest.mark.parametrize(("processes", "case"), RAGGED[:1])
def test_microbatches_of_different_lengths(pool: Pool, processes: int, case: Case) -> None:
    check_ragged(pool, processes, case)


@pytest.mark.parallel
@pytest.mark.parametrize(("processes", "case"), RAGGED[1:])
def test_microbatches_of_different_lengths_beside_axes(pool: Pool, processes: int, case: Case) -> None:
    check_ragged(pool, processes, case)


# ---- what is refused

CHOICES = {
    "out of range": r"routed_experts \[4, \d\] in row 1, token 3, mixture 2.* its 4 experts",
    "twice": r"routed_experts \[1, 1\] in row 1, token 3, mixture 2",
    "half given": r"routed_experts \[-1, \d\] in row 1",
    "a layer less": r"shape \[\d, 12, 3, 2\].* are \[\d, 12, 4, 2\]",
    "another top-k": r"shape \[\d, 12, 4, 1\]",
    "short": r"shape \[\d, 11, 4, 2\]",
    "no mixtures": r"shape \[\d, 12, 2\]",
    "rows": r"input_ids: \d+, labels: \d+, routed_experts: \d+",
    "floats": r"routed_experts of torch.float32.* int16, int32 or int64",
    "bytes": r"routed_experts of torch.uint8",
    "bools": r"routed_experts of torch.bool",
    "a list": r"routed_experts of shape list",
}


@pytest.mark.parametrize(
    ("axes", "options"),
    [(Axes(dp_shard=2), {}), pytest.param(None, PADDED, marks=pytest.mark.parallel)],
)
def test_choices_that_are_none(pool: Pool, axes: Axes | None, options: dict[str, Any]) -> None:
    """On every rank alike, also where one part of the batch alone has them."""
    case: Case = ("mixtral", 2, axes, "1f1b", options)
    everyone = pool.run(2 if axes is None else 4, jobs.refused, case, list(CHOICES))
    assert all(told == everyone[0] for told in everyone)
    for name, words in CHOICES.items():
        for told in everyone[0][name]:
            assert re.match(f"BatchError: .*{words}", told), told
    (told,) = everyone[0]["without the option"]
    assert re.match(r"BatchError: 'routed_experts' in a batch: .* replay_routing=True$", told), told
    (told,) = everyone[0]["compared"]
    assert told.startswith("BatchError: routed_experts in a comparison"), told
    for told in everyone[0]["untold"]:
        assert re.match(r"ConfigError: routed_experts\(\) of 0 microbatches.* Call step\(\) first$", told), (
            told
        )


def outlined(model: Any) -> None:
    AutoPipeline(ranks=2, microbatches=2, replay_routing=True).build_plan(model)


def test_models_whose_choices_are_not_replayed() -> None:
    """Before anything is read or joined."""
    with pytest.raises(ConfigError, match="LlamaForCausalLM: it has no experts"):
        outlined(model_of("llama"))
    with pytest.raises(ModelError, match=r"layers.0.* the one top-k"):
        outlined(zoo.tiny_model("phimoe"))
    twice = tiny_model("mixtral", layers=2)
    twice.model.layers[1].mlp = twice.model.layers[0].mlp
    with pytest.raises(ModelError, match="called twice in one forward"):
        outlined(twice)
    outlined(tiny_model("mixtral").config)  # without values


def test_the_trainers_key(tmp_path: Path) -> None:
    text = "model: {config: {model_type: mixtral}}\ndata: {path: some.txt, tokenizer: bytes}\n"
    (tmp_path / "run.yaml").write_text(text)
    for value in (True, False):
        config = load_config(tmp_path / "run.yaml", [f"train.replay_routing={value}"])
        assert make_auto(config).replay_routing is value
