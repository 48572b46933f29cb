"""The auxiliary loss that keeps experts evenly used, over the tokens of all ranks.

It is a product of two means over tokens, how often an expert is chosen and how probable it is,

    loss = experts * sum over e of  (chosen_e / tokens) * (probability_e / tokens)

so the mean of the ranks' losses is another number than the loss of all their tokens. But only the probability
has a gradient. With `chosen` and `tokens` counted over all ranks, each rank's part has its own probabilities
alone; the parts sum up to the whole loss, and each one's gradient is that of the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.errors import ModelError


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


def check_load_balancing(function: Callable[..., Tensor], num_experts: int, top_k: int) -> None:
    """Raises ModelError where a model's own `function` computes something else than load_balancing_loss.

    function: takes (gate_logits, num_experts, top_k, attention_mask), e.g. transformers'
        load_balancing_loss_func of the model's file
    """
    logits = tuple(
        (torch.arange(12 * num_experts) * 0.7 + layer).sin().view(12, num_experts) for layer in range(2)
    )
    mask = torch.ones(3, 4)
    mask[0, :2] = 0
    for given in (None, mask):
        theirs = float(function(logits, num_experts, top_k, given))
        ours = float(load_balancing_loss(logits, num_experts, top_k, given))
        if not abs(theirs - ours) <= 1e-5 * abs(theirs):
            name = f"{getattr(function, '__module__', '')}.{getattr(function, '__name__', function)}"
            raise ModelError(
                f"{name}, which gives {theirs:.6g} and not {ours:.6g}",
                "over several ranks it is computed as in transformers' load_balancing_loss_func",
                "Train without the routers' logits (output_router_logits=False) or with ep=1",
            )
