"""Vision-language models: exact with any number of images in a microbatch, none included."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from penstock import AutoPipeline, Axes, PerRow
from penstock.errors import BatchError, ConfigError, ModelError
from penstock.models.split.multiply_adds import multiply_adds, works
from penstock.models.tracing.chain import find_chain
from support import pictures
from support.mesh import build_whole
from support.pictures import assert_exact, microbatches
from support.pool import Pool
from support.reference import assert_gradients, gradients_of, plain_steps
from support.refusals import refuses

TYPICAL = ("qwen3_vl", "smolvlm")


@pytest.mark.parametrize(
    "model_type",
    [pytest.param(t, marks=[] if t in TYPICAL else [pytest.mark.sweep]) for t in pictures.TYPES],
)
def test_exact(model_type: str) -> None:
    model = pictures.tiny_model(model_type, torch.float64)
    assert_exact(model, AutoPipeline(ranks=4, microbatches=4))
    model = model.float()  # gemma3's norms round to it
    assert_exact(model, AutoPipeline(ranks=2, microbatches=4, schedule="zb_v"))


@pytest.mark.sweep
@pytest.mark.parametrize("model_type", pictures.TYPES)
def test_exact_in_float32_where_layers_run_again(model_type: str) -> None:
    model = pictures.tiny_model(model_type)
    auto = AutoPipeline(ranks=2, microbatches=4, schedule="interleaved_1f1b", activation_checkpointing="full")
    assert_exact(model, auto)


def test_a_frozen_tower_takes_no_backward() -> None:
    model = pictures.tiny_model("qwen3_vl", torch.float64)
    model.model.visual.requires_grad_(False)
    model.model.language_model.embed_tokens.requires_grad_(False)
    assert_exact(model, AutoPipeline(ranks=4, microbatches=4))
    pipe = AutoPipeline(ranks=4, microbatches=4).build(model)
    shown: list[bool] = []
    tower: Any = pipe.modules[0].get_submodule("model.visual")
    tower.register_forward_hook(lambda module, args, out: shown.append(out.pooler_output.requires_grad))
    pipe.step(microbatches(model))
    assert shown == [False, False, False]


def test_tied_weights() -> None:
    model = pictures.tiny_model("qwen2_5_vl", torch.float64, tie_word_embeddings=True)
    assert model.lm_head.weight is model.model.language_model.embed_tokens.weight
    assert_exact(model, AutoPipeline(ranks=3, microbatches=4))


@pytest.mark.sweep
@pytest.mark.parametrize("ranks", [2])
def test_exact_over_processes(pool: Pool, ranks: int) -> None:
    """Features of images cross an edge whose other end cannot know their shapes."""
    assert pool.run(ranks, exact_on_ranks, ranks) == [None] * ranks


def exact_on_ranks(ranks: int) -> None:
    torch.set_num_threads(1)
    model = pictures.tiny_model("qwen3_vl", torch.float64)
    batch = microbatches(model)
    pipe = AutoPipeline(ranks=ranks, microbatches=4, layout="Et|tttL", timeout=30).build(model)
    loss, expected = plain_steps(model, batch)
    for _ in range(2):
        pipe.zero_grad()
        assert abs(pipe.step(batch).loss - loss) <= 1e-10 * abs(loss)
    assert_gradients(gradients_of(pipe), expected, 1e-10)
    pipe.close()


def test_exact_where_one_part_of_the_batch_has_no_image(pool: Pool) -> None:
    """FSDP2 would add the gradients of one rank's tower to another rank's embedding, or wait for ever."""
    assert pool.run(4, exact_on_a_mesh) == [True] * 4


def exact_on_a_mesh() -> bool:
    torch.set_num_threads(1)
    model = pictures.tiny_model("qwen3_vl", torch.float64)
    seen, plain = microbatches(model), microbatches(model)[2]
    pipe = build_whole(model, 2, Axes(dp_shard=2), microbatches=2)
    mine = [seen[0], seen[3]] if pipe.batch_part[0] else [plain, plain]
    report = pipe.verify_against(model, mine)
    pipe.step(mine)
    tower = [p for name, p in pipe.named_parameters() if ".visual." in name]
    pipe.close()
    return report.passed and all(p.grad is not None for p in tower)


@pytest.mark.sweep
def test_images_are_refused_where_rows_are_split(pool: Pool) -> None:
    for found in pool.run(4, refused_on_a_mesh):
        assert "pixel_values in a batch with" in found


def refused_on_a_mesh() -> str:
    torch.set_num_threads(1)
    model = pictures.tiny_model("llava", attn_implementation="eager")
    pipe = build_whole(model, 2, Axes(tp=2), microbatches=2)
    with pytest.raises(BatchError) as caught:
        pipe.step(microbatches(model)[:2])
    pipe.close()
    return str(caught.value)


def test_a_batch_that_lists_the_images_of_each_row() -> None:
    model = pictures.tiny_model("qwen2_5_vl", torch.float64)
    rows: list[pictures.Row] = [[(1, 1)], [], [(2, 1), (1, 2)], [(2, 2)]]
    whole = pictures.microbatch(model, rows)
    counts, grids = [1, 0, 2, 1], whole["image_grid_thw"]
    patches = [int(each.prod(-1).sum()) for each in grids.split(counts)]
    pixels = whole["pixel_values"].double().split(patches)
    batch = {
        **whole,
        "pixel_values": PerRow([pixels[0], None, pixels[2], pixels[3]]),
        "image_grid_thw": PerRow([grids[:1], None, grids[1:3], grids[3:]]),
    }
    pipe = AutoPipeline(ranks=2, microbatches=4).build(model)
    result = pipe.step(batch)
    split = pipe.microbatches(batch)
    assert ["pixel_values" in each for each in split] == [True, False, True, True]
    assert len(split[2]["image_grid_thw"]) == 2
    loss, expected = plain_steps(model, split)
    assert result.loss == pytest.approx(loss, rel=1e-10)
    assert_gradients(gradients_of(pipe), expected, 1e-10)
    pipe.verify_against(model, batch)
    assert pipe.step([batch]).loss == pytest.approx(loss, rel=1e-10)  # as one microbatch
    with refuses(BatchError, "pixel_values: 3"):
        pipe.step({**batch, "pixel_values": PerRow(batch["pixel_values"][:3])})
    wide = PerRow([pixels[0][:, :5], pixels[2]] * 2)
    with refuses(
        BatchError, "pixel_values of shapes [16, 96] and [4, 5] in one microbatch", "the tensors of its rows"
    ):
        pipe.step({**batch, "pixel_values": wide}, microbatches=2)


def without(batch: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in batch.items() if name not in names}


def test_images_that_do_not_fit_their_tokens() -> None:
    model = pictures.tiny_model("qwen2_5_vl")
    (batch,) = microbatches(model)[:1]
    pipe = AutoPipeline(ranks=2, microbatches=1).build(model)
    fitting = pipe.step([batch]).loss
    for wrong, value, rule in (
        (without(batch, "pixel_values", "image_grid_thw"), "5 tokens of images", "has no pixel_values"),
        ({**batch, "input_ids": batch["input_ids"] % 60}, "no tokens of images", "its pixel_values"),
        (
            without(batch, "mm_token_type_ids"),
            "image_grid_thw without mm_token_type_ids",
            "positions of text and images",
        ),
        (
            {**batch, "image_grid_thw": batch["image_grid_thw"][:2]},
            "5 tokens of images",
            "2 images in image_grid_thw have 3 tokens",
        ),
    ):
        with refuses(BatchError, value, rule):
            pipe.step([wrong])
    pipe.zero_grad()
    assert pipe.step([batch]).loss == pytest.approx(fitting)


def test_images_that_only_the_forward_finds_too_few() -> None:
    model = pictures.tiny_model("llava")
    (batch,) = microbatches(model)[:1]
    pipe = AutoPipeline(ranks=2, microbatches=1).build(model)
    with refuses(BatchError, "images that do not fit the tokens of their microbatch", "image tok"):
        pipe.step([{**batch, "pixel_values": batch["pixel_values"][:2]}])


@pytest.mark.parametrize("model_type", ["blip-2", "mllama", pytest.param("idefics", marks=pytest.mark.sweep)])
def test_refused(model_type: str) -> None:
    with refuses(ModelError, rule="pipeline cuts a chain"):
        find_chain(pictures.refused_model(model_type))


def test_the_split_counts_the_towers_work() -> None:
    """The more tokens are of images, the fewer layers has the first stage; a frozen tower counts less."""
    config = pictures.tiny_config("qwen2_5_vl", layers=12)
    auto = AutoPipeline(ranks=2, microbatches=2, sequence_length=64)
    first = [len(replace(auto, image_tokens=n).build_plan(config).stages[0].layers) for n in (0, 16, 48)]
    assert first == sorted(first, reverse=True)
    assert first[0] > first[-1]
    model = pictures.tiny_model("qwen2_5_vl")
    chain = find_chain(model)
    text, whole = (multiply_adds(model, chain, 64, count).embedding for count in (0, 64))
    model.model.visual.requires_grad_(False)
    frozen = multiply_adds(model, chain, 64, 64).embedding
    assert frozen - text == pytest.approx((whole - text) / 3, rel=1e-3)
    wrong: Any
    for wrong in (65, -1, "x", 2.5, True):
        with refuses(ConfigError, f"image_tokens={wrong!r}", "a row, which has 64"):
            multiply_adds(model, chain, 64, wrong)


def test_a_backward_ends_at_the_first_weight_of_a_tower_that_trains() -> None:
    model = pictures.tiny_model("qwen2_5_vl")
    tower, chain = model.model.visual, find_chain(model)
    every, merger = (sum(p.numel() for p in part.parameters()) for part in (tower, tower.merger))
    patches = model.config.vision_config.spatial_merge_size**2
    assert works(model, chain)[-2][3:] == (patches * every, patches * every)
    tower.requires_grad_(False)
    assert works(model, chain)[-2][3:] == (patches * every, 0)
    tower.merger.requires_grad_(True)
    assert works(model, chain)[-2][3:] == (patches * every, patches * merger)
    assert works(model, chain)[-2].of(7, 49, 3) == patches * (every + 2 * merger)


def test_a_config_and_a_folder_are_built_with_their_towers(tmp_path: Any) -> None:
    config = pictures.tiny_config("qwen3_vl")
    pipe = AutoPipeline(ranks=2, microbatches=4).build(config)
    assert any(name.startswith("model.visual.") for name, _ in pipe.named_parameters())
    pipe.save_pretrained(tmp_path / "model")
    again = AutoPipeline(ranks=3, microbatches=4).build(tmp_path / "model")
    batch = microbatches(pictures.tiny_model("qwen3_vl"))
    assert again.step(batch).loss == pytest.approx(pipe.step(batch).loss, rel=1e-6)


def test_padding_that_tokens_would_see_is_refused() -> None:
    """In float32 the loss was 1e-3 off."""
    auto = AutoPipeline(ranks=2, microbatches=2, shapes="padded")
    with refuses(
        ModelError, "shapes='padded' for PaliGemmaForConditionalGeneration", "when it is padded on the right"
    ):
        auto.build_plan(pictures.tiny_model("paligemma"))


def test_a_loss_function_is_the_mean_over_rows_of_tokens() -> None:
    model = pictures.tiny_model("qwen2_5_vl", torch.float64)
    batch = microbatches(model)
    pipe = AutoPipeline(ranks=2, microbatches=4, loss_fn=lambda output, _: output.square().mean()).build(
        model
    )
    expected = sum(float(model(**each).logits.detach().square().mean()) for each in batch) / len(batch)
    assert pipe.step(batch).loss == pytest.approx(expected, rel=1e-5)
