"""Initial values, files read and written: the same model whatever the split."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM

from penstock import AutoPipeline
from penstock.errors import CheckpointError, ModelError
from penstock.models.weights import files as weights
from penstock.models.weights.tensor_file import TensorFile
from support.covering import every
from support.families import FAMILIES, ragged_batch, tiny_config, tiny_model


def values(ranks: int, source: Any, **options: Any) -> dict[str, Tensor]:
    pipe = AutoPipeline(ranks=ranks, microbatches=2, **options).build(source)
    found = {name: p.detach() for name, p in pipe.named_parameters(remove_duplicate=False)}
    for module in pipe.modules.values():
        found |= dict(module.named_buffers())
    return found


@pytest.mark.parametrize("family", every(8, FAMILIES))
def test_initial_values(family: str) -> None:
    """The same whatever the split; tied weights too. Drawn with the deviation of transformers, or equal."""
    config = tiny_config(family, tied=True, layers=3, hidden_size=64, intermediate_size=96)
    torch.manual_seed(0)  # 4 standard deviations are met now and then
    reference = AutoModelForCausalLM.from_config(config)
    found, whole = (values(ranks, config, seed=3) for ranks in (3, 1))
    for first, *others in weights.tied_names(reference):
        whole |= dict.fromkeys(others, whole[first])
    assert found.keys() <= whole.keys()
    for name, value in found.items():
        assert torch.equal(value, whole[name]), name
        if name in dict(reference.named_buffers()):
            torch.testing.assert_close(value, reference.get_buffer(name), msg=name)
            continue
        expected = reference.get_parameter(name).detach()
        if expected.std() == 0:
            assert torch.equal(value, expected), name
        elif value.numel() > 50:  # a handful of draws tells nothing of their deviation
            ratio = float(value.std() / expected.std())
            assert ratio == pytest.approx(1, abs=4 / value.numel() ** 0.5), name


def test_initial_values_depend_on_the_seed_alone() -> None:
    """An untied head has values of its own."""
    config = tiny_config("llama")
    one, again, other = (values(ranks, config, seed=seed) for ranks, seed in ((2, 3), (1, 3), (2, 4)))
    names = {"model.embed_tokens.weight", "lm_head.weight", "model.layers.3.mlp.up_proj.weight"}
    assert all(torch.equal(one[name], again[name]) for name in one)
    assert not any(torch.equal(one[name], other[name]) for name in names)
    assert not torch.equal(one["model.embed_tokens.weight"], one["lm_head.weight"])


@pytest.mark.parametrize(("family", "tied"), every(8, [(name, n % 4 > 0) for n, name in enumerate(FAMILIES)]))
def test_a_round_trip_keeps_every_bit(tmp_path: Path, family: str, tied: bool) -> None:
    """transformers writes, a pipeline reads, runs and writes, transformers reads: bit for bit."""
    model = tiny_model(family, tied=tied, layers=3).eval()
    model.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    pipe = AutoPipeline(ranks=3, microbatches=2).build(tmp_path / "theirs")
    assert all(
        torch.equal(p, model.get_parameter(name)) for name, p in pipe.named_parameters(remove_duplicate=False)
    )
    pipe.verify_against(model, ragged_batch())
    pipe.save_pretrained(tmp_path / "ours")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", experts_implementation="eager").eval()
    ids = ragged_batch()["input_ids"]
    assert torch.equal(again(ids).logits, model(ids).logits)
    assert stored(tmp_path / "ours").keys() == stored(tmp_path / "theirs").keys()


def stored(folder: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Under which names, in which dtypes and shapes a folder holds its weights. Each is in one file only."""
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for file in weights.weight_files(folder):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                assert name not in found, f"{name} is in two files"
                held = opened.get_slice(name)
                found[name] = held.get_dtype(), tuple(held.get_shape())
    return found


def test_a_base_model_without_its_prefix(tmp_path: Path) -> None:
    """Checkpoints of gpt2 are stored without `transformer.`, and its tied head not at all."""
    model = tiny_model("gpt2", tied=True)
    model.transformer.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["GPT2LMHeadModel"]}))
    pipe = AutoPipeline(ranks=2, microbatches=2).build(tmp_path)
    found = dict(pipe.named_parameters(remove_duplicate=False))
    assert torch.equal(found["lm_head.weight"], model.transformer.wte.weight)
    assert torch.equal(found["transformer.h.3.ln_1.weight"], model.transformer.h[3].ln_1.weight)


def test_a_stage_reads_its_own_tensors_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("mixtral")
    model.save_pretrained(tmp_path)
    read: set[str] = set()
    original = TensorFile.read

    def noting(file: TensorFile, name: str, *into: Any) -> Tensor:
        read.add(name)
        return original(file, name, *into)

    monkeypatch.setattr(TensorFile, "read", noting)
    plan = AutoPipeline(ranks=2, microbatches=2).build_plan(tmp_path)
    weights.load(plan.model_of(1), plan.source.files, ())
    own = ("model.layers.2.", "model.layers.3.", "model.norm", "lm_head")
    assert len(read) > 10
    assert all(name.startswith(own) for name in read)


def test_damaged_files_are_found_before_any_weight_is_read(tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    auto = AutoPipeline(ranks=2, microbatches=2)
    shard = next(iter(sorted(tmp_path.glob("model-*"))))
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-10])
    with pytest.raises(CheckpointError, match=r"it is no complete safetensors file .*not fully covered"):
        auto.build_plan(tmp_path)
    shard.write_bytes(b"")
    with pytest.raises(CheckpointError, match="header too small"):
        auto.build_plan(tmp_path)
    shard.unlink()
    with pytest.raises(CheckpointError, match="the index names it and it is missing"):
        auto.build_plan(tmp_path)
    outside = [
        json.dumps({"weight_map": {"lm_head.weight": name}}) for name in ("../x", "/x", "a/../../x", "")
    ]
    for broken in ("{", "[]", '{"weight_map": {"lm_head.weight": 3}}', *outside):
        (tmp_path / weights.INDEX).write_text(broken)
        with pytest.raises(CheckpointError, match="no index of weight files"):
            auto.build_plan(tmp_path)


def test_weights_in_other_formats_are_refused(tmp_path: Path) -> None:
    """0.1.0: a folder of pickled weights, or of shards without their index, gave random weights."""
    model = tiny_model("llama")
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    (tmp_path / weights.INDEX).unlink()
    with pytest.raises(CheckpointError, match="neither is here"):
        AutoPipeline(ranks=2, microbatches=2).build_plan(tmp_path)
    for shard in tmp_path.glob("model-*"):
        shard.unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin"):
        AutoPipeline(ranks=2, microbatches=2).build_plan(tmp_path)


def test_quantized_weights_are_refused(tmp_path: Path) -> None:
    """As DeepSeek-V3's on the Hub: matrices of 8 bits were read without their scales, in silence."""
    tiny_model("llama").save_pretrained(tmp_path)
    keys = json.loads((tmp_path / "config.json").read_text())
    keys["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps(keys))
    with pytest.raises(ModelError, match=r"quantized by fp8: .* without their scales\. Take the model in bf"):
        AutoPipeline(ranks=2, microbatches=2).build_plan(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    AutoPipeline(ranks=2, microbatches=2).build_plan(tmp_path)  # random weights


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    tiny_model("llama", layers=3).save_pretrained(tmp_path / "short")
    (tmp_path / "short" / "config.json").write_text(tiny_config("llama", layers=4).to_json_string())
    with pytest.raises(CheckpointError, match=r"it lacks 9 of the model's weights: model.layers.3"):
        AutoPipeline(ranks=2, microbatches=2).build(tmp_path / "short")
    tiny_model("llama").save_pretrained(tmp_path / "thin")
    (tmp_path / "thin" / "config.json").write_text(
        tiny_config("llama", intermediate_size=40).to_json_string()
    )
    with pytest.raises(CheckpointError, match=r"6 of another shape .*down_proj.weight is \[32, 48\], not"):
        AutoPipeline(ranks=2, microbatches=2).build(tmp_path / "thin")


def test_a_parameter_without_an_initialisation_is_refused() -> None:
    model_class = type(tiny_model("llama"))

    class Extra(model_class):  # type: ignore[valid-type, misc]
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.model.norm.extra = torch.nn.Parameter(torch.ones(3))

    with torch.device("meta"):
        model = Extra(tiny_config("llama"))
    with pytest.raises(ModelError, match=r"norm\.extra: the model's _init_weights gives it no value"):
        AutoPipeline(ranks=2, microbatches=2).build(model)
