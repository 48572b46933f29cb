"""A pipeline in a loop of one's own, beside the same loop in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import PreTrainedModel

from penstock import AutoPipeline, Pipeline
from penstock.batch.loss import NextToken
from penstock.errors import BatchError, ConfigError, ModelError, PenstockError
from penstock.pipeline import names_per_stage, provider_of
from penstock.pipeline.compare import whole_backward
from support.families import ragged_batch, tiny_model
from support.own_chain import Piece, made, squares, x_batch
from support.pool import Pool
from support.reference import TOLERANCE, Gradients, assert_gradients, plain_step

Groups = list[dict[str, Any]]


def pipeline(model: PreTrainedModel, **options: Any) -> Pipeline:
    return AutoPipeline(**{"ranks": 2, "microbatches": 4, **options}).build(model)


def gradients(pipe: Pipeline) -> Gradients:
    return {name: p.grad for name, p in pipe.named_parameters(remove_duplicate=False) if p.grad is not None}


def plain_gradients(model: nn.Module) -> Gradients:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


# --- what a user puts around the stages ---


def each_layer(part: nn.Module) -> Iterator[nn.Module]:
    yield from (m for m in part.modules() if type(m).__name__ == "LlamaDecoderLayer")


def compiling(backend: str) -> Callable[[nn.Module], nn.Module]:
    def compiled(part: nn.Module) -> nn.Module:
        for layer in each_layer(part):
            layer.compile(backend=backend)
        return part

    return compiled


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # which dynamo looks at while it traces
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
@pytest.mark.parametrize(("backend", "schedule"), [("aot_eager", "1f1b"), ("eager", "zb_h1")])
def test_compiled_layers(backend: str, schedule: str) -> None:
    model, batch = tiny_model("llama", layers=2), ragged_batch()
    loss, expected = plain_step(model, batch)
    torch._dynamo.utils.counters.clear()
    pipe = pipeline(model, schedule=schedule, parallelize_fn=compiling(backend))
    for _ in range(2):
        pipe.zero_grad()
        assert pipe.step(batch).loss == pytest.approx(loss, rel=1e-5)
        assert_gradients(gradients(pipe), expected, TOLERANCE[torch.float32])
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    torch._dynamo.reset()


def shard(part: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (1,))
    for layer in each_layer(part):
        fully_shard(layer, mesh=mesh)
    fully_shard(part, mesh=mesh)
    return part


def test_sharded_stages(one_process: None, tmp_path: Path) -> None:
    """FSDP2 over a mesh of one process: names stay, the norm is the whole one."""
    model, batch = tiny_model("llama"), ragged_batch()
    loss, expected = plain_step(model, batch)
    for name, parameter in model.named_parameters():
        parameter.grad = expected[name].clone()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    pipe = pipeline(model, transport="local", parallelize_fn=shard)
    assert pipe.step(batch).loss == pytest.approx(loss, rel=1e-5)
    found = {name: grad.full_tensor() for name, grad in gradients(pipe).items()}  # type: ignore[attr-defined]
    assert found.keys() == {name for name, _ in model.named_parameters()}
    assert_gradients(found, expected, TOLERANCE[torch.float32])
    assert pipe.clip_grad_norm_(0.1) == pytest.approx(float(norm), rel=1e-5)
    assert pipe.clip_grad_norm_(1.0) == pytest.approx(0.1, rel=1e-4)


class Adapted(nn.Module):
    """A linear with a narrow one beside it, as LoRA makes them."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base
        torch.manual_seed(base.in_features)
        self.down = nn.Linear(base.in_features, rank, bias=False, dtype=base.weight.dtype)
        self.up = nn.Linear(rank, base.out_features, bias=False, dtype=base.weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.base(x) + self.up(self.down(x))
        return result


def adapt(part: nn.Module) -> nn.Module:
    part.requires_grad_(False)
    for layer in each_layer(part):
        attention = layer.get_submodule("self_attn")
        attention.q_proj = Adapted(attention.get_submodule("q_proj"))  # type: ignore[arg-type]
    return part


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_adapters_in_the_place_of_linears(schedule: str, tmp_path: Path) -> None:
    model, batch = tiny_model("llama", torch.float64), ragged_batch()
    pipe = pipeline(model, schedule=schedule, parallelize_fn=adapt)
    reference = adapt(copy.deepcopy(model))
    loss, expected = plain_step(reference, batch)
    assert pipe.step(batch).loss == pytest.approx(loss, rel=1e-9)
    found = gradients(pipe)
    assert found.keys() == expected.keys()
    assert_gradients(found, expected, TOLERANCE[torch.float64])
    trained = sum(p.numel() for p in reference.parameters() if p.requires_grad)
    assert sum(facts.trainable for facts in pipe.info) == trained
    with pytest.raises(ModelError, match=r"layers.0.self_attn.q_proj.base.weight, which only the model or"):
        pipe.save_pretrained(tmp_path / "adapted")
    assert not (tmp_path / "adapted").exists()
    for part in pipe.modules.values():
        for layer in each_layer(part):
            attention = layer.get_submodule("self_attn")
            attention.q_proj = attention.get_submodule("q_proj.base")
    pipe.save_pretrained(tmp_path / "merged")
    assert (tmp_path / "merged" / "config.json").is_file()


def test_frozen_weights() -> None:
    model, batch = tiny_model("llama"), ragged_batch()

    def freeze(part: nn.Module) -> nn.Module:
        for name, parameter in part.named_parameters():
            parameter.requires_grad_("mlp" in name)
        return part

    pipe = pipeline(model, parallelize_fn=freeze)
    freeze(model)
    _, expected = plain_step(model, batch)
    pipe.step(batch)
    assert gradients(pipe).keys() == expected.keys()
    assert_gradients(gradients(pipe), expected, TOLERANCE[torch.float32])


class Around(nn.Module):
    """A wrapper that puts `module.` before each parameter's name."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.calls = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self.module(*args, **kwargs)


def test_a_module_around_the_stage(tmp_path: Path) -> None:
    made_around: list[Around] = []

    def around(part: nn.Module) -> nn.Module:
        made_around.append(Around(part))
        return made_around[-1]

    model, batch = tiny_model("llama"), ragged_batch()
    _, expected = plain_step(model, batch)
    pipe = pipeline(model, parallelize_fn=around)
    pipe.step(batch)
    assert gradients(pipe).keys() == {name for name, _ in model.named_parameters()}
    assert_gradients(gradients(pipe), expected, TOLERANCE[torch.float32])
    assert [wrapper.calls for wrapper in made_around] == [4, 4]
    pipe.save_pretrained(tmp_path / "model")
    own = made()
    pipe = Pipeline.from_provider(provider_of(own, names_per_stage(own, 2)), ranks=2, microbatches=2,
                                  loss_fn=squares, parallelize_fn=around)  # fmt: skip
    pipe.verify_against(own, x_batch())
    assert made_around[-1].calls == 2


@pytest.mark.parametrize(
    ("returns", "message"),
    [
        (lambda part: None, "returned a NoneType for stage 0: .* Return the module"),
        (lambda part: nn.Sequential(nn.Linear(2, 2)), "parameters such as 0.weight for stage 0"),
        (
            lambda part: Around(nn.ModuleList([part, nn.Linear(2, 2)])),
            r"a module with module.1.weight in addition",
        ),
    ],
)
def test_what_parallelize_fn_may_not_return(returns: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        pipeline(tiny_model("llama"), parallelize_fn=returns)


def test_a_tied_weight_that_is_wrapped_away() -> None:
    def wrap_head(part: nn.Module) -> nn.Module:
        if next(part.get_submodule("lm_head").parameters(), None) is not None:
            part.lm_head = Around(part.get_submodule("lm_head"))
        return part

    with pytest.raises(ModelError, match=r"after which there is no lm_head\.weight"):
        pipeline(tiny_model("llama", tied=True), parallelize_fn=wrap_head)


# --- precision ---


@pytest.mark.parametrize("schedule", ["1f1b", "zb_v"])
def test_autocast(schedule: str) -> None:
    """Rounded as one process rounds that takes the same microbatches."""
    model, batch = tiny_model("llama"), ragged_batch()
    pipe = pipeline(model, schedule=schedule)
    with torch.autocast("cpu", torch.bfloat16):
        found = pipe.step(batch).loss
        expected = whole_backward(model, pipe.microbatches(batch), NextToken())
    assert found == pytest.approx(expected, rel=1e-6)
    assert_gradients(gradients(pipe), plain_gradients(model), 1e-2)  # one rounding of bfloat16
    assert found != pytest.approx(plain_step(model, batch)[0], rel=1e-7)  # it was on


@pytest.mark.parametrize("schedule", ["1f1b", "zb_v"])
def test_weights_of_half_precision(schedule: str) -> None:
    model, batch = tiny_model("llama", torch.bfloat16), ragged_batch()
    pipe = pipeline(model, schedule=schedule)
    found = pipe.step(batch).loss
    assert found == pytest.approx(whole_backward(model, pipe.microbatches(batch), NextToken()), rel=1e-3)
    assert all(parameter.dtype == torch.bfloat16 for parameter in pipe.parameters())
    assert_gradients(gradients(pipe), plain_gradients(model), 3e-2)
    torch.optim.AdamW(pipe.parameters()).step()


# --- optimizers ---


def sgd(named: list[tuple[str, nn.Parameter]]) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD([p for _, p in named], lr=0.1, momentum=0.9, nesterov=True)]


def adamw(named: list[tuple[str, nn.Parameter]]) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW([p for _, p in named], lr=1e-2)]


def adagrad(named: list[tuple[str, nn.Parameter]]) -> list[torch.optim.Optimizer]:
    return [torch.optim.Adagrad([p for _, p in named], lr=1e-2)]


def groups(named: list[tuple[str, nn.Parameter]]) -> list[torch.optim.Optimizer]:
    """By name: no decay for norms, another rate for the embedding."""
    made: Groups = [
        {"params": [p for name, p in named if "norm" in name], "weight_decay": 0.0},
        {"params": [p for name, p in named if "embed" in name], "lr": 1e-3},
        {"params": [p for name, p in named if "norm" not in name and "embed" not in name]},
    ]
    return [torch.optim.AdamW([group for group in made if group["params"]], lr=1e-2, weight_decay=0.3)]


def muon(named: list[tuple[str, nn.Parameter]]) -> list[torch.optim.Optimizer]:
    """Matrices of the layers by Muon, the rest by AdamW, as usual."""
    inner = [p for name, p in named if p.dim() == 2 and ".layers." in name]
    rest = [p for name, p in named if not (p.dim() == 2 and ".layers." in name)]
    return [torch.optim.Muon(inner, lr=1e-2), torch.optim.AdamW(rest, lr=1e-2)]


@pytest.mark.parametrize("optimizers", [sgd, adamw, adagrad, groups, muon])
@pytest.mark.parametrize("tied", [False, True])
def test_any_optimizer(optimizers: Callable[..., list[torch.optim.Optimizer]], tied: bool) -> None:
    """Three steps of two accumulated batches, on three ranks, beside one process."""
    model = tiny_model("llama", torch.float64, tied=tied)
    pipe = pipeline(model, ranks=3)
    # of a tied weight the one name that it has in one process, or its copies would go into several groups
    ours = optimizers(list(pipe.named_parameters()))
    plain = optimizers(list(model.named_parameters()))
    for step in range(3):
        for half in range(2):
            batch = ragged_batch(8, 8 + 2 * step + half)
            accumulate(model, batch)
            pipe.step(batch)
        for optimizer in (*ours, *plain):
            optimizer.step()
            optimizer.zero_grad()
    for name, parameter in pipe.named_parameters(remove_duplicate=False):
        # Muon orthogonalises in bfloat16, so that a rounding may become a bit of that
        tolerance = 1e-4 if optimizers is muon else 1e-8
        torch.testing.assert_close(parameter, model.get_parameter(name), rtol=0, atol=tolerance)


def accumulate(model: PreTrainedModel, batch: dict[str, Tensor]) -> None:
    """One process's gradients of `batch`, added to those that are there."""
    before = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    _, found = plain_step(model, batch)
    for name, parameter in model.named_parameters():
        earlier = before[name]
        parameter.grad = found[name] if earlier is None else earlier + found[name]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_v", "dualpipe"])
def test_gradients_accumulate_over_steps(schedule: str) -> None:
    model = tiny_model("llama", tied=True)
    pipe = pipeline(model, schedule=schedule)
    for length in (8, 11, 9):
        accumulate(model, ragged_batch(8, length))
        pipe.step(ragged_batch(8, length))
    expected = plain_gradients(model)
    names = {name for name, _ in model.named_parameters()}
    found = {name: grad for name, grad in gradients(pipe).items() if name in names}
    assert found.keys() == expected.keys()
    assert_gradients(found, expected, TOLERANCE[torch.float32])


# --- what a pipeline tells of itself ---


def test_info_stages_and_parts() -> None:
    model = tiny_model("llama")
    pipe = pipeline(model, layers_per_stage=[1, 3])
    assert [facts.layers for facts in pipe.info] == [(0,), (1, 2, 3)]
    assert [(facts.info.stage, facts.info.stages, facts.rank) for facts in pipe.info] == [
        (0, 2, 0),
        (1, 2, 1),
    ]
    assert sum(facts.parameters for facts in pipe.info) == sum(p.numel() for p in model.parameters())
    assert [facts.bytes for facts in pipe.info] == [4 * facts.parameters for facts in pipe.info]
    assert [stage.index for stage in pipe.stages] == [0, 1]
    assert list(pipe.modules) == [0, 1]
    with pytest.warns(DeprecationWarning, match=r"use Pipeline\.modules\.values"):
        assert list(pipe.parts) == list(pipe.modules.values())
    zigzag = pipeline(tiny_model("llama"), schedule="zb_v")
    assert [facts.rank for facts in zigzag.info] == [0, 1, 1, 0]
    assert list(zigzag.modules) == [0, 1, 2, 3]
    own = Pipeline.from_provider(provider_of(made(), names_per_stage(made(), 2)), ranks=2, microbatches=2)
    assert [facts.layers for facts in own.info] == [(0, 1), (2, 3)]


def test_the_summary() -> None:
    pipe = pipeline(tiny_model("llama"), schedule="zb_v", layers_per_stage=[1, 2, 0, 1])
    before = str(pipe).splitlines()
    assert before[0] == "zb_v, 4 stages on 2 ranks, 4 microbatches"
    assert before[1].split() == ["stage", "rank", "layers", "parameters", "memory", "time"]
    assert [line.split()[:3] for line in before[3:7]] == [
        ["0", "0", "0"], ["1", "1", "1-2"], ["2", "1", "-"], ["3", "0", "3"]
    ]  # fmt: skip
    pipe.step(ragged_batch())
    after = pipe.summary().splitlines()
    assert "last step" in after[0]
    shares = [float(line.split()[-1].rstrip("%")) for line in after[3:7]]
    assert sum(shares) == pytest.approx(100, abs=0.3)
    assert max(map(len, after)) <= 100
    assert "KiB" in after[3]
    assert "KiB" not in after[6]  # of rank 0, whose memory stands beside its first stage
    assert before[3].split()[4:6] != after[3].split()[4:6]


@pytest.mark.parametrize(("tied", "schedule"), [(True, "1f1b"), (False, "dualpipe"), (True, "dualpipe")])
def test_the_summary_counts_a_weight_once(tied: bool, schedule: str) -> None:
    model = tiny_model("llama", tied=tied)
    pipe = pipeline(model, schedule=schedule)
    *_, total, _, legend = str(pipe).splitlines()
    assert total.split()[:3] == ["all", "2", f"{sum(p.numel() for p in model.parameters()):,}"]
    assert legend == "all: a weight that several stages hold is counted once"
    assert "counted once" not in str(pipeline(tiny_model("llama")))


# --- evaluation ---


def test_logits_of_an_evaluation() -> None:
    model, batch = tiny_model("llama"), ragged_batch(7)
    pipe = pipeline(model)
    expected = model(batch["input_ids"], use_cache=False).logits
    found = pipe.evaluate(batch, outputs=True)
    torch.testing.assert_close(found.outputs, expected.detach())
    assert found.loss == pytest.approx(plain_step(model, batch)[0], rel=1e-5)
    assert found.tokens == pipe.evaluate(batch).tokens
    assert pipe.evaluate({"input_ids": batch["input_ids"]}, outputs=True).loss is None
    with pytest.raises(BatchError, match="reads 'labels'"):
        pipe.evaluate({"input_ids": batch["input_ids"]})
    assert all(parameter.grad is None for parameter in pipe.parameters())


def test_outputs_of_several_shapes_and_kinds() -> None:
    pipe = pipeline(tiny_model("llama"))
    microbatches = [ragged_batch(2, 6), ragged_batch(3, 6), ragged_batch(1, 9)]
    several = pipe.evaluate(microbatches, outputs=True)
    assert [list(logits.shape[:2]) for logits in several.outputs] == [[2, 6], [3, 6], [1, 9]]
    assert pipe.evaluate(microbatches[:2], outputs=True).outputs.shape[:2] == (5, 6)
    best = pipe.evaluate(ragged_batch(), outputs=lambda logits, number: (number, logits.argmax(-1)))
    assert [number for number, _ in best.outputs] == [0, 1, 2, 3]
    own = Pipeline.from_provider(Piece, ranks=2, microbatches=2, loss_fn=squares)
    found = own.evaluate(x_batch(), outputs=True)
    assert found.outputs.shape[0] == 8
    assert found.loss == pytest.approx(own.evaluate(x_batch()).loss)


def test_an_evaluation_between_steps_changes_nothing() -> None:
    model, batch = tiny_model("llama"), ragged_batch()
    _, expected = plain_step(model, batch)
    pipe = pipeline(model)
    pipe.evaluate(batch, outputs=True, everywhere=True)
    pipe.step(batch)
    before = pipe.timeline
    pipe.evaluate(batch, outputs=True)
    assert pipe.timeline == before
    assert_gradients(gradients(pipe), expected, TOLERANCE[torch.float32])


@pytest.mark.parametrize(("schedule", "owner"), [("1f1b", 1), ("zb_v", 0), ("dualpipe", None)])
def test_evaluation_over_processes(pool: Pool, schedule: str, owner: int | None) -> None:
    """owner: the rank of the last stage; None where each has one of its own"""
    answers = pool.run(2, evaluated, schedule)
    model, batch = tiny_model("llama"), ragged_batch()
    loss, _ = plain_step(model, batch)
    logits = model(batch["input_ids"], use_cache=False).logits.detach()
    for rank, (alone, together, best, unlabelled, refused, info, _) in enumerate(answers):
        assert together.loss == best.loss == pytest.approx(loss, rel=1e-5)
        if owner is None:  # a list with holes in 0.4.0
            assert "the last stage of each has the outputs of half the batch. Give everywhere=True" in alone
        else:
            assert (alone.loss, alone.tokens) == (together.loss, together.tokens)
            assert (alone.outputs is not None) == (rank == owner)
        torch.testing.assert_close(together.outputs, logits)
        assert torch.equal(unlabelled.outputs, together.outputs)
        assert unlabelled.loss is None
        assert [entry["number"] for entry in best.outputs] == [0, 1, 2, 3]
        assert torch.equal(torch.cat([entry["best"] for entry in best.outputs]), together.outputs.argmax(-1))
        assert best.outputs[0]["above"].dtype == torch.bool
        assert "a result that cannot be sent (a set in" in refused
        assert info == answers[0][5]
    assert answers[0][6] == answers[1][6]


@pytest.mark.parametrize("schedule", ["1f1b", "zb_v"])
def test_a_loop_over_processes(pool: Pool, schedule: str) -> None:
    """Compiled layers, accumulated steps, tied weights, clipping, AdamW."""
    model = tiny_model("llama", torch.float64, tied=True)
    plain = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        for half in range(2):
            accumulate(model, ragged_batch(8, 10 + 2 * step + half))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        plain.step()
        plain.zero_grad()
    held: dict[str, Tensor] = {}
    for rank in pool.run(2, trained, schedule):
        held |= rank
    assert held.keys() == {name for name, _ in model.named_parameters(remove_duplicate=False)} - (
        {"lm_head.weight"} if "lm_head.weight" not in held else set()
    )
    for name, parameter in held.items():
        torch.testing.assert_close(parameter, model.get_parameter(name).detach(), rtol=0, atol=1e-8)


# --- costs of layers ---


def test_the_costs_of_layers_balance_the_model() -> None:
    model = tiny_model("llama")
    pipe = pipeline(model, ranks=2, microbatches=2)

    def slow(layer: nn.Module) -> None:
        spin = torch.randn(200, 200)
        layer.register_forward_pre_hook(lambda module, args: [spin @ spin for _ in range(40)] and None)

    slow(next(iter(each_layer(pipe.modules[0]))))
    types = [type(layer) for part in pipe.modules.values() for layer in each_layer(part)]
    costs = pipe.layer_costs(ragged_batch())
    assert len(costs.layers) == 4
    assert costs.layers[0] > 3 * max(costs.layers[1:])
    assert costs.embedding >= 0
    assert costs.head >= 0
    assert types == [type(layer) for part in pipe.modules.values() for layer in each_layer(part)]
    balanced = AutoPipeline(ranks=2, microbatches=2, balance=costs).build_plan(model)
    assert [len(stage.layers) for stage in balanced.stages] == [1, 3]


def test_the_costs_are_the_same_on_all_ranks(pool: Pool) -> None:
    answers = pool.run(2, measured)
    assert answers[0] == answers[1]
    assert len(answers[0][0]) == 1  # the stages' one layer each, both numbered 0


def compiled(part: nn.Module) -> nn.Module:
    """Each layer by itself, in place."""
    for module in part.modules():
        if type(module).__name__ == "LlamaDecoderLayer":
            module.compile(backend="eager")
    return part


def trained(schedule: str) -> dict[str, torch.Tensor]:
    """This rank's weights after three steps, each of two that are accumulated, with compiled layers."""
    pipe = AutoPipeline(
        ranks=2, schedule=schedule, microbatches=4, timeout=30, parallelize_fn=compiled
    ).build(tiny_model("llama", torch.float64, tied=True))
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
    for step in range(3):
        for half in range(2):
            pipe.step(ragged_batch(8, 10 + 2 * step + half))
        pipe.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach() for name, parameter in pipe.named_parameters(remove_duplicate=False)}


def evaluated(schedule: str) -> list[Any]:
    """As this rank sees them: logits on their owner and on all, a callback's results, and without labels."""
    pipe = AutoPipeline(ranks=2, schedule=schedule, microbatches=4, timeout=30).build(tiny_model("llama"))
    batch = ragged_batch()
    unlabelled = {"input_ids": batch["input_ids"]}

    def best(logits: torch.Tensor, number: int) -> dict[str, Any]:
        return {"number": number, "best": logits.argmax(-1), "above": logits[:, 0] > 0}

    alone: Any
    try:
        alone = pipe.evaluate(batch, outputs=True)
    except ConfigError as error:
        alone = str(error)
    return [
        alone,
        pipe.evaluate(batch, outputs=True, everywhere=True),
        pipe.evaluate(batch, outputs=best, everywhere=True),
        pipe.evaluate(unlabelled, outputs=True, everywhere=True),
        refused(pipe),
        [facts[1:] for facts in pipe.info],
        str(pipe),
    ]


def refused(pipe: Pipeline) -> str:
    """What cannot be sent is refused by all ranks, and the next evaluation goes well."""
    try:
        pipe.evaluate(ragged_batch(), outputs=lambda logits, number: {1, 2}, everywhere=True)
    except PenstockError as error:
        assert pipe.evaluate(ragged_batch(), outputs=True, everywhere=True).outputs is not None
        return str(error)
    return "no error"


def measured() -> Any:
    """Costs of the layers, the same on every rank, and gradients that are left as they were."""
    pipe = Pipeline.from_provider(
        Piece, schedule="1f1b", ranks=2, microbatches=4, loss_fn=squares, timeout=30
    )
    pipe.step(x_batch())
    before = [parameter.grad for parameter in pipe.parameters()]
    costs = pipe.layer_costs(x_batch())
    assert all(p.grad is grad for p, grad in zip(pipe.parameters(), before, strict=True))
    return costs.layers, costs.embedding, costs.head
