"""The chain of layers that a model shows, and stages cut from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, BertConfig, PretrainedConfig

from penstock import AutoPipeline
from penstock.checkpoint import save_checkpoint
from penstock.errors import BatchError, ModelError
from penstock.models.huggingface.stages import HFEdges, cut
from penstock.models.split.activation_sizes import stage_sizes
from penstock.models.stage import StageInfo
from penstock.models.tracing.chain import built_alike, find_chain, under_autocast
from penstock.models.tracing.probe import run_layers
from support import zoo
from support.families import ragged_batch, tiny_config, tiny_model
from support.refusals import refuses
from support.rewired import Forward, rewired, through


@pytest.mark.parametrize(
    ("config", "layers", "before", "after"),
    [
        (tiny_config("llama"), "model.layers", ["model.embed_tokens"], ["model.norm", "lm_head"]),
        (tiny_config("gpt2"), "transformer.h", ["transformer.wte", "transformer.wpe"],
         ["transformer.ln_f", "lm_head"]),
        (tiny_config("gpt_neox"), "gpt_neox.layers", ["gpt_neox.embed_in"],
         ["gpt_neox.final_layer_norm", "lm_head"]),
        (tiny_config("opt"), "model.decoder.layers",
         ["model.decoder.embed_tokens", "model.decoder.embed_positions"],
         ["model.decoder.final_layer_norm", "lm_head"]),
        (BertConfig(vocab_size=64, hidden_size=32, num_hidden_layers=4, num_attention_heads=4,
                    intermediate_size=48, is_decoder=True), "bert.encoder.layer", ["bert.embeddings"],
         ["cls"]),
    ],
    ids=lambda value: value.model_type if isinstance(value, PretrainedConfig) else "",
)  # fmt: skip
def test_names_around_the_layers(
    config: PretrainedConfig, layers: str, before: list[str], after: list[str]
) -> None:
    with torch.device("meta"):
        chain = find_chain(AutoModelForCausalLM.from_config(config))
    assert (chain.layers, chain.count) == (layers, 4)
    assert (sorted(chain.before), sorted(chain.after)) == (sorted(before), sorted(after))


def test_models_are_alike_wherever_their_configs_lie() -> None:
    """1.0: a model that was read from another folder was followed, and counted, once more."""

    def key(name: str, **changes: Any) -> object:
        config = tiny_config("llama", **changes)
        config.name_or_path = name
        with torch.device("meta"):
            return built_alike(AutoModelForCausalLM.from_config(config))

    assert key("") == key('a/"folder"\\with, "vocab_size": 7') is not None
    assert key("") != key("", rope_theta=5.0)
    assert key("", attn_implementation="eager") != key("", attn_implementation="sdpa")


def looked_up(model: Any, hidden: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        bias = model.table(torch.arange(hidden.shape[1]))
    return through(model.layers, hidden, bias)


def magnitude(model: Any, hidden: torch.Tensor) -> torch.Tensor:
    return through(model.layers, hidden, hidden.detach().pow(2).mean(-1, keepdim=True))


def compared(model: Any, hidden: torch.Tensor) -> torch.Tensor:
    return through(model.layers, hidden, (hidden.sum(-1, keepdim=True) > 0).to(hidden.dtype))


@pytest.mark.parametrize("forward", [looked_up, magnitude, compared])
def test_early_values_without_a_gradient(forward: Forward) -> None:
    """0.3.0: made of a dummy on later stages (roformer's table of positions is such a one)."""
    model = rewired(forward)
    AutoPipeline(ranks=4, microbatches=2).build(model).verify_against(model, ragged_batch())


def test_hidden_states_wider_than_the_weights() -> None:
    """0.4.0: mamba in bfloat16 keeps a stream in float32, and the next rank expected bfloat16."""
    model = zoo.tiny_model("mamba2", torch.bfloat16)
    assert find_chain(model).dtype == torch.float32
    AutoPipeline(ranks=4, microbatches=2).build(model).verify_against(model, zoo.tiny_batch("mamba2"))


def test_the_dtype_under_autocast_is_found_once_for_each_of_its_dtypes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """0.6.0: each build of a run in mixed precision ran the layers again without values."""
    model = tiny_model("gemma2", hidden_size=40)
    plain, run = find_chain(model), Mock(wraps=run_layers)
    monkeypatch.setattr("penstock.models.tracing.chain.run_layers", run)
    for dtype in (torch.bfloat16, torch.float16, torch.bfloat16):
        assert under_autocast(tiny_model("gemma2", hidden_size=40), plain, dtype).dtype == torch.float32
    assert run.call_count == 2


def test_a_buffer_that_the_last_stage_writes_is_saved(tmp_path: Path) -> None:
    """0.3.0: the first stage's was, which nothing had written."""

    class Mean(torch.nn.Module):
        mean: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(()))

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            self.mean += hidden.detach().mean()
            return hidden

    model = rewired(lambda model, hidden: model.running(through(model.layers, hidden)))
    model.model.running = Mean()
    pipe = AutoPipeline(ranks=2, microbatches=2).build(model)
    pipe.step(ragged_batch())
    save_checkpoint(tmp_path / "saved", pipe, torch.optim.SGD(pipe.parameters(), lr=0.1))
    held: dict[str, torch.Tensor] = {}
    for file in (tmp_path / "saved").glob("*.safetensors"):
        held |= load_file(file)
    assert float(held["model.running.mean"]) == float(pipe.modules[1].state_dict()["model.running.mean"]) != 0
    with refuses(ModelError, "weights with model.scales, which only the original model"):
        pipe.save_pretrained(tmp_path / "of no class that from_pretrained makes")


def test_entries_that_the_pipeline_sets() -> None:
    """0.4.0: a mixture's auxiliary loss was that of the last stage's routers alone."""
    pipe = AutoPipeline(ranks=2, microbatches=2).build(tiny_model("mixtral", layers=2))
    for name in ("use_cache", "output_router_logits"):
        with refuses(BatchError, f"'{name}' in a batch", "the pipeline sets it"):
            pipe.step({**ragged_batch(), name: True})


def test_an_entry_that_the_model_does_not_take() -> None:
    model: Any = tiny_model("llama")
    llama = type(model)

    def forward(self: Any, input_ids: Any = None, attention_mask: Any = None, use_cache: Any = None) -> Any:
        return llama.forward(self, input_ids, attention_mask, use_cache=use_cache)

    model.__class__ = type("Strict", (llama,), {"forward": forward})
    pipe = AutoPipeline(ranks=2, microbatches=2).build(model)
    pipe.step(ragged_batch())
    with refuses(BatchError, "'atention_mask' in a batch", "such an argument", "you mean 'attention_mask'"):
        pipe.step({**ragged_batch(), "atention_mask": ragged_batch()["input_ids"]})


def test_a_model_without_anything_to_train() -> None:
    model = tiny_model("llama").requires_grad_(False)
    with refuses(ModelError, "step() of a model", "requires a gradient"):
        AutoPipeline(ranks=2, microbatches=2).build(model).step(ragged_batch())


def test_positions_of_three_dimensions_are_split_by_rows() -> None:
    model = zoo.tiny_model("qwen3_5_text")
    batch = zoo.tiny_batch("qwen3_5_text", rows=3)
    positions = torch.arange(batch["input_ids"].shape[1]).expand(3, 3, -1)
    pipe = AutoPipeline(ranks=2, microbatches=3).build(model)
    pipe.verify_against(model, {**batch, "position_ids": positions})


def test_only_a_forward_that_looks_at_values_has_no_estimate() -> None:
    """0.5.0: any error meant that, a mistake in the estimate too."""
    model = tiny_model("llama", layers=2)
    chain, info = find_chain(model), StageInfo(0, 2)

    def estimate(hook: Any) -> Any:
        stage = cut(model, chain, range(1), info)
        stage.get_submodule("model.layers.0").register_forward_pre_hook(hook)
        return stage_sizes(stage, info, HFEdges(model, chain), (4, 32))

    assert estimate(lambda module, args: bool(args[0].sum())) is None
    with pytest.raises(ZeroDivisionError):
        estimate(lambda module, args: 1 / 0)
