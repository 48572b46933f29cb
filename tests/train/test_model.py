"""A model section becomes a config or a folder, and a mistyped key of a model is an error."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoConfig, Qwen3Config

from penstock.errors import ConfigError, ModelError
from penstock.train.config.model import ModelSection
from penstock.train.model import inline_config, named_model
from support.refusals import refuses


def test_inline_keys_make_the_config_of_their_type() -> None:
    config = inline_config({"model_type": "qwen3", "hidden_size": 32, "rope_theta": 5e4})
    assert isinstance(config, Qwen3Config)
    assert config.hidden_size == 32
    assert config.rope_parameters["rope_theta"] == 5e4
    mixture = inline_config({"model_type": "qwen3_moe", "experts_implementation": "eager"})
    assert mixture._experts_implementation == "eager"


@pytest.mark.parametrize(
    ("keys", "value", "rule", "remedy"),
    [
        ({"model_type": "qwen3", "hiden_size": 32},
         "model.config.hiden_size=32", "Qwen3Config has no such key", "mean hidden_size?"),
        ({"model_type": "gpt2", "n_layers": 2}, "model.config.n_layers=2", "no such key", "mean n_layer?"),
        ({"model_type": "qwen33"}, "model.config.model_type='qwen33'", "no such model type", "mean qwen3?"),
        ({"model_type": "qwen3", "hidden_size": "many"},
         "model.config of type qwen3", "transformers refuses it", ""),
    ],
)  # fmt: skip
def test_wrong_keys_are_refused(keys: dict[str, object], value: str, rule: str, remedy: str) -> None:
    with refuses(ConfigError, value, rule, remedy):
        inline_config(keys)


def test_a_folder_is_read_for_its_weights_or_for_its_config_alone(tmp_path: Path) -> None:
    AutoConfig.for_model("qwen3", num_hidden_layers=2).save_pretrained(tmp_path)
    assert named_model(ModelSection(path=str(tmp_path))) == tmp_path
    config = named_model(ModelSection(path=str(tmp_path), weights="random"))
    assert isinstance(config, Qwen3Config)
    with refuses(ModelError, rule="there is no such folder"):
        named_model(ModelSection(path=str(tmp_path / "nowhere"), weights="random"))


def test_the_folder_of_a_run_is_refused_with_its_newest_checkpoint(tmp_path: Path) -> None:
    for step in (8, 16):
        (tmp_path / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
    with refuses(ModelError, str(tmp_path), "no config.json", "It is a run's folder") as caught:
        named_model(ModelSection(path=str(tmp_path), weights="random"))
    assert caught.value.remedy.endswith("/step-00000016")
