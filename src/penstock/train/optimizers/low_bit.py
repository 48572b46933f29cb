"""AdamW by torchao: moments in bfloat16 or in blocks of few bits, stochastic rounding of bfloat16 weights.

torchao is imported only when an optimizer is made, as the import takes most of a second.
"""

from __future__ import annotations

import importlib.util
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from penstock.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

# by optimizer.states: the class names, as checkpoints have them
NAMES = {"bfloat16": "AdamWBfloat16", "8bit": "AdamW8bit", "4bit": "AdamW4bit", "fp8": "AdamWFp8"}

# torchao's: bits of an entry, entries of a block, which has a scale in float32, and entries of the table of
# values, in float32
_BLOCKS = {"8bit": (8, 256, 256), "4bit": (4, 128, 16), "fp8": (8, 256, 0)}
_SMALLEST = 4096  # entries; a smaller tensor, or one of no whole blocks, has moments in the weights' dtype


def check_installed(key: str) -> None:
    """Raise ConfigError if torchao is missing. key: of the config, with its value"""
    if importlib.util.find_spec("torchao") is None:
        raise ConfigError(key, "it needs torchao, which is not installed", "pip install 'penstock[low-bits]'")


def kept(states: str, parameter: Tensor, entries: int) -> float:
    """Bytes of both moments of a parameter with so many entries."""
    if states == "bfloat16":
        return 2 * 2 * entries
    bits, block, table = _BLOCKS[states]
    if entries < _SMALLEST or entries % block:
        return 2 * parameter.itemsize * entries
    return 2 * (entries * bits / 8 + entries / block * 4 + table * 4)


def make(
    states: str | None, groups: list[dict[str, Any]], stochastic_rounding: bool, **options: Any
) -> Optimizer:
    """torchao's AdamW over `groups`, whose parameters have names."""
    check_installed(f"states={states}")
    import torchao.optim

    from penstock.private import TorchaoAdamW

    if states is None or states == "bfloat16":
        base, name = TorchaoAdamW, NAMES.get(states or "", "AdamW")
    else:
        base = getattr(torchao.optim, NAMES[states])
        name = NAMES[states]
    changed: dict[str, Any] = {"_new_buffer": _bfloat16_buffer} if states == "bfloat16" else {}
    if stochastic_rounding:
        changed["step"] = _step_by_names(base.step)
    kind: Callable[..., Optimizer] = type(name, (base,), changed)
    return kind(groups, bf16_stochastic_round=stochastic_rounding, **options)


def _bfloat16_buffer(optimizer: Any, parameter: Tensor, signed: bool) -> Tensor:
    import torch

    return torch.zeros_like(parameter, dtype=torch.bfloat16)


def _step_by_names(step: Callable[[Any], Any]) -> Callable[..., Any]:
    """`step` for one parameter at a time, with random bits seeded by its name and its number of steps.

    So the copies of a tied weight on two ranks stay equal, and the number of ranks changes nothing.
    """

    def by_names(optimizer: Any, closure: Callable[[], float] | None = None) -> float | None:
        import torch

        from penstock.runtime.rng import generator_of

        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = optimizer.param_groups
        try:
            for group in groups:
                for name, parameter in zip(group["param_names"], group["params"], strict=True):
                    if parameter.grad is None:
                        continue
                    done = int(optimizer.state.get(parameter, {}).get("step", 0))
                    generator = generator_of(parameter.device)
                    before = generator.get_state()
                    generator.manual_seed(zlib.crc32(f"{name} {done}".encode()))
                    optimizer.param_groups = [{**group, "params": [parameter]}]
                    step(optimizer)
                    generator.set_state(before)
        finally:
            optimizer.param_groups = groups
        return loss

    return by_names
