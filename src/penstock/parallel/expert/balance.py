"""The auxiliary loss that keeps experts evenly used, over the tokens of all ranks.

It is a product of two means over tokens, how often an expert is chosen and how probable it is,

    loss = experts * sum over e of  (chosen_e / tokens) * (probability_e / tokens)

so the mean of the ranks' losses is another number than the loss of all their tokens. But only the probability
has a gradient. With `chosen` and `tokens` counted over all ranks, each rank's part has its own probabilities
alone; the parts sum up to the whole loss, and each one's gradient is that of the whole.

A model's forward calls the function that its file has for it, with the router logits of all layers.
`balance_by` gives the model a class of its own, whose forward finds another function under that name.
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

_NAME = "load_balancing_loss_func"  # in each of transformers' files that has one
_TAKES = ("gate_logits", "num_experts", "top_k", "attention_mask")
Balance = Callable[..., Tensor]


def load_balancing_loss(
    gate_logits: Sequence[Tensor],
    num_experts: int,
    top_k: int = 2,
    attention_mask: Tensor | None = None,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """This rank's part of the auxiliary loss of one microbatch; the parts of the group's ranks sum up to it.

    gate_logits: of each mixture, (rows * sequence, experts)
    attention_mask: (rows, sequence), 0 where a token does not count
    group: the ranks among which the microbatch's tokens lie; None where all lie here. Collective.

    Computed as transformers' load_balancing_loss_func does, in float32 whatever the logits' dtype.
    """
    device = gate_logits[0].device
    chosen = torch.zeros(num_experts + 1, device=device)  # the last entry counts tokens
    probability = torch.zeros(num_experts, device=device)
    for logits in gate_logits:
        weights = torch.softmax(logits.to(device), dim=-1)
        indices = torch.topk(weights, top_k, dim=-1).indices
        counts = _mask_of(attention_mask, logits.shape[0], device)
        each = counts.repeat_interleave(top_k)
        chosen[:-1].scatter_add_(0, indices.reshape(-1), each)
        chosen[-1] += counts.sum()
        probability = probability + (weights.float() * counts.unsqueeze(-1)).sum(0)
    if group is not None:
        dist.all_reduce(chosen, group=group)
    tokens = chosen[-1]
    return (chosen[:-1] / tokens * (probability / tokens)).sum() * num_experts


def _mask_of(attention_mask: Tensor | None, tokens: int, device: torch.device) -> Tensor:
    if attention_mask is None:
        return torch.ones(tokens, device=device)
    return attention_mask.reshape(-1).to(device=device, dtype=torch.float32)


def asks_for_balance(model: PreTrainedModel) -> bool:
    """Whether the model's config has its forward compute the routers' loss."""
    owners = (model.config, model.config.get_text_config())
    return any(getattr(owner, "output_router_logits", False) for owner in owners)


def own_function(model: nn.Module) -> Balance | None:
    """What the model's forward computes its routers' loss by; None where it calls nothing of that name."""
    forward: Any = inspect.unwrap(type(model).forward)
    return forward.__globals__.get(_NAME) if _NAME in forward.__code__.co_names else None


def check_load_balancing(function: Balance, num_experts: int, top_k: int) -> None:
    """Raises ModelError where a model's own `function` computes something else than load_balancing_loss.

    function: takes (gate_logits, num_experts, top_k, attention_mask), e.g. transformers'
        load_balancing_loss_func of the model's file
    """
    takes = tuple(inspect.signature(function).parameters)
    if takes != _TAKES:
        raise _other(function, f"takes ({', '.join(takes)})")
    logits = tuple(
        (torch.arange(12 * num_experts) * 0.7 + layer).sin().view(12, num_experts) for layer in range(2)
    )
    mask = torch.ones(3, 4)
    mask[0, :2] = 0
    for given in (None, mask):
        theirs = float(function(logits, num_experts, top_k, given))
        ours = float(load_balancing_loss(logits, num_experts, top_k, given))
        if not abs(theirs - ours) <= 1e-5 * abs(theirs):
            raise _other(function, f"gives {theirs:.6g} and not {ours:.6g}")


def _other(function: Balance, how: str) -> ModelError:
    name = f"{getattr(function, '__module__', '')}.{getattr(function, '__name__', function)}"
    return ModelError(
        f"{name}, which {how}",
        "over several ranks it is computed as in transformers' load_balancing_loss_func",
        "Train without the routers' logits (output_router_logits=False) or with cp=1",
    )


def balance_by(model: nn.Module, function: Balance) -> Callable[[], None]:
    """Let the forward of `model`, and of no other, call `function` where it calls its file's own.

    The model's class becomes one of the same name with a copy of the forward, decorators too; its file and
    its class stay as they are. The function returned undoes that.
    """
    own = type(model)
    forward = _rebound(own.forward, function)
    model.__class__ = type(own.__name__, (own,), {"__module__": own.__module__, "forward": forward})

    def undo() -> None:
        model.__class__ = own

    return undo


def _rebound(plain: Any, function: Balance) -> Any:
    """A copy of `plain` whose globals hold `function`; of a decorated one, with such a copy inside."""
    names, cells = plain.__globals__, plain.__closure__
    wrapped = getattr(plain, "__wrapped__", None)
    inner = None if wrapped is None else _rebound(wrapped, function)
    if inner is None:
        names = {**names, _NAME: function}
    else:
        if all(cell.cell_contents is not wrapped for cell in cells or ()):
            raise ModelError(
                f"{plain.__qualname__}, decorated in a way that is not known",
                f"over a cut sequence its {_NAME} is put in the place of the model's own",
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
