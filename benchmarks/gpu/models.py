"""The models of the suite, the plain loop that a pipeline is compared with, and what all parts use."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config, Qwen3MoeConfig

from benchmarks.memory import Watch
from penstock import Pipeline
from penstock.schedule import Costs, Schedule, Timeline

IGNORED = -100  # the label that counts for nothing
Batch = dict[str, Tensor]


class Size(NamedTuple):
    """A Qwen3, and the microbatches that it trains on. rows: of a microbatch"""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    rows: int
    sequence: int
    microbatches: int
    ranks: int

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.rows * self.sequence * self.microbatches

    @property
    def shape(self) -> tuple[int, int]:
        """Of a microbatch."""
        return self.rows, self.sequence

    def __str__(self) -> str:
        return (
            f"Qwen3 of {self.layers} layers of {self.hidden}, vocabulary {self.vocabulary}; "
            f"P={self.ranks}, m={self.microbatches} of {self.rows} x {self.sequence} tokens"
        )


def qwen3(size: Size, *, experts: int = 0, **more: Any) -> Qwen3Config | Qwen3MoeConfig:
    """experts: of each layer, two for a token; 0 for layers without a mixture"""
    sizes: dict[str, Any] = {
        "vocab_size": size.vocabulary, "hidden_size": size.hidden, "intermediate_size": size.intermediate,
        "num_hidden_layers": size.layers, "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads, "head_dim": size.head_dim,
        "max_position_embeddings": size.sequence, "tie_word_embeddings": False, "attn_implementation": "sdpa",
        "bos_token_id": None, "eos_token_id": None, **more,
    }  # fmt: skip
    if not experts:
        return Qwen3Config(**sizes)
    return Qwen3MoeConfig(
        **sizes, num_experts=experts, num_experts_per_tok=2, moe_intermediate_size=size.intermediate // 2
    )


def model_of(
    config: Qwen3Config | Qwen3MoeConfig, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> PreTrainedModel:
    """With random weights, in training mode. Made on `device`, where a GPU takes a hundredth of the time."""
    torch.manual_seed(0)
    with torch.device(device):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.train()


def batch_of(size: Size, device: torch.device, *, ignored: bool = False, seed: int = 0) -> Batch:
    """Random tokens of a step. ignored: whether labels are left out, of another number in each row"""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(size.vocabulary, (size.rows * size.microbatches, size.sequence), generator=generator)
    labels = ids.clone()
    if ignored:
        for row in range(len(labels)):
            labels[row, : row % (size.sequence // 2)] = IGNORED
    return {"input_ids": ids.to(device), "labels": labels.to(device)}


def microbatches_of(batch: Batch, count: int) -> list[Batch]:
    parts = {name: value.tensor_split(count) for name, value in batch.items()}
    return [{name: each[number] for name, each in parts.items()} for number in range(count)]


# ---- the plain loop


def plain_step(
    model: nn.Module,
    microbatches: Sequence[Batch],
    tokens: int,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Tensor:
    """Add the gradients of the mean over `tokens` valid tokens, one microbatch after the other; the loss.

    autocast: around each forward, as torch says: a backward under it would cast once more
    """
    loss = torch.zeros((), device=next(model.parameters()).device)
    for microbatch in microbatches:
        with autocast():
            logits = model(input_ids=microbatch["input_ids"], use_cache=False).logits[:, :-1].float()
            labels = microbatch["labels"][:, 1:].flatten()
            total = F.cross_entropy(logits.flatten(0, 1), labels, ignore_index=IGNORED, reduction="sum")
        share = total / tokens
        share.backward()  # type: ignore[no-untyped-call]
        loss += share.detach()
    return loss


def valid_tokens(batch: Batch) -> int:
    return int((batch["labels"][:, 1:] != IGNORED).sum())


def gradients(module: nn.Module) -> dict[str, Tensor]:
    """Copies by parameter name. Raises RuntimeError for a parameter without a gradient."""
    found = {}
    for name, parameter in module.named_parameters():
        if parameter.grad is None:
            raise RuntimeError(f"{name} has no gradient")
        found[name] = parameter.grad.clone()
    return found


def copy_on(model: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    return copy.deepcopy(model).to(device)


def compile_layers(backend: str) -> Callable[[nn.Module], nn.Module]:
    """A function that compiles each decoder layer of a model, or of a stage of it, in place."""

    def compiled(module: nn.Module) -> nn.Module:
        for layer in module.modules():
            if type(layer).__name__.endswith("DecoderLayer"):
                layer.compile(backend=backend)
        return module

    return compiled


def graphs_compiled() -> int:
    """By torch.compile in this process, since its counters were cleared."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


# ---- attention


def attention(backend: SDPBackend | None) -> AbstractContextManager[None]:
    """Let torch's scaled dot product take this kernel and no other; None leaves it the choice."""
    return nullcontext() if backend is None else sdpa_kernel(backend)


# ---- time and memory


def seconds(device: torch.device, run: Callable[[], object]) -> float:
    """That `run` takes, until the GPU is done."""
    wait_for(device)
    start = time.perf_counter()
    run()
    wait_for(device)
    return time.perf_counter() - start


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def predicted_live(
    timeline: Timeline, schedule: Schedule, costs: Costs, made: Mapping[int, int] | None = None
) -> float:
    """The most bytes that `costs` has for the live activations of all ranks at once, in an op too.

    In one process ranks take turns, and not as on machines of their own, so the ops count in the order in
    which they ran. A result that is only to be sent counts until the next stage takes it.

    made: bytes of gradients that a stage's first B or W makes: they are taken off before
    """
    late = dict(made or {})
    placement, count = schedule.placement, schedule.microbatches
    names = ("activation", "held_in_forward", "held_in_backward", "held_for_weight", "sent", "buffer")
    activation, forming, working, deferred, sent, buffer = (
        costs.rows(name, placement, count) for name in names
    )
    held, most = -float(sum(late.values())), 0.0
    for span in sorted(timeline.spans, key=lambda span: span.start):
        stage, kind, number = span.op
        first, last = placement.is_first(stage), placement.is_last(stage)
        kept = activation[stage][number]
        if kind == "F":  # its input is from here on a part of its activation
            received = 0.0 if first else sent[stage - 1][number]
            most = max(most, held + forming[stage][number] - received)
            held += kept - received
            held += 0.0 if last else sent[stage][number]
        elif kind == "W":
            held -= deferred[stage][number]
        else:
            most = max(most, held + working[stage][number] - kept)
            held -= kept + (0.0 if last else buffer[stage][number])
            held += 0.0 if first else buffer[stage - 1][number]
            held += deferred[stage][number] if kind == "I" else 0.0
        held += late.pop(stage, 0) if kind in ("B", "W") else 0
        most = max(most, held)
    assert abs(held) < 1.0, f"{held} bytes are left after a step"
    return most


def peak_of_storages(pipe: Pipeline, step: Callable[[], object]) -> int:
    """The most bytes of live storages in `step`: weights, gradients, and all that it makes."""
    there: list[Tensor] = list(pipe.parameters())
    there += [gradient for parameter in there if (gradient := parameter.grad) is not None]
    with Watch() as watch:
        for tensor in (*there, *(buffer for part in pipe.modules.values() for buffer in part.buffers())):
            watch.skip(tensor)
        step()
    return int(watch.peak) + sum(tensor.nbytes for tensor in there)


def gradients_made(pipe: Pipeline) -> dict[int, int]:
    """Bytes of the gradients that each stage makes in a step, where these of two copies are summed."""
    if pipe.schedule.placement.replicas == 1:
        return {}
    return {stage: sum(p.nbytes for p in part.parameters()) for stage, part in pipe.modules.items()}
