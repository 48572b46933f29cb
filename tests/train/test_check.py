"""The check before the first step: it passes, names what differs, is left out aloud, and changes nothing."""

from __future__ import annotations

import json
import math
import re
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from penstock import Axes, Pipeline
from penstock.errors import ConfigError, EquivalenceError, RunError
from penstock.models.weights import initial
from penstock.pipeline.compare import Compared, Report
from penstock.train.check.before_training import (
    TOKENS,
    Reference,
    check_split,
    compare_with_reference,
    shorten,
)
from penstock.train.check.digests import Digests, compare_digests, digest, distance
from penstock.train.check.rounding import Scores, explained_by_flips, near_ties
from penstock.train.checkpoints import NEWEST
from penstock.train.config.sections import PipelineSection, TrainConfig
from penstock.train.run import Prepared, preflight, run
from support import jobs_train as jobs
from support.pool import Pool
from support.tiny import GPT2_WITH_DROPOUT, QWEN3
from support.tiny import config as plain_config

# the schedules on which a weight has several copies, or backwards are split, besides the plain one
SCHEDULES = ["1f1b", "zb_v", "dualpipe"]


def config(folder: Path, model: dict[str, Any] | None = None, **train: Any) -> TrainConfig:
    return plain_config(folder, model, **{"check": "auto", **train})


def with_pipeline(made: TrainConfig, **changes: Any) -> TrainConfig:
    section = PipelineSection.model_validate({**made.pipeline.model_dump(), **changes})
    return made.model_copy(update={"pipeline": section})


def prepare(folder: Path, model: dict[str, Any] | None = None, **pipeline: Any) -> Prepared:
    return preflight(with_pipeline(config(folder, {**(model or QWEN3)}), **pipeline))


def parts(prepared: Prepared) -> tuple[Pipeline, Reference, Any]:
    auto = prepared.auto
    reference = Reference(prepared.plan.source, auto.seed, auto.loss(), (auto.wire_dtype,))
    return auto.build(prepared.model), reference, prepared.data.batch(1).content


def checked(prepared: Prepared) -> str:
    return check_split(*parts(prepared), "auto")


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_right_split_passes(tmp_path: Path, schedule: str, tied: bool) -> None:
    model = {**QWEN3, "num_hidden_layers": 4, "tie_word_embeddings": tied}
    told = checked(prepare(tmp_path, model, schedule=schedule, microbatches=4))
    assert told.startswith("checked in ")
    assert "the split model's loss and" in told


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight"])
def test_a_weight_that_is_another_is_named(tmp_path: Path, name: str) -> None:
    pipe, reference, batch = parts(prepare(tmp_path))
    jobs.spoil(dict(pipe.named_parameters())[name])
    stage = 0 if "embed" in name else 1
    with pytest.raises(EquivalenceError) as caught:
        check_split(pipe, reference, batch, "auto")
    assert caught.value.value.startswith(f"weight {name}: it differs before any step, by 0.00")
    assert f" on stage {stage} of rank {stage}, and its norm is " in caught.value.value
    assert ";" not in caught.value.value
    assert caught.value.exit_code == 1
    assert "train.check=off" in caught.value.remedy


@pytest.mark.parametrize("factor", [1.001, -1.0, 0.0])
def test_a_gradient_that_is_another_is_named(tmp_path: Path, factor: float) -> None:
    pipe, reference, batch = parts(prepare(tmp_path))
    norm = pipe.modules[1].get_parameter("model.norm.weight")
    norm.register_hook(lambda grad: grad * factor)  # type: ignore[no-untyped-call]
    with pytest.raises(EquivalenceError, match=r"^gradient model\.norm\.weight: it differs by [^;]* norm is"):
        check_split(pipe, reference, batch, "auto")


def test_entries_that_change_places_are_found_though_no_norm_tells(tmp_path: Path) -> None:
    pipe, reference, batch = parts(prepare(tmp_path))
    up = pipe.modules[0].get_parameter("model.layers.0.mlp.up_proj.weight")
    up.register_hook(lambda grad: grad.flip(0))  # type: ignore[no-untyped-call]
    with pytest.raises(EquivalenceError, match=r"^gradient model\.layers\.0\.mlp\.up_proj\.weight: "):
        check_split(pipe, reference, batch, "auto")


def test_a_layer_that_computes_something_else_is_found(tmp_path: Path) -> None:
    """Weights are right, and what a layer makes of them is not: all gradients before it differ, too."""
    pipe, reference, batch = parts(prepare(tmp_path))
    layer = pipe.modules[1].get_submodule("model.layers.1.mlp")
    layer.register_forward_hook(lambda module, args, output: output * 1.01)
    with pytest.raises(EquivalenceError, match=r"^gradient model\.layers\.1\.mlp.* and \d+ more"):
        check_split(pipe, reference, batch, "auto")


@pytest.mark.parametrize(
    ("dtype", "wire"),
    [("float64", None), ("bfloat16", None), ("float32", "bfloat16"), ("float32", "float16")],
)
def test_what_rounds_more_is_given_more_room(tmp_path: Path, dtype: str, wire: str | None) -> None:
    made = with_pipeline(config(tmp_path), wire_dtype=wire)
    made = made.model_copy(update={"model": made.model.model_copy(update={"dtype": dtype})})
    assert checked(preflight(made)).startswith("checked in ")


def test_it_is_left_out_aloud_where_memory_is_short(tmp_path: Path) -> None:
    pipe, reference, batch = parts(prepare(tmp_path))
    assert check_split(pipe, reference, batch, "auto", lambda _: None).startswith("checked")
    assert check_split(pipe, reference, batch, "auto", lambda _: 2 * reference.bytes).startswith("checked")
    told = check_split(pipe, reference, batch, "auto", lambda _: 2 * reference.bytes - 1)
    assert told.startswith("not checked against the whole model: the whole model and its gradients take ")
    assert "more than half of the " in told
    with pytest.raises(ConfigError, match=r"^train\.check=always: the whole model and its gradients take "):
        check_split(pipe, reference, batch, "always", lambda _: 1000)


def test_it_is_left_out_aloud_where_memory_runs_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(self: Reference, device: torch.device) -> None:
        raise torch.OutOfMemoryError

    pipe, reference, batch = parts(prepare(tmp_path))
    monkeypatch.setattr(Reference, "build", out_of_memory)
    assert check_split(pipe, reference, batch, "auto").endswith("model: memory ran out")


def test_the_host_s_memory_is_known_by_its_allocator_s_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0.5.0: the host's allocator raises a plain RuntimeError, which ended the run."""
    pipe, reference, batch = parts(prepare(tmp_path))
    monkeypatch.setattr(Reference, "build", lambda self, device: torch.empty(2**60, dtype=torch.uint8))
    assert check_split(pipe, reference, batch, "auto").endswith("model: memory ran out")
    monkeypatch.setattr(Reference, "build", lambda self, device: torch.ones(2) @ torch.ones(3))
    with pytest.raises(RuntimeError, match="inconsistent tensor size"):
        check_split(pipe, reference, batch, "auto")


def metrics(folder: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]
    measured = ("seconds", "tokens_per_second", "bubble")
    return [{key: value for key, value in row.items() if key not in measured} for row in rows]


def tensors(folder: Path) -> dict[str, Tensor]:
    files = sorted((folder / "out" / "checkpoints" / "step-00000004").glob("*.safetensors"))
    return {f"{file.name} {key}": value for file in files for key, value in load_file(file).items()}


@pytest.mark.parametrize("model", [QWEN3, GPT2_WITH_DROPOUT], ids=["qwen3", "gpt2 with dropout"])
def test_a_run_is_bit_for_bit_the_same_with_and_without_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], model: dict[str, Any]
) -> None:
    for mode in ("auto", "off"):
        (tmp_path / mode).mkdir()
        run(preflight(config(tmp_path / mode, model, check=mode)))
        told = capsys.readouterr().out
        assert told.count("checked in") == (mode == "auto")
    with_it, without = tensors(tmp_path / "auto"), tensors(tmp_path / "off")
    assert with_it.keys() == without.keys()
    assert [name for name in with_it if not torch.equal(with_it[name], without[name])] == []
    assert metrics(tmp_path / "auto") == metrics(tmp_path / "off")


def test_gradients_modes_and_random_state_are_left_as_they_were(tmp_path: Path) -> None:
    pipe, reference, batch = parts(prepare(tmp_path, GPT2_WITH_DROPOUT))
    some = next(pipe.parameters())
    some.grad = torch.ones_like(some)
    kept, state = some.grad, torch.get_rng_state()
    check_split(pipe, reference, batch, "auto")
    assert some.grad is kept
    assert torch.equal(kept, torch.ones_like(some))
    assert all(p.grad is None for p in pipe.parameters() if p is not some)
    assert all(part.training for module in pipe.modules.values() for part in module.modules())
    assert torch.equal(torch.get_rng_state(), state)


def test_a_resumed_run_is_checked_when_asked_to_and_against_its_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(preflight(config(tmp_path)))
    capsys.readouterr()
    run(preflight(config(tmp_path, steps=5), NEWEST))
    assert "checked in " not in capsys.readouterr().out
    run(preflight(config(tmp_path, steps=6, check="always"), NEWEST))
    assert "\nchecked in " in capsys.readouterr().out


def test_a_folder_with_weights_and_packed_documents(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = {key: value for key, value in QWEN3.items() if key != "model_type"}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **keys))
    model.save_pretrained(tmp_path / "model")
    made = config(tmp_path, steps=1)
    texts = (bytes(range(33, 35 + number % 23)).decode() for number in range(80))
    (tmp_path / "text").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    made = made.model_copy(
        update={
            "data": made.data.model_copy(update={"kind": "jsonl", "packing": "best_fit"}),
            "model": made.model.model_copy(update={"config": None, "path": str(tmp_path / "model")}),
        }
    )
    run(preflight(made))
    assert "\nchecked in " in capsys.readouterr().out


def test_a_wrong_split_ends_the_run_before_its_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stages' values come from another seed than the whole model's."""
    initialise = initial.initialise

    def other(stage: Any, reference: Any, ties: Any, seed: int) -> None:
        initialise(
            stage, reference, ties, seed + (type(stage) is type(reference) and hasattr(stage, "boundary"))
        )

    monkeypatch.setattr(initial, "initialise", other)
    with pytest.raises(EquivalenceError, match=r"^weight .* and \d+ more: the split model gives"):
        run(preflight(config(tmp_path)))
    assert metrics(tmp_path) == []


def test_a_model_whose_own_loss_is_no_number_is_left_to_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = config(tmp_path, {**QWEN3, "rms_norm_eps": float("nan")})
    with pytest.raises(RunError, match="step 0: held_out_loss=nan"):
        run(preflight(made))
    assert "not checked against the whole model: its own loss is nan" in capsys.readouterr().out


def test_over_processes(pool: Pool, tmp_path: Path) -> None:
    for number, (ranks, schedule) in enumerate([(2, "1f1b"), (4, "zb_h1")]):
        folder = tmp_path / str(number)
        folder.mkdir()
        told = pool.run(ranks, jobs.checked_on_ranks, str(folder), schedule)
        assert all(passed.startswith("checked in") for passed, _, _ in told)
        assert {short for _, short, _ in told} == {told[0][1]}
        assert "free to process 0" in told[0][1]
        (wrong,) = {differs for _, _, differs in told}
        assert wrong.startswith("weight model.layers.")
        assert "q_proj.weight: it differs before any step, by" in wrong
        assert "on stage 1 of rank 1" in wrong


def test_rounding_that_grows_with_depth_is_no_difference(pool: Pool) -> None:
    """At this depth some gradients differ by more than the tolerance, and none by more than rounding."""
    (told,) = set(pool.run(4, jobs.checked_when_deep, 24)[:1])
    assert told.startswith("checked in ")
    found = re.search(r"tolerance 3e-02; (\d+) by up to \d\.\de-02, no more than rounding\)$", told)
    assert found, told
    assert int(found[1]) > 5


def mixture(folder: Path, tied: bool) -> Prepared:
    """A mixture whose router knows no difference between its experts, or does."""
    keys = {
        **QWEN3, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2,
        "experts_implementation": "eager",
    }  # fmt: skip
    del keys["model_type"]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_moe", **keys))
    if tied:
        for name, parameter in model.named_parameters():
            parameter.data.mul_(0.0 if name.endswith("mlp.gate.weight") else 1.0)
    model.save_pretrained(folder / "model")
    made = config(folder)
    path = {"config": None, "path": str(folder / "model")}
    return preflight(made.model_copy(update={"model": made.model.model_copy(update=path)}))


@pytest.mark.parametrize("tied", [False, True])
def test_choices_that_rounding_may_turn_are_told_of(tmp_path: Path, tied: bool) -> None:
    pipe, reference, batch = parts(mixture(tmp_path, tied))
    over = replace(reference, axes=Axes(ep=2))  # whose sums would be rounded in another order
    assert check_split(pipe, over, batch, "auto").startswith("checked in ")
    norm = pipe.modules[1].get_parameter("model.norm.weight")
    norm.register_hook(lambda grad: grad * 1.1)  # type: ignore[no-untyped-call]
    for each in (reference, over):
        if tied and each is over:
            told = check_split(pipe, each, batch, "auto")
            assert "not checked against the whole model: rounding by ep=2 may flip 64 router choices" in told
            assert "gradient model.norm.weight: it differs by" in told
            with pytest.raises(ConfigError, match=r"^train\.check=always: rounding by ep=2 may flip"):
                check_split(pipe, each, batch, "always")
            continue
        with pytest.raises(EquivalenceError, match=r"^gradient model\.norm\.weight: it differs"):
            check_split(pipe, each, batch, "auto")


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_a_loss_that_no_turned_choice_explains_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, factor: float
) -> None:
    pipe, reference, batch = parts(mixture(tmp_path, True))
    over, step = replace(reference, axes=Axes(ep=2)), pipe.step

    def off(given: Any) -> Any:
        result = step(given)
        return result._replace(loss=result.loss * factor)

    monkeypatch.setattr(pipe, "step", off)
    with pytest.raises(EquivalenceError, match=r"^loss: "):
        check_split(pipe, over, batch, "auto")


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.mlp.experts.down_proj"])
def test_a_gradient_that_is_missing_is_found_beside_near_ties_but_for_an_expert_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    pipe, reference, batch = parts(mixture(tmp_path, True))
    over, step = replace(reference, axes=Axes(ep=2)), pipe.step

    def without(given: Any) -> Any:
        result = step(given)
        pipe.modules[1].get_parameter(name).grad = None
        return result

    monkeypatch.setattr(pipe, "step", without)
    if "experts" in name:
        assert f"{name} on stage 1 of rank 1: only one of" in check_split(pipe, over, batch, "auto")
        return
    with pytest.raises(EquivalenceError, match=r"^gradient model\.norm\.weight on stage 1 of .*: only one"):
        check_split(pipe, over, batch, "auto")


MOE = "model.layers.0.mlp."


@pytest.mark.parametrize(
    ("name", "difference", "near", "fine"),
    [
        ("model.norm.weight", 0.3, 1, True),
        ("model.norm.weight", 1.0, 1, False),
        ("model.norm.weight", 1.0, 64, True),
        ("model.norm.weight", 0.3, 0, False),
        ("model.norm.weight", math.nan, 64, False),
        ("model.layers.0.post_attention_layernorm.weight", 1.0, 1, False),
        (f"{MOE}gate.weight", 1.0, 1, True),
        (f"{MOE}experts.down_proj", 1.0, 1, True),
        (f"{MOE}experts.down_proj", math.nan, 1, False),
        ("model.layers.1.mlp.shared_expert.up_proj.weight", 1.0, 1, False),  # of a layer without experts
    ],
)
def test_what_a_turned_choice_explains(name: str, difference: float, near: int, fine: bool) -> None:
    """One of 256 tokens', or so many: a gradient with a norm of 1."""
    right = Compared("gradient", f"{MOE}experts.up_proj", 0, 0, 0.0, 1.0, 1e-5)
    tensors = [right, Compared("gradient", name, 0, 0, difference, 1.0, 1e-5)]
    assert explained_by_flips(Report.of((1.0, 1.01), tensors, 1e-5, "norm"), near, 256) == fine
    assert not explained_by_flips(Report.of((1.0, 1.2), tensors, 1e-5, "norm"), near, 256)
    assert not explained_by_flips(Report.of(None, tensors, 1e-5, "norm"), near, 256)


LAYER = "model.layers.0."


@pytest.mark.parametrize(
    ("name", "fine"),
    [
        ("self_attn.q_proj.weight", False),
        ("mlp.up_proj.weight", False),
        ("pre_feedforward_layernorm_2.weight", False),
        ("router.proj.weight", True),
        ("router.per_expert_scale", True),
        ("experts.down_proj", True),
        ("gate.weight", True),
        ("shared_expert.up_proj.weight", True),
    ],
)
def test_a_layer_that_holds_experts_itself_is_no_mixture_as_a_whole(name: str, fine: bool) -> None:
    """0.5.0: all of a gemma4 layer counted as one, its attention too, whose gradient might be any."""
    right = Compared("gradient", f"{LAYER}experts.gate_up_proj", 0, 0, 0.0, 1.0, 1e-5)
    tensors = [right, Compared("gradient", f"{LAYER}{name}", 0, 0, 1.0, 1.0, 1e-5)]
    assert explained_by_flips(Report.of((1.0, 1.0), tensors, 1e-5, "norm"), 1, 512) == fine


def test_the_whole_model_is_gone_before_the_device_s_memory_is_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe, reference, batch = parts(prepare(tmp_path))
    made: list[weakref.ref[Any]] = []
    left: list[list[Any]] = []
    make = Reference.build

    def on_host(self: Reference, device: torch.device) -> Any:
        model = make(self, torch.device("cpu"))
        made.extend(weakref.ref(each) for each in (model, *model.parameters()))
        return model

    def empty() -> None:
        left.append([each() for each in made if each() is not None])

    monkeypatch.setattr(Reference, "build", on_host)
    monkeypatch.setattr(torch.cuda, "empty_cache", empty)
    told = compare_with_reference(
        reference, torch.device("cuda"), pipe.microbatches(shorten(batch, 2)), 0.0, []
    )
    assert isinstance(told, dict)
    assert len(made) > 10
    assert left == [[]]


@pytest.mark.parametrize(
    ("entries", "moved", "wrong"),
    [(1.0, 9.0, 0), (1.01, 0.0, 1), (1.01, 0.005, 0), (1.01, 0.002, 1), (0.0, 9.0, 1), (-1.0, 9.0, 1)],
)
def test_rounding_leaves_room_but_not_for_another_gradient(entries: float, moved: float, wrong: int) -> None:
    """A gradient of ones, and so many of them in the split; the digest is of a length of 1."""
    ones = torch.ones(400)
    weight, expected = digest("a", ones), digest("a", ones / 20)
    own = [(("a", 0, 0), Digests(weight, digest("a", ones * entries / 20)))]
    report = compare_digests(
        (1.0, 1.0), own, {"a": Digests(weight, expected)}, 1e-5, torch.float32, {"a": moved}
    )
    assert len(report.wrong) == wrong


def test_near_ties_are_those_that_the_scores_have_moved_by() -> None:
    before, after, shorter = Scores(), Scores(), Scores()
    scores = torch.tensor([[3.0, 2.0, 1.0], [3.0, 2.0, 1.9], [2.0, 2.0, -torch.inf]])
    with before:
        scores.topk(2)
        torch.topk(scores[:, :2], 2)  # leaves no choice
    with after:
        torch.topk(scores + torch.tensor([[0.0, 0.0, 0.1]]), k=2, dim=-1)
    with shorter:
        scores[:1].topk(2)
    assert [(given.shape, k) for given, k in before.calls] == [((3, 3), 2)]
    assert near_ties(before, before) == 0
    assert near_ties(before, after) == 1
    assert near_ties(before, shorter) == 3


def test_rows_are_cut_short_where_the_ranks_share_them_out_evenly(tmp_path: Path) -> None:
    reference = parts(prepare(tmp_path))[1]
    assert reference.tokens == TOKENS
    assert not reference.reorders
    assert replace(reference, axes=Axes(cp=3, tp=2)).tokens == 60
    assert replace(reference, axes=Axes(cp=40)).tokens == 80


def test_rows_are_cut_short() -> None:
    reference = {"input_ids": torch.arange(400).view(4, 100), "labels": torch.arange(400).view(4, 100)}
    short = shorten(reference, 3)
    assert [tuple(part["labels"].shape) for part in short] == [(1, TOKENS)] * 3
    assert [int(part["input_ids"][0, 0]) for part in short] == [0, 100, 200]
    bounds = torch.tensor([0, 30, 100, 150, 200], dtype=torch.int32)
    flash = {name: reference[name][:2] for name in reference} | {
        "cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": 70, "max_length_k": 70,
    }  # fmt: skip
    (part,) = shorten([flash], 1)
    assert part["cu_seq_lens_q"].tolist() == [0, 30, 64]
    assert part["max_length_k"] == 34


@pytest.mark.parametrize("shape", [(7,), (5, 3), (4, 3, 2), (3000, 2000), ()])
def test_a_digest_measures_differences(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    tensor = torch.randn(shape)
    other = tensor + 1e-3 * torch.randn(shape)
    found, same, another = digest("a", tensor), digest("a", tensor.clone()), digest("a", other)
    assert found == same
    assert found[0] == pytest.approx(float(tensor.double().norm()), rel=1e-9)
    difference = float((tensor - other).double().norm())
    assert 0.05 * difference < distance(found, another) < 20 * difference
