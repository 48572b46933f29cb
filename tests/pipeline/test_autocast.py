"""A pipeline under torch.autocast: one process's gradients, and each weight cast once a stage and step."""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from penstock import AutoPipeline, Axes, Pipeline
from penstock.batch import head_logits
from penstock.errors import ConfigError, ShapeError
from penstock.models.activation_checkpointing import Checkpointing
from penstock.models.stage import StageInfo
from penstock.parallel.fsdp import Sharded
from penstock.schedule import simulate
from support.covering import every, pairs
from support.families import FAMILIES, pipeline, ragged_batch, tiny_model
from support.pool import Pool
from support.reference import Gradients, assert_gradients, gradients_of
from support.refusals import refuses

LOW = torch.bfloat16
SCHEDULES: dict[str, dict[str, Any]] = {
    "1f1b": {"schedule": "1f1b"},
    "zb_h1": {"schedule": "zb_h1"},
    "zb_v": {"schedule": "zb_v"},
    "interleaved_zero_bubble": {"schedule": "interleaved_zero_bubble"},
    "dualpipe_v": {"schedule": "dualpipe_v"},
}
CHECKPOINTING: dict[str, Any] = {
    "kept": None,
    "full": True,
    "selective": "selective",
    "one of two": Checkpointing(every=2, in_flight=1),
}


def autocast(**options: Any) -> AbstractContextManager[Any]:
    return torch.autocast("cpu", LOW, **options)


class Casts(TorchDispatchMode):
    """Counts the casts to half precision of weights, by name: those made, and the most that lived at once."""

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = {p.untyped_storage()._cdata: name for name, p in named if p.dim() > 1}
        self._casts: defaultdict[str, list[weakref.ref[object]]] = defaultdict(list)
        self.made, self.most = Counter[str](), Counter[str]()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and result.dtype == LOW:
            name = self._names.get(args[0].untyped_storage()._cdata)
            if name is not None:
                self._casts[name].append(weakref.ref(result.untyped_storage()))
                self.made[name] += 1
                self.most[name] = max(self.most[name], self.alive[name])
        return result

    @property
    def alive(self) -> Counter[str]:
        return Counter({name: sum(ref() is not None for ref in refs) for name, refs in self._casts.items()})


class LoRA(nn.Module):
    """As PEFT adds it: a frozen product, and two small ones of the same input."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        generator = torch.Generator().manual_seed(base.in_features)
        self.a = nn.Parameter(torch.randn(4, base.in_features, generator=generator) / 4)
        self.b = nn.Parameter(torch.randn(base.out_features, 4, generator=generator) / 4)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.base(x) + F.linear(F.linear(x, self.a), self.b)
        return found


def freeze(model: PreTrainedModel) -> None:
    """All of the second layer, and the matrices of the third one's mlp."""
    layers: Any = model.get_submodule("model.layers")
    layers[1].requires_grad_(False)
    for part in layers[2].mlp.children():
        part.requires_grad_(False)


def adapt(model: PreTrainedModel) -> None:
    model.requires_grad_(False)
    for layer in model.get_submodule("model.layers").children():
        attention: Any = layer.get_submodule("self_attn")
        attention.q_proj, attention.v_proj = LoRA(attention.q_proj), LoRA(attention.v_proj)


MODELS: dict[str, Callable[[PreTrainedModel], None]] = {
    "trained": lambda model: None,
    "frozen": freeze,
    "lora": adapt,
}


def made(edit: str = "trained", **options: Any) -> PreTrainedModel:
    model = tiny_model("llama", **options)
    MODELS[edit](model)
    return model


def plain(model: PreTrainedModel, pipe: Pipeline, batch: Any, **options: Any) -> tuple[float, Gradients]:
    """Loss and gradients of one process that takes the same microbatches, each in a region of its own."""
    model.zero_grad()
    microbatches = pipe.microbatches(batch)
    weight = sum(int((each["labels"][:, 1:] != -100).sum()) for each in microbatches)
    loss = 0.0
    for each in microbatches:
        with autocast(**options):
            logits = model(each["input_ids"], use_cache=False).logits[:, :-1].float()
            total = F.cross_entropy(
                logits.flatten(0, 1), each["labels"][:, 1:].flatten(), ignore_index=-100, reduction="sum"
            )
        torch.autograd.backward(total, torch.full_like(total, 1 / weight))
        loss += float(total.detach()) / weight
    return loss, gradients_of(model)


def assert_same_bits(found: Gradients, expected: Gradients, names: Iterable[str] | None = None) -> None:
    assert found.keys() == expected.keys()
    different = [name for name in names or found if not torch.equal(found[name], expected[name])]
    assert not different


MATRIX = pairs({"schedule": list(SCHEDULES), "how": list(CHECKPOINTING), "edit": list(MODELS)})


@pytest.mark.parametrize(("schedule", "how", "edit"), every(6, [tuple(row.values()) for row in MATRIX]))
def test_a_weight_is_cast_once_a_step_and_gradients_keep_their_bits(
    schedule: str, how: str, edit: str
) -> None:
    """0.5.0: a split backward had one copy of the weights for each live microbatch, a frozen one all had."""
    model, batch = made(edit), ragged_batch()
    pipe = pipeline(model, **SCHEDULES[schedule], activation_checkpointing=CHECKPOINTING[how])
    loss, expected = plain(model, pipe, batch)
    matrices = {name for name, p in pipe.named_parameters() if p.dim() > 1 and "embed" not in name}
    casts = Casts(pipe.named_parameters())
    for watched in (casts, nullcontext()):  # a second thread runs where no mode watches
        pipe.zero_grad()
        with autocast():
            with watched:
                result = pipe.step(batch)
            assert not sum(casts.alive.values()), "a step has ended, and the caller's region goes on"
        assert result.loss == pytest.approx(loss, rel=1e-6)
        assert_same_bits(gradients_of(pipe), expected)
    assert casts.made.keys() == matrices
    assert set(casts.made.values()) == {1}
    pipe.close()


@pytest.mark.parametrize("schedule", every(2, SCHEDULES))
def test_a_tied_weight(schedule: str) -> None:
    """The sum of its two gradients over the microbatches is taken in another order; all else is the same."""
    model, batch = made(tied=True), ragged_batch()
    pipe = pipeline(model, **SCHEDULES[schedule])
    _, expected = plain(model, pipe, batch)
    with autocast(), Casts(pipe.named_parameters()) as casts:
        pipe.step(batch)
    assert set(casts.most.values()) == {1}
    found = gradients_of(pipe)
    assert_gradients(found, expected, 1e-5)
    tied = {"model.embed_tokens.weight", "lm_head.weight"}
    assert_same_bits(found, expected, found.keys() - tied)


@pytest.mark.parametrize("schedule", ["1f1b", "zb_v"])
def test_the_weight_of_a_head_that_leaves_its_product_to_the_loss(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_logits, "HELD_BYTES", 4 * 2 * 10 * 13)
    model, batch = made(), ragged_batch()
    pipe = pipeline(model, schedule=schedule)
    loss, expected = plain(model, pipe, batch)
    with autocast(), Casts(pipe.named_parameters()) as casts:
        found = pipe.step(batch).loss
    assert casts.made["lm_head.weight"] == 1
    assert found == pytest.approx(loss, rel=1e-3)
    assert_gradients(gradients_of(pipe), expected, 2e-2)  # logits in blocks are rounded in another order


@pytest.mark.parametrize("schedule", [pytest.param("1f1b", marks=pytest.mark.sweep), "zb_h1"])
def test_steps_in_one_region_use_the_new_weights(schedule: str) -> None:
    """0.5.0: whole backwards went on with the first step's weights, which torch keeps as long as a region."""
    model, batch = made("frozen"), ragged_batch()
    pipe = pipeline(model, schedule=schedule)
    plain_optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    with autocast():
        for _ in range(2):
            with Casts(pipe.named_parameters()) as casts:
                pipe.evaluate(batch)
            assert set(casts.made.values()) == {1}
            assert not sum(casts.alive.values())
            pipe.zero_grad()
            pipe.step(batch, optimizer=optimizer)
    for _ in range(2):
        plain(model, pipe, batch)
        plain_optimizer.step()
    for name, parameter in pipe.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name)), name


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_a_region_without_a_cache_shares_nothing(schedule: str) -> None:
    model, batch = made(), ragged_batch()
    pipe = pipeline(model, schedule=schedule)
    _, expected = plain(model, pipe, batch, cache_enabled=False)
    with autocast(cache_enabled=False), Casts(pipe.named_parameters()) as casts:
        pipe.step(batch)
    assert set(casts.made.values()) == {4}
    assert_same_bits(gradients_of(pipe), expected)


class Piece(nn.Module):
    """A convolution, whose cast torch keeps, and a product used twice, within a module of the user's own."""

    def __init__(self, info: StageInfo) -> None:
        super().__init__()
        torch.manual_seed(info.stage)
        self.conv, self.linear = nn.Conv1d(4, 4, 1), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.linear(self.linear(self.conv(x)).tanh())
        return x + hidden


def pieces(**options: Any) -> Pipeline:
    return Pipeline.from_provider(
        Piece, ranks=2, microbatches=4, loss_fn=lambda output, microbatch: output.pow(2).mean(), **options
    )


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
@pytest.mark.parametrize("evaluates", [False, True])
def test_convolutions_and_weights_that_are_used_twice(schedule: str, evaluates: bool) -> None:
    """Steps and evaluations in one region, with an update after each step.

    Both uses are one cast, so that their gradients are summed in half precision, as by torch.
    """
    pipe, batch = pieces(schedule=schedule), {"x": torch.randn(8, 4, 8)}
    whole = nn.Sequential(*(Piece(StageInfo(stage, 2)) for stage in range(2)))
    steps = []
    for _ in range(2):
        whole.zero_grad()
        for rows in batch["x"].chunk(4):
            with autocast():
                loss = whole(rows).pow(2).mean()
            loss.backward(torch.tensor(1 / 4))
        steps.append(gradients_of(whole))
        update(whole)
    with autocast():
        for expected in steps:
            if evaluates:  # without gradients
                pipe.evaluate(batch)
            pipe.zero_grad()
            pipe.step(batch)
            found = {f"{n}.{name}": g for n, m in pipe.modules.items() for name, g in gradients_of(m).items()}
            assert_same_bits(found, expected)
            for module in pipe.modules.values():
                update(module)


class InPlace(Piece):
    """Enters three products with one tensor, which it modifies in between where it has no gradient."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = x * 2
        first = self.linear(hidden)
        if hidden.requires_grad:
            hidden = hidden.clone()
        hidden += first.detach()  # it stays without a gradient
        second = self.linear(hidden)
        if x.requires_grad:
            hidden = hidden.clone()
        hidden += second  # it has one from now on
        found: Tensor = x + first + self.linear(hidden)
        return found


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_activations_without_gradients_may_be_modified_in_place(schedule: str) -> None:
    """0.5.0, with a split backward: the second product took a cast of what the tensor had held before."""
    pipe = Pipeline.from_provider(
        InPlace, ranks=2, microbatches=4, schedule=schedule,
        loss_fn=lambda output, microbatch: output.pow(2).mean(),
    )  # fmt: skip
    batch, whole = {"x": torch.randn(8, 4, 8)}, nn.Sequential(*pipe.modules.values())
    loss = 0.0
    for rows in batch["x"].chunk(4):
        with autocast():
            of_rows = whole(rows).pow(2).mean() / 4
        of_rows.backward()
        loss += of_rows.item()
    expected = gradients_of(whole)
    pipe.zero_grad()
    with autocast():
        assert pipe.evaluate(batch).loss == pytest.approx(loss, rel=1e-6)
        pipe.step(batch)
    assert_same_bits(gradients_of(whole), expected)


def test_an_evaluation_frees_activations_after_their_use() -> None:
    """When stages began to share casts, each input of a product was held to the end of its forward."""
    inputs: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    class Deep(Piece):
        def forward(self, x: Tensor) -> Tensor:
            inputs.clear()
            for _ in range(8):
                x = self.linear(x).float().tanh()
                inputs.append(weakref.ref(x))
                alive.append(sum(ref() is not None for ref in inputs))
            return x

    pipe = Pipeline.from_provider(
        Deep, ranks=2, microbatches=2, loss_fn=lambda output, microbatch: output.mean()
    )
    with autocast():
        pipe.evaluate({"x": torch.randn(4, 4, 8)})
        alive.clear()
        pipe.evaluate({"x": torch.randn(4, 4, 8)})
    assert set(alive) == {1}


class LooksFirst(Piece):
    """Takes its weight, and then a tensor of its own, without a gradient before it takes them with one."""

    def __init__(self, info: StageInfo, off: Callable[[], AbstractContextManager[Any]]) -> None:
        super().__init__(info)
        self.off = off

    def forward(self, x: Tensor) -> Tensor:
        with self.off():
            self.linear(x)
        with torch.enable_grad():
            own = x.detach().requires_grad_()
            with self.off():
                self.linear(own)
            (slope,) = torch.autograd.grad((self.linear(own) + own).float().pow(2).sum(), own)
        return super().forward(x) + slope


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_a_cast_that_was_first_used_without_a_gradient(
    schedule: str, off: Callable[[], AbstractContextManager[Any]]
) -> None:
    """In inference mode, torch refused it later; the cast of an activation lost its gradient in silence."""
    pipe = Pipeline.from_provider(
        lambda info: LooksFirst(info, off), ranks=2, microbatches=4, schedule=schedule,
        loss_fn=lambda output, microbatch: output.pow(2).mean(),
    )  # fmt: skip
    batch, whole = {"x": torch.randn(8, 4, 8)}, nn.Sequential(*pipe.modules.values())
    for rows in batch["x"].chunk(4):
        with autocast(cache_enabled=False):  # torch's own cache has this fault
            loss = whole(rows).pow(2).mean() / 4
        loss.backward()
    expected = gradients_of(whole)
    pipe.zero_grad()
    with autocast():
        pipe.step(batch)
    assert_gradients(gradients_of(whole), expected, 1e-2)


@torch.no_grad()
def update(module: nn.Module) -> None:
    for parameter in module.parameters():
        assert parameter.grad is not None
        parameter.sub_(parameter.grad)


@pytest.mark.parametrize("reshard", [pytest.param(False, marks=pytest.mark.sweep), True])
def test_sharded_weights(pool: Pool, reshard: bool) -> None:
    """They are gathered for a step, or for each op."""
    assert all(pool.run(4, passes, reshard))


def passes(reshard: bool) -> bool:
    """Whether a step has the loss and the gradients of one process."""
    torch.set_num_threads(1)
    model, sharded = made(), Sharded(reshard_after_forward=reshard)
    pipe = AutoPipeline(
        ranks=2, microbatches=4, schedule="zb_h1", timeout=60, axes=Axes(dp_shard=2), sharded=sharded
    ).build(model)
    with autocast():
        found = pipe.compare(model, ragged_batch(), 1e-5).passed
    pipe.close()
    return found


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # which dynamo looks at while it traces
def test_compiled_layers() -> None:
    """The compiler makes casts of its own."""

    def compiled(stage: nn.Module) -> nn.Module:
        for module in stage.modules():
            if type(module).__name__ == "LlamaMLP":
                module.compile(backend="eager")
        return stage

    model, batch = made(), ragged_batch()
    for schedule in ("1f1b", "zb_h1"):
        pipe = AutoPipeline(ranks=2, microbatches=4, schedule=schedule, parallelize_fn=compiled).build(model)
        _, expected = plain(model, pipe, batch)
        with autocast():
            pipe.step(batch)
        assert_same_bits(gradients_of(pipe), expected)


# _built: the casts that stages keep are seen there alone
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_a_step_that_fails_keeps_no_casts(schedule: str) -> None:
    class Fails(Piece):
        def forward(self, x: Tensor) -> Tensor:
            if len(x) == 3:
                raise ValueError("three rows")
            return super().forward(x)

    pipe = Pipeline.from_provider(
        Fails, ranks=2, microbatches=2, schedule=schedule,
        loss_fn=lambda output, microbatch: output.pow(2).mean(),
    )  # fmt: skip
    with autocast(), Casts(pipe.named_parameters()) as casts:
        with pytest.raises(ValueError, match="three rows"):
            pipe.step([{"x": torch.randn(2, 4, 8)}, {"x": torch.randn(3, 4, 8)}])
        assert sum(casts.made.values())
        assert not any(len(stage.casts) for stage in pipe._built.stages)


# ---- AutoPipeline(autocast=)


# _built: the casts that stages keep are seen there alone
@pytest.mark.parametrize("schedule", [pytest.param("1f1b", marks=pytest.mark.sweep), "zb_v"])
def test_the_option_is_a_region_around_every_forward(schedule: str) -> None:
    """A region of the caller's own, on or off, changes nothing; a loss that is not finite neither."""
    model, batch = made(), ragged_batch()
    pipe = pipeline(model, schedule=schedule, autocast=LOW, activation_checkpointing=True)
    loss, expected = plain(model, pipe, batch)
    for around in (nullcontext(), autocast(enabled=False), torch.autocast("cpu", torch.float16)):
        pipe.zero_grad()
        with around, Casts(pipe.named_parameters()) as casts:
            assert pipe.step(batch).loss == pytest.approx(loss, rel=1e-6)
        assert_same_bits(gradients_of(pipe), expected)
        assert set(casts.made.values()) == {1}
        assert not sum(casts.alive.values())
    with autocast():
        evaluated = model.eval()(**batch, use_cache=False).loss
    assert pipe.evaluate(batch).loss == pytest.approx(evaluated.item(), rel=1e-3)
    assert pipe.verify_against(model, batch).tolerance == 1e-5
    with torch.no_grad():
        model.get_parameter("model.norm.weight").fill_(float("nan"))
        pipe.modules[pipe.schedule.stages - 1].get_parameter("model.norm.weight").fill_(float("nan"))
    assert torch.tensor(pipe.step(batch).loss).isnan()
    assert not any(len(stage.casts) for stage in pipe._built.stages)


@pytest.mark.parametrize(
    "family", ["gpt2", "mixtral", *(pytest.param(each, marks=pytest.mark.sweep) for each in FAMILIES)]
)
def test_families_under_the_option(family: str) -> None:
    """Their hidden states cross edges in the dtype that autocast gives them."""
    model, batch = tiny_model(family, layers=2), ragged_batch()
    pipe = pipeline(model, schedule="zb_h1", autocast=LOW)
    loss, expected = plain(model, pipe, batch)
    assert pipe.step(batch).loss == pytest.approx(loss, rel=1e-5)
    assert_gradients(gradients_of(pipe), expected, 1e-5)


@pytest.mark.parametrize(
    ("options", "value", "rule"),
    [
        ({"autocast": torch.float16}, "autocast=torch.float16", "loss scaling"),
        (
            {"autocast": LOW, "sharded": Sharded(param_dtype=LOW), "axes": Axes(dp_shard=2)},
            "autocast=torch.bfloat16 with Sharded",
            "both are mixed precision",
        ),
    ],
)
def test_what_autocast_cannot_be(options: dict[str, Any], value: str, rule: str) -> None:
    with refuses(ConfigError, value, rule):
        AutoPipeline(ranks=2, **options).build_plan(made())


# _built: the casts that stages keep are seen there alone
@pytest.mark.sweep
def test_the_bytes_under_autocast_are_predicted() -> None:
    """0.5.0 left autocast out: casts of weights were missing, and activations counted in float32."""
    model, auto = made(tied=True), AutoPipeline(ranks=2, microbatches=4, schedule="1f1b", autocast=LOW)
    plan = auto.build_plan(model)
    account, costs = auto.account(plan), auto.memory_costs(plan, (2, 24))
    assert costs is not None
    pipe, casts = auto.build(model), [0, 0]
    for rank, stage in enumerate(pipe._built.stages):

        def end_step(stage: Any = stage, rank: int = rank, end: Callable[[], None] = stage.end_step) -> None:
            casts[rank] = sum(storage.nbytes() for storage in stage.casts.storages)
            end()

        stage.end_step = end_step  # type: ignore[method-assign]
    for _ in range(2):
        pipe.step(ragged_batch(8, 24))
    assert [each.casts for each in account.ranks()] == casts
    between_ops = replace(costs, buffer=0.0, sent=0.0, held_in_forward=None, held_in_backward=None)
    predicted = simulate(plan.schedule, between_ops).peak_memory
    assert predicted == pytest.approx([held.activations for held in pipe.memory], rel=0.01)
    again = replace(auto, activation_checkpointing=True)
    fewer, kept = (each.account(plan).ranks((2, 24)) for each in (again, auto))
    assert all((a.activations or 0) < (b.activations or 0) for a, b in zip(fewer, kept, strict=True))


class EndsInAProduct(nn.Module):
    """What crosses its edge is in the dtype of autocast."""

    def __init__(self, info: StageInfo) -> None:
        super().__init__()
        torch.manual_seed(info.stage)
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.linear(x)
        return found


def test_a_module_of_the_users_own_sends_what_autocast_made() -> None:
    """In a region of the caller's own it is refused, as shapes are inferred without the region."""
    options: dict[str, Any] = {
        "ranks": 2, "microbatches": 2, "loss_fn": lambda output, microbatch: output.float().pow(2).mean()
    }  # fmt: skip
    batch = {"x": torch.randn(4, 8)}
    pipe = Pipeline.from_provider(EndsInAProduct, autocast=LOW, **options)
    whole = nn.Sequential(*(EndsInAProduct(StageInfo(stage, 2)) for stage in range(2)))
    for rows in batch["x"].chunk(2):
        with autocast():
            loss = whole(rows).float().pow(2).mean() / 2
        loss.backward()
    pipe.step(batch)
    found = {f"{n}.{name}": g for n, m in pipe.modules.items() for name, g in gradients_of(m).items()}
    assert_same_bits(found, gradients_of(whole))
    with autocast(), refuses(ShapeError, "0F0 gave bfloat16[2, 8]", remedy="option autocast="):
        Pipeline.from_provider(EndsInAProduct, **options).step(batch)
