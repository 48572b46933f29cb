"""Tiny random models that see, and microbatches with images for them.

A row is a list of sizes, its images': (height, width) in units of the model's smallest. Where a model takes
images of one size, the sizes only count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from penstock import AutoPipeline
from support import zoo
from support.reference import TOLERANCE, assert_gradients, gradients_of, plain_steps

IMAGE, VIDEO, START, END = 60, 61, 62, 63  # token ids; those of text are below
Row = Sequence[tuple[int, int]]

_SIGLIP = {
    "model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "image_size": 32, "patch_size": 8,
}  # fmt: skip
_CLIP = {**_SIGLIP, "model_type": "clip_vision_model"}
_QWEN = {
    "depth": 2, "hidden_size": 32, "embed_dim": 32, "intermediate_size": 48, "num_heads": 4, "patch_size": 4,
    "temporal_patch_size": 2, "spatial_merge_size": 2, "out_hidden_size": 32, "window_size": 16,
    "fullatt_block_indexes": [1], "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1],
    "in_channels": 3,
}  # fmt: skip
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
_LLAMA = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip
_PIXTRAL = {
    "model_type": "pixtral", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "image_size": 128, "patch_size": 8, "head_dim": 8,
}  # fmt: skip
_MISTRAL = {**_LLAMA, "model_type": "mistral"}

# what each type needs beyond the rules of the zoo
OWN: dict[str, dict[str, Any]] = {
    "gemma3": {"vision_config": _SIGLIP, "mm_tokens_per_image": 4},
    "idefics3": {"vision_config": {**_SIGLIP, "model_type": "idefics3_vision"}, "text_config": _LLAMA},
    "internvl": {"vision_config": {"image_size": [32, 32], "patch_size": [8, 8], "num_hidden_layers": 2},
                 "text_config": _LLAMA},
    "llava": {"vision_config": _CLIP, "text_config": _LLAMA},
    "mistral3": {"vision_config": _PIXTRAL, "text_config": _MISTRAL},
    "paligemma": {"vision_config": {**_SIGLIP, "projection_dim": 32}, "projection_dim": 32},
    "qwen2_vl": {"vision_config": {**_QWEN, "hidden_size": 32, "mlp_ratio": 2},
                 "text_config": {"rope_parameters": _ROPE}},
    "qwen2_5_vl": {"vision_config": _QWEN, "text_config": {"rope_parameters": _ROPE}},
    "qwen3_vl": {"vision_config": _QWEN, "text_config": {"rope_parameters": _ROPE}},
    "qwen3_vl_moe": {"vision_config": _QWEN, "text_config": {"rope_parameters": _ROPE}},
    "aya_vision": {"vision_config": _SIGLIP, "downsample_factor": 2},
    "cohere2_vision": {"vision_config": _SIGLIP, "downsample_factor": 2},
    "deepseek_vl": {"vision_config": _SIGLIP, "text_config": _LLAMA},
    "exaone4_5": {"vision_config": _QWEN},
    "glm4v": {"vision_config": {**_QWEN, "image_size": 32}, "text_config": {"rope_parameters": _ROPE}},
    "got_ocr2": {"vision_config": {"image_size": 32, "window_size": 2, "global_attn_indexes": [0]}},
    "idefics2": {"vision_config": {**_SIGLIP, "model_type": "idefics2_vision"}, "text_config": _MISTRAL},
    "lighton_ocr": {"vision_config": _PIXTRAL, "text_config": {**_LLAMA, "model_type": "qwen3"}},
    "qwen3_5": {"vision_config": _QWEN},
    "vipllava": {"vision_config": _CLIP, "text_config": _LLAMA, "vision_feature_layers": [-1, -2]},
    "smolvlm": {"vision_config": {**_SIGLIP, "model_type": "smolvlm_vision"}, "text_config": _LLAMA},
}  # fmt: skip
TYPES = tuple(OWN)


def tiny_config(model_type: str, *, layers: int = 4, **changes: Any) -> Any:
    options = zoo.options_of(CONFIG_MAPPING[model_type](), layers)
    for part in ("vision_config", "text_config"):
        if (own := OWN[model_type].get(part)) and "model_type" in own:
            options[part] = own  # in place of the default's, of another type
    for more in (OWN[model_type], changes):
        options = zoo.merged(options, more)
    known = CONFIG_MAPPING[model_type]()
    for name, number in (("image_token", IMAGE), ("video_token", VIDEO), ("vision_start_token", START),
                         ("vision_end_token", END)):  # fmt: skip
        for suffix in ("_index", "_id"):
            if hasattr(known, name + suffix):
                options[name + suffix] = number
                break
    if "vision_config" in options:
        fields = CONFIG_MAPPING[options["vision_config"]["model_type"]]().to_dict()
        options["vision_config"] = {k: v for k, v in options["vision_config"].items() if k in fields}
    return AutoConfig.for_model(model_type, **deepcopy(options))


def tiny_model(
    model_type: str, dtype: torch.dtype = torch.float32, *, seed: int = 0, **changes: Any
) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = tiny_config(model_type, **changes)
    model = AutoModelForImageTextToText.from_config(config, experts_implementation="eager")
    zoo.unsettle(model, seed)
    return model.to(dtype).train()


# ---- Images as each model takes them, of some rows; and tokens of each image

Images = Callable[[PreTrainedModel, Sequence[Row], torch.Generator], dict[str, Tensor]]


def _patches(model: PreTrainedModel, rows: Sequence[Row], generator: torch.Generator) -> dict[str, Tensor]:
    vision = model.config.vision_config
    merge, size = vision.spatial_merge_size, 3 * vision.temporal_patch_size * vision.patch_size**2
    grid = torch.tensor([(1, h * merge, w * merge) for row in rows for h, w in row])
    patches = int(grid.prod(-1).sum())
    return {
        "pixel_values": torch.randn(patches, size, generator=generator),
        "image_grid_thw": grid,
    }


def _squares(model: PreTrainedModel, rows: Sequence[Row], generator: torch.Generator) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(sum(map(len, rows)), 3, 32, 32, generator=generator)}


def _sized(model: PreTrainedModel, rows: Sequence[Row], generator: torch.Generator) -> dict[str, Tensor]:
    sizes = torch.tensor([(16 * h, 32 * w) for row in rows for h, w in row])  # one token: squeezed away
    height, width = sizes.max(dim=0).values.tolist()
    pixels = torch.randn(len(sizes), 3, height, width, generator=generator)
    return {"pixel_values": pixels, "image_sizes": sizes}


def _by_row(model: PreTrainedModel, rows: Sequence[Row], generator: torch.Generator) -> dict[str, Tensor]:
    pixels = torch.zeros(len(rows), max(map(len, rows)), 3, 32, 32)
    for at, row in enumerate(rows):
        pixels[at, : len(row)] = torch.randn(len(row), 3, 32, 32, generator=generator)
    return {"pixel_values": pixels}


FORMS: dict[str, Images] = {
    **dict.fromkeys(("idefics2", "idefics3", "smolvlm"), _by_row),
    **dict.fromkeys(("lighton_ocr", "mistral3"), _sized),
    **dict.fromkeys(("exaone4_5", "glm4v", "qwen3_5"), _patches),
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"), _patches),
}  # fmt: skip


def microbatch(
    model: PreTrainedModel, rows: Sequence[Row], *, text: int = 6, seed: int = 0
) -> dict[str, Any]:
    """input_ids, labels, (rows, sequence), and what belongs to the images; padded with plain tokens.

    text: tokens of text around and between images
    """
    generator = torch.Generator().manual_seed(seed)
    form = FORMS.get(model.config.model_type, _squares)
    taken: dict[str, Any] = form(model, rows, generator) if any(rows) else {}
    lines = []
    for row in rows:
        line = torch.randint(3, IMAGE, (text // 2,), generator=generator).tolist()
        for size in row:
            line += [START, *[IMAGE] * _tokens(model, size), END]
        lines.append(line + torch.randint(3, IMAGE, (text - text // 2,), generator=generator).tolist())
    longest = max(map(len, lines))
    ids = torch.tensor([line + [5] * (longest - len(line)) for line in lines])
    labels = ids.masked_fill(ids >= IMAGE, -100)
    labels[0, :2] = -100
    types = {"mm_token_type_ids", "token_type_ids"} & _parameters(model)
    return {"input_ids": ids, "labels": labels, **taken, **{name: (ids == IMAGE).long() for name in types}}


def _parameters(model: PreTrainedModel) -> set[str]:
    return set(type(model).forward.__annotations__)


@torch.no_grad()
def _tokens(model: PreTrainedModel, size: tuple[int, int]) -> int:
    """How many tokens an image of this size has: as many as features."""
    form = FORMS.get(model.config.model_type, _squares)
    images = form(model, [[size]], torch.Generator())
    images = {n: v.to(model.dtype) if v.is_floating_point() else v for n, v in images.items()}
    found = model.base_model.get_image_features(**images, return_dict=True).pooler_output
    features = found if isinstance(found, Tensor) else torch.cat(list(found))
    return int(features.numel()) // int(model.config.get_text_config().hidden_size)


# of two rows each: one image and two, none and one, none at all, one and one
ROWS: tuple[tuple[Row, ...], ...] = (
    ([(1, 1)], [(2, 1), (1, 2)]), ([], [(2, 2)]), ([], []), ([(1, 3)], [(2, 1)]),
)  # fmt: skip


def microbatches(model: PreTrainedModel) -> list[dict[str, Any]]:
    made = [microbatch(model, rows, seed=number) for number, rows in enumerate(ROWS)]
    return [{n: v.to(model.dtype) if v.is_floating_point() else v for n, v in each.items()} for each in made]


def assert_exact(model: PreTrainedModel, auto: AutoPipeline) -> None:
    """Loss, every gradient and an evaluation are those of the plain model, of microbatches with images."""
    batch, tolerance = microbatches(model), TOLERANCE[model.dtype]
    loss, expected = plain_steps(model, batch)
    pipe = auto.build(model)
    result = pipe.step(batch)
    assert abs(result.loss - loss) <= tolerance * max(1.0, abs(loss))
    found = gradients_of(pipe)
    held = {name for name, _ in pipe.named_parameters(remove_duplicate=False)}
    assert found.keys() == held & expected.keys()
    assert_gradients(found, expected, tolerance)
    assert abs(pipe.evaluate(batch).loss - loss) <= tolerance * max(1.0, abs(loss))


def refused_model(model_type: str) -> PreTrainedModel:
    """A small model of a type whose text is no chain."""
    config: Any = CONFIG_MAPPING[model_type]()
    if model_type == "blip-2":
        small = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        config = AutoConfig.for_model(
            model_type,
            vision_config={**small, "image_size": 28, "patch_size": 14},
            qformer_config={**small, "vocab_size": 64, "encoder_hidden_size": 32},
            text_config={"model_type": "opt", "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2,
                         "num_attention_heads": 4, "vocab_size": 64, "word_embed_proj_dim": 32},
        )  # fmt: skip
    elif model_type == "mllama":
        config = zoo.tiny_config("mllama")
    with torch.device("meta"):
        return AutoModelForImageTextToText.from_config(config)
