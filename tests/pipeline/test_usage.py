"""What users do around a pipeline, each of which went wrong before it was released."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import AutoPipeline, Axes, Checkpointing, Pipeline, StageInfo
from penstock.batch.payload import TensorSpec
from penstock.errors import BatchError, ConfigError, ModelError
from penstock.models.stage import own_layers
from penstock.runtime.transport.buffers import Pool as Buffers
from penstock.schedule import simulate
from support.families import ragged_batch, tiny_model

WIDTH = 4


class Block(nn.Module):
    def __init__(self, info: StageInfo) -> None:
        super().__init__()
        torch.manual_seed(info.stage)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += x.device.type != "meta"
        return torch.tanh(self.linear(x))


def squares(output: Tensor, microbatch: Any) -> Tensor:
    return output.square().sum(-1).mean()


def batch(rows: int = 4) -> dict[str, Tensor]:
    return {"x": torch.linspace(-1, 1, rows * WIDTH).reshape(rows, WIDTH)}


def pipeline(provider: Callable[[StageInfo], nn.Module], **options: Any) -> Pipeline:
    wanted = {"schedule": "1f1b", "ranks": 2, "microbatches": 2, "loss_fn": squares, **options}
    return Pipeline.from_provider(provider, **wanted)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # which dynamo looks at while it traces
def test_compiled_layers_stay_compiled() -> None:
    """Measuring what the first forward holds made torch.compile give up on it for good."""
    model = tiny_model("llama", layers=2)
    pipe = AutoPipeline(ranks=2, microbatches=2).build(model)
    ran = []

    def backend(graph: torch.fx.GraphModule, examples: Any) -> Any:
        def run(*args: Any) -> Any:
            ran.append(1)
            return graph.forward(*args)

        return run

    for module in pipe.modules.values():
        for part in module.modules():
            if type(part).__name__ == "LlamaDecoderLayer":
                part.compile(backend=backend)
    for step in (1, 2):
        ran.clear()
        pipe.zero_grad()
        pipe.step(ragged_batch())
        assert len(ran) >= 4, f"step {step}"
    torch._dynamo.reset()


def test_a_provider_may_return_modules_that_it_keeps() -> None:
    blocks = [Block(StageInfo(stage, 2)) for stage in range(2)]
    reference = copy.deepcopy(blocks)
    pipe = pipeline(lambda info: blocks[info.stage])
    pipe.step(batch())
    squares(reference[1](reference[0](batch()["x"])), None).backward()  # type: ignore[no-untyped-call]
    for own, other in zip(blocks, reference, strict=True):
        torch.testing.assert_close(own.linear.weight.grad, other.linear.weight.grad)


@pytest.mark.parametrize("schedule", ["1f1b", "dualpipe"])
def test_one_module_for_two_stages_is_refused(schedule: str) -> None:
    blocks = [Block(StageInfo(stage, 2)) for stage in range(2)]
    shared = blocks[0]
    with pytest.raises(ModelError, match="it is the same object as one of stage"):
        pipeline(lambda info: shared if schedule == "1f1b" else blocks[info.stage], schedule=schedule)


def test_layers_in_a_list_within_a_dict_are_found() -> None:
    """As nanoGPT keeps them, beside its embedding and its norm."""
    model = nn.Module()
    blocks = nn.ModuleList([nn.Sequential(nn.Linear(2, 2)) for _ in range(3)])
    model.transformer = nn.ModuleDict({"wte": nn.Embedding(4, 2), "h": blocks, "ln_f": nn.LayerNorm(2)})
    assert list(own_layers(model)) == list(enumerate(blocks))
    experts = nn.ModuleDict({"4": nn.ModuleDict({"ffn": nn.Linear(2, 2)})})
    assert [number for number, _ in own_layers(nn.Sequential(experts))] == [0]
    assert [number for number, _ in own_layers(nn.ModuleDict({"5": nn.Linear(1, 1)}))] == [5]


def test_evaluation_in_inference_mode_before_the_first_step() -> None:
    pipe = pipeline(Block)
    with torch.inference_mode():
        before = pipe.evaluate(batch()).loss
    assert pipe.step(batch()).loss == pytest.approx(before)


def test_a_loss_that_is_no_number_is_no_harmless_batch() -> None:
    pipe = pipeline(Block, loss_fn=lambda output, microbatch: output)
    with pytest.raises(ModelError, match="loss_fn returns one number"):
        pipe.step(batch())


def test_a_loss_without_a_graph_is_refused() -> None:
    pipe = pipeline(Block, loss_fn=lambda output, microbatch: output.detach().mean())
    with pytest.raises(ModelError, match="depends on no trained weight"):
        pipe.step(batch())


def test_what_has_no_gradient_is_a_stages_own() -> None:
    """In one process a stage that changed it in place wrote into the batch."""

    class Passes(Block):
        def forward(self, x: Tensor, mask: Tensor) -> Any:  # type: ignore[override]
            return super().forward(x), mask

    class Adds(Block):
        def forward(self, x: Tensor, mask: Tensor) -> Any:  # type: ignore[override]
            mask.add_(1)
            return super().forward(x) * mask.sum()

    def provider(info: StageInfo) -> nn.Module:
        return Adds(info) if info.is_last else Passes(info)

    mask = torch.ones(4)
    pipe = pipeline(provider)
    losses = [pipe.step({**batch(), "mask": mask}).loss for _ in range(2)]
    assert losses[0] == losses[1]
    assert mask.tolist() == [1.0] * 4


def test_a_backward_is_not_cast_by_the_callers_autocast() -> None:
    """Plain torch is told to leave autocast before backward(), which a step gives no chance to."""

    class Mixed(Block):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", enabled=False):
                return super().forward(x.float())

    for schedule in ("1f1b", "zb_h1"):
        found = []
        for enabled in (False, True):
            pipe = pipeline(Mixed, schedule=schedule)
            with torch.autocast("cpu", enabled=enabled):
                pipe.step(batch())
            found.append([p.grad for p in pipe.parameters()])
        for plain, cast in zip(*found, strict=True):
            torch.testing.assert_close(cast, plain, rtol=0, atol=0)


def test_a_small_buffer_does_not_cost_the_large_ones() -> None:
    pool = Buffers(torch.device("cpu"))
    large, small = TensorSpec((1000,), torch.float32), TensorSpec((), torch.float32)
    made = []
    for _ in range(5):
        hidden, scalar = pool.take(large), pool.take(small)
        made += [hidden.untyped_storage()._cdata, scalar.untyped_storage()._cdata]
        del hidden, scalar
    assert len(set(made)) == 2


def test_microbatches_without_rows_and_limits_without_a_model() -> None:
    pipe = pipeline(Block)
    with pytest.raises(BatchError, match="microbatch 1: it has no rows"):
        pipe.step([batch(), {"x": torch.zeros(0, WIDTH)}])
    with pytest.raises(ConfigError, match="memory_limit with from_provider"):
        pipeline(Block, activation_checkpointing=Checkpointing(memory_limit=1e9, shape=(1, 1)))


def test_a_memory_limit_is_kept_and_told_in_its_own_terms() -> None:
    model, shape = tiny_model("llama", layers=4, hidden_size=64), (4, 64)
    free = AutoPipeline(ranks=2, microbatches=8).build_plan(model)
    everything = simulate(free.schedule, free.sizes(shape)).peak_memory
    for share in (0.5, 0.95):
        limit = free.weight_bytes(0, Axes()) + share * max(everything)
        auto = AutoPipeline(
            ranks=2, microbatches=8, activation_checkpointing=Checkpointing(memory_limit=limit, shape=shape)
        )
        outline = auto.build_plan(model)
        predicted = simulate(outline.schedule, auto.memory_costs(outline, shape)).peak_memory
        for rank, held in enumerate(predicted):
            assert held + outline.weight_bytes(rank, Axes()) <= limit * (1 + 1e-9)
    with pytest.raises(ConfigError, match=r"memory_limit=0.5 MiB: rank 0 takes .* MiB for weights"):
        AutoPipeline(
            ranks=2, microbatches=8, activation_checkpointing=Checkpointing(memory_limit=2**19, shape=shape)
        ).build_plan(model)


def test_a_memory_limit_knows_what_is_spread() -> None:
    """0.5.0: what fits beside dp_shard or cp was refused, as if a rank held a whole stage and all tokens."""
    model, shape = tiny_model("llama", layers=4, hidden_size=64), (4, 64)
    whole = AutoPipeline(ranks=2, microbatches=8).build_plan(model).weight_bytes(0, Axes())
    for axes, part in ((Axes(dp_shard=8), 1 / 8 + 1 / 2), (Axes(cp=2), 1 / 2 + 1 / 2)):
        auto = AutoPipeline(ranks=2, microbatches=8, axes=axes)
        outline = auto.build_plan(model)
        assert outline.weight_bytes(0, axes) == pytest.approx(part * whole, rel=1e-4)
        held = simulate(outline.schedule, auto.memory_costs(outline, shape)).peak_memory
        limit = outline.weight_bytes(0, axes) + max(held)
        how = Checkpointing(memory_limit=limit, shape=shape)
        kept = replace(auto, activation_checkpointing=how).build_plan(model)
        assert kept.recomputed(how, axes) == frozenset()
