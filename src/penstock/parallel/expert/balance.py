"""The auxiliary loss that keeps experts evenly used, over the tokens of all ranks.

It is a product of two means over tokens: how often an expert is chosen, and how probable it is,

    loss = experts * sum over e of  (chosen_e / tokens) * (probability_e / tokens)

So the mean of the ranks' losses is not the loss of all their tokens. But only the probability has a gradient.
With `chosen` and `tokens` counted over all ranks and the probabilities of its own tokens, each rank computes
its share of the loss: the shares and their gradients sum up to those of all tokens.

A model's forward calls the function for this loss in its own file, with the router logits of all layers.
`replace_balance_loss` gives the model a class of its own, whose forward calls another function by that name.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from types import CellType, FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from penstock.errors import ModelError
from penstock.runtime.around import derive

_NAME = "load_balancing_loss_func"  # in all files of transformers with such a function
_TAKES = ("gate_logits", "num_experts", "top_k", "attention_mask")
BalanceLoss = Callable[..., Tensor]


def load_balancing_loss(
    gate_logits: Sequence[Tensor],
    num_experts: int,
    top_k: int = 2,
    attention_mask: Tensor | None = None,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """This rank's share of a microbatch's auxiliary loss; the shares of the group's ranks sum up to it.

    Computed as transformers' load_balancing_loss_func does, in float32 whatever the logits' dtype.
    Collective over `group`.

    Args:
        gate_logits: of each mixture, (rows * sequence, experts)
        attention_mask: (rows, sequence), 0 for tokens that do not count
        group: the ranks that share the microbatch's tokens; None where all are here
    """
    device = gate_logits[0].device
    chosen = torch.zeros(num_experts + 1, device=device)  # the last entry counts tokens
    probability = torch.zeros(num_experts, device=device)
    for logits in gate_logits:
        weights = torch.softmax(logits.to(device), dim=-1)
        indices = torch.topk(weights, top_k, dim=-1).indices
        if attention_mask is None:
            counts = torch.ones(logits.shape[0], device=device)
        else:
            counts = attention_mask.reshape(-1).to(device=device, dtype=torch.float32)
        chosen[:-1].scatter_add_(0, indices.reshape(-1), counts.repeat_interleave(top_k))
        chosen[-1] += counts.sum()
        probability = probability + (weights.float() * counts.unsqueeze(-1)).sum(0)
    if group is not None:
        dist.all_reduce(chosen, group=group)
    tokens = chosen[-1]
    return (chosen[:-1] / tokens * (probability / tokens)).sum() * num_experts


def asks_for_balance(model: PreTrainedModel) -> bool:
    """Whether the model's config makes its forward compute the routers' loss."""
    owners = (model.config, model.config.get_text_config())
    return any(getattr(owner, "output_router_logits", False) for owner in owners)


def balance_function(model: nn.Module) -> BalanceLoss | None:
    """The function by which the model's forward computes its routers' loss; None without one."""
    forward: Any = inspect.unwrap(type(model).forward)
    return forward.__globals__.get(_NAME) if _NAME in forward.__code__.co_names else None


def check_load_balancing(function: BalanceLoss, num_experts: int, top_k: int) -> None:
    """Raise ModelError where a model's `function` computes something else than load_balancing_loss.

    Args:
        function: takes (gate_logits, num_experts, top_k, attention_mask)
    """
    name = f"{getattr(function, '__module__', '')}.{getattr(function, '__name__', function)}"
    rule = "over several ranks it is computed as in transformers' load_balancing_loss_func"
    remedy = "Train without the routers' logits (output_router_logits=False) or with cp=1"
    takes = tuple(inspect.signature(function).parameters)
    if takes != _TAKES:
        raise ModelError(f"{name}, which takes ({', '.join(takes)})", rule, remedy)
    logits = tuple(
        (torch.arange(12 * num_experts) * 0.7 + layer).sin().view(12, num_experts) for layer in range(2)
    )
    masked = torch.ones(3, 4)
    masked[0, :2] = 0
    for mask in (None, masked):
        theirs = float(function(logits, num_experts, top_k, mask))
        ours = float(load_balancing_loss(logits, num_experts, top_k, mask))
        if not abs(theirs - ours) <= 1e-5 * abs(theirs):
            raise ModelError(f"{name}, which gives {theirs:.6g} and not {ours:.6g}", rule, remedy)


def replace_balance_loss(model: nn.Module, function: BalanceLoss) -> None:
    """Make the forward of `model`, and of no other model, call `function` in place of its file's function.

    The model gets a class of the same name with a copy of the forward, decorators too; its file and its
    former class do not change. Raises ModelError for an unknown kind of decorator.
    """
    model.__class__ = derive(type(model), forward=functools.partial(_rebound, function=function))


def _rebound(plain: Any, function: BalanceLoss) -> Any:
    """A copy of `plain` with `function` in its globals; for a decorated function, with such a copy inside."""
    names, cells = plain.__globals__, plain.__closure__
    wrapped = getattr(plain, "__wrapped__", None)
    inner = None if wrapped is None else _rebound(wrapped, function)
    if inner is None:
        names = {**names, _NAME: function}
    else:
        if all(cell.cell_contents is not wrapped for cell in cells or ()):
            raise ModelError(
                f"{plain.__qualname__}, decorated in a way that is not known",
                f"over a split sequence, penstock replaces the model's {_NAME}",
                "Set output_router_logits=False, or leave out cp",
            )
        cells = tuple(CellType(inner) if cell.cell_contents is wrapped else cell for cell in cells or ())
    made = FunctionType(plain.__code__, names, plain.__name__, plain.__defaults__, cells)
    functools.update_wrapper(made, plain)
    made.__kwdefaults__ = plain.__kwdefaults__
    if inner is None:
        del made.__wrapped__  # type: ignore[attr-defined]
    else:
        made.__wrapped__ = inner  # type: ignore[attr-defined]
    return made
