"""Values at the boundary of a stage: those that models write into, pass by or leave for later layers."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from penstock import AutoPipeline
from penstock.errors import ModelError
from penstock.models.tracing.chain import find_chain
from support.families import ragged_batch, tiny_model
from support.refusals import refuses
from support.rewired import Forward, rewired, through


def scaled(scale: Callable[[Any, int], Any]) -> Forward:
    def forward(model: Any, hidden: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(model.layers):
            hidden = layer(hidden) * scale(model, index)
        return hidden

    return forward


def skips(model: Any, hidden: torch.Tensor) -> torch.Tensor:
    first = model.layers[0](hidden)
    share: torch.Tensor = first.detach().abs()
    return through(model.layers[1:], first) * share


def left_on(box: Any, made: torch.Tensor) -> None:
    box.x = made


def passed_in(box: Callable[[], Any], put: Callable[[Any, Any], Any], get: Callable[[Any], Any]) -> Any:
    def forward(model: Any, hidden: torch.Tensor) -> torch.Tensor:
        return through(model.layers, hidden, box())

    def layer(layer: Any, hidden: torch.Tensor, box: Any) -> torch.Tensor:
        before, made = get(box), layer.mlp(hidden)
        put(box, made)
        return made if before is None else made + before  # type: ignore[no-any-return]

    return forward, layer


@pytest.mark.parametrize(
    ("forward", "rule"),
    [
        (lambda model, h: through(model.layers, h) + h, "a result from before the layers"),
        (skips, "layer 0 returned reaches the head"),
        (lambda model, h: through(model.layers, h) @ model.embed_tokens.weight.T @ model.embed_tokens.weight,
         "both before and after the layers"),
        (scaled(lambda model, index: model.scales.data[index]), "between layers"),
        (lambda model, h: through(model.layers, h) + (h if model.training else 0),
         "a result from before the layers"),
        (lambda model, h: through(model.layers, h) * (model.norm(h * 0) if model.training else 1),
         "reaches the head"),
    ],
)  # fmt: skip
def test_values_that_pass_the_layers_by(forward: Forward, rule: str) -> None:
    """0.3.0: made of a dummy on the last stage, in silence."""
    with refuses(ModelError, "LlamaForCausalLM", rule):
        find_chain(rewired(forward))


@pytest.mark.parametrize(
    ("wires", "rule"),
    [
        (passed_in(dict, lambda box, new: box.update(x=new), lambda box: box.get("x")), "left in a dict"),
        (passed_in(list, lambda box, new: box.append(new), lambda box: box[-1] if box else None),
         "left in a list"),
        (passed_in(SimpleNamespace, left_on, lambda box: getattr(box, "x", None)),
         "a value of the embeddings"),
    ],
)  # fmt: skip
def test_values_that_layers_leave_for_each_other(wires: tuple[Forward, Any], rule: str) -> None:
    with refuses(ModelError, "LlamaForCausalLM", rule):
        find_chain(rewired(*wires))


def test_a_model_that_writes_into_its_embeddings() -> None:
    """0.1.0: ctrl scales them in place, which on later stages scaled what had been received."""
    config = AutoConfig.for_model("ctrl", vocab_size=64, n_embd=32, dff=48, n_layer=3, n_head=4,
                                  resid_pdrop=0.0, embd_pdrop=0.0)  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    AutoPipeline(ranks=3, microbatches=4).build(model).verify_against(model, ragged_batch())


def test_a_module_may_keep_a_tensor_of_its_own() -> None:
    """As RecurrentGemma does after a forward: its truth was asked, which is an error of torch."""
    whole = tiny_model("llama")
    expected = find_chain(whole)
    whole.model.state = torch.ones(2, 3)
    assert find_chain(whole) == expected
