"""Initial values, files read and written: the same model whatever the split."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from penstock import AutoPipeline
from penstock.errors import CheckpointError, ConfigError, ModelError
from penstock.models.source import open_source
from penstock.models.weights import files as weights
from penstock.models.weights.tensor_file import TensorFile
from support import zoo
from support.covering import every
from support.families import FAMILIES, ragged_batch, tiny_config, tiny_model
from support.refusals import refuses


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
    with refuses(CheckpointError, shard.name, "not fully covered"):
        auto.build_plan(tmp_path)
    shard.write_bytes(b"")
    with refuses(CheckpointError, rule="header too small"):
        auto.build_plan(tmp_path)
    shard.unlink()
    with refuses(CheckpointError, rule="index names"):
        auto.build_plan(tmp_path)
    outside = [
        json.dumps({"weight_map": {"lm_head.weight": name}}) for name in ("../x", "/x", "a/../../x", "")
    ]
    for broken in ("{", "[]", '{"weight_map": {"lm_head.weight": 3}}', *outside):
        (tmp_path / weights.INDEX).write_text(broken)
        with refuses(CheckpointError, rule="no index of weight files"):
            auto.build_plan(tmp_path)


def test_weights_in_other_formats_are_refused(tmp_path: Path) -> None:
    """0.1.0: a folder of pickled weights, or of shards without their index, gave random weights."""
    model = tiny_model("llama")
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    (tmp_path / weights.INDEX).unlink()
    with refuses(CheckpointError, rule="neither is here"):
        AutoPipeline(ranks=2, microbatches=2).build_plan(tmp_path)
    for shard in tmp_path.glob("model-*"):
        shard.unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with refuses(CheckpointError, "pytorch_model.bin"):
        AutoPipeline(ranks=2, microbatches=2).build_plan(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
def test_a_link_that_leads_nowhere(tmp_path: Path, name: str) -> None:
    """As in a cache from which a file was removed. Unreleased: "neither is here", of the link itself."""
    (tmp_path / name).symlink_to(tmp_path / "blobs" / "0a1b")
    with refuses(CheckpointError, str(tmp_path / name), "blobs/0a1b, where no file is"):
        weights.weight_files(tmp_path)


def test_quantized_weights_are_refused(tmp_path: Path) -> None:
    """As DeepSeek-V3's on the Hub: matrices of 8 bits were read without their scales, in silence."""
    tiny_model("llama").save_pretrained(tmp_path)
    keys = json.loads((tmp_path / "config.json").read_text())
    keys["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps(keys))
    with refuses(ModelError, "quantized by fp8", "without their scales", "model in bf"):
        AutoPipeline(ranks=2, microbatches=2).build_plan(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    AutoPipeline(ranks=2, microbatches=2).build_plan(tmp_path)  # random weights


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    tiny_model("llama", layers=3).save_pretrained(tmp_path / "short")
    (tmp_path / "short" / "config.json").write_text(tiny_config("llama", layers=4).to_json_string())
    with refuses(CheckpointError, rule="it lacks 9 of the model's weights: model.layers.3"):
        AutoPipeline(ranks=2, microbatches=2).build(tmp_path / "short")
    tiny_model("llama").save_pretrained(tmp_path / "thin")
    (tmp_path / "thin" / "config.json").write_text(
        tiny_config("llama", intermediate_size=40).to_json_string()
    )
    with refuses(CheckpointError, "thin", "down_proj.weight is [32, 48], not [32, 40]"):
        AutoPipeline(ranks=2, microbatches=2).build(tmp_path / "thin")


def test_a_parameter_without_an_initialisation_is_refused() -> None:
    model_class = type(tiny_model("llama"))

    class Extra(model_class):  # type: ignore[valid-type, misc]
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.model.norm.extra = torch.nn.Parameter(torch.ones(3))

    with torch.device("meta"):
        model = Extra(tiny_config("llama"))
    with refuses(ModelError, "Extra: model.norm.extra", "model's _init_weights"):
        AutoPipeline(ranks=2, microbatches=2).build(model)


# ---- What the files hold, and what the model has


def changed(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]], **config: Any) -> Path:
    """The folder of a llama whose single file or config was changed."""
    tiny_model("llama").save_pretrained(folder)
    file, keys = folder / weights.SINGLE, json.loads((folder / "config.json").read_text())
    save_file(change(load_file(file)), file, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**keys, **config}))
    return folder


def without(*names: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {name: value for name, value in tensors.items() if name not in names}


def same(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return tensors


@pytest.mark.parametrize("shards", ["there", "gone"])
def test_a_single_file_goes_before_an_index(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, shards: str
) -> None:
    """0.5.0: an index left beside a newer file was read, other weights than transformers', and nothing said.

    With its shards gone the folder was refused. The reader asked for the index first.
    """
    tiny_model("llama").save_pretrained(tmp_path, max_shard_size="40KB")
    newer = tiny_model("llama", seed=1)
    newer.save_pretrained(tmp_path / "newer")
    (tmp_path / "newer" / weights.SINGLE).rename(tmp_path / weights.SINGLE)
    for shard in tmp_path.glob("model-*") if shards == "gone" else ():
        shard.unlink()
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
    auto = AutoPipeline(ranks=2, microbatches=2)
    for pipe in (auto.build(tmp_path), auto.build(tmp_path)):
        for name, parameter in pipe.named_parameters():
            assert torch.equal(parameter, theirs.get_parameter(name)), name
    said = [record.getMessage() for record in caplog.records if "is ignored" in record.getMessage()]
    assert len(said) == 1, "said once"
    assert f"{weights.SINGLE} is read, as transformers does, and {weights.INDEX} is ignored" in said[0]


def test_an_index_of_no_file_is_refused(tmp_path: Path) -> None:
    """0.5.0: the model was trained from random values, as a folder without files is."""
    tiny_model("llama").save_pretrained(tmp_path, max_shard_size="40KB")
    (tmp_path / weights.INDEX).write_text('{"metadata": {}, "weight_map": {}}')
    with refuses(CheckpointError, rule="its weight_map names no file"):
        AutoPipeline(ranks=2, microbatches=2).build_plan(tmp_path)


@pytest.mark.parametrize("name", ["a" * 5000 + ".safetensors", "a\0.safetensors", "\ud800.safetensors"])
def test_a_name_that_no_file_has_is_refused(tmp_path: Path, name: str) -> None:
    """0.5.0: a traceback of OSError: the file system was asked for a name of 5,000 characters."""
    (tmp_path / weights.INDEX).write_text(json.dumps({"weight_map": {"lm_head.weight": name}}))
    with refuses(CheckpointError, weights.INDEX, "no safetensors file"):
        weights.weight_files(tmp_path)


REFUSED: dict[str, tuple[Callable[[dict[str, Tensor]], dict[str, Tensor]], dict[str, Any], str, str]] = {
    "two layers of four": (
        same, {"num_hidden_layers": 2},
        "has no place for: model.layers.2", "has 2 layers and the files have 4",
    ),
    "four layers of six": (
        same, {"num_hidden_layers": 6},
        "lacks 18 of the model's weights: model.layers.4", "has 6 layers and the files have 4",
    ),
    "an unknown tensor": (
        lambda tensors: {**tensors, "model.gate.weight": torch.ones(2)}, {},
        "has no place for: model.gate.weight", "save the model anew",
    ),
    "a missing tensor": (
        without("model.norm.weight"), {},
        "lacks 1 of the model's weights: model.norm.weight", 'new_weights=("model.norm.weight",)',
    ),
    "scales of float8": (
        lambda tensors: {
            **{n: t.to(torch.float8_e4m3fn) if "_proj" in n else t for n, t in tensors.items()},
            **{f"{n}_scale_inv": torch.ones(1, 1) for n in tensors if "_proj" in n},
        }, {},
        "28 that the model has no place for", "quantization_config",
    ),
    "torch.compile": (
        lambda tensors: {f"_orig_mod.{name}": value for name, value in tensors.items()}, {},
        "lacks 39 of the model's weights",
        "_orig_mod.lm_head.weight for lm_head.weight: save the model without torch.compile",
    ),
    "PEFT": (
        lambda tensors: {name.replace("q_proj.", "q_proj.base_layer."): t for name, t in tensors.items()}, {},
        "lacks 4 of the model's weights",
        "q_proj.base_layer.weight for model.layers.0.self_attn.q_proj.weight: save the model without PEFT",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_files_that_do_not_fit_the_whole_model_are_refused(tmp_path: Path, case: str) -> None:
    """0.5.0: `build` and `check` passed over tensors that the model has no place for; `train` alone looked.

    So four layers were built as two, and float8 weights were read without their scales.
    """
    change, config, rule, remedy = REFUSED[case]
    folder = changed(tmp_path / "model", change, **config)
    with refuses(CheckpointError, "the weights in", rule, remedy):
        open_source(folder, None, None)
    with refuses(CheckpointError, "the weights in", rule, remedy):
        AutoPipeline(ranks=2, microbatches=2).build(folder)


def test_two_values_of_one_tied_weight_are_refused(tmp_path: Path) -> None:
    """0.5.0: both ends of the model were read, and trained as one weight of two values.

    transformers leaves them untied then. Equal copies are read.
    """
    folder = changed(tmp_path / "apart", same, tie_word_embeddings=True)
    with refuses(CheckpointError, rule="ties them to one weight,", remedy="Set tie_word"):
        AutoPipeline(ranks=2, microbatches=2).build(folder)
    name = "model.embed_tokens.weight"
    equal = changed(
        tmp_path / "equal",
        lambda tensors: {**tensors, "lm_head.weight": tensors[name].clone()},
        tie_word_embeddings=True,
    )
    AutoPipeline(ranks=2, microbatches=2).build(equal)


def test_what_transformers_ignores_is_ignored(tmp_path: Path) -> None:
    """Old checkpoints have inv_freq in each layer; prediction layers (MTP) are left out unless asked for."""
    frequencies = {f"model.layers.{n}.self_attn.rotary_emb.inv_freq": torch.ones(4) for n in range(4)}
    folder = changed(tmp_path / "old", lambda tensors: {**tensors, **frequencies})
    AutoPipeline(ranks=2, microbatches=2).build(folder)
    config = zoo.tiny_config("deepseek_v3", num_nextn_predict_layers=1)
    pipe = AutoPipeline(ranks=2, microbatches=2, mtp_loss_scaling_factor=0.1).build(config)
    pipe.save_pretrained(tmp_path / "mtp")
    assert any("layers.4.eh_proj" in name for name in stored(tmp_path / "mtp"))
    plain = AutoPipeline(ranks=2, microbatches=2).build(tmp_path / "mtp")
    assert not any("layers.4" in name for name, _ in plain.named_parameters())


def test_new_weights_are_those_that_the_files_lack(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """0.5.0: a weight that no file gives could not be asked for. The same ones as transformers reports."""
    lacking = "lm_head.weight", "model.layers.3.mlp.up_proj.weight"
    folder = changed(tmp_path / "model", without(*lacking))
    _, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert report["missing_keys"] == set(lacking)
    auto = AutoPipeline(microbatches=2, seed=5, new_weights=("lm_head.*", "*.3.mlp.up_proj.*"))
    made = [dict(replace(auto, ranks=ranks).build(folder).named_parameters()) for ranks in (1, 2, 4)]
    assert f"its files lack them: {', '.join(lacking)}" in caplog.text
    whole, fresh = tiny_model("llama"), values(2, tiny_config("llama"), seed=5)
    for found in made:
        for name, value in found.items():
            assert torch.equal(value, fresh[name] if name in lacking else whole.get_parameter(name)), name
    assert AutoPipeline(ranks=2, microbatches=2, new_weights=("*",)).build_plan(folder).source.new == lacking


@pytest.mark.parametrize(
    ("patterns", "value"),
    [
        (("lm_head.*", "score.*"), "new_weights='score.*'"),
        (("model.norm.*", "lm_head.*"), "new_weights='model.norm.*'"),
    ],
)
def test_a_pattern_that_is_not_needed_is_refused(
    tmp_path: Path, patterns: tuple[str, ...], value: str
) -> None:
    folder = changed(tmp_path / "model", without("lm_head.weight"))
    with refuses(ConfigError, value, "no such weight is missing"):
        AutoPipeline(ranks=2, microbatches=2, new_weights=patterns).build_plan(folder)
    with refuses(CheckpointError, rule="it lacks 1"):
        AutoPipeline(ranks=2, microbatches=2, new_weights=("model.norm.*",)).build_plan(folder)
    with refuses(ConfigError, "under an adapter"):
        AutoPipeline(
            ranks=2, microbatches=2, new_weights=("lm_head.*",), adapter=LoraConfig(target_modules=["q_proj"])
        ).build_plan(folder)
    with refuses(ConfigError, "new_weights='lm_head.*'", "such weight"):  # a config has no files
        AutoPipeline(ranks=2, microbatches=2, new_weights=("lm_head.*",)).build_plan(tiny_config("llama"))


def test_weights_that_no_memory_holds_are_refused(tmp_path: Path) -> None:
    """0.5.0: a traceback of the allocator, for sizes that nobody has room for."""
    with refuses(ModelError, "LlamaForCausalLM with 256,000.0 GB of weights", "room"):
        AutoPipeline(ranks=2, microbatches=2).build(tiny_config("llama", vocab_size=10**12))


def test_weights_that_are_read_back_have_a_place(tmp_path: Path) -> None:
    """0.5.0: `load_weights` passed over what the model has no place for. A stage knows the whole's names."""
    pipe = AutoPipeline(ranks=2, microbatches=2).build(tiny_model("llama"))
    folder = changed(tmp_path / "model", lambda tensors: {**tensors, "model.gate.weight": torch.ones(2)})
    before = [parameter.detach().clone() for parameter in pipe.parameters()]
    with refuses(CheckpointError, rule="1 that the model has no place for: model.gate.weight"):
        pipe.load_weights(folder)
    assert all(torch.equal(was, now) for was, now in zip(before, pipe.parameters(), strict=True))


@pytest.mark.parametrize("first", [torch.float32, torch.bfloat16])
def test_a_config_without_a_dtype_has_that_of_the_files(tmp_path: Path, first: torch.dtype) -> None:
    """0.5.0: weights of bfloat16 trained in float32 without a word, as their config had no dtype.

    transformers takes the dtype of the first weight, by its name.
    """

    def mixed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {
            name: value.to(first if name == min(tensors) else torch.float16)
            for name, value in tensors.items()
        }

    folder = changed(tmp_path, mixed)
    config = json.loads((folder / "config.json").read_text())
    del config["dtype"]
    (folder / "config.json").write_text(json.dumps(config))
    expected = AutoModelForCausalLM.from_pretrained(folder)
    found = values(2, folder)
    assert expected.dtype == first
    for name, value in expected.state_dict().items():
        assert torch.equal(found[name], value), name
        assert found[name].dtype == value.dtype


def test_weights_in_a_file_that_the_config_names_are_refused(tmp_path: Path) -> None:
    """0.5.0: transformers_weights was passed over, and other weights than transformers' were read."""
    folder = changed(tmp_path, same, transformers_weights="other.safetensors")
    with refuses(ModelError, "transformers_weights='other"):
        values(2, folder)
