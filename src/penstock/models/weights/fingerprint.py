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
        return _digest({name: file.described(name, _END) for name, file in file_of.items()})


def fingerprint_of_tensors(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """The same of weights in memory, by the names and in the shapes that their files have."""
    described = {}
    for name, tensor in tensors:
        flat, count = tensor.detach().reshape(-1), max(1, _END // tensor.element_size())
        ends = [
            end.cpu().contiguous().view(torch.uint8).numpy().tobytes()
            for end in (flat[:count], flat[-count:])
        ]
        described[name] = NAMES.get(tensor.dtype, str(tensor.dtype)), list(tensor.shape), ends
    return _digest(described)


def _digest(described: Mapping[str, tuple[str, list[int], list[bytes]]]) -> str:
    digest = hashlib.sha256()
    for name, (dtype, shape, ends) in sorted(described.items()):
        content = f"{dtype} {shape} ".encode() + b"".join(ends)
        digest.update(name.encode() + b" " + hashlib.sha256(content).digest())
    return digest.hexdigest()
