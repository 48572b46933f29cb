"""Accelerate's view of a pipeline: all ranks are one process.

    plain Trainer, 1 process            PipelineTrainer, each rank
    reads a batch of b rows             reads the same batch of b * dp rows
    computes its loss                   computes its stages' part of it; the step gives every rank the loss
    gathers nothing                     gathers nothing

So the trainer's own loop, on each rank, counts, logs, evaluates and calls callbacks as in one process. Only
the first rank writes files: `process_index` is the rank's own.
"""

from __future__ import annotations

import copy
from typing import Any

from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType
from transformers import TrainingArguments


class OneProcessState(PartialState):  # type: ignore[misc]  # accelerate has no types
    """Accelerate's state of this process, in a job that counts as one process. Its index stays the rank."""

    @property
    def num_processes(self) -> int:
        return 1

    @property
    def distributed_type(self) -> Any:
        return DistributedType.NO


class OneProcessAccelerator(Accelerator):  # type: ignore[misc]  # accelerate has no types
    """Gives every rank all rows of a data loader, and takes each rank's results as those of all."""

    @property
    def num_processes(self) -> int:
        return 1

    @property
    def process_index(self) -> int:
        return 0

    @property
    def distributed_type(self) -> Any:
        return DistributedType.NO

    def gather(self, tensor: Any) -> Any:
        return tensor

    def pad_across_processes(self, tensor: Any, *_: Any, **__: Any) -> Any:
        return tensor


def as_one_process(args: TrainingArguments, parts: int) -> TrainingArguments:
    """A copy of `args` for a job that counts as one process.

    parts: data-parallel parts of a batch. A batch has the rows of all of them.
    """
    ours = copy.copy(args)
    ours.distributed_state = OneProcessState()
    ours.per_device_train_batch_size *= parts
    ours.per_device_eval_batch_size *= parts
    return ours
