"""The base model that an adapter belongs to: a digest of each weight's name, dtype, shape and ends.

Reading all of a large model would take as long as loading it. Fine-tuning changes most entries of a weight,
so that a model of the same shape with other weights has another fingerprint. How tensors lie in files does
not count.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from penstock.models.weights.tensor_file import NAMES, open_all

_END = 2048  # bytes of each end of a weight


def fingerprint_of_files(files: Sequence[Path]) -> str:
    """Of the weights in safetensors files."""
    with open_all(files) as file_of:
        return _digest({n: _described(*file.described(n, _END)) for n, file in file_of.items()})


def fingerprint_of_tensors(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """The same of weights in memory, by the names and in the shapes that their files have."""
    found: dict[str, bytes] = {}
    for name, tensor in tensors:
        flat, count = tensor.detach().reshape(-1), max(1, _END // tensor.element_size())
        ends = [_bytes(flat[:count]), _bytes(flat[-count:])]
        found[name] = _described(NAMES.get(tensor.dtype, str(tensor.dtype)), list(tensor.shape), ends)
    return _digest(found)


def _bytes(tensor: Tensor) -> bytes:
    return bytes(tensor.cpu().contiguous().view(torch.uint8).numpy())


def _described(dtype: str, shape: Sequence[int], ends: Sequence[bytes]) -> bytes:
    return f"{dtype} {list(shape)} ".encode() + b"".join(ends)


def _digest(found: Mapping[str, bytes]) -> str:
    digest = hashlib.sha256()
    for name, described in sorted(found.items()):
        digest.update(name.encode() + b" " + hashlib.sha256(described).digest())
    return digest.hexdigest()
