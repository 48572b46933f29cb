"""The matrices under an adapter in 4 bits: NF4, of QLoRA (arXiv 2305.14314), by torchao.

A stage reads its weights in the model's dtype, and then quantises each matrix with an update to 4 bits: 64
entries share a scale, and groups of 256 scales are quantised to 8 bits. A product dequantises the matrix to
its input's dtype, in forward and backward. Matrices without an update are not changed.
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
    """Raise the ConfigError or ModelError of `quantize_base`."""
    if quantize != "nf4":
        raise ConfigError(f"quantize={quantize!r}", "weights under an adapter are in 'nf4'", "Take 'nf4'")
    if adapter is None:
        rule = "it is for frozen weights under an adapter, and here all weights are trained"
        raise ConfigError("quantize='nf4' without an adapter", rule, "Give an adapter, or leave it out")
    if adapter.config.use_dora:
        rule = "DoRA needs norms of the weights, which NF4 lacks"
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
    """Quantise the frozen matrices under the adapter to 4 bits, one after the other, in place."""
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
        raise ConfigError("quantize='nf4'", "it needs torchao, which is not installed", remedy) from cause
    return NF4Tensor
