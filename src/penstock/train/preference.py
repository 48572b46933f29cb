"""Training on preferences: reference log-probabilities, and rewards in the metrics.

    build      starting weights, before a checkpoint is read
    references  log p of each chosen and rejected row by these weights, an adapter off   reference_logps.npz
               of a single completion: log p of it, and of its neighbour's after the same prompt
    steps      each batch has the entry reference_logps; the loss sums rewards, which `Rewards` logs
               with KTO, log p of the neighbours' completions by the present weights gives the KL term first

The pass over the rows runs once a run: a resumed run reads its file, and computes what the file lacks.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt
import torch

from penstock.batch.kto import KL, divergence
from penstock.batch.row_loss import REFERENCE, RowLoss
from penstock.pipeline.pipeline import Pipeline
from penstock.reading import open_regular
from penstock.train.config.sections import TrainConfig
from penstock.train.data.batches import Data, LoadedBatch
from penstock.train.data.pairs import ReferringLayout
from penstock.train.data.rows import StoredRows
from penstock.train.data.sources import digest_of
from penstock.train.part import Run, RunPart, TrainStep
from penstock.train.records.metrics import MetricsRow, replacing

References = npt.NDArray[np.float64]
_FILE = "reference_logps.npz"


class Rewards(RunPart):
    """Logs the rewards of a step's rows, and of held-out ones, by TRL's names. Collective each time."""

    def __init__(self, run: Run, loss: RowLoss) -> None:
        super().__init__(run)
        self._loss = loss

    @contextmanager
    def training(self) -> Iterator[None]:
        self._loss.metrics()  # forgets what the check of the split has added
        yield

    def evaluated(self) -> MetricsRow:
        return {f"held_out_{name}": mean for name, mean in self._gathered().items()}

    def row(self, step: TrainStep) -> MetricsRow:
        return self._gathered()

    def _gathered(self) -> MetricsRow:
        return self._loss.metrics(self.run.pipe.ranks.gather)


class KLTerm(RunPart):
    """Computes the KL term of KTO before each step and evaluation, by the present weights. Collective."""

    def prepare(self, batch: LoadedBatch) -> LoadedBatch:
        pipe, content = self.run.pipe, batch.content
        assert isinstance(content, list)
        reference = torch.cat([part[REFERENCE] for part in batch.beside])
        term = divergence(pipe.logprobs(batch.beside), reference, pipe.ranks.gather)
        return batch._replace(content=[{**part, KL: term} for part in content])


def with_references(data: Data, config: TrainConfig, pipe: Pipeline, run: str | None) -> Data:
    """The data with the reference log-probabilities of its rows, by the weights of `pipe`. Collective.

    run: the identity of the run, on the process that writes its files; None on the others
    """
    layout = data.layout
    if not (isinstance(layout, ReferringLayout) and layout.refers):
        return data
    rows, held_out = layout.linked(data.rows, data.first_epoch()), layout.linked(data.held_out)
    path, key = config.output.path / _FILE, f"{run} {data.digest}"
    if rows.neighbours is not None:
        key += f" whole {digest_of(str(rows.neighbours.tolist()))}"  # other sizes of steps give others
    known = pipe.ranks.gather(None if run is None else _read(path, key))
    saved: dict[str, Any] = next(filter(None, known), {})
    evaluated = data.held_out_rows(config.train.evaluate_batches)
    trained = _completed(pipe, data, rows, _needed(data, config), saved.get("rows"))
    other = _completed(pipe, data, held_out, evaluated, saved.get("held_out"))
    if run is not None:
        _write(path, key, trained, other)
    rows, held_out = replace(rows, references=trained), replace(held_out, references=other)
    return replace(data, rows=rows, held_out=held_out)


def _needed(data: Data, config: TrainConfig) -> Sequence[int]:
    """The rows that the run trains on; all of them where it may leave some out and go on with later ones."""
    spike, steps = config.train.spike, config.train.last
    if spike is not None and spike.then == "rewind":
        return range(len(data.rows))
    return sorted(set(data.rows_until(steps)))


def _completed(
    pipe: Pipeline, data: Data, rows: StoredRows, needed: Sequence[int], saved: list[list[float]] | None
) -> References:
    """By row, the log-probabilities of its two completions; not a number for rows that are not needed."""
    made = np.full((len(rows), 2), np.nan)
    if saved is not None:
        made[:] = saved
    missing = [row for row in needed if np.isnan(made[row, 0])]
    size = data.sizes.full.rows
    part, parts = pipe.batch_part
    for at in range(0, len(missing), size):
        chosen = [missing[(at + index) % len(missing)] for index in range(size)]  # full batches, on any mesh
        mine = data.layout.deal(rows, chosen, parts)[part]
        _compute(pipe, data, rows, mine, made)
    return made


def _compute(pipe: Pipeline, data: Data, rows: StoredRows, mine: Sequence[int], made: References) -> None:
    """Fill in the log-probabilities of one batch, of which this pipeline has the rows `mine`. Collective."""
    layout = data.layout
    assert isinstance(layout, ReferringLayout)
    logps = pipe.logprobs(layout.referred(rows, mine), adapters=False).double().view(-1, 2).tolist()
    for of_rank in pipe.ranks.gather([layout.order(rows, mine), logps]):
        made[of_rank[0]] = of_rank[1]


def _read(path: Path, key: str) -> dict[str, list[list[float]]] | None:
    """The arrays of the file, if it is of this run and its data; what cannot be read is computed again."""
    try:
        with open_regular(path) as opened, np.load(opened, allow_pickle=False) as file:
            arrays = {name: file[name].tolist() for name in ("rows", "held_out")}
            return arrays if str(file["key"]) == key else None
    except (OSError, ValueError, KeyError, EOFError, BadZipFile, zlib.error):
        return None


def _write(path: Path, key: str, rows: References, held_out: References) -> None:
    """Raises RunError if the file cannot be written."""
    with replacing(path) as fresh, fresh.open("wb") as file:
        np.savez(file, key=np.array(key), rows=rows, held_out=held_out)
