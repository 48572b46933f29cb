"""The models of published runs: their configs in transformers, and the FLOPs that papers count for them."""

from __future__ import annotations

from transformers import (
    DeepseekV3Config,
    GPTNeoXConfig,
    LlamaConfig,
    PretrainedConfig,
    Qwen3MoeConfig,
)

from benchmarks.validation.runs import Measure, Run
from penstock.planner.workload import Workload

_WORKLOADS: dict[tuple[object, ...], Workload] = {}


def workload(run: Run) -> Workload:
    """The model of a run; one object for all runs of a model, as it keeps what it measured."""
    if run.model not in _WORKLOADS:
        _WORKLOADS[run.model] = Workload(config(run), "bfloat16", "sdpa")
    return _WORKLOADS[run.model]


def config(run: Run) -> PretrainedConfig:
    match run.family:
        case "gpt":  # GPT-2 but for its positions; GPT-NeoX's weights can be sharded by tp
            return GPTNeoXConfig(
                vocab_size=run.local_vocabulary,
                max_position_embeddings=run.length,
                hidden_size=run.hidden,
                intermediate_size=4 * run.hidden,
                num_hidden_layers=run.layers,
                num_attention_heads=run.heads,
                use_parallel_residual=False,
                tie_word_embeddings=True,
            )
        case "llama":
            return LlamaConfig(
                vocab_size=run.local_vocabulary,
                max_position_embeddings=131072,
                hidden_size=run.hidden,
                intermediate_size=run.inner,
                num_hidden_layers=run.layers,
                num_attention_heads=run.heads,
                num_key_value_heads=run.key_heads,
            )
        case "deepseek":
            return DeepseekV3Config()
        case "kimi":
            return DeepseekV3Config(
                vocab_size=163840,
                n_routed_experts=384,
                num_attention_heads=64,
                num_key_value_heads=64,
                first_k_dense_replace=1,
                n_group=1,
                topk_group=1,
            )
        case "qwen3_moe":
            return Qwen3MoeConfig(
                vocab_size=151936,
                hidden_size=2048,
                intermediate_size=6144,
                moe_intermediate_size=768,
                num_hidden_layers=48,
                num_attention_heads=32,
                num_key_value_heads=4,
                head_dim=128,
                num_experts=128,
                num_experts_per_tok=8,
            )


def seconds(run: Run, measure: Measure) -> float:
    """The published step time of a run."""
    rows, devices = run.batch * run.repeats, run.candidate.devices
    match measure:
        case "seconds":
            return run.value
        case "tokens_per_device":
            return rows * run.length / (run.value * devices)
        case "tflops":  # the model's, of attention the half that no mask hides
            return flops(run) / (run.value * 1e12 * devices)
        case "tflops_recomputed":
            return gpt_flops(run, recomputed=True) / (run.value * 1e12 * devices)
        case "mfu":
            return gpt_flops(run, recomputed=False) / (run.value * 312e12 * devices)


def flops(run: Run) -> float:
    """FLOPs of a step as the planner counts them.

    Those of the head, for the part of the vocabulary on other processes, are added.
    """
    elsewhere = 6 * run.length * run.hidden * (run.vocabulary - run.local_vocabulary)
    return (workload(run).flops(run.length) + elsewhere) * run.batch * run.repeats


def gpt_flops(run: Run, *, recomputed: bool, mask: bool = False) -> float:
    """FLOPs of a step by the formula of arXiv 2104.04473 (3), with or without the recomputed forward.

    mask: leave out the half of attention that the mask hides, which the formula counts
    """
    length, hidden, layers = run.length, run.hidden, run.layers
    layer = 24 * length * hidden**2 * (1 + length / (12 if mask else 6) / hidden)
    passes = 4 if recomputed else 3
    return run.batch * run.repeats * (passes * layers * layer + 6 * length * hidden * run.vocabulary)
