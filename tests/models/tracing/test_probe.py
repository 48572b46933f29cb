"""The chain of a model's layers: which list it is, and models that are none."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    ASTConfig,
    ASTForAudioClassification,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    T5Config,
    ViTConfig,
    ViTForImageClassification,
)

from penstock import AutoPipeline
from penstock.errors import ModelError, PartitionError
from penstock.models.tracing.chain import find_chain
from penstock.models.tracing.probe import register_chain
from support import heads
from support.covering import some
from support.families import ragged_batch, tiny_config, tiny_model
from support.refusals import refuses
from support.rewired import rewired, through


@pytest.mark.parametrize("family", some(["bloom", "falcon", "mpt"], "bloom"))
def test_layers_that_return_tuples(family: str) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes))
    assert find_chain(model).output_form == "tuple"
    pipe = AutoPipeline(ranks=3, microbatches=4).build(model)
    pipe.verify_against(model.train(), ragged_batch())


def test_models_that_are_refused() -> None:
    cases: list[tuple[Any, dict[str, Any], str, str]] = [
        (T5Config(vocab_size=64, d_model=16, num_layers=2, num_heads=2), {},
         "model_type='t5'", "no causal LM"),
        (3, {}, "model given as int", "a local folder"),
        ("/nowhere/at/all", {}, "model folder /nowhere/at/all", "no such folder"),
        (tiny_model("llama"), {"dtype": torch.float64}, "dtype=torch.float64", "is not changed"),
        (tiny_model("llama"), {"attention": "eager"}, "attention=eager", "is not changed"),
    ]  # fmt: skip
    for model, options, value, rule in cases:
        with refuses(ModelError, value, rule):
            AutoPipeline(ranks=2, microbatches=2, **options).build_plan(model)
    with refuses(PartitionError, "6 stages for 4 layers"):
        AutoPipeline(ranks=6, microbatches=2).build_plan(tiny_config("llama"))


@pytest.mark.parametrize(
    ("order", "rule"),
    [
        (lambda layers, h: through(layers[2:], through(layers[:2], h) + h),
         "layer 2 does not take"),
        (lambda layers, h: through([*layers[2:], *layers[:2]], h),
         "order [2, 3, 0, 1]"),
        (lambda layers, h: through(layers[:2], h), "order [0, 1]"),
        (lambda layers, h: through([layers[0], *layers], h), "order [0, 0, 1, 2, 3]"),
    ],
)  # fmt: skip
def test_layers_that_do_not_run_once_each_in_order(order: Callable[[Any, Any], Any], rule: str) -> None:
    with refuses(ModelError, "LlamaForCausalLM", rule):
        find_chain(rewired(lambda model, hidden: order([*model.layers], hidden)))


def test_a_registered_rule_names_the_list_of_layers() -> None:
    """Where its config does not tell which list is the layers'."""
    model = tiny_model("llama")
    mine: Any = type("Mine", (type(model),), {})
    model.__class__ = mine
    model.model.experts = torch.nn.ModuleList(torch.nn.Linear(256, 256) for _ in range(4))
    with refuses(ModelError, "Mine", "layers run"):
        find_chain(model)
    register_chain(mine, lambda model: "model.layers")
    assert find_chain(model).layers == "model.layers"
    register_chain(mine, lambda model: "model.blocks")
    with refuses(ModelError, "returns 'model.blocks'", "nn.ModuleList", "Return 'model.layers'"):
        find_chain(model)


def test_layers_dropped_at_random_are_refused() -> None:
    """0.1.0: a placeholder that was passed by gave a loss without gradients."""
    with refuses(ModelError, "layerdrop=0.3", remedy="Set layerdrop=0"):
        AutoPipeline(ranks=2, microbatches=2).build(tiny_config("opt", layerdrop=0.3))
    model = tiny_model("opt")
    pipe = AutoPipeline(ranks=2, microbatches=2).build(model)
    for module in pipe.modules.values():
        module.model.decoder.layerdrop = 1.0  # type: ignore[union-attr]
    with refuses(ModelError, "called on a stage that does not have it", remedy="layer dropping to 0"):
        pipe.step(ragged_batch())


def test_torch_logs_nothing_for_ops_that_fail_without_values() -> None:
    """The grouped product of the default experts takes float32, but not in torch's rules for shapes."""
    records: list[logging.LogRecord] = []
    handler, log = logging.Handler(), logging.getLogger("torch._subclasses.fake_tensor")
    handler.emit = records.append  # type: ignore[assignment, method-assign]
    log.addHandler(handler)
    try:
        config = tiny_config("mixtral", num_local_experts=4, hidden_size=64)
        AutoPipeline(ranks=2, microbatches=2).build(AutoModelForCausalLM.from_config(config))
    finally:
        log.removeHandler(handler)
    assert not records


def test_a_model_of_images_or_sound_is_refused_in_words() -> None:
    """Unreleased: "its forward could not be followed: 'NoneType' object has no attribute 'dtype'"."""
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    cases: list[tuple[PreTrainedModel, str]] = [
        (ViTForImageClassification(ViTConfig(image_size=16, patch_size=8, **small)), "pixel_values"),
        (ASTForAudioClassification(ASTConfig(**small)), "input_values"),
    ]
    for model, entry in cases:
        with refuses(ModelError, type(model).__name__, f"it reads {entry}, and a pipeline cuts"):
            AutoPipeline(ranks=2, microbatches=2).build_plan(model)
        with refuses(ModelError, f"model_type={model.config.model_type!r}", "none of its models for texts"):
            AutoPipeline(ranks=2, microbatches=2).build_plan(model.config)


def test_two_layers_that_return_tuples() -> None:
    """Unreleased: with two layers or fewer, [0] of a tensor passed for the first entry of a tuple, and the
    model's own loss was then not recognised.
    """
    for name, model_type in (("MPNetForMaskedLM", "mpnet"), ("RoFormerForTokenClassification", "roformer")):
        model = heads.tiny(name, model_type, layers=2)
        assert find_chain(model).output_form != "tensor"
        classes = model.config.vocab_size if "Masked" in name else heads.CLASSES
        pipe = AutoPipeline(ranks=2, microbatches=2).build(model)
        assert pipe.verify_against(model, heads.token_batch(classes)).note == ""
