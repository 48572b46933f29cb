"""The models of published runs: their configs in transformers, and the FLOPs that papers count for them."""

from __future__ import annotations

from dataclasses import replace

from torch import nn
from transformers import (
    DeepseekV3Config,
    GPTNeoXConfig,
    LlamaConfig,
    PretrainedConfig,
    Qwen3MoeConfig,
)

from benchmarks.validation.runs import Measure, Run
from penstock.planner.candidate import Candidate
from penstock.planner.tracing import Measurement
from penstock.planner.work import OpWork, PartWork
from penstock.planner.workload import Workload

_WORKLOADS: dict[tuple[object, ...], Workload] = {}
_BF16 = 2  # bytes


class EverySecondKept(Workload):
    """A model whose selective recomputation keeps the first, third, ... product of a layer.

    So does torchtitan's. The others run again. A backward's peak is the same: all results are there by then.
    """

    def _measured(self, candidate: Candidate) -> Measurement:
        measured = super()._measured(candidate)
        if candidate.recomputed != "selective":
            return measured
        work = measured.work
        kinds = (self._part(work.layers.index(kind), one, candidate) for kind, one in enumerate(work.kinds))
        return measured._replace(work=replace(work, kinds=tuple(kinds)))

    def _part(self, layer: int, part: PartWork, candidate: Candidate) -> PartWork:
        """The work of a layer whose second, fourth, ... product runs again. The axes shard no product."""
        assert candidate.axes.tp == 1
        rows, length = candidate.axes.local_shape(candidate.shape)
        modules = self.source.model.get_submodule(f"{self.chain.layers}.{layer}").modules()
        again = [module for module in modules if isinstance(module, nn.Linear)][1::2]
        kept = part.nbytes.recomputed_activation - sum(
            _BF16 * rows * length * product.out_features for product in again
        )
        nbytes = part.nbytes._replace(recomputed_activation=kept)
        ops = tuple(_product(rows * length, product) for product in again)
        return part._replace(recomputed=part.recomputed + ops, nbytes=nbytes)


def _product(tokens: int, linear: nn.Linear) -> OpWork:
    inner, outer = linear.in_features, linear.out_features
    moved = _BF16 * (tokens * inner + inner * outer + tokens * outer)
    return OpWork("matmul", "bfloat16", 2 * tokens * inner * outer, moved)


def workload(run: Run) -> Workload:
    """The model of a run; one object for all runs of a model, as it keeps what it measured."""
    key = *run.model, run.every_second
    if key not in _WORKLOADS:
        kind = EverySecondKept if run.every_second else Workload
        _WORKLOADS[key] = kind(config(run), "bfloat16", "sdpa")
    return _WORKLOADS[key]


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
