"""The cells of a schedule's file: ops as text, each at a place that an error can point to."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from penstock.errors import ConfigError
from penstock.schedule.ops import Op, Pair
from penstock.schedule.placement import Placement

Place = tuple[int, int]  # row and column, counted from 0; the row is the rank

# what PyTorch adds for its own executor, once it knows what each rank computes
_COMMUNICATION = re.compile(r"\d+(SEND|RECV)_[FB]\d+|\d+(UNSHARD|RESHARD|REDUCE_GRAD)", re.ASCII)
_OP = re.compile(r"\d{1,9}[FBIW]\d{1,9}", re.ASCII)
_PAIR = re.compile(rf"\(\s*{_OP.pattern}\s*;\s*{_OP.pattern}\s*\)\s*OVERLAP_F_B", re.ASCII)
_SHOWN = 10


class Cells:
    """Reads the cells of all ranks, and collects what is wrong with them.

    name_place: how a place is called in this file
    communication: whether PyTorch's ops that send, receive, gather and release are passed over
    """

    def __init__(self, path: Path, name_place: Callable[[Place], str], *, communication: bool) -> None:
        self._path, self.name_place, self._communication = path, name_place, communication
        self.places: dict[Op, Place] = {}
        self.overlaps: set[Pair] = set()
        self.complaints: list[str] = []

    def program(self, rank: int, cells: Sequence[str]) -> tuple[Op, ...]:
        """The ops of a row."""
        ops: list[Op] = []
        for column, cell in enumerate(cells):
            if text := cell.strip():
                ops += self._read(text, (rank, column))
        return tuple(ops)

    def _read(self, text: str, place: Place) -> list[Op]:
        if self._communication and _COMMUNICATION.fullmatch(text):
            return []
        if _OP.fullmatch(text):
            ops = [Op.parse(text)]
        elif _PAIR.fullmatch(text):
            ops = self._pair(text, place)
        else:
            self.complain(place, f"{shortened(text)} is no op{_likely_cause(text)}")
            return []
        for op in ops:
            first = self.places.setdefault(op, place)
            if first is not place:
                self.complain(place, f"{op} stands already at {self.name_place(first)}")
        return ops

    def _pair(self, text: str, place: Place) -> list[Op]:
        pair = Pair.parse(text)
        assert pair is not None
        if pair.forward.kind != "F" or pair.backward.kind not in ("B", "I"):
            self.complain(place, f"{shortened(text)} overlaps other kinds than a forward and then a backward")
        self.overlaps.add(pair)
        return list(pair)

    def complain(self, place: Place, what: str) -> None:
        self.complaints.append(f"{self.name_place(place)}: {what}")

    def check(self) -> None:
        """Raise ConfigError with all that is wrong."""
        if not self.complaints:
            return
        rule = self.complaints[0]
        if len(self.complaints) > 1:
            shown = "".join(f"\n  {complaint}" for complaint in self.complaints[:_SHOWN])
            more = len(self.complaints) - _SHOWN
            rule = f"{len(self.complaints)} cells are wrong:{shown}" + (
                f"\n  and {more} more" if more > 0 else ""
            )
        raise ConfigError(
            f"schedule file {str(self._path)!r}",
            rule,
            "Write an op like 2F0 (stage 2, forward, microbatch 0) and each op once, a row for each rank",
        )


def placed(programs: Sequence[Sequence[Op]], cells: Cells) -> Placement:
    """The placement that puts each stage where its ops stand. Raises ConfigError where none does."""
    rank_of: dict[int, int] = {}
    first: dict[int, Op] = {}
    torn: set[int] = set()
    for rank, program in enumerate(programs):
        if not program:
            cells.complain((rank, 0), "the row holds no op that computes; each rank hosts at least one stage")
        for op in program:
            if rank_of.setdefault(op.stage, rank) != rank and op.stage not in torn:
                torn.add(op.stage)
                there = cells.name_place(cells.places[first[op.stage]])
                what = f"{op} is of stage {op.stage}, which stands at {there} on rank {rank_of[op.stage]}"
                cells.complain(cells.places[op], f"{what}; a stage is on one rank")
            first.setdefault(op.stage, op)
    for stage in sorted(rank_of):
        if stage and stage - 1 not in rank_of:
            what = f"{first[stage]} is of stage {stage}, and stage {stage - 1} is nowhere"
            cells.complain(cells.places[first[stage]], f"{what}; stages are numbered from 0 without a gap")
    cells.check()
    return Placement(tuple(rank_of[stage] for stage in range(len(rank_of))))


def shortened(text: str) -> str:
    return repr(text) if len(text) <= 40 else f"{text[:37]!r}..."


def _likely_cause(text: str) -> str:
    """What spreadsheets and people do to such a file."""
    if "(" not in text and (";" in text or "\t" in text):
        return "; cells are separated by commas"
    if _OP.fullmatch(text.upper()):
        return f"; {text.upper()} is"
    if re.fullmatch(r"\d+[FBIW]", text, re.ASCII):
        return "; the microbatch is missing"
    return ""
