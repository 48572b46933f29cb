"""Training with KTO: each row's neighbour, and the KL term of a step.

neighbours   once, before the references: of which row each prompt also gets the completion
references   log p of both, by the starting weights (preference.py)
each step    log p of the neighbours' completions by the present weights; the mean log-ratio is kl
"""

from __future__ import annotations

from dataclasses import replace

import torch

from penstock.batch.kto import KL, divergence
from penstock.batch.row_loss import REFERENCE
from penstock.train.data.loading import Data, LoadedBatch
from penstock.train.data.unpaired import neighbours
from penstock.train.part import RunPart


def with_neighbours(data: Data) -> Data:
    """The data, with each row's neighbour for the KL term."""
    trained, held_out = neighbours(len(data.rows), data.first_epoch()), neighbours(len(data.held_out))
    return replace(
        data,
        rows=replace(data.rows, neighbours=trained),
        held_out=replace(data.held_out, neighbours=held_out),
    )


class KLTerm(RunPart):
    """Computes the KL term of KTO before each step and evaluation, by the present weights. Collective."""

    def prepare(self, batch: LoadedBatch) -> LoadedBatch:
        pipe, content = self.run.pipe, batch.content
        assert isinstance(content, list)
        reference = torch.cat([part[REFERENCE] for part in batch.beside])
        term = divergence(pipe.logprobs(batch.beside), reference, pipe.ranks.gather)
        return batch._replace(content=[{**part, KL: term} for part in content])
