"""The hard cases of a split backward: each gradient as plain autograd has it, deferred where it can be."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM

from penstock.models.activation_checkpointing import Checkpointing, install
from penstock.runtime.split_backward.backward import hold, input_backward
from penstock.runtime.split_backward.deferred import Deferred
from penstock.runtime.split_backward.recording import deferring
from support.covering import every
from support.families import FAMILIES, ragged_batch, tiny_config, tiny_model
from support.reference import assert_gradients, gradients_of
from support.splitting import assert_exact

DTYPES = (torch.float32, torch.float64)
WIDTH = 8


Make = Callable[[], nn.Module]
CASES: dict[str, Make] = {}


class Functional(nn.Module):
    """A module made of its parts and one function of (module, inputs)."""

    def __init__(self, function: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(self, *inputs)


def case(make: Make) -> Make:
    CASES[make.__name__] = make
    return make


def forward_of(**parts: Callable[[], Any]) -> Callable[[Callable[..., Any]], Make]:
    """A case whose module has these parts, made anew each time, and runs the decorated function."""

    def register(run: Callable[..., Any]) -> Make:
        def make() -> nn.Module:
            return Functional(run, **{name: part() for name, part in parts.items()})

        CASES[run.__name__] = make
        return make

    return register


def linear(inputs: int = WIDTH, outputs: int = WIDTH, **options: Any) -> nn.Linear:
    return nn.Linear(inputs, outputs, **options)


def weight(*shape: int) -> Callable[[], nn.Parameter]:
    return lambda: nn.Parameter(torch.randn(shape) / shape[-1] ** 0.5)


@forward_of(one=linear)
def reused(m: Any, x: Tensor) -> Any:
    return m.one(m.one(x).tanh()) + m.one(x)


@case
def shared_across_layers() -> nn.Module:
    return nn.Sequential(shared := linear(), nn.ReLU(), nn.Sequential(shared, linear()))


@forward_of(table=lambda: nn.Embedding(9, WIDTH))
def tied(m: Any, x: Tensor) -> Any:
    """The same weight in a lookup, whose gradient is I's, and in a product, whose gradient is W's."""
    return F.linear(x + m.table.weight[:5], m.table.weight)


@forward_of(a=linear, b=linear)
def several_outputs(m: Any, x: Tensor) -> Any:
    return m.a(x), m.b(x), m.a(x) * 0 + 1, torch.arange(3)


@forward_of(qkv=lambda: linear(WIDTH, 3 * WIDTH), wide=linear, stack=weight(2, 4, WIDTH))
def nodes_of_several_outputs(m: Any, x: Tensor) -> Any:
    q, k, v = m.qkv(x).chunk(3, -1)
    a, b = m.wide(q).split([2, WIDTH - 2], -1)
    c, d = m.stack.unbind(0)
    return a.sum() * k, torch.cat([b, v], -1), F.linear(v, c) + F.linear(k, d) * c.sum()


@forward_of(one=linear, bias=weight(WIDTH), table=weight(5, WIDTH), own=linear, idle=linear)
def off_the_path(m: Any, x: Tensor) -> Any:
    """A bias-only branch, a positional table, and a product that no input takes part in."""
    return m.one(x) + m.bias + m.table * m.own(m.table), m.own(m.bias)


@case
def some_frozen() -> nn.Module:
    module = nn.Sequential(linear(), nn.ReLU(), linear(), nn.ReLU(), linear())
    module[2].requires_grad_(False)
    module[4].bias.requires_grad_(False)
    return module


@case
def all_frozen() -> nn.Module:
    return nn.Sequential(linear(), nn.ReLU(), linear()).requires_grad_(False)


@case
def without_parameters() -> nn.Module:
    return nn.ReLU()


@forward_of(
    base=lambda: linear().requires_grad_(False),
    a=lambda: linear(WIDTH, 2, bias=False),
    b=lambda: linear(2, WIDTH, bias=False),
)
def lora(m: Any, x: Tensor) -> Any:
    return m.base(x) + m.b(m.a(x)) * 2


@forward_of(up=weight(4, 2 * WIDTH, WIDTH), down=weight(4, 2 * WIDTH, WIDTH))
def experts(m: Any, x: Tensor) -> Any:
    """Slices of one parameter, one of them for no row at all."""
    rows = x.flatten(0, -2)
    parts = [F.linear(rows[i::3] if i < 3 else rows[:0], m.up[i]) @ m.down[i] for i in range(4)]
    return torch.cat(parts) + torch.cat([rows[i::3] for i in range(3)]) @ m.up[2:].select(0, 1)[:WIDTH]


@forward_of(up=weight(3, WIDTH, 16), down=weight(3, WIDTH, 16))
def grouped(m: Any, x: Tensor) -> Any:
    rows, ends = x.flatten(0, -2), torch.tensor([2, 2, x[..., 0].numel()], dtype=torch.int32)
    hidden = F.grouped_mm(rows, m.up, offs=ends)
    return F.grouped_mm(hidden.tanh(), m.down.transpose(-2, -1), offs=ends)


@forward_of(a=linear, b=lambda: linear(bias=False), c=linear)
def in_place(m: Any, x: Tensor) -> Any:
    hidden = m.a(x).relu_()
    out = m.b(hidden)
    out += x
    out[..., 1:] *= 2
    out.view(-1)[:3].add_(1)
    return m.c(out).mul_(2)


@forward_of(w=weight(WIDTH, WIDTH), b=weight(WIDTH))
def other_calls(m: Any, x: Tensor) -> Any:
    """Every way to call a product, and those that have to stay torch's."""
    rows = x.flatten(0, -2)
    results = [
        F.linear(input=x, weight=m.w, bias=m.b).flatten(0, -2),
        F.linear(x, m.w.t()).flatten(0, -2),
        F.linear(weight=m.w, input=rows),
        torch.addmm(m.b, rows, m.w),
        torch.addmm(input=m.b, mat1=rows, mat2=m.w),
        torch.addmm(m.b, rows, m.w, alpha=2, beta=0.5),
        torch.addmm(m.b.sum(), rows, m.w[:, :]),
        rows @ m.w, torch.matmul(rows, m.w), rows.matmul(other=m.w), torch.mm(rows, m.w), rows.mm(m.w),
        (x @ m.w).flatten(0, -2), (m.w @ rows.t()).t(), torch.einsum("ri,io->ro", rows, m.w),
        torch.stack([F.linear(rows[0], m.w, m.b), rows[0] @ m.w]).sum(0, keepdim=True),
        F.linear(rows, m.w * 2), F.linear(rows, m.w[0]).unsqueeze(1), F.linear(m.w, m.w).sum() * rows,
    ]  # fmt: skip
    return sum(results)


@forward_of(a=linear, b=linear)
def detached_parts(m: Any, x: Tensor) -> Any:
    with torch.no_grad():
        gate = m.a(x).sigmoid()
    return m.b(x) * gate + m.a(x.detach())


@case
def dropping() -> nn.Module:
    return nn.Sequential(linear(), nn.Dropout(0.5), linear(), nn.Dropout(0.2))


@forward_of(a=linear, b=linear)
def gradient_inside(m: Any, x: Tensor) -> Any:
    """A forward that differentiates, once for good and once to be differentiated again."""
    with torch.enable_grad():
        y = m.a(x).tanh()
    (kept,) = torch.autograd.grad(y.sum(), m.a.weight, create_graph=True)
    (dropped,) = torch.autograd.grad(m.b(x).sum(), m.b.weight)
    return m.b(y) + kept.pow(2).sum() + dropped.sum()


class AsksForWeights(torch.autograd.Function):
    """Its backward runs a backward of its own, and needs the weight's gradient there and then."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, inner: list[Tensor]) -> Tensor:
        ctx.inner = inner
        return x * 1

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (of_weight,) = torch.autograd.grad(*ctx.inner)
        return gradients[0] * of_weight.sum(), None


@forward_of(a=linear, b=linear)
def backward_in_backward(m: Any, x: Tensor) -> Any:
    inner = [m.a(x.detach()).sin().sum(), m.a.weight]
    return m.b(AsksForWeights.apply(m.b(x), inner))  # type: ignore[no-untyped-call]


@forward_of(one=linear, table=weight(3 * 5 * WIDTH))
def given_away(m: Any, x: Tensor) -> Any:
    """The table's gradient is, memory and all, that of the product's output; later ones are added to it."""
    return m.one(x) + m.table.view(x.shape)


class Stops(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> None:
        return None


@forward_of(a=linear, b=linear)
def no_gradient_back(m: Any, x: Tensor) -> Any:
    """A product that no gradient comes back to: its weight has none, rather than zeros."""
    return m.a(x) + Stops.apply(m.b(x))  # type: ignore[no-untyped-call]


@case
def checkpointed(use_reentrant: bool = False) -> nn.Module:
    def run(m: Any, x: Tensor) -> Any:
        for layer in m.layers:
            x = x + checkpoint(layer, x, use_reentrant=use_reentrant)
        return m.layers[0](x)

    parts = [nn.Sequential(linear(), nn.Dropout(0.3), nn.GELU(), linear(bias=False)) for _ in range(2)]
    return Functional(run, layers=nn.ModuleList(parts))


@case
def checkpointed_reentrant() -> nn.Module:
    return checkpointed(use_reentrant=True)  # type: ignore[call-arg]


def microbatches(dtype: torch.dtype, *shape: int, count: int = 3) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [[torch.randn(shape, generator=generator, dtype=dtype)] for _ in range(count)]


# each case in one of the two in every run, in turn
@pytest.mark.parametrize(("name", "dtype"), [
    pytest.param(name, dtype, marks=() if turn == place % 2 or name == "grouped" else pytest.mark.sweep)
    for place, name in enumerate(CASES) for turn, dtype in enumerate(DTYPES)
])  # fmt: skip
def test_every_gradient_is_that_of_plain_autograd(name: str, dtype: torch.dtype) -> None:
    if name == "grouped" and dtype == torch.float64:
        pytest.skip("torch has no grouped product in float64")
    torch.manual_seed(0)
    held = assert_exact(CASES[name]().to(dtype), microbatches(dtype, 3, 5, WIDTH))
    assert (held > 0) == (name not in ("all_frozen", "without_parameters"))


@pytest.mark.parametrize(
    "shape", [(5, WIDTH), (WIDTH,), (2, 1, 3, WIDTH), (0, WIDTH), (2, 0, WIDTH)], ids=str
)
@pytest.mark.parametrize("bias", [True, False])
def test_inputs_of_any_shape(shape: Sequence[int], bias: bool) -> None:
    module = nn.Sequential(linear(bias=bias), nn.Tanh(), linear(bias=bias)).double()
    assert_exact(module, microbatches(torch.float64, *shape))


def test_inputs_that_are_not_contiguous() -> None:
    def run(m: Any, x: Tensor) -> Any:
        return m.a(x.transpose(0, 1))[:, ::2] + m.b(x[..., ::2]).transpose(0, 1)[:, ::2]

    module = Functional(run, a=linear(), b=linear(WIDTH // 2)).double()
    assert assert_exact(module, microbatches(torch.float64, 4, 4, WIDTH)) > 0


def test_frozen_then_unfrozen_between_steps() -> None:
    module = some_frozen().double()
    first = next(module.children())
    for frozen in (True, False, True):
        first.requires_grad_(not frozen)
        assert assert_exact(module, microbatches(torch.float64, 5, WIDTH)) > 0


@pytest.mark.parametrize(
    "make",
    every(2, [reused, shared_across_layers, experts, in_place, lora, some_frozen, tied, off_the_path,
              checkpointed_reentrant, checkpointed, dropping]),
)  # fmt: skip
def test_autocast(make: Make) -> None:
    """Half the precision, and still the same numbers."""
    torch.manual_seed(0)
    module = make()

    def call(module: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            result: Tensor = module(x)
        return result

    assert assert_exact(module, microbatches(torch.float32, 3, 5, WIDTH), call=call, tolerance=1e-5) > 0


@pytest.mark.parametrize("make", [reused, experts, in_place, tied, checkpointed, grouped])
def test_bfloat16(make: Make) -> None:
    """Tied weights have one more sum that is rounded: the part of I, and that of W."""
    torch.manual_seed(0)
    module = make().bfloat16()
    assert assert_exact(module, microbatches(torch.bfloat16, 3, 5, WIDTH), tolerance=2**-6) > 0


def test_a_compiled_part_stays_whole() -> None:
    """The compiler sees torch's own products, and compiles once for all microbatches."""
    compiled = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        compiled.append(graph)
        return graph.forward

    part = torch.compile(nn.Sequential(linear(), nn.GELU(), linear()), backend=backend)
    module = Functional(lambda m, x: m.last(m.part(x)), part=part, last=linear())
    assert assert_exact(module, microbatches(torch.float32, 5, WIDTH)) > 0
    assert len(compiled) <= 2, "once under the mode, and once without"
    assert not any("Product" in str(node.target) for graph in compiled for node in graph.graph.nodes)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # torch's own, in jvp
def test_transforms_of_functions_stay_torchs() -> None:
    module = linear().double()
    x = torch.randn(4, WIDTH, dtype=torch.float64)
    with deferring():
        mapped = torch.vmap(module)(x)
        tangent = torch.func.jvp(module, (x,), (x,))[1]
    torch.testing.assert_close(mapped, module(x))
    torch.testing.assert_close(tangent, F.linear(x, module.weight))


def test_a_wrong_call_gets_torchs_own_error() -> None:
    one = linear()
    with deferring():
        with pytest.raises(RuntimeError, match="mat1 and mat2 shapes"):
            one(torch.ones(2, WIDTH + 1))
        with pytest.raises(RuntimeError, match="must be a matrix"):
            torch.mm(torch.ones(2, 3, WIDTH), one.weight)
        with pytest.raises(TypeError, match="linear"):
            F.linear(torch.ones(2, WIDTH), one.weight, spurious=1)  # type: ignore[call-arg]


def logits(model: nn.Module, ids: Tensor) -> Tensor:
    found: Tensor = model(input_ids=ids, use_cache=False).logits
    return found


def token_microbatches() -> list[list[Tensor]]:
    return [[ids.clone()] for ids in torch.chunk(ragged_batch(6)["input_ids"], 3)]


@pytest.mark.parametrize("family", every(3, FAMILIES))
def test_every_family(family: str) -> None:
    model = tiny_model(family, layers=2, tied=True)
    assert assert_exact(model, token_microbatches(), call=logits, orders=["interleaved", "whole"]) > 0


# each family and each implementation in every run
@pytest.mark.parametrize(
    ("family", "experts"),
    every(2, [("mixtral", "eager"), ("mixtral", "batched_mm"), ("gpt_oss", "grouped_mm"),
              ("gpt_oss", "eager"), ("qwen3_moe", "batched_mm"), ("qwen3_moe", "grouped_mm")]),
)  # fmt: skip
def test_mixture_of_experts(family: str, experts: str) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(moe_config(family), experts_implementation=experts).train()
    orders = ["interleaved", "whole"]
    assert assert_exact(model, token_microbatches(), call=logits, orders=orders) > 0


def moe_config(family: str) -> Any:
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FAMILIES, family, FAMILIES.get(family, sizes))
        return tiny_config(family, layers=2)


@pytest.mark.parametrize("family", ["gpt2", "mixtral"])
def test_checkpointing_of_layers(family: str) -> None:
    model = tiny_model(family, layers=2)
    layers = next(module for module in model.modules() if isinstance(module, nn.ModuleList))
    install(enumerate(layers), Checkpointing())
    whole = assert_exact(model, token_microbatches(), call=logits, orders=["interleaved", "delayed", "whole"])
    assert whole > model.config.hidden_size * 2 * 10 * 4, "layers that were run again were deferred as well"


def deferred_of(module: nn.Module, x: Tensor, gradient: Tensor) -> Deferred:
    """A forward and its I: what they leave for W."""
    with deferring() as tape:
        output = module(x.requires_grad_())
    return input_backward(hold([x], [output], tape), [gradient])[1]


def test_hooks_see_the_whole_gradient_once() -> None:
    """0.2.0: a weight with a hook and a use that cannot be deferred would show the hook two parts."""
    module, reference = tied().double(), tied().double()
    reference.load_state_dict(module.state_dict())
    seen: dict[str, list[Tensor]] = {"a": [], "b": [], "a after": [], "b after": []}

    def see(name: str, gradient: Tensor) -> Tensor:
        seen[name].append(gradient)
        return gradient.clamp(-0.1, 0.1)

    for name, part in (("a", reference), ("b", module)):
        (table,) = part.parameters()
        after = seen[f"{name} after"]
        table.register_hook(functools.partial(see, name))  # type: ignore[no-untyped-call]
        table.register_post_accumulate_grad_hook(lambda p, after=after: after.append(p.grad.clone()))  # type: ignore[no-untyped-call]
    x, gradient = torch.randn(5, WIDTH).double(), torch.randn(5, 9).double()
    reference(x).backward(gradient)
    deferred_of(module, x, gradient).run()
    for one, other in (("a", "b"), ("a after", "b after")):
        assert len(seen[one]) == len(seen[other]) == 1
        torch.testing.assert_close(seen[one], seen[other])


def test_weights_may_change_between_i_and_w() -> None:
    """W needs what went in and what came back, not the weight: an optimizer may have stepped already."""
    module = linear().double()
    x, gradient = torch.randn(5, WIDTH).double(), torch.randn(5, WIDTH).double()
    module(x).backward(gradient)
    expected = module.weight.grad
    module.zero_grad()
    deferred = deferred_of(module, x, gradient)
    with torch.no_grad():
        module.weight.zero_()
    deferred.run()
    torch.testing.assert_close(module.weight.grad, expected)


def test_a_weight_frozen_between_i_and_w_gets_nothing_more() -> None:
    """As autograd has it where a weight is frozen between a forward and its backward."""
    module = linear()
    for grad in (None, torch.zeros(WIDTH, WIDTH)):
        deferred = deferred_of(module.requires_grad_(), torch.randn(5, WIDTH), torch.ones(5, WIDTH))
        module.weight.requires_grad_(False).grad = grad
        deferred.run()
        assert module.weight.grad is None or not module.weight.grad.any()


@pytest.mark.parametrize("when", ["before I", "before W"])
def test_activations_may_not_change(when: str) -> None:
    module = nn.Sequential(linear(), nn.Tanh(), linear())
    x, hidden = torch.randn(5, WIDTH).requires_grad_(), []
    module[1].register_forward_hook(lambda _, __, output: hidden.append(output.detach()))
    with deferring() as tape:
        output = module(x)
    live = hold([x], [output], tape)
    if when == "before I":
        hidden[0].zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            input_backward(live, [torch.ones_like(output)])
    else:
        _, deferred = input_backward(live, [torch.ones_like(output)])
        hidden[0].zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            deferred.run()


def test_checkpointing_of_calls_that_are_no_products() -> None:
    """Under saved-tensor hooks of any kind, here those that keep copies."""
    module = reused().double()

    def call(module: nn.Module, x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda copy: copy):
            result: Tensor = module(x)
        return result

    assert assert_exact(module, microbatches(torch.float64, 5, WIDTH), call=call) > 0


class _GivesItsInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        x: Tensor = ctx.saved_tensors[0]
        return x


def test_a_gradient_has_no_graph() -> None:
    """Before a release: a backward of one's own that gives a tensor of the graph gave a weight one."""
    last = linear()
    module, x = nn.Sequential(linear(), nn.Tanh(), last), torch.randn(5, WIDTH)
    outputs = _GivesItsInput.apply(module(x))  # type: ignore[no-untyped-call]
    outputs.backward(torch.ones_like(outputs))
    expected = gradients_of(module)
    for _ in range(2):
        module.zero_grad()
        with deferring() as tape:
            outputs = _GivesItsInput.apply(module(x))  # type: ignore[no-untyped-call]
        input_backward(hold([x], [outputs], tape), [torch.ones_like(outputs)])[1].run()
        assert last.weight.grad is not None
        assert not last.weight.grad.requires_grad
        assert_gradients(gradients_of(module), expected, 1e-5)


@pytest.mark.skipif(
    not hasattr(Tensor, "grad_dtype"), reason="this torch has gradients of the weight's dtype"
)
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gradients", [torch.float32, torch.bfloat16, None])
def test_a_gradient_of_another_dtype_than_the_weight(
    weights: torch.dtype, gradients: torch.dtype | None
) -> None:
    """Before a release: RuntimeError in the first W, as the gradient was not converted."""
    module = linear().to(weights)
    module.weight.grad_dtype = gradients
    assert assert_exact(module, microbatches(weights, 5, WIDTH), tolerance=2**-6) > 0
