"""Tiny models with adapters of PEFT without zeros, and what PEFT computes of them in one process."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from penstock import Pipeline
from support import zoo
from support.census import microbatches
from support.reference import Gradients, assert_gradients, gradients_of, plain_steps

PREFIX = "base_model.model."


def rarely(names: Iterable[str], always: Collection[str]) -> list[Any]:
    """Cases by name: those in `always` in every run of the tests, the others in `make sweep`."""
    return [pytest.param(name, marks=[] if name in always else [pytest.mark.sweep]) for name in names]


def lora(**options: Any) -> LoraConfig:
    return LoraConfig(
        **{"task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 6, "target_modules": "all-linear", **options}
    )


def adapted(model: PreTrainedModel, config: LoraConfig | None = None) -> Any:
    """`model`, changed in place, as a PeftModel in training mode."""
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Model has `tie_word_embeddings=True`")
        warnings.filterwarnings("ignore", r"The following \w+_pattern keys did not match")
        warnings.filterwarnings("ignore", "fan_in_fan_out is set to False but the target module is `Conv1D`")
        made = get_peft_model(model, config or lora())
    zoo.unsettle(made, 1)  # B is zero, which hides the gradient of A
    return made.train()


def whole(peft: Any, batch: Mapping[str, Tensor]) -> tuple[float, Gradients]:
    """Loss and gradients that PEFT computes, by the names in the model inside of the PeftModel."""
    loss, gradients = plain_steps(peft, microbatches(batch))
    return loss, {name.removeprefix(PREFIX): gradient for name, gradient in gradients.items()}


def assert_exact(pipe: Pipeline, peft: Any, batch: Mapping[str, Tensor], tolerance: float = 1e-5) -> None:
    """A step of two microbatches gives PEFT's loss and each of its gradients, and no other."""
    pipe.zero_grad()
    found = pipe.step(batch)
    loss, expected = whole(peft, batch)
    assert abs(found.loss - loss) <= tolerance * max(1.0, abs(loss)), (found.loss, loss)
    gradients = gradients_of(pipe)
    held = {name for name, _ in pipe.named_parameters(remove_duplicate=False)}
    assert gradients.keys() == held & expected.keys(), gradients.keys() ^ (held & expected.keys())
    assert expected, "nothing is trained"
    assert {
        name for name, p in pipe.named_parameters(remove_duplicate=False) if p.requires_grad
    } == gradients.keys()
    assert_gradients(gradients, expected, tolerance)


@torch.no_grad()
def logits(model: Any, ids: Tensor) -> Tensor:
    found: Tensor = model.eval()(input_ids=ids, use_cache=False).logits
    return found


def opened(base: PreTrainedModel, folder: Path) -> Any:
    """The base model with the adapter in `folder`, by PEFT alone."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Model has `tie_word_embeddings=True`")
        return PeftModel.from_pretrained(base, str(folder))


def tensors_of(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = load_file(folder / "adapter_model.safetensors")
    return found
