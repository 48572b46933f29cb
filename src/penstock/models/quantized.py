"""The matrices under an adapter in 4 bits: NF4, of QLoRA (arXiv 2305.14314), by torchao.

A stage reads its weights in the model's dtype, and then puts each matrix that has an update in 4 bits: 64
entries share a scale, and 256 scales are in 8 bits. A product takes the matrix back to its input's dtype,
forwards and backwards. What the adapter does not touch stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from torch import nn

from penstock.errors import ConfigError, ModelError
from penstock.models.adapters import Adapter, wrappers

Quantize = Literal["nf4"]
_BLOCK, _SCALES = 64, 256  # entries that share a scale, scales that are quantised together


def check_quantized(model: nn.Module, adapter: Adapter | None, quantize: str) -> None:
    """Raise ConfigError or ModelError where `quantize_base` would."""
    if quantize != "nf4":
        raise ConfigError(f"quantize={quantize!r}", "weights under an adapter are in 'nf4'", "Take 'nf4'")
    if adapter is None:
        rule = "it is for frozen weights under an adapter, and here all weights are trained"
        raise ConfigError("quantize='nf4' without an adapter", rule, "Give an adapter, or leave it out")
    if adapter.config.use_dora:
        rule = "DoRA takes norms of the weights, which NF4 does not have"
        raise ConfigError("quantize='nf4' with DoRA", rule, "Take LoRA or rsLoRA")
    _nf4()
    for name, base in _bases(model):
        if base.weight.numel() % (_BLOCK * _SCALES):
            raise ModelError(
                f"{name} of shape {list(base.weight.shape)}, for nf4",
                f"a matrix has a multiple of {_BLOCK} x {_SCALES} entries",
                "Target other modules, or leave quantize out",
            )


def quantize_base(model: nn.Module) -> None:
    """Put the frozen matrices under the adapter in 4 bits, one after the other, in place."""
    nf4 = _nf4()
    for _, base in _bases(model):
        values = nf4.from_tensor(base.weight.detach(), _BLOCK, _SCALES)
        base.weight = nn.Parameter(values, requires_grad=False)


def _bases(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The linear layers that have an update."""
    for name, module in wrappers(model):
        if hasattr(module, "lora_A") and type(base := module.get_base_layer()) is nn.Linear:
            yield name, base


def _nf4() -> Any:
    try:
        from torchao.quantization import NF4Tensor
    except ImportError as cause:
        remedy = "Install it: pip install 'penstock[low-bits]'"
        raise ConfigError("quantize='nf4'", "torchao makes it, and is not installed", remedy) from cause
    return NF4Tensor
