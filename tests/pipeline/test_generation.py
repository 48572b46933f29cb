"""Generation over stages: the tokens that transformers generates in one process, and no trace in training."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from transformers import Cache, StoppingCriteriaList

from penstock import AutoPipeline, Axes, Pipeline
from penstock.batch.microbatches import PerRow
from penstock.errors import BatchError, ConfigError, InputError, ModelError, PeerError
from support import pictures, zoo
from support.adapted import adapted
from support.covering import some
from support.families import FAMILIES, ragged_batch, tiny_model
from support.generated import LENGTH, NEW, PAD, in_processes, middle_token, over_stages, prompts, whole
from support.mesh import later
from support.own_chain import Piece, squares
from support.pool import Pool
from support.predicting import tiny_predicting
from support.reference import gradients_of
from support.refusals import refuses

# with states, convolutions, windows, shared keys, latents, indexers, tables: what a cache may hold
OTHER_CACHES = (
    "bamba", "bloom", "cpmant", "deepseek_v3", "deepseek_v4", "falcon", "falcon_h1", "gemma3n_text",
    "gemma4_text", "glm_moe_dsa", "granitemoehybrid", "jamba", "lfm2", "longcat_flash", "mamba", "mamba2",
    "mpt", "qwen3_next", "zamba2",
)  # fmt: skip


def built(model: Any, **options: Any) -> Pipeline:
    return AutoPipeline(**{"ranks": 2, "microbatches": 2, **options}).build(model)


def assert_same(pipe: Pipeline, model: Any, batch: dict[str, Any], **options: Any) -> torch.Tensor:
    """The tokens of both, which are equal, and not the same token again and again."""
    expected = whole(model, batch, **options)
    assert torch.equal(over_stages(pipe, batch, **options), expected)
    assert len(set(expected[:, batch["input_ids"].shape[1] :].flatten().tolist())) > 3
    return expected


@pytest.mark.parametrize("family", some(FAMILIES, "llama", "gemma3_text", "gpt_oss"))
def test_greedy(family: str) -> None:
    model = tiny_model(family, tied=family in ("llama", "gemma"))
    pipe = built(model)
    assert_same(pipe, model, prompts(padded=False))
    assert_same(pipe, model, prompts())


@pytest.mark.parametrize("model_type", some(OTHER_CACHES, "jamba", "cpmant"))
def test_greedy_with_caches_of_other_kinds(model_type: str) -> None:
    model = zoo.tiny_model(model_type)
    assert torch.equal(over_stages(built(model), prompts()), whole(model, prompts()))


PLACEMENTS: list[dict[str, Any]] = [
    {"schedule": "interleaved_1f1b", "microbatches": 4},
    {"schedule": "zb_v"},
    {"chunked_loss": True},
    {"ranks": 4, "schedule": "gpipe"},
    {"ranks": 1},
    {"activation_checkpointing": "full"},
]


@pytest.mark.parametrize("options", some(PLACEMENTS, *PLACEMENTS[1:3]))
def test_any_placement(options: dict[str, Any]) -> None:
    model = tiny_model("gemma2")
    pipe = built(model, **options)
    expected = assert_same(pipe, model, prompts())
    for count in (1, 5):
        assert torch.equal(over_stages(pipe, prompts(), microbatches=count), expected)


def test_rows_end_at_different_times() -> None:
    model = tiny_model("llama")
    end = middle_token(whole(model, prompts()))
    expected = whole(model, prompts(), eos_token_id=end)
    assert (expected == PAD).sum() > (prompts()["input_ids"] == PAD).sum()
    pipe = built(model)
    for count in (1, 2, 5):
        assert torch.equal(over_stages(pipe, prompts(), eos_token_id=end, microbatches=count), expected)
    first = whole(model, prompts())[:1, LENGTH].tolist()
    one_row = {name: value[:1] for name, value in prompts().items()}
    assert over_stages(pipe, one_row, eos_token_id=first).shape == (1, LENGTH + 1)  # shorter than the most


def test_the_model_s_own_end_and_length_of_one_token() -> None:
    model = tiny_model("llama")
    model.generation_config.eos_token_id = middle_token(whole(model, prompts()))
    model.generation_config.pad_token_id = PAD
    pipe = built(model)
    for new in (1, NEW):
        given: dict[str, Any] = {**prompts(), "max_new_tokens": new}
        assert torch.equal(pipe.generate(**given), model.eval().generate(**given))


def test_sampling_draws_what_transformers_draws() -> None:
    """In one microbatch. In several, the same seed draws the same, and another one other tokens."""
    model, pipe = tiny_model("llama"), built(tiny_model("llama"))
    sampling = {"do_sample": True, "temperature": 1.5, "top_k": 30, "top_p": 0.9, "repetition_penalty": 1.2}
    before = torch.get_rng_state()
    torch.manual_seed(11)
    expected = whole(model, prompts(), **sampling)
    torch.set_rng_state(before)
    assert torch.equal(over_stages(pipe, prompts(), **sampling, seed=11, microbatches=1), expected)
    drawn = [over_stages(pipe, prompts(), **sampling, seed=seed) for seed in (11, 11, 12)]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    assert torch.equal(before, torch.get_rng_state())
    assert not torch.equal(expected, whole(model, prompts()))


def test_processors_and_criteria_of_the_user() -> None:
    model, pipe = tiny_model("llama"), built(tiny_model("llama"))

    def third(input_ids: torch.Tensor, scores: Any) -> torch.Tensor:
        return torch.full((len(input_ids),), input_ids.shape[1] >= LENGTH + 3)

    options = {
        "stopping_criteria": StoppingCriteriaList([third]),
        "min_new_tokens": 2,
        "bad_words_ids": [[40], [41]],
    }
    expected = whole(model, prompts(), **options)
    assert expected.shape[1] == LENGTH + 3
    assert torch.equal(over_stages(pipe, prompts(), **options), expected)


def test_an_adapter() -> None:
    peft = adapted(tiny_model("llama"))
    assert_same(built(peft), peft, prompts())


@pytest.mark.parametrize("model_type", some(["llava", "qwen2_vl"], "qwen2_vl"))
def test_prompts_with_images(model_type: str) -> None:
    """The first stage encodes the images once; later stages count their tokens for positions."""
    model = pictures.tiny_model(model_type)
    sizes = [[(2, 2)], [(2, 2)], [(2, 2)]] if model_type == "qwen2_vl" else [[(1, 1)]] * 3
    batch = pictures.microbatch(model, sizes)
    del batch["labels"]
    by_row = {
        name: PerRow(value.chunk(3)) if name in ("pixel_values", "image_grid_thw") else value
        for name, value in batch.items()
    }
    assert torch.equal(over_stages(built(model), by_row), whole(model, batch))


def test_a_step_after_it_is_as_without_it() -> None:
    """Gradients, dropout, modes and random states; and no cache is left."""
    drops: dict[str, Any] = {"resid_pdrop": 0.2, "embd_pdrop": 0.2, "attn_pdrop": 0.2}
    steps = []
    for generates in (False, True):
        torch.manual_seed(3)
        pipe = built(tiny_model("gpt2", seed=1, **drops))
        frozen = pipe.modules[0].get_submodule("transformer.h.0")
        frozen.eval()
        pipe.step(ragged_batch())
        if generates:
            timeline = pipe.timeline
            over_stages(pipe, prompts(), do_sample=True, seed=5)
            assert pipe.timeline == timeline
        assert pipe.modules[0].training
        assert not frozen.training
        loss = pipe.step(ragged_batch()).loss
        steps.append((loss, gradients_of(pipe), torch.get_rng_state()))
    (loss, gradients, state), (other_loss, others, other_state) = steps
    assert loss == other_loss
    assert torch.equal(state, other_state)
    assert all(torch.equal(gradient, others[name]) for name, gradient in gradients.items())
    gc.collect()
    assert not [value for value in gc.get_objects() if isinstance(value, Cache)]


# ---- over processes


CASES: list[dict[str, Any]] = [
    {},
    {"ends": True, "split": 3},
    {"ends": True, "split": 1},
    {"split": 5, "prompts": {"padded": False}},
]


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (3, {"transport": "gloo"}),
        (2, {"schedule": "zb_v"}),
        *later((3, {}), (2, {"schedule": "interleaved_1f1b"}), mark=pytest.mark.sweep),
    ],
)
def test_over_processes(pool: Pool, ranks: int, options: dict[str, Any]) -> None:
    """Every rank gets the same tokens, through shared memory too, of which a step may use each entry once."""
    for of_rank in pool.run(ranks, partial(in_processes, **options), ranks, CASES):
        for tokens, expected in of_rank:
            assert torch.equal(tokens, expected)


@pytest.mark.parametrize(
    ("axes", "family"),
    [
        (Axes(tp=2), "llama"),
        (Axes(dp_shard=2, ep=2), "mixtral"),
        *later((Axes(dp_shard=2), "llama"), mark=pytest.mark.sweep),
    ],
)
def test_on_a_mesh(pool: Pool, axes: Axes, family: str) -> None:
    """Pipelines that share weights run equally many rounds, although their rows end at other times."""
    cases: list[dict[str, Any]] = [
        {"prompts": {"rows": 8}},
        {"prompts": {"rows": 8}, "ends": True, "split": 2},
    ]
    for of_rank in pool.run(4, in_processes, 2, cases, axes, family):
        for tokens, expected in of_rank:
            assert torch.equal(tokens, expected)


def test_an_error_on_the_last_rank_ends_all(pool: Pool) -> None:
    assert pool.run(2, failing) == ["PeerError", "ValueError"]


def failing() -> str:
    """The error of this rank when a criterion on the last one raises."""
    pipe = AutoPipeline(ranks=2, microbatches=2, timeout=2.0, transport="gloo").build(tiny_model("llama"))

    def third(input_ids: torch.Tensor, scores: Any) -> torch.Tensor:
        if input_ids.shape[1] >= LENGTH + 3:
            raise ValueError("no more")
        return torch.zeros(len(input_ids), dtype=torch.bool)

    try:
        over_stages(pipe, prompts(), stopping_criteria=StoppingCriteriaList([third]))
    except PeerError:
        return "PeerError"
    except ValueError as error:
        return type(error).__name__
    return "none"


def test_ranks_with_other_options_are_refused(pool: Pool) -> None:
    for error in pool.run(2, differing):
        assert "max_new_tokens" in error


def differing() -> str:
    pipe = AutoPipeline(ranks=2, microbatches=2, timeout=10.0).build(tiny_model("llama"))
    new = 3 + torch.distributed.get_rank()
    try:
        over_stages(pipe, prompts(), max_new_tokens=new)
    except BatchError as error:
        return str(error)
    return ""


# ---- refused


@pytest.mark.parametrize(
    ("options", "error", "value", "rule", "remedy"),
    [
        ({"num_beams": 2}, ConfigError, "num_beams=2", "greedy search or by sampling", ""),
        ({"do_sample": True, "temperature": 0.0}, ConfigError, "generate()", "`temperature`", ""),
        ({"do_sample": True, "temperature": 5e-324}, ConfigError, "temperature=4.94066e-324", "overflow", ""),
        ({"max_new_tokens": 0}, ConfigError, "max_new_tokens=0", "at least one token", ""),
        ({"max_new_tokens": 60}, ConfigError,
         "max_new_tokens=60", "positions for 64 tokens", "Take max_new_tokens=59"),
        ({"num_return_sequences": 2, "do_sample": True}, ConfigError,
         "num_return_sequences=2", "does not have it", ""),
        ({"use_cache": False}, ConfigError, "use_cache=False", "a cache", ""),
        ({"stop_strings": "a"}, ConfigError, "generate()", "tokenizer", ""),
        ({"microbatches": 6}, BatchError, "a batch of 5 rows", "6 microbatches", ""),
        ({"attention_mask": torch.ones(5, 7)}, BatchError, "attention_mask of shape [5, 7]", "[5, 6]", ""),
        ({"attention_mask": torch.zeros(5, 6)}, BatchError,
         "hides the last token of row 0", "padded on the left", ""),
        ({"input_ids": torch.zeros(5, 0, dtype=torch.long)}, BatchError,
         "input_ids of shape [5, 0]", "has a token", ""),
        ({"input_ids": torch.full((5, 6), 64)}, BatchError, "input_ids with 64", "64 tokens", ""),
        ({"attention_masks": torch.ones(5, 6)}, BatchError,
         "'attention_masks'", "takes such an argument", "'attention_mask'"),
        ({"streamer": 1}, BatchError, "'streamer'", "takes such an argument", ""),
        ({"stopping_criteria": [lambda ids, scores: ids[:, 0] > 0], "pad_token_id": None},
         ConfigError, "without a pad_token_id", "are padded", ""),
    ],
)  # fmt: skip
def test_refused_options(
    options: dict[str, Any], error: type[InputError], value: str, rule: str, remedy: str
) -> None:
    pipe = built(tiny_model("llama"))
    given = {**prompts(), "max_new_tokens": NEW, "eos_token_id": None, **options}
    with refuses(error, value, rule, remedy):
        pipe.generate(**given)
    assert pipe.modules[0].training
    assert over_stages(pipe, prompts()).shape == (5, LENGTH + NEW)  # another one may follow


@pytest.mark.parametrize(
    ("build", "error", "value", "rule"),
    [
        (lambda: built(tiny_model("llama"), schedule="dualpipe", microbatches=4), ConfigError,
         "schedule 'dualpipe'", "two copies"),
        (lambda: built(tiny_model("llama"), shapes="padded"), ConfigError,
         "shapes='padded'", "rows on the right"),
        (lambda: built(tiny_predicting()), ModelError, "DeepseekV3ForCausalLM", "prediction layers"),
        (lambda: built(zoo.tiny_model("openai-gpt")), ModelError, "OpenAIGPTLMHeadModel", "no cache"),
        (lambda: built(zoo.tiny_model("recurrent_gemma")), ModelError,
         "RecurrentGemmaForCausalLM", "state in its modules"),
        (lambda: built(zoo.tiny_model("xlstm", chunk_size=16)), ModelError,
         "xLSTMForCausalLM", "transformers' DynamicCache"),
        (lambda: Pipeline.from_provider(Piece, ranks=2, microbatches=2, loss_fn=squares),
         ModelError, "a user's own modules", "models of transformers"),
        (lambda: built(tiny_model("mixtral", output_router_logits=True)),
         ConfigError, "output_router_logits=True", "mask of all tokens"),
    ],
)  # fmt: skip
def test_refused_pipelines(
    build: Callable[[], Pipeline], error: type[InputError], value: str, rule: str
) -> None:
    with refuses(error, value, rule):
        over_stages(build(), prompts())


def test_cp_is_refused(pool: Pool) -> None:
    for error in pool.run(2, on_cp):
        assert "cp gives each rank a part of them" in error


def on_cp() -> str:
    pipe = AutoPipeline(ranks=1, microbatches=2, axes=Axes(cp=2), timeout=10.0).build(tiny_model("llama"))
    try:
        over_stages(pipe, prompts())
    except ConfigError as error:
        return str(error)
    return ""
