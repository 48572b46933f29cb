"""Every causal language model of the installed transformers: exact when it is cut, or refused.

All of them in `make sweep`; here those that differ most from a plain chain.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from penstock import AutoPipeline
from penstock.batch.padding import Padding, PadEntry
from penstock.errors import ConfigError, ModelError
from support import census, zoo
from support.mesh import later
from support.pool import Pool
from support.reference import TOLERANCE, assert_gradients, gradients_of, plain_steps
from support.refusals import refuses

# of each way to differ from Llama at least one; test_every_schedule.py has Llama and its kin
TYPICAL = (
    "bert", "ctrl",  # tied in the head, writes into its embeddings
    "jamba",  # states and convolutions
    "longcat_flash",
    "zamba2", "cpmant",  # layers take the embeddings, or a table, and share a block
    "qwen4_exp_text",  # layers hand on more, in other shapes
    "bart",  # with parts that no text goes through
)  # fmt: skip
ROUTED = (
    "dbrx", "deepseek_v4", "ernie4_5_moe", "flex_olmo", "flint", "gpt_oss", "granitemoe", "granitemoe_swa",
    "granitemoehybrid", "granitemoeshared", "jamba", "jetmoe", "laguna", "mellum", "minimax", "minimax_m2",
    "minimax_m3_vl_text", "mixtral", "olmoe", "phimoe", "qwen2_moe", "qwen3_moe", "qwen3_5_moe_text",
    "qwen3_next", "qwen4_exp_text",
)  # fmt: skip
REFUSED = {
    "blt": "could not be followed",  # patches of bytes, found by their values
    "gemma4_assistant": "another model's embeddings",
    "gemma4_unified_assistant": "another model's embeddings",
    "git": "its own loss could not be followed",  # looks into its layers; logits of image tokens too
    "hrm_text": "the layers run in the order",  # runs its layers in turns, many times
    "inkling2_text": "could not be followed",  # each layer takes the outputs of all before
    "mllama": "the layers run in the order",  # without an image some layers do not run
    "musicgen": "its own loss could not be followed",  # labels of several codebooks
    "musicgen_melody": "its own loss could not be followed",
    "prophetnet": "returns integers",
    "reformer": "could not be followed",  # reversible layers, with a backward of their own
    "rwkv": "could not be followed",  # rescales its layers' weights from outside
    "xlm": "could not be followed",  # no list of layers, but one of each of their parts
    "xmod": "could not be followed",  # looks into its layers
}
NO_FLOAT64 = {"xglm"}  # its mask is made of float64's least number, as a float32


@pytest.mark.parametrize(
    "model_type",
    [pytest.param(name, marks=[] if name in TYPICAL else [pytest.mark.sweep]) for name in zoo.TYPES],
)
def test_exact(model_type: str) -> None:
    verdict = census.judge(model_type, (4,) if model_type in TYPICAL else (2, 4))
    if model_type in REFUSED:
        assert REFUSED[model_type] in verdict.refusal
    else:
        assert verdict.chain is not None, verdict.refusal


# their tokens see the padding after them: an indexer chooses keys, or positions count from the row's end
NOT_PADDED = {
    "axk2", "cpmant", "deepseek_v32", "deepseek_v4", "doge", "dots3_note", "dots3_note_text", "glm_moe_dsa",
    "hy_v4",
}  # fmt: skip


@pytest.mark.parametrize(
    "model_type",
    [
        pytest.param(
            name, marks=[] if name in ("llama", "jamba", "cpmant", "hy_v4", "doge") else [pytest.mark.sweep]
        )
        for name in zoo.TYPES
        if name not in REFUSED
    ],
)
def test_padded_rows_are_exact_or_refused(model_type: str) -> None:
    """0.5.0, cpmant: other losses, as it counts from a row's end. Where an indexer chooses keys, at times."""
    model = zoo.tiny_model(model_type)
    sizes = (2, 9), (1, 6), (2, 7), (1, 9)  # rows and their length; musicgen's labels have codebooks
    batches = [(zoo.tiny_batch(model_type, rows, 9), length) for rows, length in sizes]
    rows = [{name: value[:, :n].squeeze(-1) for name, value in batch.items()} for batch, n in batches]
    # 0, which rows are padded with, stands for images in some of these small models, and in none of the Hub
    plain = Padding(entries={"input_ids": PadEntry(-1, zoo.FIRST_PLAIN_TOKEN)})
    of_images = getattr(model.config, "image_token_id", None) == 0
    auto = AutoPipeline(ranks=2, microbatches=4, shapes=plain if of_images else "padded")
    if model_type in NOT_PADDED:
        with refuses(ModelError, "shapes='padded' for", remedy="Take shapes='inferred', which pads no"):
            auto.build(model)
        return
    pipe = auto.build(model)
    result = pipe.step(rows)
    loss, expected = plain_steps(model, rows, shifted=census.is_shifted(model))
    assert result.loss == pytest.approx(loss, rel=1e-5)
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    for name, found in gradients_of(pipe).items():  # longer sums round otherwise
        wanted = expected.get(name, torch.zeros_like(found))
        size = max(float(wanted.abs().max()), 1e-3 * largest)
        assert float((found - wanted).abs().max()) < 2e-4 * size, name


@pytest.mark.parametrize(
    ("model_type", "schedule"),
    [
        ("zamba2", "interleaved_zero_bubble"),
        ("mixtral", "interleaved_zero_bubble"),
        pytest.param("gemma3n_text", "zb_v", marks=pytest.mark.sweep),
        pytest.param("glm_moe_dsa", "zb_v", marks=pytest.mark.sweep),
    ],
)
def test_exact_where_backwards_are_split(model_type: str, schedule: str) -> None:
    """What several stages take of one value comes back to it as one gradient, in the first half."""
    options: dict[str, Any] = {"output_router_logits": True} if model_type == "mixtral" else {}
    settings = {"schedule": schedule} | ({} if schedule == "zb_v" else {"stages_per_rank": 2})
    assert census.judge(model_type, (2,), schedule=settings, **options).chain is not None


@pytest.mark.parametrize(
    ("model_type", "how"),
    [pytest.param("gemma3n_text", "selective", marks=pytest.mark.sweep), ("zamba2", "full")],
)
def test_exact_where_layers_run_again(model_type: str, how: str) -> None:
    assert census.judge(model_type, (2,), checkpointing=how, schedule="zb_h1").chain is not None


@pytest.mark.sweep
@pytest.mark.parametrize(
    "model_type",
    [pytest.param(t, marks=[] if t in ("mixtral", "jamba") else [pytest.mark.sweep]) for t in ROUTED],
)
def test_exact_with_the_routers_auxiliary_loss(model_type: str) -> None:
    """It is part of the loss that transformers itself gives, and hangs on all layers' routers at once."""
    plain = census.judge(model_type, (2,))
    verdict = census.judge(model_type, output_router_logits=True)
    assert verdict.chain is not None, verdict.refusal
    assert verdict.loss > plain.loss
    assert verdict.loss == pytest.approx(verdict.own_loss, rel=1e-5)


def test_more_than_hidden_states_does_not_go_in_batches() -> None:
    auto = AutoPipeline(ranks=2, microbatches=2, exchange="batched")
    with refuses(ConfigError, "exchange='batched' for Gemma3nForCausalLM"):
        auto.build_plan(zoo.tiny_config("gemma3n_text"))


OVER_GLOO: list[tuple[str, Any, dict[str, Any]]] = [
    ("gemma3n_text", "1f1b", {}),
    ("mixtral", "1f1b", {"output_router_logits": True}),
    ("zaya", "zb_h1", {}),
    ("zamba2", "gpipe", {}),
    ("glm_moe_dsa", "1f1b", {}),
]


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("ranks", "cases"),
    [(2, OVER_GLOO[:2]), *later((2, OVER_GLOO[2:]), (4, OVER_GLOO), mark=pytest.mark.sweep)],
)
def test_exact_over_gloo(pool: Pool, ranks: int, cases: list[tuple[str, Any, dict[str, Any]]]) -> None:
    wrong = pool.run(ranks, exact_on_ranks, ranks, cases)
    assert wrong == [[]] * ranks


@pytest.mark.sweep
@pytest.mark.parametrize("model_type", [t for t in zoo.TYPES if t not in REFUSED and t not in NO_FLOAT64])
def test_every_type_in_float64(model_type: str) -> None:
    verdict = census.judge(model_type, dtype=torch.float64)
    assert verdict.chain is not None, verdict.refusal


@pytest.mark.sweep
@pytest.mark.parametrize("how", ["full", "selective"])
@pytest.mark.parametrize("model_type", [t for t in zoo.TYPES if t not in REFUSED])
def test_every_type_where_layers_run_again(model_type: str, how: str) -> None:
    verdict = census.judge(model_type, (2,), checkpointing=how)
    assert verdict.chain is not None, verdict.refusal


def exact_on_ranks(ranks: int, cases: Sequence[tuple[str, Any, dict[str, Any]]]) -> list[str]:
    """Of each model type, schedule and change of the config: what went wrong on this rank."""
    torch.set_num_threads(1)
    wrong = []
    for model_type, schedule, changes in cases:
        model, batch = zoo.tiny_model(model_type, **changes), zoo.tiny_batch(model_type)
        loss, expected = census.plain(model, batch)
        pipe = AutoPipeline(
            ranks=ranks, schedule=schedule, microbatches=census.MICROBATCHES, timeout=30
        ).build(model)
        try:
            for _ in range(2):  # a second step meets nothing that the first one left
                pipe.zero_grad()
                assert abs(pipe.step(batch).loss - loss) <= 1e-5 * max(1.0, abs(loss))
            for module in pipe.modules.values():
                found = gradients_of(module)
                assert found.keys() == dict(module.named_parameters()).keys() & expected.keys()
                assert_gradients(found, expected, TOLERANCE[torch.float32])
        except AssertionError as difference:
            wrong.append(f"{model_type} P={ranks} {schedule}: {difference}")
        pipe.close()
    return wrong
