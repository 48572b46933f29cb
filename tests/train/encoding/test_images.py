"""Training on chats that show images: exact, resumed exactly, and refused where an image is missing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoProcessor

import draw_pictures
from penstock.batch.loss import IGNORED
from penstock.errors import ConfigError, DataError
from penstock.train.check.before_training import Reference
from penstock.train.config.load import load_config
from penstock.train.config.sections import TrainConfig
from penstock.train.preflight import preflight
from penstock.train.run import run
from support.refusals import refuses
from support.tiny import QWEN3, assert_same_tensors, checkpoint, config, held_out_losses

ROOT = Path(__file__).parents[3]


def drawn(folder: Path, keys: Mapping[str, Any] | None = None, count: int = 40, **train: Any) -> TrainConfig:
    """A tiny run on pictures that are drawn now, unless they are there."""
    pictures = folder / "pictures"
    if not pictures.exists():
        draw_pictures.write(pictures, count, hidden=32, layers=2)
    return config(
        folder,
        None,
        {
            "model": {"path": str(pictures / "model")}, "data.path": str(pictures / "chats.jsonl"),
            "data.kind": "chat", "data.images": str(pictures / "images"), "data.sequence_length": 128,
            "data.held_out": 0.2, "data.tokenizer": None, "data.cache": str(folder / "cache"), **(keys or {}),
        },
        **train,
    )  # fmt: skip


def test_every_gradient_is_that_of_each_chat_alone(tmp_path: Path) -> None:
    """As transformers' own processor makes the inputs of each."""
    prepared = preflight(drawn(tmp_path, {"model.dtype": "float64"}, batch_size=7))
    pipe = prepared.auto.build(prepared.model)
    source = prepared.plan.source
    model = Reference(source, prepared.auto.seed, prepared.auto.loss()).build(torch.device("cpu"))
    processor = AutoProcessor.from_pretrained(tmp_path / "pictures" / "model")
    data, total, count, shown = prepared.data, torch.zeros((), dtype=torch.float64), 0, set()
    assert data.sampler is not None
    for row in data.sampler.rows(0, 7):
        (piece,) = data.rows.read(row)
        messages = json.loads(piece.shown or b"")
        images = 0
        for part in messages[0]["content"]:
            if part["type"] == "image":
                part["image"] = Image.open(tmp_path / "pictures" / "images" / part.pop("path"))
                images += 1
        made = processor.apply_chat_template(
            [messages], tokenize=True, return_dict=True, return_tensors="pt"
        ).data
        assert made["input_ids"][0].tolist() == piece.ids.tolist()
        if images:
            made["pixel_values"] = made["pixel_values"].double()
        labels = torch.from_numpy(piece.labels)
        assert processor.decode(piece.ids[piece.labels != IGNORED]).endswith("<|im_end|>")
        logits = model(**made).logits[0, :-1]
        total = total + torch.nn.functional.cross_entropy(
            logits, labels[1:], ignore_index=IGNORED, reduction="sum"
        )
        count += int((labels[1:] != IGNORED).sum())
        shown.add(images)
    assert shown == {0, 1, 2}
    torch.autograd.backward([total / count])
    batch = data.batch(1).content
    assert isinstance(batch, list)
    result = pipe.step([{n: v.double() if v.is_floating_point() else v for n, v in m.items()} for m in batch])
    assert result.tokens == count
    assert result.loss == pytest.approx(float(total.detach() / count), rel=1e-10)
    expected = dict(model.named_parameters())
    for name, parameter in pipe.named_parameters(remove_duplicate=False):
        wanted = expected[name].grad
        assert (parameter.grad is None) == (wanted is None), name
        if wanted is not None and parameter.grad is not None:
            allowed = 1e-10 * max(1e-3, float(wanted.abs().max()))
            assert float((parameter.grad - wanted).abs().max()) <= allowed, name


def test_a_resumed_run_and_its_evaluations_are_those_of_an_undisturbed_one(tmp_path: Path) -> None:
    """Its pictures lie in another folder."""
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    for folder in (whole, resumed):
        folder.mkdir()
    keys = {"train.steps": 2, "train.checkpoint_every": 1, "train.evaluate_every": 1}
    run(preflight(drawn(whole, {**keys, "train.check": "always"})))
    run(preflight(drawn(resumed, keys), str(checkpoint(whole, 1))))
    first, second = (checkpoint(folder, 2) for folder in (whole, resumed))
    assert_same_tensors(first, second)
    assert held_out_losses(whole)[-1] == held_out_losses(resumed)[-1]
    again = AutoProcessor.from_pretrained(second)
    assert again.image_seq_len == draw_pictures.TOKENS
    assert again.chat_template == draw_pictures.TEMPLATE


def test_a_batch_counts_the_tokens_that_stand_for_its_images(tmp_path: Path) -> None:
    """Of all pipelines, though each reads its own part alone."""
    prepared = preflight(drawn(tmp_path))
    data, token = prepared.data, prepared.plan.source.model.config.image_token_id
    for step in (1, 2):
        parts: list[Any] = [replace(data, part=part, parts=2).batch(step) for part in range(2)]
        seen = [sum(int((each["input_ids"] == token).sum()) for each in part.content) for part in parts]
        assert [part.fill.images for part in parts] == [sum(seen)] * 2 == [data.batch(step).fill.images] * 2
        assert sum(seen) > 0
    assert prepared.auto.image_tokens is None


def test_the_config_of_the_example_is_planned(tmp_path: Path) -> None:
    draw_pictures.write(tmp_path, 30, hidden=32, layers=2)
    found = {
        "model.path": "model",
        "data.path": "chats.jsonl",
        "data.images": "images",
        "data.cache": "cache",
    }
    keys = [f"{key}={tmp_path / name}" for key, name in found.items()]
    prepared = preflight(load_config(ROOT / "configs" / "pictures.yaml", [*keys, "train.batch_size=4"]))
    names = prepared.plan.stages[0].modules
    assert {"model.vision_model", "model.connector"} <= set(names)


# ---- What is wrong


def record(folder: Path, content: list[Any], **more: Any) -> None:
    """Put one chat more in front of the others."""
    file = folder / "pictures" / "chats.jsonl"
    asked = {"role": "user", "content": content}
    answered = {"role": "assistant", "content": [{"type": "text", "text": "x"}]}
    line = json.dumps({"messages": [asked, answered], **more})
    file.write_text(line + "\n" + file.read_text())


TEXT = {"type": "text", "text": "?"}


@pytest.fixture(scope="module")
def one_picture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    drawn(folder := tmp_path_factory.mktemp("one"), count=1)
    return folder / "pictures"


@pytest.mark.parametrize(
    ("content", "more", "rule"),
    [
        ([{"type": "image"}, TEXT], {}, "names no file"),
        ([TEXT], {"images": ["0.png"]}, "'0.png'"),
        ([{"type": "text", "text": "a <image>"}], {}, "'<image>'"),
        ([{"type": "image", "path": "no.png"}], {}, "no.png cannot be read"),
        ([{"type": "image", "path": "../chats.jsonl"}], {}, "Pillow reads no image"),
        ([{"type": "image", "url": "https://a/b.png"}], {}, "'h"),
        ([{"type": "video", "path": "0.png"}], {}, "'video'"),
        ([{"image": "0.png"}, TEXT], {}, "{'image': '0.png'}"),
        (["?"], {}, "a part ?"),
        ([{"type": "image"}], {"images": "0.png"}, "a str"),
        ([TEXT], {"tools": [{"name": "f"}]}, "tools"),
    ],
)
def test_a_record_that_cannot_be_read(
    tmp_path: Path, one_picture: Path, content: Any, more: Any, rule: str
) -> None:
    shutil.copytree(one_picture, tmp_path / "pictures")
    made = drawn(tmp_path)
    record(tmp_path, content, **more)
    with refuses(DataError, "line 1", rule):
        preflight(made)


def test_images_may_be_listed_in_the_record(tmp_path: Path) -> None:
    made = drawn(tmp_path, {"data.held_out": 0.5, "data.held_out_from": "end"}, count=12)
    record(tmp_path, [{"type": "image"}, TEXT, {"type": "image"}], images=["0.png", "1.png"])
    (piece,) = preflight(made).data.rows.sources[0].read(0)
    paths = [
        Path(part["path"]).name for part in json.loads(piece.shown or b"")[0]["content"] if "path" in part
    ]
    assert paths == ["0.png", "1.png"]


def test_an_image_that_changed_since_it_was_tokenised(tmp_path: Path) -> None:
    prepared = preflight(drawn(tmp_path))
    for file in (tmp_path / "pictures" / "images").iterdir():
        Image.new("RGB", (30, 40)).save(file)
    with refuses(DataError, ".png", "it has changed"):
        prepared.data.batch(1)


def text_only(folder: Path) -> None:
    (folder / "processor_config.json").unlink()


def another_token(folder: Path) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "image_token_id": 7}))


@pytest.mark.parametrize(
    ("spoil", "rule"),
    [(text_only, "processor"), (another_token, "'<image>', is 259, and the model's is 7")],
)
def test_a_processor_that_does_not_fit(tmp_path: Path, spoil: Callable[[Path], None], rule: str) -> None:
    made = drawn(tmp_path)
    spoil(tmp_path / "pictures" / "model")
    with refuses(DataError, rule=rule):
        preflight(made)


def test_images_for_a_model_that_takes_none(tmp_path: Path) -> None:
    keys = {"data.tokenizer": str(tmp_path / "pictures" / "model"), "data.sequence_length": 64}
    made = drawn(tmp_path, keys)
    text = {**QWEN3, "vocab_size": 262}
    made = made.model_copy(update={"model": made.model.model_copy(update={"path": None, "config": text})})
    with refuses(DataError, rule="Qwen3ForCausalLM takes none"):
        preflight(made)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"data.packing": "best_fit"}, "data.packing=best_fit"),
        ({"data.overlong": "truncate"}, "data.overlong=truncate"),
        ({"data.kind": "text", "data.packing": "none", "data.overlong": "drop"}, "data.kind=text"),
        ({"data.tokenizer": "bytes"}, "data.tokenizer=bytes"),
        (
            {"train.ramp": [{"until": 2, "sequence_length": 8}]},
            "train.ramp",
        ),
        ({"parallel.cp": 2}, "parallel.cp=2"),
    ],
)
def test_settings_that_would_cut_images(tmp_path: Path, keys: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, ValueError), match=message):
        drawn(tmp_path, keys, count=1)
