"""To a trainer, all ranks are one process, which keeps its own index."""

from __future__ import annotations

import io
from pathlib import Path

import torch
from accelerate import PartialState
from torch.utils.data import DataLoader, TensorDataset

from penstock.integrations.one_process import OneProcessAccelerator, as_one_process
from support import trainers
from support.pool import Pool


def test_arguments_count_one_process_with_the_rows_of_all_parts(tmp_path: Path) -> None:
    with trainers.as_launched():
        args = trainers.arguments(tmp_path, per_device_train_batch_size=3, per_device_eval_batch_size=5)
        ours = as_one_process(args, 2)
        assert (ours.train_batch_size, ours.eval_batch_size) == (6, 10)
        assert (args.train_batch_size, args.eval_batch_size) == (3, 5)


def test_each_rank_sees_one_process_and_its_own_index(pool: Pool, tmp_path: Path) -> None:
    for rank, facts in enumerate(pool.run(2, _facts, tmp_path)):
        assert facts == {"world": 1, "rank": rank, "saves": rank == 0, "real": 2, "loaded": 1}


def _facts(folder: Path) -> dict[str, int]:
    with trainers.as_launched():
        args = as_one_process(trainers.arguments(folder), 1)
        file = io.BytesIO()
        torch.save(args, file)  # as Trainer does
        file.seek(0)
        return {
            "world": args.world_size,
            "rank": args.process_index,
            "saves": args.should_save,
            "real": PartialState().num_processes,  # others, as a data set's preparation, see the job
            "loaded": torch.load(file, weights_only=False).world_size,
        }


def test_every_rank_reads_all_rows_and_gathers_nothing(pool: Pool) -> None:
    for rows, gathered in pool.run(2, _read):
        assert rows == list(range(5))
        assert gathered == [7]


def _read() -> tuple[list[int], list[int]]:
    with trainers.as_launched():
        accelerator = OneProcessAccelerator(cpu=True)
        loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(5)), batch_size=2))
        rows = [int(row) for batch in loader for row in batch[0]]
        return rows, accelerator.gather(torch.tensor([7])).tolist()
