"""What splitting a backward into I and W costs, beside one whole backward and the other ways to split it.

One decoder layer of Qwen3 in float32 on one thread, between two stages: its input has a gradient. Each way
runs a forward, I and W in turn with the others, and gradients accumulate, as over a step's microbatches.

- penstock: products deferred in the forward (`penstock.runtime.split_backward.deferred`).
- walk: the rival that needs nothing in the forward. I walks the graph from its roots for matrix products
  whose weight is a parameter, has the engine leave those out, and keeps what came in and what came back.
- torch: `stage_backward_input` and `stage_backward_weight` of `torch.distributed.pipelining`.

Times are of the processor, so that other programs count less; on it, a backward runs in its caller's thread.
Held: what W gives back, by torch's own count of its allocations.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.graph import GradientEdge, Node
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RotaryEmbedding

from benchmarks.report import Found, Row, measured
from benchmarks.rounds import Numbers, Rounds, rounds_of
from penstock.runtime.split_backward.backward import hold, input_backward, whole_backward
from penstock.runtime.split_backward.recording import deferring

SIZES = ((512, 256), (512, 512), (1024, 256), (1024, 512))  # width, sequence
ROUNDS = 7  # of each way, in turn, in one repeat
BAR = 1.05
LEAF = "torch::autograd::AccumulateGrad"
W = Callable[[], object]


class Layer:
    """A decoder layer and what it is called with."""

    def __init__(self, width: int, sequence: int) -> None:
        torch.manual_seed(0)
        config = AutoConfig.for_model(
            "qwen3", hidden_size=width, intermediate_size=3 * width, num_attention_heads=width // 64,
            num_key_value_heads=width // 128, head_dim=64, num_hidden_layers=1, attn_implementation="sdpa",
        )  # fmt: skip
        self.module: nn.Module = Qwen3DecoderLayer(config, 0).train()
        self._input, self.gradient = torch.randn(1, sequence, width), torch.randn(1, sequence, width)
        self._rotary = Qwen3RotaryEmbedding(config)(self._input, torch.arange(sequence)[None])

    def input(self) -> Tensor:
        return self._input.clone().requires_grad_()

    def __call__(self, x: Tensor) -> Tensor:
        output: Tensor = self.module(x, position_embeddings=self._rotary)
        return output


class BuiltStages(NamedTuple):
    """The parts of one microbatch, each to be timed. The I gives the W."""

    forward: Callable[[Layer, Tensor], Any]
    first: Callable[[Layer, Tensor, Any], W | None]


def plain_forward(layer: Layer, x: Tensor) -> Tensor:
    return layer(x)


def deferring_forward(layer: Layer, x: Tensor) -> Any:
    with deferring() as tape:
        output = layer(x)
    return hold([x], [output], tape)


def whole(layer: Layer, x: Tensor, output: Tensor) -> None:
    whole_backward(hold([x], [output]), [layer.gradient])


def deferring_whole(layer: Layer, x: Tensor, live: Any) -> None:
    whole_backward(live, [layer.gradient])


def penstock_input(layer: Layer, x: Tensor, live: Any) -> W:
    return input_backward(live, [layer.gradient])[1].run


def torch_input(layer: Layer, x: Tensor, output: Tensor) -> W:
    groups = stage_backward_input([output], [layer.gradient], [x], layer.module.parameters())[1]
    return lambda: stage_backward_weight(layer.module.parameters(), groups)


def walk_input(layer: Layer, x: Tensor, output: Tensor) -> W:
    """I by a walk over the graph: sturdy in that the engine does the pruning, whatever the graph is like."""
    root = GradientEdge(output.grad_fn, 0)  # type: ignore[arg-type]
    products, leaves = find_products(root.node)
    kept: list[tuple[Node, Tensor, Tensor]] = []
    handles = [node.register_prehook(_keeper(node, parameter, kept)) for node, parameter in products]
    with torch.no_grad():
        Variable._execution_engine.run_backward(
            (root,), (layer.gradient,), False, False, leaves, allow_unreachable=True, accumulate_grad=True
        )
    for handle in handles:
        handle.remove()
    return lambda: walk_weight(kept)


def _keeper(node: Any, parameter: Node, kept: list[tuple[Node, Tensor, Tensor]]) -> Callable[..., None]:
    def keep(gradients: tuple[Tensor, ...]) -> None:
        kept.append((parameter, node._saved_self.detach(), gradients[0]))

    return keep


def find_products(root: Node) -> tuple[list[tuple[Node, Node]], tuple[GradientEdge, ...]]:
    """Products with the parameter whose transpose they multiply by; every leaf that is reached otherwise."""
    products: list[tuple[Node, Node]] = []
    leaves: dict[Node, GradientEdge] = {}
    seen, stack = {root}, [root]
    while stack:
        node = stack.pop()
        edges = [edge for edge, _ in node.next_functions]
        if node.name() == "MmBackward0" and edges[1] is not None and edges[1].name() == "TBackward0":
            ((parameter, _),) = edges[1].next_functions
            if parameter is not None and parameter.name() == LEAF:
                products.append((node, parameter))
                edges = edges[:1]
        for edge in edges:
            if edge is not None and edge not in seen:
                seen.add(edge)
                stack.append(edge)
                if edge.name() == LEAF:
                    leaves[edge] = GradientEdge(edge, 0)
    return products, tuple(leaves.values())


def walk_weight(kept: list[tuple[Node, Tensor, Tensor]]) -> None:
    while kept:
        parameter, x, dy = kept.pop(0)
        Variable._execution_engine.run_backward(
            (GradientEdge(parameter, 0),), (dy.t() @ x,), False, False, (),
            allow_unreachable=True, accumulate_grad=True,
        )  # fmt: skip


WAYS = {
    "whole": BuiltStages(plain_forward, whole),
    "whole, could be split": BuiltStages(deferring_forward, deferring_whole),
    "penstock": BuiltStages(deferring_forward, penstock_input),
    "walk": BuiltStages(plain_forward, walk_input),
    "torch": BuiltStages(plain_forward, torch_input),
}


def timed(layer: Layer, parts: BuiltStages) -> tuple[float, float, float]:
    """Seconds of the forward, of I (or the whole) and of W."""
    x = layer.input()
    start = time.thread_time()
    result = parts.forward(layer, x)
    forward = time.thread_time()
    late = parts.first(layer, x, result)
    first = time.thread_time()
    if late is not None:
        late()
    return forward - start, first - forward, time.thread_time() - first


def held(layer: Layer, parts: BuiltStages) -> int:
    """Bytes that W gives back: what stays after a forward and I, less what stays after W as well."""
    return _kept(layer, parts, run_late=False) - _kept(layer, parts, run_late=True)


def _kept(layer: Layer, parts: BuiltStages, run_late: bool) -> int:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as records:
        x = layer.input()
        late = parts.first(layer, x, parts.forward(layer, x))
        if run_late and late is not None:
            late()
        gc.collect()
    return sum(int(event.self_cpu_memory_usage) for event in records.key_averages())


def check(layer: Layer) -> None:
    """All ways give the same gradients."""
    expected: list[Tensor] = []
    for parts in WAYS.values():
        layer.module.zero_grad()
        timed(layer, parts)
        found = [parameter.grad for parameter in layer.module.parameters()]
        expected = expected or [gradient.clone() for gradient in found if gradient is not None]
        for gradient, other in zip(found, expected, strict=True):
            assert gradient is not None
            assert float((gradient - other).abs().max()) <= 1e-5 * float(other.abs().max())


def measure(repeats: int) -> Found:
    torch.set_num_threads(1)
    rows: list[Row] = []
    raw: dict[str, Any] = {}
    for width, sequence in SIZES:
        layer = Layer(width, sequence)
        check(layer)
        # programs outside are not looked for: the processor's time leaves them out
        rounds = rounds_of(partial(_round, layer), repeats * ROUNDS, others=None)
        bytes_held = {way: held(layer, stages) for way, stages in WAYS.items()}
        case = f"width {width}, sequence {sequence}"
        raw[case] = {"seconds": rounds.found, "bytes held": bytes_held}
        rows += judge(case, rounds, bytes_held)
    notes = [
        f"one Qwen3 decoder layer, float32, one thread, processor time; {repeats * ROUNDS} rounds in turn",
        "walk: a walk over autograd's graph at I, which needs nothing in the forward; other: "
        "stage_backward_input and stage_backward_weight of torch.distributed.pipelining",
    ]
    return Found("split", "Split backward: I and W", rows, notes, raw)


def _round(layer: Layer, number: int) -> Numbers:
    """F, I and W of each way, and I + W; the whole backward counts as an I."""
    found: dict[str, float] = {}
    start = number % len(WAYS)
    for way in [*list(WAYS)[start:], *list(WAYS)[:start]]:
        forward, first, late = timed(layer, WAYS[way])
        found |= {f"{way}: F": forward, f"{way}: I": first, f"{way}: W": late, f"{way}: I + W": first + late}
    return found


def judge(case: str, rounds: Rounds, bytes_held: dict[str, int]) -> list[Row]:
    base = "whole: I + W"
    rows = [
        measured(case, "whole backward", rounds[base].scaled(1e3), "ms"),
        measured(case, "forward that defers / plain forward", rounds.ratio("penstock: F", "whole: F")),
        measured(case, "whole after it / whole backward", rounds.ratio("whole, could be split: I + W", base)),
    ]
    for way in ("penstock", "walk"):
        rows += [
            measured(case, f"{way}: {what}", rounds.ratio(f"{way}: {what}", f"torch: {what}"), "ms",
                     ours=rounds[f"{way}: {what}"].middle * 1e3, torch=rounds[f"torch: {what}"].middle * 1e3)
            for what in ("I", "W", "I + W")
        ]  # fmt: skip
        rows += [
            measured(case, f"{way}: (I + W) / whole", rounds.ratio(f"{way}: I + W", base),
                     at_most=BAR if way == "penstock" else None),
            Row(case, f"{way}: held for W", bytes_held[way] / 2**20, "MiB", bytes_held["torch"] / 2**20),
        ]  # fmt: skip
    return rows
