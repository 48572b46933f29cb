"""Models and options that an axis would train wrongly: one typed error on every rank."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock import AutoPipeline, Axes, Sharded
from penstock.batch.loss import NextToken
from penstock.errors import ConfigError, InputError, ModelError
from support.families import tiny_config, tiny_model
from support.mesh import (
    Built,
    Piece,
    batch,
    build_pipe,
    build_whole,
    error_of,
    full,
    model_of,
    own_part,
    pieces,
    same_on_all,
    worst_gradient,
)
from support.pool import Pool
from support.reference import plain_step
from support.refusals import refuses

SIX_HEADS = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 6}
SIX_EXPERTS = {"num_local_experts": 6}
ROUTERS = {"output_router_logits": True}
MODELS: list[tuple[str, dict[str, Any], Axes, type[InputError], str, str, str]] = [
    ("llama", SIX_HEADS, Axes(cp=4), ConfigError, "cp=4 by ulysses", "6 attention heads", "cp divide 6"),
    ("llama", {}, Axes(cp=4, tp=2), ConfigError, "cp=4 by ulysses", "2 attention heads", ""),
    ("llama", SIX_HEADS, Axes(tp=4), ConfigError, "6 num_attention_heads", "of heads", "1 or 2 or 3 or 6"),
    (
        "mixtral",
        SIX_EXPERTS,
        Axes(dp_shard=4, ep=4),
        ConfigError,
        "ep=4 with the 6 experts",
        "same number",
        "1, 2, 3",
    ),
    ("llama", {}, Axes(dp_shard=2, ep=2), ConfigError, "ep=2 for LlamaForCausalLM", "no experts", ""),
    ("mamba", {}, Axes(cp=2), ModelError, "its state runs over the sequence", "causal attention", ""),
    ("gpt2", {}, Axes(tp=2), ModelError, "GPT2LMHeadModel", "which modules", ""),
    ("llama", ROUTERS, Axes(cp=2), ConfigError, "output_router_logits=True with cp", "routers' losses", ""),
]


@pytest.mark.parametrize(("family", "sizes", "axes", "kind", "value", "rule", "remedy"), MODELS)
def test_a_model_that_an_axis_does_not_fit_is_refused(
    family: str, sizes: dict[str, Any], axes: Axes, kind: type[InputError], value: str, rule: str, remedy: str
) -> None:
    made = AutoPipeline(ranks=1, schedule="1f1b", microbatches=2, axes=axes)
    with refuses(kind, value, rule, remedy):
        made.build_plan(model_of(family, **sizes))


@pytest.mark.parametrize(
    ("family", "value", "rule"),
    [
        ("gemma4_text", "Gemma4ForCausalLM with sequence_parallel", "values of all tokens"),
        ("deepseek_v4", "DeepseekV4ForCausalLM with sequence_parallel", "not (rows, tokens, width)"),
    ],
)
def test_layers_that_need_all_tokens_refuse_sequence_parallel(family: str, value: str, rule: str) -> None:
    """0.5.0: their first forward failed in a sum of tensors of two lengths."""
    options: dict[str, Any] = {"axes": Axes(tp=2), "sequence_parallel": True}
    with refuses(ModelError, value, rule):
        AutoPipeline(ranks=1, microbatches=2, **options).build_plan(model_of(family))


DROPS: list[tuple[str, dict[str, Any], Axes, dict[str, Any], str]] = [
    ("qwen3", {"attention_dropout": 0.1}, Axes(tp=2), {}, "attn with tp"),
    ("qwen3", {"attention_dropout": 0.1}, Axes(cp=2), {}, "attn with cp"),
    ("gpt_neox", {"hidden_dropout": 0.1}, Axes(cp=2), {}, "dropout with cp"),
    ("gpt_neox", {"hidden_dropout": 0.1}, Axes(tp=2), {"sequence_parallel": True}, "with sequence_parallel"),
]


@pytest.mark.parametrize(("family", "sizes", "axes", "options", "value"), DROPS)
def test_dropout_that_would_depend_on_the_mesh_is_refused(
    family: str, sizes: dict[str, Any], axes: Axes, options: dict[str, Any], value: str
) -> None:
    common: dict[str, Any] = {"ranks": 1, "microbatches": 2, "axes": axes, **options}
    with refuses(ConfigError, value, "random numbers"):
        AutoPipeline(schedule="1f1b", **common).build_plan(model_of(family, **sizes))
    plain = model_of(family, **dict.fromkeys(sizes, 0.0))
    AutoPipeline(schedule="1f1b", **common).build_plan(plain)


def test_inference_takes_a_model_with_dropout() -> None:
    made = AutoPipeline(ranks=1, schedule="inference", microbatches=2, axes=Axes(tp=2))
    made.build_plan(model_of("qwen3", attention_dropout=0.1))


def test_the_ring_needs_no_heads_that_divide() -> None:
    made = AutoPipeline(ranks=1, schedule="1f1b", microbatches=2, axes=Axes(cp=4, tp=2), context="ring")
    made.build_plan(model_of("llama"))


@pytest.mark.parametrize(("options", "value", "rule", "remedy"), [
    ({"axes": Axes(cp=2), "loss_fn": lambda output, part: output.square().mean()},
     "a loss_fn that is a function, with cp=2", "mean over whole rows", "`weight`"),
    ({"sharded": Sharded(param_dtype=torch.bfloat16)},
     "param_dtype=torch.bfloat16", "no weight is sharded", ""),
    ({"axes": Axes(tp=2), "sharded": Sharded(cpu_offload=True)},
     "axes tp=2", "needs dp_shard", "Set dp_shard to 2"),
    ({"axes": Axes(dp_shard=6, ep=2)},
     "down_proj of shape [4, 32, 48] over 3 ranks", "divides its second dimension", ""),
])  # fmt: skip
def test_options_that_would_be_wrong_or_ignored_are_refused(
    options: dict[str, Any], value: str, rule: str, remedy: str
) -> None:
    """0.5.0: the loss and all gradients were cp times too large; and weights stayed as they were."""
    with refuses(ConfigError, value, rule, remedy):
        AutoPipeline(ranks=2, microbatches=2, **options).build_plan(
            tiny_model("mixtral" if "ep=2" in str(options) else "llama")
        )


@pytest.mark.parametrize("axes", [Axes(tp=2), Axes(cp=-1), Axes(dp_shard=2, ep=2)])
def test_a_provider_takes_no_axes_that_change_modules(axes: Axes) -> None:
    with refuses(ConfigError, "with from_provider", "shard sequences, experts", "Take dp_shard"):
        pieces(2, axes, {})


def refused_builds(cases: list[Built]) -> list[str]:
    return [error_of(lambda case=case: build_pipe(*case)) for case in cases]  # type: ignore[misc]


BUILDS: list[tuple[str, int, Axes, dict[str, Any], str]] = [
    ("llama", 2, Axes(dp_shard=3), {}, "WorldSizeError: 4 processes for pp=2 x dp_shard=3: .* to 2"),
    ("llama", 3, Axes(dp_shard=-1), {"model": {"layers": 3}},
     "WorldSizeError: 4 processes for pp=3 x dp_shard=-1: .* Start 3 processes"),
    ("mixtral", 2, Axes(dp_shard=2, ep=3), {"model": SIX_EXPERTS},
     "ConfigError: ep=3 with dp_shard=2 and cp=1"),
    ("llama", 1, Axes(tp=-1), {}, "ConfigError: tp=4 .*2 num_key_value_heads"),
    ("mamba", 1, Axes(cp=-1), {}, "ModelError: cp=4 for MambaForCausalLM"),
    ("mixtral", 1, Axes(dp_shard=4, ep=-1), {"model": SIX_EXPERTS}, "ConfigError: ep=4 with the 6 experts"),
    ("llama", 2, Axes(tp=2), {"transport": "local"}, "WorldSizeError: the axes tp=2 in one process"),
]  # fmt: skip


@pytest.mark.sweep
def test_builds_are_refused_on_every_rank(pool: Pool) -> None:
    """Sizes of -1 too, which are known once the processes are."""
    found = same_on_all(pool.run(4, refused_builds, [case[:4] for case in BUILDS]))
    for words, (*_, message) in zip(found, BUILDS, strict=True):
        assert re.match(message, words), words


def modules_of_ones_own(ranks: int, axes: Axes, schedule: str) -> tuple[str, list[float]]:
    """The error for replicas that differ, and by how much loss and gradients of equal ones differ from one
    process's."""
    refused = error_of(lambda: pieces(ranks, axes, {}, random=True))
    pipe = pieces(ranks, axes, {"schedule": schedule})
    whole = {"x": torch.arange(64, dtype=torch.float64).view(16, 4) / 64}
    loss = pipe.step(own_part(whole, *pipe.batch_part)).loss
    plain = nn.Sequential(*(Piece(stage) for stage in range(pipe.schedule.stages)))
    expected = plain(whole["x"]).square().mean()
    expected.backward()
    gradients = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    differences = [abs(loss - float(expected))]
    for stage, module in pipe.modules.items():
        for name, parameter in module.named_parameters():
            assert parameter.grad is not None
            differences.append(float((full(parameter.grad) - gradients[f"{stage}.{name}"]).abs().max()))
    pipe.close()
    return refused, differences


REPLICAS = "HandshakeError: ranks whose models have different values"


@pytest.mark.parametrize(
    ("ranks", "axes", "schedule"),
    [(1, Axes(dp_replicate=2), "1f1b"), (1, Axes(dp_shard=2), "1f1b"), (2, Axes(dp_shard=2), "zb_v")],
)
def test_a_providers_modules_are_compared_and_exact(
    pool: Pool, ranks: int, axes: Axes, schedule: str
) -> None:
    """0.5.0: replicas of other values were trained apart, and a single stage with replicas failed."""
    for refused, differences in pool.run(2 * ranks, modules_of_ones_own, ranks, axes, schedule):
        assert refused.startswith(REPLICAS)
        assert max(differences) < 1e-12


def other_models(axes: Axes) -> str:
    """The error for replicas of a pipeline of one rank, each with a model that its process made at random."""
    kind, config = type(tiny_model("llama")), tiny_config("llama")
    torch.manual_seed(dist.get_rank())
    model = kind(config)
    return error_of(lambda: build_whole(model, 1, axes))


def test_replicas_with_other_values_are_refused(pool: Pool) -> None:
    assert same_on_all(pool.run(2, other_models, Axes(dp_replicate=2))).startswith(REPLICAS)


class Doubled(NextToken):
    """A loss of one's own as an object, which with cp sees a part of each row."""

    def total(self, output: Any, microbatch: Any) -> Tensor:
        return 2 * super().total(output, microbatch)


def own_loss(ranks: int, axes: Axes) -> list[float]:
    """By how much loss and gradients of an object as loss_fn differ from one process's."""
    pipe = build_pipe("llama", ranks, axes, {"loss_fn": Doubled()})
    loss, expected = plain_step(model_of("llama"), batch())
    difference = abs(pipe.step(own_part(batch(), *pipe.batch_part)).loss - 2 * loss)
    worst, _ = worst_gradient(pipe, expected, times=2)
    pipe.close()
    return [difference, worst]


def test_a_loss_object_is_exact_over_a_split_sequence(pool: Pool) -> None:
    for differences in pool.run(2, own_loss, 1, Axes(cp=2)):
        assert max(differences) < 1e-10
