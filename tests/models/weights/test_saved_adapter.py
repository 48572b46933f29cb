"""An adapter's folder is PEFT's, byte for byte where it counts, and comes back at any number of ranks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.optim import AdamW

from penstock import AutoPipeline
from penstock.checkpoint.save_load import load_checkpoint, save_checkpoint
from penstock.errors import CheckpointError, ModelError, UnfitError
from penstock.models.source import open_source
from penstock.models.weights.tensor_file import fingerprint_of_files, fingerprint_of_tensors
from support import zoo
from support.adapted import adapted, logits, lora, opened, rarely, tensors_of
from support.covering import some
from support.refusals import refuses

EXPERTS = {
    "target_modules": ["q_proj"],
    "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
}
FORMS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "lora": ("llama", {}, {}),
    "dora": ("gpt2", {"use_dora": True, "target_modules": ["c_attn"], "fan_in_fan_out": True}, {}),
    "rslora, biases": ("opt", {"use_rslora": True, "bias": "all", "lora_bias": True}, {}),
    "experts": ("qwen3_moe", EXPERTS, {}),
    "experts of mixtral": ("mixtral", EXPERTS, {}),
    "modules and rows": ("llama", {"modules_to_save": ["lm_head"], "trainable_token_indices": [5, 9]}, {}),
    "rows of tied weights": ("llama", {"trainable_token_indices": [5, 9]}, {"tie_word_embeddings": True}),
    "whole ends of tied weights": (
        "llama", {"modules_to_save": ["lm_head", "embed_tokens"], "ensure_weight_tying": True},
        {"tie_word_embeddings": True},
    ),
    "embedding and head": ("llama", {"target_modules": ["embed_tokens", "lm_head"]}, {}),
}  # fmt: skip


def made(form: str) -> tuple[Any, Any]:
    """A PeftModel and its pipeline."""
    family, options, model = FORMS[form]
    peft = adapted(zoo.tiny_model(family, **model), lora(**options))
    return peft, AutoPipeline(ranks=2, microbatches=2).build(peft)


def train(pipe: Any, optimizer: AdamW, batch: Any) -> float:
    pipe.zero_grad()
    loss = float(pipe.step(batch).loss)
    optimizer.step()
    return loss


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.filterwarnings("ignore:Adapter 'default'. 24 LoRA tensor")  # of the shape of a bias
@pytest.mark.parametrize("form", rarely(FORMS, ("dora", "experts", "modules and rows")))
def test_peft_opens_it_with_the_same_logits(form: str, tmp_path: Path) -> None:
    family, _, model = FORMS[form]
    peft, pipe = made(form)
    batch = zoo.tiny_batch(family)
    train(pipe, AdamW([p for p in pipe.parameters() if p.requires_grad], lr=1e-2), batch)
    pipe.save_pretrained(tmp_path / "ours")
    found = opened(zoo.tiny_model(family, **model), tmp_path / "ours")
    outputs = pipe.infer({"input_ids": batch["input_ids"]})
    expected = torch.cat([outputs[number] for number in sorted(outputs)])
    torch.testing.assert_close(logits(found, batch["input_ids"]), expected, rtol=1e-5, atol=1e-6)
    before = logits(peft, batch["input_ids"])
    assert not torch.allclose(before, expected, atol=1e-4)

    peft.save_pretrained(tmp_path / "theirs", save_embedding_layers=False)
    ours, theirs = tensors_of(tmp_path / "ours"), tensors_of(tmp_path / "theirs")
    assert {name: (t.shape, t.dtype) for name, t in ours.items()} == {
        n: (t.shape, t.dtype) for n, t in theirs.items()
    }
    configs = [
        json.loads((tmp_path / each / "adapter_config.json").read_text()) for each in ("ours", "theirs")
    ]
    for config in configs:  # sets, in no order
        for names in ("target_modules", "target_parameters"):
            config[names] = sorted(config.get(names) or ())
    assert configs[0] == configs[1]


def test_a_relative_folder_is_named_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PEFT warned, and an adapter named a base model that only one working folder has."""
    zoo.tiny_model("llama").save_pretrained(tmp_path / "base")
    monkeypatch.chdir(tmp_path)
    adapter = lora(target_modules=["q_proj"])
    pipe = AutoPipeline(ranks=2, microbatches=2, adapter=adapter).build("base")
    pipe.save_pretrained(tmp_path / "adapter")
    written = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert written["base_model_name_or_path"] == str(tmp_path / "base")


def checkpoint(tmp_path: Path) -> tuple[Path, Any, AdamW, Any]:
    """A checkpoint after one step, and what made it."""
    _, pipe = made("modules and rows")
    batch, optimizer = zoo.tiny_batch("llama"), _adamw(pipe)
    train(pipe, optimizer, batch)
    save_checkpoint(tmp_path / "checkpoint", pipe, optimizer, {"step": 1})
    return tmp_path / "checkpoint", pipe, optimizer, batch


def _adamw(pipe: Any) -> AdamW:
    return AdamW([p for p in pipe.parameters() if p.requires_grad], lr=1e-2)


@pytest.mark.parametrize("ranks", some([1, 2, 4], 4))
def test_a_checkpoint_holds_the_adapter_alone_and_resumes_at_any_split(ranks: int, tmp_path: Path) -> None:
    folder, pipe, optimizer, batch = checkpoint(tmp_path)
    frozen = {n for n, p in pipe.named_parameters() if not p.requires_grad}
    assert not any("base_layer" in name for name in tensors_of(folder))
    assert not any("model-" in file.name or file.name == "model.safetensors" for file in folder.iterdir())
    assert not any(name in text.read_text() for text in folder.glob("optimizer-*.json") for name in frozen)
    peft, _ = made("modules and rows")
    layers = {1: [4], 2: [3, 1], 4: [1, 1, 1, 1]}[ranks]
    other = AutoPipeline(ranks=ranks, microbatches=2, layers_per_stage=layers).build(peft)
    second = _adamw(other)
    assert load_checkpoint(folder, other, second) == {"step": 1}
    ours, theirs = (dict(each.named_parameters()) for each in (pipe, other))
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
    first = [train(pipe, optimizer, batch) for _ in range(2)]
    assert [train(other, second, batch) for _ in range(2)] == pytest.approx(first, rel=1e-6)


def test_another_base_model_is_refused(tmp_path: Path) -> None:
    folder, *_ = checkpoint(tmp_path)
    _, options, _ = FORMS["modules and rows"]
    peft = adapted(zoo.tiny_model("llama", seed=5), lora(**options))
    pipe = AutoPipeline(ranks=2, microbatches=2).build(peft)
    before = {n: p.detach().clone() for n, p in pipe.named_parameters()}
    with refuses(UnfitError, f"adapter {folder}", "another base model"):
        load_checkpoint(folder, pipe, _adamw(pipe))
    assert all(torch.equal(p, before[n]) for n, p in pipe.named_parameters())


@pytest.fixture(scope="module")
def plain_lora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    _, pipe = made("lora")
    pipe.save_pretrained(folder := tmp_path_factory.mktemp("lora") / "saved")
    return folder


@pytest.mark.parametrize(
    ("options", "value", "rule"),
    [
        ({"lora_alpha": 7}, "lora_alpha=6", "the model has 7"),
        ({"r": 2}, "r=4", "the model has 2"),
        ({"target_modules": r".*(_proj|lm_head)"}, "it lacks base_model.model", "other tensors"),
        ({"target_modules": ["q_proj"]}, "it holds base_model", "no such tensor"),
    ],
)
def test_another_adapter_is_refused(options: dict[str, Any], value: str, rule: str, plain_lora: Path) -> None:
    other = AutoPipeline(ranks=2, microbatches=2).build(adapted(zoo.tiny_model("llama"), lora(**options)))
    with refuses(UnfitError, value, rule):
        other.load_weights(plain_lora)


def test_a_folder_of_pefts_own_is_loaded(tmp_path: Path) -> None:
    """PEFT says nothing of the base model."""
    peft, _ = made("dora")
    peft.save_pretrained(tmp_path / "theirs", save_embedding_layers=False)
    family, options, _ = FORMS["dora"]
    fresh = adapted(zoo.tiny_model(family), lora(**options))
    with torch.no_grad():
        for parameter in fresh.parameters():
            if parameter.requires_grad:
                parameter.fill_(0.5)
    pipe = AutoPipeline(ranks=2, microbatches=2).build(fresh)
    pipe.load_weights(tmp_path / "theirs")
    expected = dict(peft.get_base_model().named_parameters())
    assert all(torch.equal(value, expected[name]) for name, value in pipe.named_parameters())


def test_a_tensor_that_the_adapter_has_no_place_for_is_refused(tmp_path: Path) -> None:
    """0.5.0: it was passed over, as an embedding that PEFT saves along and loads is."""
    _, pipe = made("lora")
    pipe.save_pretrained(tmp_path / "saved")
    file = tmp_path / "saved" / "adapter_model.safetensors"
    more = {"base_model.model.model.embed_tokens.weight": torch.ones(64, 32)}
    save_file({**load_file(file), **more}, file)
    with refuses(UnfitError, "embed_tokens.weight", "no such tensor"):
        pipe.load_weights(tmp_path / "saved")


def test_a_torn_file_is_refused(tmp_path: Path) -> None:
    _, pipe = made("lora")
    pipe.save_pretrained(tmp_path / "saved")
    file = tmp_path / "saved" / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    with refuses(CheckpointError, "adapter_model.safetensors of", "complete safetensors"):
        pipe.load_weights(tmp_path / "saved")
    shutil.rmtree(tmp_path / "saved")
    with refuses(CheckpointError, "adapter_config.json", "read"):
        pipe.load_weights(tmp_path / "saved")


def test_weights_that_are_trained_in_addition_are_refused(tmp_path: Path) -> None:
    """They would be in no file."""
    peft, _ = made("lora")
    peft.get_base_model().get_submodule("model.norm").requires_grad_(True)
    pipe = AutoPipeline(ranks=2, microbatches=2).build(peft)
    for save in (pipe.save_pretrained, lambda path: save_checkpoint(path, pipe, _adamw(pipe))):
        with refuses(ModelError, "weights with model.norm.weight", remedy="freeze weights outside"):
            save(tmp_path / "saved")
    assert not list(tmp_path.iterdir())


def test_fingerprints(tmp_path: Path) -> None:
    """Of files and of the weights in them they are one; shards do not count, and one other weight does."""
    model = zoo.tiny_model("llama")
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="20KB")
    files = [sorted((tmp_path / each).glob("*.safetensors")) for each in ("one", "many")]
    assert len(files[1]) > 2
    assert fingerprint_of_files(files[0]) == fingerprint_of_files(files[1])
    assert fingerprint_of_files(files[0]) == fingerprint_of_tensors(model.state_dict().items())
    with torch.no_grad():
        nn.init.normal_(model.get_submodule("model.layers.2.mlp.up_proj").get_parameter("weight"))
    assert fingerprint_of_files(files[0]) != fingerprint_of_tensors(model.state_dict().items())


@pytest.mark.parametrize("family", ["mixtral", "gpt_neox"])
def test_a_base_model_is_known_again_in_files_of_other_names(family: str, tmp_path: Path) -> None:
    """An adapter of a model in memory was refused with its files where these have other names."""
    model = zoo.tiny_model(family)
    model.save_pretrained(tmp_path)
    in_memory = open_source(model, None, None).base_fingerprint(0)()
    wrapped = open_source(adapted(model), None, None).base_fingerprint(0)()
    assert in_memory == wrapped == open_source(tmp_path, None, None).base_fingerprint(0)()
