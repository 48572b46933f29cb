"""Checkpointed layers: the same gradients, run again exactly where chosen, and less held meanwhile."""

from __future__ import annotations

import copy
import functools
import inspect
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, UntypedStorage, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from penstock.batch.loss import NextToken
from penstock.batch.payload import Payload
from penstock.errors import ConfigError, ModelError
from penstock.models.activation_checkpointing import Checkpointing, checkpointing, install
from penstock.models.huggingface.stages import HFCall, cut
from penstock.models.stage import StageInfo
from penstock.models.tracing.chain import find_chain
from penstock.runtime.stage import Stage
from penstock.runtime.stage_part import Forward
from support.covering import every, pairs
from support.families import FAMILIES, ragged_batch, tiny_model
from support.reference import TOLERANCE, Gradients, assert_gradients, gradients_of, plain_step
from support.refusals import refuses
from support.splitting import ORDERS, assert_exact, plain, split

FULL, SELECTIVE = Checkpointing(), Checkpointing(save=("matmul", "attention"))
OPTIONS = {"full": FULL, "every second": Checkpointing(every=2), "selective": SELECTIVE}
WHOLE, SPLIT = "F0 F1 B0 F2 B1 B2", "F0 F1 I0 F2 I1 W0 I2 W1 W2"
ONE_STAGE = (range(4),)
BOTH = pytest.mark.parametrize("how", [FULL, SELECTIVE], ids=["full", "selective"])
Batch = dict[str, Tensor]


class CheckpointedStages:
    """A model's stages in one process, the layers of each checkpointed."""

    def __init__(
        self, model: PreTrainedModel, how: Checkpointing, splits: Sequence[range] = ONE_STAGE
    ) -> None:
        chain = find_chain(model)
        self.stages: list[Stage] = []
        self.runs: Counter[int] = Counter()  # by layer, how often it really ran
        for number, layers in enumerate(splits):
            info = StageInfo(number, len(splits))
            part = cut(model, chain, layers, info)
            own = {index: part.get_submodule(f"{chain.layers}.{index}") for index in layers}
            switch = install(own.items(), how)
            for index, layer in own.items():
                next(layer.children()).register_forward_pre_hook(self._count(index))
            self.stages.append(Stage(number, part, HFCall(part, info), [switch]))

    def _count(self, index: int) -> Callable[..., None]:
        def hook(*_: object) -> None:
            self.runs[index] += 1

        return hook

    def step(self, batch: Batch, order: str = WHOLE, on: Sequence[bool] = (True,) * 3) -> Gradients:
        """Loss gradients of the whole batch by `order`; on: whether microbatches are checkpointed."""
        self.runs.clear()
        microbatches = [
            {name: value.chunk(len(on))[number] for name, value in batch.items()} for number in range(len(on))
        ]
        weight = NextToken().weight(batch)
        for op in order.split():
            kind, number = op[0], int(op[1:])
            if kind == "F":
                self.forward(number, microbatches[number], on[number], "I" in order)
            elif kind == "W":
                for stage in reversed(self.stages):
                    stage.weight_backward(number)
            else:
                gradients = (torch.tensor(1 / weight, dtype=next(self.stages[0].module.parameters()).dtype),)
                for stage in reversed(self.stages):
                    backward = stage.backward if kind == "B" else stage.input_backward
                    gradients = backward(number, gradients)  # type: ignore[assignment]
        return {name: grad for stage in self.stages for name, grad in gradients_of(stage.module).items()}

    def forward(self, number: int, microbatch: Batch, on: bool, split: bool) -> None:
        received: Payload | None = None
        how = Forward(split, recompute=on)
        for stage in self.stages[:-1]:
            sent = stage.forward(number, received, microbatch, how=how)
            received = Payload(tuple(tensor.detach() for tensor in sent.tensors), sent.specs)
        self.stages[-1].forward(number, received, microbatch, how=how, loss=NextToken())


@pytest.mark.parametrize("row", every(3, pairs({
    "family": list(FAMILIES), "way": ["full", "selective"], "order": [WHOLE, SPLIT]
})), ids=lambda row: " ".join(row.values()))  # fmt: skip
def test_every_family(row: dict[str, str]) -> None:
    """Whole and split: the gradients of one plain process, and each layer run twice."""
    model, batch = tiny_model(row["family"], layers=2), ragged_batch(9)
    stages = CheckpointedStages(model, OPTIONS[row["way"]], [range(2)])
    found = stages.step(batch, row["order"])
    assert_gradients(found, plain_step(model, batch)[1], TOLERANCE[torch.float32])
    assert stages.runs == {0: 6, 1: 6}


SPLITS = {
    "3 1": (range(3), range(3, 4)),
    "0 4": (range(0), range(4)),
    "4 0": (range(4), range(4, 4)),
    "0 4 0": (range(0), range(4), range(4, 4)),
}


@pytest.mark.parametrize("row", every(2, pairs({
    "splits": list(SPLITS), "way": list(OPTIONS), "order": [WHOLE, SPLIT]
})), ids=lambda row: " ".join(row.values()))  # fmt: skip
def test_the_boundary_of_a_stage_stays_outside(row: dict[str, str]) -> None:
    """A layer that is the entry or the exit of its stage too is run again with what was received."""
    model, batch, how = tiny_model("llama", torch.float64), ragged_batch(9), OPTIONS[row["way"]]
    stages = CheckpointedStages(model, how, SPLITS[row["splits"]])
    found = stages.step(batch, row["order"])
    assert_gradients(found, plain_step(model, batch)[1], 1e-10)
    assert stages.runs == {index: 3 if index % how.every else 6 for index in range(4)}


@BOTH
@pytest.mark.parametrize("order", [WHOLE, SPLIT, "F0 F1 F2 B2 B1 B0"])
def test_the_switch_counts_for_each_forward(how: Checkpointing, order: str) -> None:
    model, batch = tiny_model("qwen3", torch.float64), ragged_batch(9)
    stages = CheckpointedStages(model, how)
    found = stages.step(batch, order, (True, False, True))
    assert_gradients(found, plain_step(model, batch)[1], 1e-10)
    assert stages.runs == dict.fromkeys(range(4), 5)


# ---- what is held


class Watch(TorchDispatchMode):
    """Notes every op, and the storages that ops create, not those of their arguments."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: Counter[object] = Counter()
        self.storages: dict[int, weakref.ref[UntypedStorage]] = {}

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.ops[func] += 1
        of_arguments = {storage._cdata for storage in _storages((args, kwargs))}
        for storage in _storages(result):
            if storage._cdata not in of_arguments:
                self.storages[storage._cdata] = weakref.ref(storage)
        return result


def _storages(values: Any) -> list[UntypedStorage]:
    return [value.untyped_storage() for value in tree_leaves(values) if isinstance(value, Tensor)]


def held_by(model: PreTrainedModel, how: Checkpointing, on: bool, split: bool, batch: Batch) -> int:
    """Bytes that a forward made and that are still there when it has ended, its result let go."""
    stages = CheckpointedStages(model, how, [range(model.config.num_hidden_layers)])
    with Watch() as new:
        stages.forward(0, batch, on, split)
    alive = (reference() for reference in new.storages.values())
    return sum(storage.nbytes() for storage in alive if storage is not None)


@pytest.mark.parametrize("family", every(4, FAMILIES))
def test_held_bytes(family: str) -> None:
    model, batch = tiny_model(family, layers=2), ragged_batch(3, 16)
    none = held_by(model, FULL, False, True, batch)
    full, every_second, selective = (held_by(model, how, True, True, batch) for how in OPTIONS.values())
    assert full < every_second < none
    assert full < selective < none
    four_layers = held_by(tiny_model(family), FULL, True, True, batch)
    assert (four_layers - full) / 2 == 3 * 16 * 32 * 4, "of each layer its input"


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_the_split_backward_holds_no_more(family: str) -> None:
    model, batch = tiny_model(family, layers=2), ragged_batch(3, 16)
    for how in OPTIONS.values():
        assert held_by(model, how, True, True, batch) == held_by(model, how, True, False, batch)


def test_scores_of_eager_attention_are_not_kept() -> None:
    """They are products too, and quadratic in the sequence; unless they are asked for by name."""
    model = tiny_model("llama", layers=1)
    model.set_attn_implementation("eager")
    named = Checkpointing(save=("matmul", "aten.bmm"))
    for length in (32, 64):
        batch = ragged_batch(1, length)
        group, all_products = (held_by(model, how, True, False, batch) for how in (SELECTIVE, named))
        heads = 4
        assert all_products - group == heads * length * length * 4


# ---- layers of a user's own

WIDTH = 8


class Block(nn.Module):
    """Keyword and non-tensor arguments, a tuple returned, and something dropped at random."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)
        self.drop = nn.Dropout(0.4)

    def forward(self, x: Tensor, *, scale: float, shift: Tensor, debug: str = "") -> tuple[Tensor, str]:
        hidden = self.up(self.norm(x)).relu_()  # in place, on what may have been kept
        return x + self.drop(self.down(self.drop(hidden))) * scale + shift, debug


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), nn.Linear(WIDTH, WIDTH), Block()])
        self.shift = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        first, linear, last = self.layers
        x, said = first(x, scale=0.5, shift=self.shift, debug="one")
        assert said == "one"
        x, _ = last(linear(x), scale=2.0, shift=self.shift.sin())
        x, _ = first(x, scale=1.0, shift=self.shift)
        return x


def twins(make: Callable[[], nn.Module]) -> tuple[Any, Any]:
    """The same module twice, in float64."""
    torch.manual_seed(0)
    made = make().double()
    return made, copy.deepcopy(made)


def stack(how: Checkpointing | None, dtype: torch.dtype = torch.float64) -> Stack:
    torch.manual_seed(0)
    made = Stack().to(dtype)
    if how is not None:
        install(enumerate(made.layers), how)
    return made


def inputs(dtype: torch.dtype = torch.float64) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [[torch.randn(5, WIDTH, generator=generator, dtype=dtype)] for _ in range(3)]


def call(module: nn.Module, *given: Tensor) -> Any:
    return module(*given)


def autocast(module: nn.Module, *given: Tensor) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return module(*given)


def assert_as_plain(module: nn.Module, reference: nn.Module, run: Callable[..., Any] = call) -> None:
    """By every order, with the same random numbers."""
    dtype = next(reference.parameters()).dtype
    of_inputs = plain(reference, run, inputs(dtype))
    expected = gradients_of(reference)
    plain(module, run, inputs(dtype))
    assert_gradients(gradients_of(module), expected, TOLERANCE[dtype])
    for order in ORDERS.values():
        module.zero_grad()
        found = split(module, run, inputs(dtype), order)[0]
        assert_gradients(gradients_of(module), expected, TOLERANCE[dtype])
        for one, other in zip(found, of_inputs, strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("way", OPTIONS)
def test_layers_of_a_users_own(way: str) -> None:
    """In float64, and under autocast: its cache spares a layer casts, but not when the layer is run again."""
    assert_as_plain(stack(OPTIONS[way]), stack(None))
    assert_as_plain(stack(OPTIONS[way], torch.float32), stack(None, torch.float32), autocast)


def logits(module: nn.Module, ids: Tensor) -> Any:
    return module(input_ids=ids, use_cache=False).logits


def test_dropout_of_a_model() -> None:
    microbatches = [[ids] for ids in ragged_batch(6)["input_ids"].chunk(3)]
    for way in OPTIONS.values():
        options: dict[str, Any] = {"attn_pdrop": 0.3, "resid_pdrop": 0.2, "embd_pdrop": 0.1}
        model, reference = (tiny_model("gpt2", torch.float64, layers=2, **options) for _ in range(2))
        install(enumerate(model.transformer.h), way)
        plain(reference, logits, microbatches)
        split(model, logits, microbatches, SPLIT)
        assert_gradients(gradients_of(model), gradients_of(reference), 1e-10)


@torch.library.custom_op("penstock_test::drop", mutates_args=())
def drop(x: Tensor, dropout_p: float) -> Tensor:
    """What an attention of a GPU does: draws numbers within an op."""
    return x * (torch.rand_like(x) >= dropout_p) if dropout_p else x.clone()


drop.register_autograd(
    lambda ctx, gradient: (gradient * (ctx.saved_tensors[0] != 0), None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
)


class Drops(nn.Module):
    def __init__(self, probability: float) -> None:
        super().__init__()
        self.linear, self.probability = nn.Linear(WIDTH, WIDTH), probability

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = drop(self.linear(x), self.probability).sin()
        return nn.functional.dropout(result, 0.5) * x


@pytest.mark.parametrize(("probability", "runs"), [(0.5, 2), (0.0, 1)])
def test_ops_that_draw_random_numbers_run_again(probability: float, runs: int) -> None:
    """Given in place of run, it would leave the dropout after it other numbers than it had."""
    module, reference = twins(lambda: Drops(probability))
    install([(0, module)], Checkpointing(save=("penstock_test.drop",)))
    with Watch() as seen:
        assert len(plain(module, call, inputs())) == 3
    assert seen.ops[torch.ops.penstock_test.drop.default] == 3 * runs
    plain(reference, call, inputs())
    assert_gradients(gradients_of(module), gradients_of(reference), 1e-10)


def test_saved_outputs_are_not_computed_again() -> None:
    mm = torch.ops.aten.mm.default
    with Watch() as plainly:
        plain(Products(), call, [[torch.randn(5, WIDTH)]])
    for save, again in ((("matmul",), 0), (("aten.mm",), 0), (("attention",), 2), ((), 2)):
        module = Products()
        install([(0, module)], Checkpointing(save=save))
        for order in ("F0 B0", "F0 I0 W0"):
            with Watch() as seen:
                split(module, call, [[torch.randn(5, WIDTH)]], order)
            # W adds by addmm where there is a gradient already
            accumulates = 2 if order == "F0 I0 W0" else 0
            assert seen.ops[mm] == plainly.ops[mm] + again - accumulates, (save, order)


class Products(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.two(self.one(x).sin()).cos() * x
        return result.exp()


def test_outputs_that_an_op_in_place_overwrote_are_computed_again() -> None:
    class InPlace(Products):
        def forward(self, x: Tensor) -> Tensor:
            hidden = self.one(x)
            hidden += x
            result: Tensor = self.two(hidden.relu_()).mul_(2)
            return result.sin() * x

    module, reference = twins(InPlace)
    install([(0, module)], SELECTIVE)
    assert_as_plain(module, reference)


class Residual(Products):
    """Its last product is kept, and nothing needs it in the backward."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.two(self.one(x).sin())
        return result


@BOTH
@pytest.mark.parametrize("make", [Stack, Products, Residual])
def test_a_retained_graph_runs_twice(make: type[nn.Module], how: Checkpointing) -> None:
    module, reference = twins(make)
    layers = module.layers if isinstance(module, Stack) else [module]
    install(enumerate(layers), how)
    for each in (module, reference):
        torch.manual_seed(1)
        total = each(inputs()[0][0]).square().sum()
        for kept in (True, False):
            total.backward(retain_graph=kept)
    assert_gradients(gradients_of(module), gradients_of(reference), 1e-10)


def test_an_input_that_is_modified_is_an_error() -> None:
    module = Products()
    install([(0, module)], FULL)
    for given in ({}, {"x": torch.randn(5, WIDTH)}):
        x = given.get("x", torch.randn(5, WIDTH))
        output = module(**given) if given else module(x)
        x.zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward()


def test_evaluation_runs_plainly() -> None:
    module, reference = stack(FULL).eval(), stack(None).eval()
    (x,) = inputs()[0]
    with Watch() as seen:
        torch.testing.assert_close(module(x), reference(x))
        module(x).sum().backward()
        module.train()
        with torch.no_grad():
            module(x)
    assert seen.ops[torch.ops.aten.native_layer_norm.default] == 4 * 3, "nothing was run again"


def test_hooks_run_once_and_see_the_layer() -> None:
    module, seen = stack(FULL), []
    for layer in module.layers:
        layer.register_forward_pre_hook(lambda layer, given: seen.append("before"))
        layer.register_forward_hook(lambda layer, given, output: seen.append("after"))
        layer.register_full_backward_hook(lambda layer, given, output: seen.append("back"))
    module(inputs()[0][0].requires_grad_()).sum().backward()
    assert Counter(seen) == {"before": 4, "after": 4, "back": 4}


def test_the_layers_stay_what_they_are() -> None:
    module, reference = stack(FULL), stack(None)
    assert list(module.state_dict()) == list(reference.state_dict())
    put_on = {"_checkpointing", "is_checkpointed"}
    kept = [vars(one).keys() - put_on for one in module.modules()]
    assert kept == [vars(one).keys() for one in reference.modules()]
    layer = module.layers[0]
    assert isinstance(layer, Block)
    assert type(layer).__name__ == "Block"
    assert inspect.signature(layer.forward) == inspect.signature(reference.layers[0].forward)
    assert type(layer) is type(module.layers[2])
    twin = copy.deepcopy(module)
    twin.load_state_dict(reference.state_dict())
    assert_as_plain(twin, reference)


def test_a_layer_in_two_places_is_checkpointed_once() -> None:
    layer = Products()
    install([(0, layer), (1, layer)], FULL)
    assert sum(cls.__name__ == "Products" for cls in type(layer).__mro__) == 2


def test_a_forward_on_the_instance_is_refused() -> None:
    layer = Products()
    layer.forward = layer.one.forward  # type: ignore[method-assign, assignment]
    with refuses(ModelError, "layer 3, a Products with a forward of its own"):
        install([(3, layer)], FULL)
    install([(3, layer)], Checkpointing(every=2))


class Compiler:
    """A backend that runs what it is given as it is; by graph, how many products are in it."""

    def __init__(self) -> None:
        self.forwards: list[int] = []
        self.backwards: list[int] = []
        self.runs = 0
        self.backend = aot_autograd(
            fw_compiler=functools.partial(self._compile, self.forwards),
            bw_compiler=functools.partial(self._compile, self.backwards),
            partition_fn=min_cut_rematerialization_partition,
        )

    def _compile(self, seen: list[int], graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        seen.append(sum(node.target is torch.ops.aten.mm.default for node in graph.graph.nodes))

        def run(*args: Any) -> Any:
            self.runs += 1
            return graph.forward(*args)

        boxed: Callable[..., Any] = make_boxed_func(run)
        return boxed


@pytest.fixture
def compiler() -> Iterator[Compiler]:
    yield Compiler()
    torch.compiler.reset()


@pytest.mark.long
@pytest.mark.parametrize(
    ("how", "again", "first"),
    every(4, [
        (FULL, 2, "compiled"),
        (SELECTIVE, 0, "compiled"),
        (SELECTIVE, 0, "checkpointed"),
        (Checkpointing(save=("attention",)), 2, "checkpointed"),
    ]),
)  # fmt: skip
def test_compiled_layers(compiler: Compiler, how: Checkpointing, again: int, first: str) -> None:
    module, reference = twins(lambda: nn.Sequential(Products(), Products()))
    if first == "checkpointed":
        switch = install(enumerate(module), how)
    for layer in module:
        layer.compile(backend=compiler.backend, fullgraph=True)
    if first == "compiled":
        switch = install(enumerate(module), how)
    for on in (True, False):
        switch.on = on
        compiler.backwards.clear()
        module.zero_grad()
        reference.zero_grad()
        assert_as_plain(module, reference)
        plain_backward = {3, 4}  # the first layer's input may need no gradient
        assert compiler.backwards
        assert {count - (again if on else 0) for count in compiler.backwards} <= plain_backward


@BOTH
def test_a_compiled_part_of_a_layer(compiler: Compiler, how: Checkpointing) -> None:
    """It stays compiled, also when it is run again."""

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.part = nn.Linear(WIDTH, WIDTH), Products()

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.linear(x) + self.part(x).sin()
            return result.sin()

    module, reference = twins(Around)
    module.part.compile(backend=compiler.backend)
    install([(0, module)], how)
    assert_as_plain(module, reference)
    compiler.runs = 0
    plain(module, call, inputs())
    assert compiler.runs == 3 * 3, "forward, forward again, backward"


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize(("how", "first"), [(FULL, "sharded"), (SELECTIVE, "checkpointed")])
def test_fsdp(how: Checkpointing, first: str) -> None:
    """A layer's parameters are gathered once for its backward, and not again in what is run again."""
    module: Any = stack(None)
    reference = stack(None)
    if first == "checkpointed":
        install(enumerate(module.layers), how)
    for layer in module.layers:
        fully_shard(layer)
    fully_shard(module)
    if first == "sharded":
        install(enumerate(module.layers), how)
    plain(module, call, inputs())
    plain(reference, call, inputs())
    found = {name: p.grad.full_tensor() for name, p in module.named_parameters()}
    assert_gradients(found, gradients_of(reference), 1e-10)


def test_mixtures_of_experts_of_every_kind() -> None:
    for experts in ("eager", "grouped_mm", "batched_mm"):
        model = tiny_model("mixtral", layers=1)
        model.set_experts_implementation(experts)
        install(enumerate(model.model.layers), SELECTIVE)
        microbatches = [[ids] for ids in ragged_batch(6)["input_ids"].chunk(3)]
        assert_exact(model, microbatches, call=logits, orders=["interleaved", "whole"])


# ---- the option


def test_forms_of_the_option() -> None:
    assert [checkpointing(option) for option in (None, False, "none")] == [None] * 3
    assert [checkpointing(option) for option in (True, "full", "selective")] == [FULL, FULL, SELECTIVE]
    own = Checkpointing(every=3, in_flight=(2, 0))
    assert checkpointing(own) is own
    for other in ("all", 1.5, "Full"):
        with refuses(ConfigError, rule="'full', 'selective' or 'none'"):
            checkpointing(other)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "value", "rule", "remedy"),
    [
        ({"every": 0}, "every=0", "1 or more", ""),
        ({"in_flight": -1}, "in_flight=-1", "0 or more", ""),
        ({"in_flight": (3, -1)}, "in_flight=(3, -1)", "0 or more", ""),
        ({"in_flight": 2, "memory_limit": 1e9, "shape": (1, 8)}, "in_flight=2", "memory_limit chooses", ""),
        ({"memory_limit": 1e9}, "memory_limit=1000000000.0", "rows and sequence", ""),
        ({"save": ("matmull",)}, "save='matmull'", "a group", "you mean matmul"),
        ({"save": ("mm",)}, "save='mm'", "a group", "aten.mm"),
        ({"save": ("aten.bm",)}, "save='aten.bm'", "a group", "aten.bmm"),
        ({"save": ("matmul", "zzzzzzzz")}, "save='zzzzzzzz'", "a group", "Take matmul or attention"),
        ({"save": ("aten.matmul",)}, "save='aten.matmul'", "torch decomposes this op", ""),
        (
            {"save": ("aten.scaled_dot_product_attention",)},
            "save='aten.scaled_dot_product_attention'",
            "torch decomposes this op",
            "",
        ),
        ({"save": ("aten.view",)}, "save='aten.view'", "returns a view", ""),
        ({"save": ("aten.relu_",)}, "save='aten.relu_'", "in place", ""),
        ({"save": ("aten.native_dropout",)}, "save='aten.native_dropout'", "random numbers", ""),
    ],
    ids=str,
)
def test_options_that_are_refused(options: dict[str, Any], value: str, rule: str, remedy: str) -> None:
    with refuses(ConfigError, value, rule, remedy):
        Checkpointing(**options)


def test_selective_where_a_product_is_written_into() -> None:
    """0.3.0: of three dimensions its view has a version of its own, and what was kept was another value."""
    model: Any = tiny_model("llama", layers=2)

    class Shifted(type(model.model.layers[0].mlp)):  # type: ignore[misc]
        def forward(self, hidden: Tensor) -> Tensor:
            up = self.up_proj(hidden)
            up += 1.0
            made: Tensor = self.down_proj(torch.sigmoid(self.gate_proj(hidden)) * up)
            return made

    for layer in model.model.layers:
        layer.mlp.__class__ = Shifted
    batch = ragged_batch(9)
    found = CheckpointedStages(model, SELECTIVE, [range(2)]).step(batch)
    assert_gradients(found, plain_step(model, batch)[1], 1e-5)
