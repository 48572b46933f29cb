"""Every model type's files: transformers writes, a pipeline reads and writes, transformers reads.

All types in `make sweep`; here those whose files differ most from their modules.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from models.test_every_model import REFUSED
from models.weights.test_files import stored
from penstock import AutoPipeline
from penstock.errors import ConfigError
from penstock.models.model_folder import other_files
from penstock.models.weights import files as weights
from penstock.models.weights.saved import FileLayout, SavedModel
from penstock.models.weights.tensor_file import DTYPES
from penstock.runtime.stage import Stage
from penstock.train.encoding.tokenizer import byte_level_tokenizer
from support import zoo
from support.refusals import refuses

TYPICAL = (
    "bert",  # tied heads, under several names
    "mixtral", "deepseek_v3", "gpt_oss",  # experts, put together from pieces
)  # fmt: skip
# folders that transformers writes and does not open itself: nothing to compare with
NOT_OPENED = {
    "emu3": "its text config is no causal language model's for AutoModelForCausalLM",
    "gemma3n": "its vision part is built by timm, which is not installed",
    "musicgen": "the config of its decoder is no causal language model's for AutoModelForCausalLM",
    "musicgen_melody": "the same",
}
# transformers keeps a part of it in float32, and then multiplies that with the rest
NOT_RUN_IN_BFLOAT16 = {"xlnet"}
TAKEN = [name for name in zoo.TYPES if name not in REFUSED and name not in zoo.SKIPPED]


def whole(folder: Path, **options: Any) -> PreTrainedModel:
    """As transformers itself opens it."""
    opened = AutoModelForCausalLM.from_pretrained(folder, experts_implementation="eager", **options)
    model: PreTrainedModel = opened.eval()
    return model


def logits(model: PreTrainedModel, model_type: str) -> Tensor:
    ids = zoo.tiny_batch(model_type)["input_ids"]
    with torch.no_grad():
        found: Tensor = model(input_ids=ids, use_cache=False).logits
    return found


def settings(folder: Path) -> dict[str, Any]:
    """config.json, but for what says who wrote it."""
    held: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return {name: value for name, value in held.items() if name != "transformers_version"}


def check(model_type: str, folder: Path, dtype: torch.dtype = torch.float32) -> None:
    theirs, ours, again = folder / "theirs", folder / "ours", folder / "again"
    zoo.tiny_model(model_type, dtype).save_pretrained(theirs, max_shard_size="30KB")
    if model_type in NOT_OPENED:
        with pytest.raises((ValueError, ImportError)):
            whole(theirs)
        return
    expected = whole(theirs)
    pipe = AutoPipeline(ranks=2, microbatches=2).build(theirs)
    held = expected.state_dict()
    met = set()
    for module in pipe.modules.values():
        for name, value in module.state_dict().items():
            assert value.dtype == held[name].dtype, name
            assert torch.equal(value, held[name]), name
            met.add(name)
    assert met == held.keys()
    frozen = {name for name, p in expected.named_parameters() if not p.requires_grad}
    assert {name for name, p in pipe.named_parameters() if not p.requires_grad} <= frozen
    assert str(pipe.config.dtype) == str(dtype)
    pipe.save_pretrained(ours)
    expected.save_pretrained(again)
    assert stored(ours) == stored(again)
    assert settings(ours) == settings(again)
    assert torch.equal(logits(whole(ours), model_type), logits(expected, model_type))


@pytest.mark.parametrize(
    "model_type",
    [pytest.param(name, marks=[] if name in TYPICAL else [pytest.mark.sweep]) for name in TAKEN],
)
def test_files_of_a_type(model_type: str, tmp_path: Path) -> None:
    check(model_type, tmp_path)


@pytest.mark.sweep
@pytest.mark.parametrize("model_type", [name for name in TAKEN if name not in NOT_RUN_IN_BFLOAT16])
def test_files_of_every_type_in_bfloat16(model_type: str, tmp_path: Path) -> None:
    """Where some families keep a part of their weights in float32."""
    check(model_type, tmp_path, torch.bfloat16)


@pytest.mark.parametrize("model_type", ["bert", "mixtral", "zamba2"])
def test_weights_come_back_in_place(model_type: str, tmp_path: Path) -> None:
    """Tied, put together from pieces and shared; checked first, and read into what an optimizer holds."""
    pipe = AutoPipeline(ranks=2, microbatches=2).build(zoo.tiny_model(model_type))
    pipe.save_pretrained(tmp_path / "ours")
    held = list(pipe.parameters())
    expected = [parameter.detach().clone() for parameter in held]
    with torch.no_grad():
        for parameter in held:
            parameter.add_(1)
    pipe.load_weights(tmp_path / "ours")
    assert all(mine is other for mine, other in zip(held, pipe.parameters(), strict=True))
    assert all(map(torch.equal, expected, held))


def test_layers_of_several_widths_are_written_in_the_order_of_the_file(tmp_path: Path) -> None:
    """Wider dtypes come first, from all layers, so each layer is converted twice: experts to pieces here."""
    model = zoo.tiny_model("mixtral", torch.bfloat16)
    for name, parameter in model.named_parameters():
        if "norm" in name or "gate.weight" in name:
            parameter.data = parameter.data.float()
    model.save_pretrained(tmp_path / "theirs")
    AutoPipeline(ranks=2, microbatches=2).build(model).save_pretrained(tmp_path / "ours")
    expected = load_file(tmp_path / "theirs" / "model.safetensors")
    found: dict[str, Tensor] = {}
    for file in (tmp_path / "ours").glob("*.safetensors"):
        found |= load_file(file)
    assert {value.dtype for value in found.values()} == {torch.bfloat16, torch.float32}
    assert found.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


def test_other_files_of_the_folder_are_kept(tmp_path: Path) -> None:
    """A tokenizer's files, chat templates and generation config are those of the folder, byte for byte."""
    model = zoo.tiny_model("llama")
    model.save_pretrained(tmp_path / "theirs")
    byte_level_tokenizer().save_pretrained(tmp_path / "theirs")
    generation = json.dumps({"temperature": 0.5, "do_sample": False})  # which transformers refuses to save
    (tmp_path / "theirs" / "generation_config.json").write_text(generation)
    (tmp_path / "theirs" / "chat_template.jinja").write_text("{{ messages }}")
    (tmp_path / "theirs" / "additional_chat_templates").mkdir()
    (tmp_path / "theirs" / "additional_chat_templates" / "tool.jinja").write_text("{{ tools }}")
    for name in ("merges.txt", "spiece.model", "preprocessor_config.json", "README.md", "training_args.bin"):
        (tmp_path / "theirs" / name).write_text("{}")
    pipe = AutoPipeline(ranks=2, microbatches=2).build(tmp_path / "theirs")
    pipe.save_pretrained(tmp_path / "ours")
    expected = {
        "tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja",
        "additional_chat_templates/tool.jinja", "merges.txt", "spiece.model", "preprocessor_config.json",
    }  # fmt: skip
    assert set(other_files(tmp_path / "theirs")) == expected
    manifest = json.loads((tmp_path / "ours" / "manifest.json").read_text())["files"]
    for name in expected:
        assert (tmp_path / "ours" / name).read_bytes() == (tmp_path / "theirs" / name).read_bytes()
        assert name in manifest
    assert not {"README.md", "training_args.bin"} & manifest.keys()
    opened = AutoTokenizer.from_pretrained(tmp_path / "ours")
    assert opened.encode("ab", add_special_tokens=False) == [97, 98]
    again = AutoPipeline(ranks=2, microbatches=2).build(tmp_path / "ours")
    shutil.rmtree(tmp_path / "ours")  # nothing of a long run may hang on it
    again.save_pretrained(tmp_path / "elsewhere")
    assert expected <= {
        f.relative_to(tmp_path / "elsewhere").as_posix() for f in (tmp_path / "elsewhere").rglob("*")
    }


def test_a_generation_config_where_there_is_no_folder(tmp_path: Path) -> None:
    model = zoo.tiny_model("llama")
    assert model.generation_config is not None
    model.generation_config.max_new_tokens = 7
    AutoPipeline(ranks=2, microbatches=2).build(model).save_pretrained(tmp_path / "ours")
    assert json.loads((tmp_path / "ours" / "generation_config.json").read_text())["max_new_tokens"] == 7


@pytest.mark.parametrize("model_type", ["llama", "mixtral"])
def test_shards_of_a_stage(model_type: str, tmp_path: Path) -> None:
    """Files are below the limit, but for single weights above it, and there are no more than it takes."""
    model = zoo.tiny_model(model_type).eval()
    pipe = AutoPipeline(ranks=2, microbatches=2).build(model)
    stages = {index: Stage(index, module, lambda *_: None) for index, module in pipe.modules.items()}
    saved = SavedModel(model.config, None, weights.tied_names(model))
    for folder, limit in (("small", 20_000), ("text", "20KB"), ("one", "1GB")):
        (tmp_path / folder).mkdir()
        saved.write(tmp_path / folder, saved.lay_out(stages), pipe.processes, limit)
        assert torch.equal(logits(whole(tmp_path / folder), model_type), logits(model, model_type))
    files = weights.weight_files(tmp_path / "small")
    assert [file.name for file in files] == [file.name for file in weights.weight_files(tmp_path / "text")]
    assert len(weights.weight_files(tmp_path / "one")) == 2
    sizes = [stored_bytes(file) for file in files]
    assert all(sum(held) <= 20_000 or len(held) == 1 for held in sizes)
    assert len(files) > 4
    for limit in (0, "5 apples", -1):
        with refuses(ConfigError, rule="number of bytes"):
            saved.write(tmp_path / "none", saved.lay_out(stages), pipe.processes, limit)


def stored_bytes(file: Path) -> list[int]:
    with safe_open(file, framework="pt") as opened:
        return [opened.get_tensor(name).nbytes for name in opened.keys()]  # noqa: SIM118


def test_files_are_safetensors(tmp_path: Path) -> None:
    """Byte for byte, for every dtype, also of tensors without numbers or dimensions."""
    held: dict[str, Tensor] = {
        f"of {dtype}": torch.arange(6).reshape(2, 3).to(dtype) for dtype in DTYPES.values()
    }
    held |= {"empty": torch.ones(0, 3), "one": torch.tensor(2.0), "turned": torch.rand(3, 2).T}

    class Module(torch.nn.Module):
        _keys_to_ignore_on_save = ("one",)

        def state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:  # type: ignore[override]
            return held

        config = None
        _weight_conversions: tuple[()] = ()

    layout = FileLayout.of(cast(Any, Module()), ())
    layout.write(tmp_path / "ours.safetensors", layout.sizes.keys())
    expected = {name: value.contiguous() for name, value in held.items() if name != "one"}
    found = load_file(tmp_path / "ours.safetensors")
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape), name
        both = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (found[name], value))
        assert torch.equal(*both), name
