"""The types of a config's values: each form that a key takes, and what is out of range."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.train.config.values import CheckpointingSection, CompileSection
from support.configs import MINIMAL, loaded, refused, same_as_yaml


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("false", None),
        ("none", None),
        ("null", None),
        ("true", {}),
        ("full", {}),
        ("selective", {"save": ["matmul", "attention"]}),
        ("{}", {}),
        ("{every: 2, save: [attention], in_flight: 2}", {"every": 2, "save": ["attention"], "in_flight": 2}),
        ("{in_flight: [2, 1, 0, 0]}", {"in_flight": [2, 1, 0, 0]}),
        ("{memory_limit: 8 GiB}", {"memory_limit": 8 * 2**30}),
        ("{memory_limit: 1.5gb}", {"memory_limit": 1.5e9}),
        ("{memory_limit: 4096}", {"memory_limit": 4096}),
    ],
)
def test_every_form_of_activation_checkpointing(
    tmp_path: Path, given: str, meant: dict[str, Any] | None
) -> None:
    config = loaded(tmp_path, MINIMAL, f"train.activation_checkpointing={given}")
    expected = None if meant is None else CheckpointingSection.model_validate(meant)
    assert config.train.activation_checkpointing == expected
    same_as_yaml(config)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("true", {}), ("none", None), ("null", None), ("layers", {"loss": False}),
        ("loss", {"layers": "none"}),
        ("{layers: products, backend: aot_eager}", {"layers": "products", "backend": "aot_eager"}),
    ],
)  # fmt: skip
def test_every_form_of_compile(tmp_path: Path, given: str, meant: dict[str, Any] | None) -> None:
    config = loaded(tmp_path, MINIMAL, f"train.compile={given}")
    assert config.train.compile == (None if meant is None else CompileSection.model_validate(meant))
    same_as_yaml(config)


PATHS = (
    "output.folder", "data.path", "data.cache", "data.tokenizer", "data.chat_template", "data.images",
    "model.path", "data.validation.path", "output.trackers.0.folder",
)  # fmt: skip


NO_PATHS = {
    "empty": ("", "an empty path would be the working folder"),
    "blank": ("  ", "an empty path would be the working folder"),
    "a long name": ("a" * 256, "a name has at most 255 bytes"),
    "a long name of few characters": ("\u00e9" * 128, "a name has at most 255 bytes"),
    "a long path": ("a/" * 2000, "and a path 3,000 characters"),
    "nobody's home": ("~nobody-of-this-name/x", "there is no such user"),
    "a variable": ("/scratch/$USER/x", "$USER would be a folder of that very name"),
    "a variable in braces": ("${HOME}/x", "${HOME} would be a folder of that very name"),
    "a NUL": ("a\0b", "a NUL or half a surrogate pair"),
    "half a surrogate pair": ("a\ud800", "a NUL or half a surrogate pair"),
}


@pytest.mark.parametrize("key", PATHS)
@pytest.mark.parametrize("case", NO_PATHS)
def test_a_path_that_no_file_can_have_is_refused(tmp_path: Path, key: str, case: str) -> None:
    """0.5.0: an empty one wrote into the working folder, and the others ended with tracebacks of Python's."""
    text, message = NO_PATHS[case]
    if key == "output.trackers.0.folder":
        override = f"output.trackers=[{{name: tensorboard, folder: {json.dumps(text)}}}]"
    else:
        override = f"{key}={json.dumps(text)}"
    assert message in refused(tmp_path, MINIMAL, override)


@pytest.mark.parametrize(
    "key",
    [
        "train.steps", "train.seed", "model.seed", "train.log_every", "train.evaluate_batches",
        "data.workers",
        "pipeline.head_weight", "pipeline.embedding_weight", "pipeline.timeout_seconds", "train.stop_seconds",
        "output.sample_tokens",
    ],
)  # fmt: skip
def test_a_number_beyond_any_run_is_refused(tmp_path: Path, key: str) -> None:
    """0.5.0: a weight of 10^30 layers ran for ever, such a seed or timeout was an OverflowError."""
    said = refused(tmp_path, MINIMAL, f"{key}={10**30}")
    assert f"{key}: 1" in said
    assert "is more than any run has. Give" in said
