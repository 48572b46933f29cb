"""Stages of a Hugging Face model: what each has, and what crosses between them."""

from __future__ import annotations

import pytest
import torch

from penstock import AutoPipeline
from penstock.errors import ModelError
from penstock.models.huggingface.boundary import BoundaryPlaceholder, at_boundary
from penstock.models.huggingface.stages import cut
from penstock.models.stage import StageInfo
from penstock.models.tracing.chain import find_chain
from penstock.runtime.around import is_around
from support import zoo
from support.families import tiny_config, tiny_model
from support.refusals import refuses


def test_a_stage_holds_its_own_parameters_only() -> None:
    model = tiny_model("gpt2")
    chain = find_chain(model)
    names = []
    for stage, layers in enumerate((range(1), range(1, 3), range(3, 4))):
        part = cut(model, chain, layers, StageInfo(stage, 3))
        names.append({name for name, _ in part.named_parameters()})
        layers_kept = [layer for layer in part.transformer.h if type(layer) is not BoundaryPlaceholder]
        own = [is_around(at_boundary, layer) for layer in layers_kept]
        assert own == [[True], [False, True], [False]][stage]  # the last one ends the forward
    assert set.union(*names) == {name for name, _ in model.named_parameters(remove_duplicate=False)}
    assert not names[0] & names[1]
    assert not names[1] & names[2]
    assert all(p.device.type == "cpu" for p in model.parameters())


def test_a_head_alone_makes_masks_of_the_models_dtype() -> None:
    """0.5.0, xlnet: StopIteration: a model reads its dtype and device from its first weight, and had none."""
    model = zoo.tiny_model("xlnet", torch.float64)
    pipe = AutoPipeline(ranks=2, microbatches=2, layers_per_stage=[4, 0]).build(model)
    assert [type(module).__name__ for module in pipe.modules.values()] == ["XLNetLMHeadModel"] * 2
    assert pipe.verify_against(model, zoo.tiny_batch("xlnet")).passed


@pytest.mark.parametrize("is_moe", [False, True])
def test_the_logits_of_routers_cross_where_there_are_routers(is_moe: bool) -> None:
    """0.5.0, a dense doge with output_router_logits: KeyError: its config was asked, and not its layers."""
    model = zoo.tiny_model("doge", torch.float64, output_router_logits=True, is_moe=is_moe)
    assert find_chain(model).recorded == (("router_logits",) if is_moe else ())
    pipe = AutoPipeline(ranks=2, microbatches=2).build(model)
    assert pipe.verify_against(model, zoo.tiny_batch("doge")).passed


def test_positions_that_depend_on_earlier_rows_are_refused() -> None:
    """0.5.0: "use a decoder-only model" for a decoder-only model: its forward looks at values."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    with refuses(ModelError, "rope_type='dynamic'", "frequencies depend"):
        AutoPipeline(ranks=2, microbatches=2).build_plan(tiny_config("llama", rope_parameters=rope))
    by_kind = {"sliding_attention": rope, "full_attention": {**rope, "rope_type": "default"}}
    with refuses(ModelError, "rope_type='dynamic'", "frequencies depend"):
        AutoPipeline(ranks=2, microbatches=2).build_plan(tiny_config("gemma3_text", rope_parameters=by_kind))


def test_a_parameter_of_another_stage_is_zeros_that_are_not_saved() -> None:
    """Code that uses it runs on a dummy input, and needs a value of its shape."""
    model = zoo.tiny_model("xlnet", torch.float32)
    chain = find_chain(model)
    used_before = [name for name, is_before in chain.direct_parameters.items() if is_before]
    assert used_before
    part = cut(model, chain, range(2, 4), StageInfo(1, 2))
    for name in used_before:
        assert torch.equal(part.get_buffer(name), torch.zeros_like(model.get_parameter(name)))
    assert part.state_dict().keys().isdisjoint(used_before)
