"""Modules that ask for the tape: whatever a user makes of them, at whatever time, each gradient is exact."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from penstock.runtime.split_backward.modules import ProductModules
from support.splitting import assert_exact

WIDTH = 8


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = x + self.down(self.up(x).tanh())
        return hidden


def layer() -> Any:
    torch.manual_seed(0)
    return Layer().double()


def microbatches() -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [[torch.randn(5, WIDTH, generator=generator, dtype=torch.float64)] for _ in range(3)]


# ---- an nn.Linear that somebody has changed


class ByProperty(nn.Linear):
    @property
    def weight(self) -> Any:
        return self._parameters["weight"] * 0.5  # type: ignore[operator]

    @weight.setter
    def weight(self, weight: Any) -> None:
        raise AttributeError


class ByGetAttr(nn.Linear):
    def __getattr__(self, name: str) -> Any:
        found: Any = super().__getattr__(name)
        return found * 0.5 if name == "weight" else found


class Doubled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def has_weight_in_dict(linear: nn.Linear) -> None:
    linear.__dict__["weight"] = torch.ones_like(linear.weight)


def has_one_dimension(linear: nn.Linear) -> None:
    linear.weight, linear.bias = nn.Parameter(linear.weight[0].detach().clone()), None  # type: ignore[assignment]
    linear.register_forward_hook(lambda module, args, output: output.unsqueeze(-1).expand(-1, 2 * WIDTH))


def becomes(kind: type[nn.Linear]) -> Callable[[nn.Linear], None]:
    return lambda linear: setattr(linear, "__class__", kind)


CHANGES: dict[str, Callable[[nn.Linear], None]] = {
    "weight by a property": becomes(ByProperty),
    "weight by __getattr__": becomes(ByGetAttr),
    "forward of a subclass": becomes(Doubled),
    "weight in __dict__": has_weight_in_dict,
    "weight of one dimension": has_one_dimension,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=list(CHANGES))
def test_a_changed_linear(change: Callable[[nn.Linear], None]) -> None:
    """Before a release: the product was made of the parameter, which is not what its forward reads."""
    module = layer()
    change(module.up)
    assert_exact(module, microbatches())


@pytest.mark.parametrize("kind", [ByProperty, ByGetAttr, Doubled])
def test_a_class_that_a_hook_changes_during_a_step(kind: type[nn.Linear]) -> None:
    """Before a release: the forward that the step had given the module went on as that of nn.Linear."""
    module = layer()

    def becomes_in_the_second(layer: Any, args: object) -> None:
        layer.up.__class__ = kind if layer.forwards % 3 == 1 else nn.Linear
        layer.forwards += 1

    module.forwards = 0
    module.register_forward_pre_hook(becomes_in_the_second)
    assert_exact(module, microbatches())


@pytest.mark.parametrize("owner", [nn.Linear, F], ids=["nn.Linear.forward", "F.linear"])
def test_a_replaced_function_of_torch(owner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a release: the modules went on with torch's own."""
    name = "linear" if owner is F else "forward"
    plain = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args: 1.5 * plain(*args))
    assert_exact(layer(), microbatches())


class Static(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(WIDTH, WIDTH))

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * 2


def test_a_forward_that_is_no_method() -> None:
    """Before a release: it was called with the module."""
    assert_exact(nn.Sequential(Static(), layer()).double(), microbatches())


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace.*:DeprecationWarning")
def test_a_traced_module() -> None:
    """Before a release: a step could not begin, as the class of a traced module has no forward to ask for."""
    traced = torch.jit.trace(layer(), microbatches()[0])  # type: ignore[no-untyped-call]
    module = nn.ModuleList([layer(), traced])
    products = ProductModules(module)
    products.begin_step()
    products.end_step()
    assert "forward" not in vars(module[0].up)


# ---- parts that run again


class Elsewhere(Layer):
    """Makes a product of a weight of another module."""

    def forward(self, x: Tensor) -> Tensor:
        def inner(x: Tensor) -> Tensor:
            hidden: Tensor = x + self.down(F.linear(x, self.up.weight, self.up.bias).tanh())
            return hidden

        result: Tensor = checkpoint(inner, x, use_reentrant=False)
        return result


class Inside(Layer):
    """Makes products of its own in a part that runs again without the rest of its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(WIDTH, 2 * WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        def inner(x: Tensor) -> Tensor:
            hidden: Tensor = x + self.down(F.linear(x, self.table.t()).tanh())
            return hidden

        result: Tensor = checkpoint(inner, self.up(x)[:, :WIDTH], use_reentrant=False)
        return result


@pytest.mark.parametrize("kind", [Elsewhere, Inside])
def test_what_runs_again_is_recorded_as_it_was(kind: type[Layer]) -> None:
    """Before a release: CheckpointError, as every product was recorded where a part ran again.

    The first forward had shown that modules make all products, and only they had been asked.
    """
    torch.manual_seed(0)
    assert_exact(kind().double(), microbatches())


# ---- what looks into the modules during a step


def test_a_compiled_function_that_calls_modules() -> None:
    """Before a release: the compiler could not follow the modules' forwards, and ended the graph at each."""
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    torch.manual_seed(0)
    module = Compiled(backend).double()
    assert_exact(module, microbatches())
    assert len(graphs) <= 4, "under the mode and without, in a step and outside of one"


class Compiled(nn.Module):
    def __init__(self, backend: Any) -> None:
        super().__init__()
        self.inner, self.table, self.last = Layer(), Table(), nn.Linear(WIDTH, WIDTH)
        self.compiled = torch.compile(self.both, backend=backend, fullgraph=True)

    def both(self, x: Tensor) -> Any:
        return self.table(self.inner(x))

    def forward(self, x: Tensor) -> Any:
        return self.last(self.compiled(x))


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.table


def test_a_module_that_is_saved_during_a_step() -> None:
    """Before a release: it could not be loaded, as pickle looked for a method of that name."""
    module = nn.Sequential(layer(), Table()).double()
    x = microbatches()[0][0]
    products = ProductModules(module)
    products.begin_step()
    saved, copied = pickle.dumps(module), copy.deepcopy(module)
    products.end_step()
    for parameter in module.parameters():
        parameter.detach().zero_()
    expected = copied(x)
    assert expected.any()
    torch.testing.assert_close(pickle.loads(saved)(x), expected)
