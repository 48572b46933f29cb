"""The work of a model: the ops of its parts."""

from __future__ import annotations

from typing import Literal, NamedTuple

OpKind = Literal["matmul", "attention", "other"]


class OpWork(NamedTuple):
    """`count` ops of one kind, dtype and size.

    dtype: of the operands, as torch names it without its prefix: "bfloat16", "float32"
    flops: of one op; a multiply-add counts two. 0 for "other" ops, which memory bounds
    nbytes: that one op reads and writes
    """

    kind: OpKind
    dtype: str
    flops: float
    nbytes: float
    count: float = 1.0
