"""Write a safetensors file from its first byte to its last, and hash it on the way.

The file begins with the length of its header in 8 bytes. The header is JSON: dtype, shape and place of each
tensor. The tensors follow, wider dtypes first, so that each begins at a multiple of its width.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.errors import CheckpointError
from penstock.models.weights.files import DTYPES
from penstock.models.weights.folder import Entry, made_entry


def widest_first(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same in the order of a file, which is otherwise kept."""
    return dict(sorted(tensors.items(), key=lambda item: -item[1].itemsize))


def write_tensors(
    file: Path,
    layout: Mapping[str, Tensor],
    values: Iterable[tuple[str, Tensor]] | None = None,
    buffers: Collection[str] = (),
) -> Entry:
    """Write a file, and return its entry in a manifest.

    Args:
        layout: shapes and dtypes by name, in the order of the file (`widest_first`); may be on meta
        values: the tensors in that order, each made when its turn comes; None takes those of `layout`
        buffers: names that may hold infinity, as a mask does. The entry names the first other that does so

    Raises CheckpointError for a dtype that safetensors lacks.
    """
    digest, odd = hashlib.sha256(), ""
    with file.open("wb") as opened:

        def write(data: bytes | memoryview) -> None:
            digest.update(data)
            opened.write(data)

        write(_header(layout))
        for expected, (name, value) in zip(layout, values or layout.items(), strict=True):
            assert name == expected, f"{name} in the place of {expected}"
            flat = value.detach().cpu().contiguous().reshape(-1)
            write(memoryview(flat.view(torch.uint8).numpy()))  # type: ignore[arg-type]
            if not odd and name not in buffers and not is_finite(flat):
                odd = name
        return made_entry(opened.tell(), digest.hexdigest(), odd)


def is_finite(flat: Tensor) -> bool:
    """A sum is finite only where all values are. It may also be too large: then each value is looked at.

    Of the time to hash and write a file the sum takes 3 %, and looking at each value takes as long as both.
    """
    if not flat.is_floating_point() or flat.itemsize == 1:  # torch adds no 8-bit floats
        return True
    return math.isfinite(flat.sum().item()) or bool(flat.isfinite().all())


def _header(layout: Mapping[str, Tensor]) -> bytes:
    dtypes = {dtype: name for name, dtype in DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, value in layout.items():
        if value.dtype not in dtypes:
            raise CheckpointError(
                f"{name} of {value.dtype}", "safetensors has no such dtype", "Convert it to another first"
            )
        header[name] = {"dtype": dtypes[value.dtype], "shape": list(value.shape),
                        "data_offsets": [end, end + value.nbytes]}  # fmt: skip
        end += value.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text
