"""How the data of a resumed run differs from that of its checkpoint, which holds a digest of each source.

For data that is tokenised before training, the digest is of each source's tokens, labels and lengths, which
determine the batches; their counts come with it. For a stream, which tokenises while it trains, it is of the
files, with their number and their bytes: it does not show whether a change lies behind the reader's position.
Both are of bytes on the disk: penstock.train.data.store compares them with the bytes that were written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Known = dict[str, Any]  # JSON: path, digest, and counts: documents and tokens, or files and bytes


def changes(before: object, now: Sequence[Known]) -> list[str]:
    """How the sources differ, in words, a line for each.

    Args:
        before: the sources in a checkpoint; a checkpoint of another version may have anything there
    """
    if not isinstance(before, list) or not all(isinstance(source, Mapping) for source in before):
        return []
    if len(before) != len(now):
        return [f"it has {_number(len(now), 'sources')} (was {len(before)})"]
    pairs = zip(before, now, strict=True)
    return [_change(was, has) for was, has in pairs if was.get("digest") != has["digest"]]


def _change(was: Mapping[str, Any], has: Known) -> str:
    counts = {key: count for key, count in has.items() if type(count) is int}
    changed = [
        f"{_number(count, key)} (was {was[key]:,})"
        for key, count in counts.items()
        if type(was.get(key)) is int and was[key] != count
    ]
    same = f"as many {' and '.join(counts)} as before, and others"
    moved = "" if was.get("path") == has["path"] else f" (was {was.get('path')})"
    return f"{has['path']}{moved} has {' and '.join(changed) or same}"


def _number(count: int, noun: str) -> str:
    return f"{count:,} {noun if count != 1 else noun.removesuffix('s')}"
