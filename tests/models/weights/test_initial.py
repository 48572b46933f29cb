"""Initial values are those of the model's own initialisation, piece by piece."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaMLP, LlamaPreTrainedModel

from penstock import AutoPipeline
from penstock.errors import ModelError
from penstock.models.tracing.meta import write_through
from penstock.models.weights import files as weights
from penstock.models.weights.initial import initialise
from penstock.runtime.sharded_weights import materialize
from support.covering import every
from support.families import FAMILIES, tiny_config
from support.refusals import refuses


def check_pieces(family: str) -> None:
    """Initial values are the same bit for bit, whether they come all at once or piece by piece."""
    plan = AutoPipeline(ranks=2, microbatches=2).build_plan(tiny_config(family))
    model = plan.source.model
    ties = weights.tied_names(model)
    for stage in range(2):
        whole, part = plan.model_of(stage), plan.model_of(stage)
        initialise(whole, model, ties, 3)
        given = write_through(part)
        materialize(part, torch.device("cpu"))
        initialise(given, model, ties, 3)
        for kind in ("parameters", "buffers"):
            expected, found = (dict(getattr(m, f"named_{kind}")()) for m in (whole, part))
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("family", every(5, FAMILIES))
def test_initial_values_come_piece_by_piece(family: str) -> None:
    check_pieces(family)


def test_an_initialisation_that_looks_at_values(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = LlamaPreTrainedModel._init_weights

    def looks(self: LlamaPreTrainedModel, module: nn.Module) -> None:
        plain(self, module)
        if isinstance(module, LlamaMLP) and float(module.up_proj.weight.detach().max()) > 0:
            module.down_proj.weight.mul_(2)

    monkeypatch.setattr(LlamaPreTrainedModel, "_init_weights", looks)
    check_pieces("llama")


def test_an_initialisation_that_hides_what_it_fills(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = LlamaPreTrainedModel._init_weights

    def hides(self: LlamaPreTrainedModel, module: nn.Module) -> None:
        plain(self, module)
        if isinstance(module, LlamaDecoderLayer) and not module.input_layernorm.weight.is_meta:
            module.mlp.down_proj.weight.mul_(2)

    monkeypatch.setattr(LlamaPreTrainedModel, "_init_weights", hides)
    with refuses(ModelError, "reads more tensors when there are values"):
        check_pieces("llama")
