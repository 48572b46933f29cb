"""The check before the first step passes, names what differs, says when it is skipped, changes nothing."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from penstock import Axes, Pipeline
from penstock.errors import ConfigError, DifferenceError, EquivalenceError, ModelError, RunError
from penstock.models.weights import initial
from penstock.train.check.before_training import (
    TOKENS,
    Reference,
    check_split,
    compare_with_reference,
    shorten,
)
from penstock.train.checkpoints import NEWEST
from penstock.train.config.sections import TrainConfig
from penstock.train.preflight import Prepared, preflight
from penstock.train.run import run
from support import jobs_train as jobs
from support import tiny
from support.covering import every
from support.pool import Pool
from support.refusals import refuses
from support.tiny import GPT2_WITH_DROPOUT, QWEN3, assert_same_tensors, checkpoint, write_documents

Checked = tuple[Pipeline, Reference, Any]  # what check_split takes


def config(
    folder: Path, model: dict[str, Any] | None = None, keys: dict[str, Any] | None = None, **train: Any
) -> TrainConfig:
    return tiny.config(folder, model, keys, **{"check": "auto", **train})


def built(prepared: Prepared) -> Checked:
    auto = prepared.auto
    reference = Reference(prepared.plan.source, auto.seed, auto.loss(), (auto.wire_dtype,))
    return auto.build(prepared.model), reference, prepared.data.batch(1).content


@pytest.fixture
def tiny_pipe(tmp_path: Path) -> Checked:
    return built(preflight(config(tmp_path)))


def saved(folder: Path, tied_scores: bool = False, **keys: Any) -> dict[str, Any]:
    """Save a model; the config's keys that name it.

    tied_scores: whether its routers see no difference between experts
    """
    model = tiny.save_model(folder / "model", **keys)
    for name, parameter in model.named_parameters():
        if tied_scores and name.endswith("mlp.gate.weight"):
            parameter.data.zero_()
    model.save_pretrained(folder / "model")
    return {"model.config": None, "model.path": str(folder / "model")}


# ---- Refused before it: what a class of the user's own does to its modules


def replaces_a_forward(model: Any) -> None:
    mlp = model.model.layers[0].mlp
    old = mlp.forward
    mlp.forward = lambda x: old(x) * 1.5


def hooks_another_module(model: Any) -> None:
    norm = model.model.norm
    model.model.layers[0].register_forward_pre_hook(lambda module, args: (norm(args[0]),))


def hooks_a_gradient(model: Any) -> None:
    model.model.layers[0].mlp.up_proj.weight.register_hook(lambda gradient: 3 * gradient)


def replaces_its_loss(model: Any) -> None:
    model.loss_function = nn.functional.cross_entropy


def scales_in_a_hook(model: Any) -> None:
    model.model.layers[1].mlp.register_forward_hook(lambda module, args, output: output * 1.5)


def registered(edit: Callable[[Any], None]) -> str:
    """The model type of a class of the user's own, which edits itself as it is made."""

    class Config(Qwen3Config):  # type: ignore[misc]
        model_type = f"own_{edit.__name__}"

    class Model(Qwen3ForCausalLM):  # type: ignore[misc]
        config_class = Config

        def __init__(self, config: Qwen3Config) -> None:
            super().__init__(config)
            edit(self)

    AutoConfig.register(Config.model_type, Config, exist_ok=True)
    AutoModelForCausalLM.register(Config, Model, exist_ok=True)
    return Config.model_type


@pytest.mark.parametrize(
    ("edit", "value", "rule"),
    [
        (
            replaces_a_forward,
            "model.layers.0.mlp.forward, which uses model.layers.0.mlp",
            "keeps its references",
        ),
        (hooks_another_module, "a hook of model.layers.0, which uses model.norm", "keeps its references"),
        (hooks_a_gradient, "up_proj.weight, with a hook on its gradient", "are replaced"),
        (replaces_its_loss, "a loss_function of Model that was replaced", "computes the loss itself"),
    ],
)
def test_what_a_registered_class_does_to_itself_is_refused(
    tmp_path: Path, edit: Callable[[Any], None], value: str, rule: str
) -> None:
    """0.5.0: the first two trained another model, the hook on a gradient and the loss were dropped."""
    with refuses(ModelError, value, rule):
        built(preflight(config(tmp_path, {**QWEN3, "model_type": registered(edit)})))


def test_a_hook_that_needs_its_module_only_is_kept(tmp_path: Path) -> None:
    model = {**QWEN3, "model_type": registered(scales_in_a_hook)}
    assert check_split(*built(preflight(config(tmp_path, model))), "always").startswith("checked in ")


# ---- Passing


@pytest.mark.parametrize(
    ("schedule", "tied"),
    [pytest.param("1f1b", True, marks=pytest.mark.sweep), ("zb_v", False), ("dualpipe", True)],
)
def test_a_correct_split_passes(tmp_path: Path, schedule: str, tied: bool) -> None:
    """The plain schedule, one with split backwards, one with two copies of each weight."""
    model = {**QWEN3, "num_hidden_layers": 4, "tie_word_embeddings": tied}
    keys = {"pipeline.schedule": schedule, "pipeline.microbatches": 4}
    line = check_split(*built(preflight(config(tmp_path, model, keys))), "auto")
    assert line.startswith("checked in ")
    assert "the split model's loss and" in line


@pytest.mark.parametrize(
    ("dtype", "wire"),
    every(2, [("bfloat16", None), ("float64", None), ("float32", "bfloat16"), ("float32", "float16")]),
)
def test_narrower_dtypes_get_wider_tolerances(tmp_path: Path, dtype: str, wire: str | None) -> None:
    made = config(tmp_path, keys={"model.dtype": dtype, "pipeline.wire_dtype": wire})
    assert check_split(*built(preflight(made)), "auto").startswith("checked in ")


def test_a_folder_with_weights_and_packed_documents_passes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(preflight(config(tmp_path, keys=saved(tmp_path) | write_documents(tmp_path), steps=1)))
    assert "\nchecked in " in capsys.readouterr().out


def test_a_resumed_run_is_checked_only_when_asked_to_and_against_its_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(preflight(config(tmp_path, steps=1)))
    capsys.readouterr()
    run(preflight(config(tmp_path, steps=2), NEWEST))
    assert "checked in " not in capsys.readouterr().out
    run(preflight(config(tmp_path, steps=3, check="always"), NEWEST))
    assert "\nchecked in " in capsys.readouterr().out


# ---- Differences


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight"])
def test_a_different_weight_is_named(tiny_pipe: Checked, name: str) -> None:
    jobs.spoil(dict(tiny_pipe[0].named_parameters())[name])
    stage = 0 if "embed" in name else 1
    with pytest.raises(EquivalenceError) as caught:
        check_split(*tiny_pipe, "auto")
    assert caught.value.value.startswith(f"weight {name}: it differs before any step, by 0.00")
    assert f" on stage {stage} of rank {stage}, and its norm is " in caught.value.value
    assert ";" not in caught.value.value
    assert caught.value.exit_code == 1
    assert "train.check=off" in caught.value.remedy


UP = "model.layers.0.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("stage", "name", "change"),
    [
        (1, "model.norm.weight", lambda grad: grad * 1.001),
        (1, "model.norm.weight", lambda grad: -grad),
        (1, "model.norm.weight", lambda grad: grad * 0.0),
        (0, UP, lambda grad: grad.flip(0)),  # its norm is the same
    ],
    ids=["factor", "sign", "zero", "order"],
)
def test_a_different_gradient_is_named(
    tiny_pipe: Checked, stage: int, name: str, change: Callable[[Any], Any]
) -> None:
    tiny_pipe[0].modules[stage].get_parameter(name).register_hook(change)  # type: ignore[no-untyped-call]
    with refuses(DifferenceError, f"gradient {name}: it differs by") as caught:
        check_split(*tiny_pipe, "auto")
    worst = caught.value.value.split("; ")[0]
    assert worst.startswith(f"gradient {name}: ")
    assert "norm is" in worst


def test_a_layer_that_computes_something_else_is_found(tiny_pipe: Checked) -> None:
    """All gradients before it differ too."""
    layer = tiny_pipe[0].modules[1].get_submodule("model.layers.1.mlp")
    layer.register_forward_hook(lambda module, args, output: output * 1.01)
    with refuses(DifferenceError, " more", "the loss and the gradients") as caught:
        check_split(*tiny_pipe, "auto")
    assert caught.value.value.startswith("gradient model.layers.1.mlp")


def test_a_wrong_split_ends_the_run_before_its_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stages' values come from another seed than the reference model's."""
    initialise = initial.initialise

    def other(stage: Any, whole: Any, ties: Any, seed: int) -> None:
        initialise(stage, whole, ties, seed + (type(stage) is type(whole) and hasattr(stage, "boundary")))

    monkeypatch.setattr(initial, "initialise", other)
    with refuses(DifferenceError, " more", "the loss and the gradients") as caught:
        run(preflight(config(tmp_path)))
    assert caught.value.value.startswith("weight ")
    assert tiny.metrics(tmp_path) == []


# ---- Skipping


def test_it_is_skipped_where_memory_is_short(tiny_pipe: Checked) -> None:
    needed = 2 * tiny_pipe[1].bytes
    assert check_split(*tiny_pipe, "auto", lambda _: None).startswith("checked")
    assert check_split(*tiny_pipe, "auto", lambda _: needed).startswith("checked")
    line = check_split(*tiny_pipe, "auto", lambda _: needed - 1)
    assert line.startswith("not checked against the whole model: the whole model and its gradients take ")
    assert "more than half of the " in line
    with refuses(ConfigError, "train.check=always", "whole model"):
        check_split(*tiny_pipe, "always", lambda _: 1000)


def test_it_is_skipped_where_memory_runs_out(tiny_pipe: Checked, monkeypatch: pytest.MonkeyPatch) -> None:
    """0.5.0: the host's allocator raises a plain RuntimeError, which ended the run."""

    def on_gpu(reference: Reference, device: torch.device) -> None:
        raise torch.OutOfMemoryError

    for build in (on_gpu, lambda *_: torch.empty(2**60, dtype=torch.uint8)):
        monkeypatch.setattr(Reference, "build", build)
        assert check_split(*tiny_pipe, "auto").endswith("model: memory ran out")
    monkeypatch.setattr(Reference, "build", lambda *_: torch.ones(2) @ torch.ones(3))
    with pytest.raises(RuntimeError, match="inconsistent tensor size"):
        check_split(*tiny_pipe, "auto")


def test_a_model_whose_loss_is_nan_is_left_to_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = config(tmp_path, {**QWEN3, "rms_norm_eps": float("nan")})
    with refuses(RunError, "step 0: held_out_loss=nan"):
        run(preflight(made))
    assert "not checked against the whole model: its own loss is nan" in capsys.readouterr().out


# ---- It changes nothing


def test_a_run_is_bit_for_bit_the_same_with_and_without_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a model with dropout, so that the random numbers count too."""
    for mode in ("auto", "off"):
        (tmp_path / mode).mkdir()
        run(preflight(config(tmp_path / mode, GPT2_WITH_DROPOUT, steps=2, check=mode)))
        assert capsys.readouterr().out.count("checked in") == (mode == "auto")
    assert_same_tensors(checkpoint(tmp_path / "auto", 2), checkpoint(tmp_path / "off", 2))
    measured = (
        "seconds", "seconds_by_part", "tokens_per_second", "bubble", "tflops_per_device", "peak_resident",
        "run",
    )  # fmt: skip
    rows = [
        [{key: value for key, value in row.items() if key not in measured} for row in tiny.metrics(folder)]
        for folder in (tmp_path / "auto", tmp_path / "off")
    ]
    assert rows[0] == rows[1]


def test_gradients_modes_and_random_state_are_left_as_they_were(tmp_path: Path) -> None:
    pipe, reference, batch = built(preflight(config(tmp_path, GPT2_WITH_DROPOUT)))
    some = next(pipe.parameters())
    some.grad = torch.ones_like(some)
    before, state = some.grad, torch.get_rng_state()
    check_split(pipe, reference, batch, "auto")
    assert some.grad is before
    assert torch.equal(before, torch.ones_like(some))
    assert all(p.grad is None for p in pipe.parameters() if p is not some)
    assert all(part.training for module in pipe.modules.values() for part in module.modules())
    assert torch.equal(torch.get_rng_state(), state)


def test_the_reference_model_is_gone_before_the_device_s_memory_is_released(
    tiny_pipe: Checked, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe, reference, batch = tiny_pipe
    made: list[weakref.ref[Any]] = []
    alive: list[list[Any]] = []
    build = Reference.build

    def on_host(self: Reference, device: torch.device) -> Any:
        model = build(self, torch.device("cpu"))
        made.extend(weakref.ref(each) for each in (model, *model.parameters()))
        return model

    monkeypatch.setattr(Reference, "build", on_host)
    monkeypatch.setattr(
        torch.cuda, "empty_cache", lambda: alive.append([each() for each in made if each() is not None])
    )
    microbatches = pipe.microbatches(shorten(batch, 2))
    result = compare_with_reference(reference, torch.device("cuda"), microbatches, 0.0, [])
    assert isinstance(result, dict)
    assert len(made) > 10
    assert alive == [[]]


# ---- Over processes, and where ranks add up in another order


def test_every_process_has_the_same_outcome(pool: Pool, tmp_path: Path) -> None:
    found = pool.run(3, jobs.checked_on_ranks, str(tmp_path), "zb_h1")
    assert all(passed.startswith("checked in") for passed, _, _ in found)
    assert {short for _, short, _ in found} == {found[0][1]}
    assert "free to process 0" in found[0][1]
    (wrong,) = {differs for _, _, differs in found}
    assert wrong.startswith("weight model.layers.")
    assert "q_proj.weight: it differs before any step, by" in wrong
    assert "on stage 1 of rank 1" in wrong


@pytest.mark.sweep
def test_rounding_that_grows_with_depth_is_no_difference(pool: Pool) -> None:
    """At this depth some gradients differ by more than the tolerance, and none by more than rounding."""
    line = pool.run(4, jobs.checked_when_deep, 24)[0]
    assert line.startswith("checked in ")
    found = re.search(r"tolerance 3e-02; (\d+) by up to \d\.\de-02, no more than rounding[;)]", line)
    assert found, line
    assert int(found[1]) > 5


def mixture(folder: Path, tied_scores: bool) -> Checked:
    """A mixture of experts on a mesh whose sums may be rounded in another order."""
    keys = {
        "model_type": "qwen3_moe", "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2,
        "experts_implementation": "eager",
    }  # fmt: skip
    pipe, reference, batch = built(preflight(config(folder, keys=saved(folder, tied_scores, **keys))))
    return pipe, replace(reference, axes=Axes(ep=2)), batch


@pytest.mark.parametrize("tied_scores", [False, True])
def test_router_flips_that_rounding_may_cause_are_reported(tmp_path: Path, tied_scores: bool) -> None:
    pipe, over, batch = mixture(tmp_path, tied_scores)
    assert check_split(pipe, over, batch, "auto").startswith("checked in ")
    norm = pipe.modules[1].get_parameter("model.norm.weight")
    norm.register_hook(lambda grad: grad * 1.1)  # type: ignore[no-untyped-call]
    differs = "gradient model.norm.weight: it differs"
    with refuses(DifferenceError, differs):
        check_split(pipe, replace(over, axes=Axes()), batch, "auto")
    if not tied_scores:
        with refuses(DifferenceError, differs):
            check_split(pipe, over, batch, "auto")
        return
    line = check_split(pipe, over, batch, "auto")
    assert "not checked against the whole model: rounding by ep=2 may flip 64 router choices" in line
    assert "gradient model.norm.weight: it differs by" in line
    with refuses(ConfigError, "train.check=always", "ep=2 may flip"):
        check_split(pipe, over, batch, "always")


# ---- The batch


def test_rows_are_short_and_shared_evenly_by_cp_and_tp(tiny_pipe: Checked) -> None:
    reference = tiny_pipe[1]
    assert reference.tokens == TOKENS
    assert not reference.reorders
    assert replace(reference, axes=Axes(cp=3, tp=2)).tokens == 60
    assert replace(reference, axes=Axes(cp=40)).tokens == 80


def test_a_batch_is_cut_to_one_short_row_a_microbatch() -> None:
    batch = {"input_ids": torch.arange(400).view(4, 100), "labels": torch.arange(400).view(4, 100)}
    short = shorten(batch, 3)
    assert [tuple(part["labels"].shape) for part in short] == [(1, TOKENS)] * 3
    assert [int(part["input_ids"][0, 0]) for part in short] == [0, 100, 200]


def test_the_bounds_of_documents_are_cut_too() -> None:
    bounds = torch.tensor([0, 30, 100, 150, 200], dtype=torch.int32)
    batch = {
        "input_ids": torch.arange(200).view(2, 100), "cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds,
        "max_length_q": 70, "max_length_k": 70,
    }  # fmt: skip
    (part,) = shorten([batch], 1)
    assert part["cu_seq_lens_q"].tolist() == [0, 30, 64]
    assert part["max_length_k"] == 34
