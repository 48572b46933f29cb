from __future__ import annotations

import functools
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import AutoPipeline
from penstock.errors import ModelError
from penstock.models.huggingface.references import reached
from support.edits import EDITS
from support.families import ragged_batch, tiny_model
from support.refusals import refuses


def refusal(edit: str, seed: int = 0) -> str:
    model = tiny_model("llama", layers=2).double()
    EDITS[edit](model, Random(seed))
    with pytest.raises(ModelError) as error:
        AutoPipeline(ranks=2, microbatches=2).build(model)
    return str(error.value)


@pytest.mark.parametrize(("edit", "said"), [
    ("scaled_by_a_closure", r"mlp.forward, which uses model.layers.1.mlp of the model that was given"),
    ("compiled_forward", r"mlp.forward, which uses model.layers.1.mlp of the model that was given"),
    ("scaled_by_default", r"mlp.forward, which uses model.layers.1.mlp of the model that was given"),
    ("hook_with_adapter_of_the_model", "a hook of model.layers.1, which uses the model"),
    ("hook_with_a_global", "a hook of model.layers.1, which uses model.layers.1.adapter"),
    ("hook_with_a_module_of_its_own", "a hook of model.layers.1, which uses Linear, a module with weights"),
    ("gradient_hook_with_the_model", "a gradient hook of"),
    ("accumulated_hook", "a hook that runs after its gradient is accumulated"),
    ("other_loss", "a loss_function of LlamaForCausalLM that was replaced"),
])  # fmt: skip
def test_a_function_that_keeps_the_callers_modules_is_refused(edit: str, said: str) -> None:
    """0.5.0: the stage computed with the caller's modules and trained them, as functions are not copied."""
    assert said in refusal(edit)


def test_a_module_of_another_stage_in_a_partial_is_refused() -> None:
    """0.5.0: it read as zeros, as a placeholder stands for the modules of other stages."""
    model = tiny_model("llama", layers=2)

    def adds(module: nn.Module, args: Any, output: Tensor, head: nn.Linear) -> Tensor:
        return output + head.weight.mean()

    model.model.layers[0].register_forward_hook(functools.partial(adds, head=model.lm_head))
    with refuses(ModelError, "a hook of model.layers.0, which uses modules of another stage"):
        AutoPipeline(ranks=2, microbatches=2).build(model)


def test_a_gradient_hook_is_carried_over() -> None:
    """0.5.0: it was dropped, so that training new rows of an embedding trained all of them."""
    model = tiny_model("qwen3", layers=2)
    embedding = model.get_input_embeddings().weight
    mask = torch.zeros_like(embedding)
    mask[-8:] = 1
    embedding.register_hook(lambda gradient: gradient * mask)
    pipe = AutoPipeline(ranks=2, microbatches=2).build(model)
    pipe.step(ragged_batch())
    gradient = pipe.modules[0].get_parameter("model.embed_tokens.weight").grad
    assert gradient is not None
    assert not gradient[:-8].any()


def test_a_list_that_is_named_as_hooks_are_is_no_table_of_hooks() -> None:
    """It ended in AttributeError: 'list' object has no attribute 'values'."""
    model = tiny_model("llama")
    vars(model)["my_hooks"] = [len]
    AutoPipeline(ranks=2, microbatches=2).build(model)


class Holder:
    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def method(self) -> None: ...


def test_what_a_function_reaches() -> None:
    module = nn.Linear(1, 1)

    def by_closure() -> nn.Module:
        return module

    def by_default(it: nn.Module = module) -> nn.Module:
        return it

    def by_keyword(*, it: nn.Module = module) -> nn.Module:
        return it

    for function in (
        by_closure, by_default, by_keyword, functools.partial(print, module),
        Holder(module).method, Holder(module), [{"a": (by_closure,)}], lambda: by_closure(),
    ):  # fmt: skip
        assert list(reached(function)) == [module], function
    assert list(reached(lambda: torch.nn.Linear)) == []
