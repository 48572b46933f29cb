"""What users do to a model before they build a pipeline of it: hooks, closures, adapters, frozen weights.

An edit changes a model in place. Applied to two equal models it makes two equal models, so that one can run
in a plain process and the other as a pipeline.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.parametrize import register_parametrization
from transformers import PreTrainedModel

from penstock.models.tracing.probe import layer_list

Edit = Callable[[PreTrainedModel, Random], None]


def layer_of(model: PreTrainedModel, random: Random) -> nn.Module:
    return random.choice(list(layer_list(model)[1]))


def mlp_of(model: PreTrainedModel, random: Random) -> Any:
    return layer_of(model, random).mlp


def matrix_of(model: PreTrainedModel, random: Random) -> Any:
    """A linear layer in an mlp, or in a layer whose mlp has none."""
    layer: Any = layer_of(model, random)
    found = ([m for m in each.modules() if isinstance(m, nn.Linear)] for each in (layer.mlp, layer))
    return random.choice(next(filter(None, found)))


def width_of(model: PreTrainedModel) -> int:
    return int(model.config.get_text_config().hidden_size)


def seeded(module: nn.Module) -> nn.Module:
    """With values that depend on its shapes alone."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 8)
    return module.double()


def on_hidden(change: Callable[[Tensor], Tensor], output: Any) -> Any:
    return change(output) if isinstance(output, Tensor) else (change(output[0]), *output[1:])


# ---- closures


def scaled_by_a_closure(model: PreTrainedModel, random: Random) -> None:
    mlp = mlp_of(model, random)
    inner = mlp.forward
    mlp.forward = lambda x: inner(x) * 1.5


def compiled_forward(model: PreTrainedModel, random: Random) -> None:
    mlp = mlp_of(model, random)
    mlp.forward = torch.compile(mlp.forward, backend="eager")


def scaled_by_default(model: PreTrainedModel, random: Random) -> None:
    mlp = mlp_of(model, random)

    def forward(x: Tensor, inner: Any = mlp.forward) -> Tensor:
        return inner(x) * 1.5  # type: ignore[no-any-return]

    mlp.forward = forward


def partial_forward(model: PreTrainedModel, random: Random) -> None:
    mlp = mlp_of(model, random)
    mlp.forward = functools.partial(type(mlp).forward, mlp)


def _scaled(self: Any, x: Tensor) -> Tensor:
    return type(self).forward(self, x) * 1.5  # type: ignore[no-any-return]


def method_forward(model: PreTrainedModel, random: Random) -> None:
    mlp = mlp_of(model, random)
    mlp.forward = types.MethodType(_scaled, mlp)


def method_of_another_layer(model: PreTrainedModel, random: Random) -> None:
    first, second = random.sample(list(layer_list(model)[1]), 2)
    first.mlp.forward = second.mlp.forward  # type: ignore[union-attr]


def hook_with_adapter_of_the_model(model: PreTrainedModel, random: Random) -> None:
    width = width_of(model)
    model.adapter = seeded(nn.Linear(width, width))
    layer_of(model, random).register_forward_hook(
        lambda module, args, output: on_hidden(lambda hidden: hidden + model.adapter(hidden), output)
    )


def hook_with_adapter_of_the_layer(model: PreTrainedModel, random: Random) -> None:
    layer, width = layer_of(model, random), width_of(model)
    layer.adapter = seeded(nn.Linear(width, width))
    layer.register_forward_hook(
        lambda module, args, output: on_hidden(lambda hidden: hidden + module.adapter(hidden), output)
    )


class AddsAdapter:
    """A hook that holds what it adds."""

    def __init__(self, adapter: nn.Module) -> None:
        self.adapter = adapter

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        return on_hidden(lambda hidden: hidden + self.adapter(hidden), output)


def object_hook(model: PreTrainedModel, random: Random) -> None:
    layer, width = layer_of(model, random), width_of(model)
    layer.adapter = seeded(nn.Linear(width, width))
    layer.register_forward_hook(AddsAdapter(layer.adapter))


def hook_object_in_a_closure(model: PreTrainedModel, random: Random) -> None:
    layer, width = layer_of(model, random), width_of(model)
    layer.adapter = seeded(nn.Linear(width, width))
    adds = AddsAdapter(layer.adapter)
    layer.register_forward_hook(lambda module, args, output: adds(module, args, output))


NOTEBOOK: dict[str, Any] = {}  # what a notebook's cells assign to


def _notebook_hook(module: nn.Module, args: Any, output: Any) -> Any:
    return on_hidden(lambda hidden: hidden + NOTEBOOK["adapter"](hidden), output)


def hook_with_a_global(model: PreTrainedModel, random: Random) -> None:
    layer, width = layer_of(model, random), width_of(model)
    NOTEBOOK["adapter"] = layer.adapter = seeded(nn.Linear(width, width))
    layer.register_forward_hook(_notebook_hook)


def partial_hook_with_the_head(model: PreTrainedModel, random: Random) -> None:
    head = model.get_output_embeddings()

    def adds(module: nn.Module, args: Any, output: Any, head: Any) -> Any:
        return on_hidden(lambda hidden: hidden + head.weight.mean(), output)

    layer_of(model, random).register_forward_hook(functools.partial(adds, head=head))


def hook_with_a_module_of_its_own(model: PreTrainedModel, random: Random) -> None:
    width = width_of(model)
    extra = seeded(nn.Linear(width, width))
    layer_of(model, random).register_forward_hook(
        lambda module, args, output: on_hidden(lambda hidden: hidden + extra(hidden), output)
    )


# ---- plain hooks and parametrizations


def scaling_hook(model: PreTrainedModel, random: Random) -> None:
    mlp_of(model, random).register_forward_hook(lambda module, args, output: output * 1.5)


def scaling_pre_hook(model: PreTrainedModel, random: Random) -> None:
    mlp_of(model, random).register_forward_pre_hook(lambda module, args: (args[0] * 0.5, *args[1:]))


def backward_hook(model: PreTrainedModel, random: Random) -> None:
    mlp_of(model, random).register_full_backward_hook(lambda module, into, out: (into[0] * 0.5, *into[1:]))


def in_place_pre_hook(model: PreTrainedModel, random: Random) -> None:
    def scale(module: nn.Module, args: Any, kwargs: Any) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        hidden.mul_(1.25)

    layer_of(model, random).register_forward_pre_hook(scale, with_kwargs=True)


def weight_norm(model: PreTrainedModel, random: Random) -> None:
    matrix = matrix_of(model, random)
    if not hasattr(matrix, "parametrizations"):
        parametrizations.weight_norm(matrix)


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 0.5 + weight.flip(0) * 0.5


def parametrization(model: PreTrainedModel, random: Random) -> None:
    matrix = matrix_of(model, random)
    if not hasattr(matrix, "parametrizations"):
        register_parametrization(matrix, "weight", Symmetric(), unsafe=True)


# ---- along the sequence


def rolls(model: PreTrainedModel, random: Random) -> None:
    layer_of(model, random).register_forward_hook(
        lambda module, args, output: on_hidden(lambda hidden: hidden + hidden.roll(1, dims=1) / 4, output)
    )


def sums_along(model: PreTrainedModel, random: Random) -> None:
    mlp_of(model, random).register_forward_pre_hook(lambda module, args: (args[0].cumsum(1) / 4, *args[1:]))


def takes_the_mean(model: PreTrainedModel, random: Random) -> None:
    layer_of(model, random).register_forward_hook(
        lambda module, args, output: on_hidden(lambda hidden: hidden - hidden.mean(1, keepdim=True), output)
    )


# ---- parameters


def trained_weight(model: PreTrainedModel, random: Random) -> Any:
    return random.choice([parameter for parameter in model.parameters() if parameter.requires_grad])


def frozen(model: PreTrainedModel, random: Random) -> None:
    for parameter in model.parameters():
        parameter.requires_grad_(random.random() < 0.6)
    next(model.parameters()).requires_grad_(True)


def gradient_hook(model: PreTrainedModel, random: Random) -> None:
    trained_weight(model, random).register_hook(lambda gradient: gradient * 0.5)


def trains_new_rows(model: PreTrainedModel, random: Random) -> None:
    embedding = model.get_input_embeddings().weight
    mask = torch.zeros_like(embedding)
    mask[-8:] = 1
    embedding.register_hook(lambda gradient: gradient * mask)


def gradient_hook_with_the_model(model: PreTrainedModel, random: Random) -> None:
    weight = trained_weight(model, random)
    weight.register_hook(lambda gradient: gradient + weight)


def accumulated_hook(model: PreTrainedModel, random: Random) -> None:
    def halve(parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)

    trained_weight(model, random).register_post_accumulate_grad_hook(halve)


class LowRank(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = seeded(nn.Linear(base.in_features, 2, bias=False))
        self.up = seeded(nn.Linear(2, base.out_features, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))  # type: ignore[no-any-return]


def adapter(model: PreTrainedModel, random: Random) -> None:
    mlp = mlp_of(model, random)
    names = [name for name, child in mlp.named_children() if type(child) is nn.Linear]
    if names:
        name = random.choice(names)
        setattr(mlp, name, LowRank(getattr(mlp, name)))


def shares_a_weight(model: PreTrainedModel, random: Random) -> None:
    layers: list[Any] = random.sample(list(layer_list(model)[1]), 2)
    first, second = (layer.mlp for layer in layers)
    for name, child in second.named_children():
        if type(child) is nn.Linear and type(getattr(first, name)) is nn.Linear:
            child.weight = getattr(first, name).weight
            return


# ---- forwards that do unusual things


def inner_gradient(model: PreTrainedModel, random: Random) -> None:
    """A layer that differentiates within its forward, as some physics models do."""

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        def with_force(hidden: Tensor) -> Tensor:
            with torch.enable_grad():
                at = hidden if hidden.requires_grad else hidden.detach().requires_grad_()
                (force,) = torch.autograd.grad((at**3).sum(), at, create_graph=True)
            return hidden + force / 16

        return on_hidden(with_force, output)

    layer_of(model, random).register_forward_hook(hook)


def inner_gradient_of_a_product(model: PreTrainedModel, random: Random) -> None:
    mlp = mlp_of(model, random)

    def hook(module: Any, args: Any, output: Any) -> Any:
        with torch.enable_grad():
            at = args[0] if args[0].requires_grad else args[0].detach().requires_grad_()
            (force,) = torch.autograd.grad(
                type(module).forward(module, at).pow(2).sum(), at, create_graph=True
            )
        return output + force / 16

    mlp.register_forward_hook(hook)


class Counter(nn.Module):
    """Its result depends on how often it ran."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.count: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return x * (1 + self.count.clone() / 8)


def updated_buffer(model: PreTrainedModel, random: Random) -> None:
    mlp = mlp_of(model, random)
    mlp.counter = Counter()
    mlp.register_forward_hook(lambda module, args, output: module.counter(output))


def other_loss(model: PreTrainedModel, random: Random) -> None:
    def loss(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
        shifted = labels[:, 1:].reshape(-1)
        return nn.functional.cross_entropy(logits[:, :-1].reshape(-1, vocab_size), shifted) * 2

    model.loss_function = loss


EDITS: dict[str, Edit] = {
    edit.__name__: edit
    for edit in (
        scaled_by_a_closure, compiled_forward, scaled_by_default, partial_forward, method_forward,
        method_of_another_layer,
        hook_with_adapter_of_the_model, hook_with_adapter_of_the_layer, object_hook, hook_object_in_a_closure,
        hook_with_a_global, partial_hook_with_the_head, hook_with_a_module_of_its_own, scaling_hook,
        scaling_pre_hook, backward_hook, in_place_pre_hook, weight_norm, parametrization, rolls, sums_along,
        takes_the_mean, frozen, gradient_hook, trains_new_rows, gradient_hook_with_the_model,
        accumulated_hook,
        adapter, shares_a_weight, inner_gradient, inner_gradient_of_a_product, updated_buffer, other_loss,
    )
}  # fmt: skip
