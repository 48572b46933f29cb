"""Fine-tuning from a config: an adapter's run, its resume, what PEFT opens and what `merge` writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from penstock import Pipeline
from penstock.cli.merge import merge_folder
from penstock.errors import CheckpointError, ConfigError, ModelError, UnfitError
from penstock.models.weights.folder import read_manifest
from penstock.train.checkpoints import NEWEST
from penstock.train.config.sections import TrainConfig
from penstock.train.preflight import dry_run, preflight
from penstock.train.run import run
from support import tiny
from support.adapted import adapted, logits, lora, opened, rarely, tensors_of, whole
from support.covering import some
from support.folders import check_folder
from support.refusals import refuses

BRIEF = {"steps": 1, "checkpoint_every": 1, "evaluate_every": 1}
IDS = torch.arange(40, 56).view(2, 8)


def config(
    folder: Path, adapter: dict[str, Any] | None = None, train: dict[str, Any] | None = None, **model: Any
) -> TrainConfig:
    """Of a run of two ranks in one process, on a base model in a folder of its own."""
    folder.mkdir(exist_ok=True)
    if not (folder / "base").is_dir():
        tiny.save_model(folder / "base", **model)
    tree = tiny.tree(folder)
    tree["model"] = {"path": str(folder / "base")}
    tree["train"] |= {"checkpoint_every": 2, **(train or {})}
    tree["adapter"] = {"r": 2, "alpha": 4} if adapter is None else adapter
    return TrainConfig.model_validate(tree)


def newest(folder: Path) -> Path:
    return tiny.checkpoint(folder, 4)


def base(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder / "base")


KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "lora": ({"targets": ["q_proj", "v_proj"], "r": 2, "dropout": 0.1}, {}),
    "dora": ({"kind": "dora", "r": 2, "modules_to_save": ["lm_head"]}, {}),
    "rslora, tied": ({"kind": "rslora", "r": 2, "trained_tokens": [40, 41]}, {"tie_word_embeddings": True}),
    "head of tied": ({"targets": ["lm_head", "q_proj"], "r": 2}, {"tie_word_embeddings": True}),
}


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize("kind", rarely(KINDS, ("dora", "head of tied")))
def test_a_run_opens_in_peft_and_merges(kind: str, tmp_path: Path) -> None:
    adapter, model = KINDS[kind]
    run(preflight(config(tmp_path, adapter, **model)))
    losses = tiny.held_out_losses(tmp_path)
    assert losses[-1] < losses[0]
    folder = newest(tmp_path)
    check_folder(folder)
    assert "adapter_model.safetensors" in read_manifest(folder)
    tuned = logits(opened(base(tmp_path), folder), IDS)
    assert not torch.allclose(tuned, logits(base(tmp_path), IDS), atol=1e-3)
    AutoTokenizer.from_pretrained(folder)

    for source, shard in ((tmp_path / "out", "50GB"), (folder, "4KB")):
        merge_folder(source, tmp_path / "merged", None, shard)
        check_folder(tmp_path / "merged")
        merged, info = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", output_loading_info=True)
        assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        torch.testing.assert_close(logits(merged, IDS), tuned, rtol=1e-4, atol=1e-5)
        AutoTokenizer.from_pretrained(tmp_path / "merged")
    assert len(list((tmp_path / "merged").glob("*.safetensors"))) > 3


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
def test_a_resumed_run_ends_as_one_that_was_not_interrupted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the split is checked against the whole model, with an adapter that is not zero."""
    adapter = {"kind": "dora", "dropout": 0.2, "r": 2, "modules_to_save": ["lm_head"]}
    run(preflight(config(tmp_path, adapter)))
    whole = {name: value.clone() for name, value in tensors_of(newest(tmp_path)).items()}
    for file in newest(tmp_path).iterdir():
        file.unlink()
    newest(tmp_path).rmdir()
    capsys.readouterr()
    run(preflight(config(tmp_path, adapter, {"check": "always"}), NEWEST))
    assert "gradients equal the whole one's" in capsys.readouterr().out
    found = tensors_of(newest(tmp_path))
    assert found.keys() == whole.keys()
    assert all(torch.equal(value, whole[name]) for name, value in found.items())


def test_another_base_model_is_refused_before_it_is_loaded(tmp_path: Path) -> None:
    run(preflight(config(tmp_path, train=BRIEF)))
    tiny.save_model(tmp_path / "base", seed=9)
    with refuses(UnfitError, "adapter", "another base model"):
        preflight(config(tmp_path, train={"steps": 6}), NEWEST)
    with refuses(UnfitError, "adapter", "another base model"):
        merge_folder(tmp_path / "out", tmp_path / "merged", None, "1GB")
    assert not (tmp_path / "merged").exists()
    with refuses(UnfitError, rule="it was trained on another base model"):
        preflight(config(tmp_path, {"path": str(tiny.checkpoint(tmp_path, 1))}))


@pytest.mark.parametrize(
    ("adapter", "value", "rule"),
    [
        ({"targets": ["qproj"]}, "'qproj' in the adapter's target_modules", "nothing in Qwen3ForCausalLM"),
        ({"targets": r"layers\.9\..*"}, "the adapter's settings", "not found"),
        (
            {"modules_to_save": ["score"]},
            "'score' in the adapter's modules_to_save",
            "nothing in Qwen3ForCausalLM",
        ),
        ({"trained_tokens": [256]}, "256 in the adapter's trainable_token_indices", "rows 0 to 255"),
        ({"layers": [7], "targets": ["q_proj"]}, "the adapter's settings", "layers_to_transform"),
        ({"ranks": {"(": 2}, "targets": ["q_proj"]}, "the adapter's settings", "PEFT refuses them"),
    ],
)
def test_targets_that_match_nothing_are_refused(
    adapter: dict[str, Any], value: str, rule: str, tmp_path: Path
) -> None:
    with refuses(ConfigError, value, rule):
        preflight(config(tmp_path, adapter))


def test_a_base_model_without_weights_is_refused(tmp_path: Path) -> None:
    made = config(tmp_path)
    (tmp_path / "base" / "model.safetensors").unlink()
    for each in (made, tiny.config(tmp_path, keys={"adapter.r": 2})):
        with refuses(ConfigError, "adapter", "trained weights"):
            preflight(each)
    with pytest.raises(ValueError, match=r"'lora' is no section; write adapter: \{kind: lora\}"):
        tiny.config(tmp_path, keys={"adapter": "lora"})


def a_peft_adapter(folder: Path, **options: Any) -> Any:
    """A PeftModel on the base model of `config(folder)`, saved into folder/tuned, where nothing is zero."""
    made = adapted(base(folder), lora(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], **options))
    made.save_pretrained(folder / "tuned")
    return PeftModel.from_pretrained(base(folder), folder / "tuned", is_trainable=True).train()


BOTH = {"use_dora": True, "use_rslora": True}


@pytest.mark.parametrize("options", some([{}, {"use_dora": True}, {"use_rslora": True}, BOTH], BOTH), ids=str)
def test_a_run_goes_on_from_an_adapter_of_peft_with_its_gradients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """The loss and every gradient of the first step are PEFT's, and none is of a new adapter."""
    train = {"clip_norm": None, "check": "always", "steps": 2}
    config(tmp_path)
    peft = a_peft_adapter(tmp_path, **options)
    prepared = preflight(config(tmp_path, {"path": str(tmp_path / "tuned")}, train))
    gradients: list[dict[str, Tensor]] = []
    clip = Pipeline.clip_grad_norm_

    def recorded(pipe: Pipeline, *arguments: Any) -> Any:
        norm = clip(pipe, *arguments)
        gradients.append({name: p.grad.clone() for name, p in pipe.named_parameters() if p.grad is not None})
        return norm

    monkeypatch.setattr(Pipeline, "clip_grad_norm_", recorded)
    run(prepared)
    content = prepared.data.batch(1).content
    loss, expected = whole(peft, content)  # type: ignore[arg-type]
    assert tiny.metrics(tmp_path)[1]["loss"] == pytest.approx(loss, rel=1e-6)
    wanted = {name: value for name, value in expected.items() if value is not None and "lora_" in name}
    assert gradients[0].keys() == wanted.keys() != set()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-5, atol=1e-7, msg=name)
    again = opened(base(tmp_path), tiny.checkpoint(tmp_path, 2))  # which PEFT opens
    assert not torch.allclose(logits(again, IDS), logits(peft.eval(), IDS), atol=1e-4)


def test_a_resumed_run_goes_on_from_its_checkpoint_and_not_from_its_first_adapter(tmp_path: Path) -> None:
    config(tmp_path)
    a_peft_adapter(tmp_path)
    adapter = {"path": str(tmp_path / "tuned")}
    run(preflight(config(tmp_path, adapter)))
    expected = tensors_of(newest(tmp_path))
    run(preflight(config(tmp_path, adapter), str(tiny.checkpoint(tmp_path, 2))))
    ended = tensors_of(newest(tmp_path))
    assert all(torch.equal(value, expected[name]) for name, value in ended.items())


def test_an_adapter_that_cannot_be_trained_on_is_refused(tmp_path: Path) -> None:
    config(tmp_path)
    a_peft_adapter(tmp_path)
    path = {"path": str(tmp_path / "tuned")}
    with pytest.raises(ValueError, match=r"path=.* with r=2: .* of its own; leave r and alpha out"):
        config(tmp_path, {**path, "r": 2, "alpha": 8})
    with refuses(CheckpointError, rule="it cannot be read", remedy="Give a folder that holds an adapter"):
        preflight(config(tmp_path, {"path": str(tmp_path / "nowhere")}))
    weights = tmp_path / "tuned" / "adapter_model.safetensors"
    tensors = load_file(weights)
    save_file({name: value[:1] for name, value in tensors.items()}, weights)
    with refuses(UnfitError, "not"):
        preflight(config(tmp_path, path))


def test_a_dry_run_counts_what_is_trained(tmp_path: Path) -> None:
    planned = dry_run(config(tmp_path, {"r": 2, "targets": ["q_proj"]}))
    trained = [n for n, p in planned.plan.source.model.named_parameters() if p.requires_grad]
    assert len(trained) == 4
    assert all("lora_" in name for name in trained)


def test_an_adapters_folder_is_no_base_model_and_merging_needs_one(tmp_path: Path) -> None:
    made = config(tmp_path, train=BRIEF)
    run(preflight(made))
    model = made.model.model_copy(update={"path": str(tiny.checkpoint(tmp_path, 1))})
    with refuses(ModelError, rule="no config.json", remedy="adapter: merge"):
        preflight(made.model_copy(update={"model": model}))
    (tmp_path / "base").rename(tmp_path / "moved")
    with refuses(ConfigError, rule="adapter_config.json names", remedy="--base"):
        merge_folder(tmp_path / "out", tmp_path / "merged", None, "1GB")
    merge_folder(tmp_path / "out", tmp_path / "merged", tmp_path / "moved", "1GB")
    with refuses(CheckpointError, rule="adapter_config.json, and no checkpoint"):
        merge_folder(tmp_path / "moved", tmp_path / "again", None, "1GB")
