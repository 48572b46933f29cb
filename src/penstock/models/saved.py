"""The whole model's files, written and read by its stages."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, PretrainedConfig

from penstock.errors import CheckpointError
from penstock.models import weights
from penstock.models.weights import Ties
from penstock.runtime.processes import Processes
from penstock.runtime.stage import Stage


@dataclass(frozen=True)
class SavedModel:
    """What of the whole model its stages need to write and read its files."""

    config: PretrainedConfig
    generation_config: GenerationConfig | None
    ties: Ties
    stages: int

    @property
    def copies(self) -> frozenset[str]:
        """Names under which a weight appears that is saved under another."""
        return frozenset(name for names in self.ties for name in names[1:])

    def write(self, folder: Path, stages: Mapping[int, Stage], processes: Processes) -> None:
        """Write this process's stages into `folder`; process 0 adds index and configs."""
        mine = {
            self._file(index): weights.stored(stage.module, self.copies) for index, stage in stages.items()
        }
        sizes = {file: {name: value.nbytes for name, value in held.items()} for file, held in mine.items()}
        everywhere: dict[str, dict[str, int]] = {}
        for part in processes.gather(sizes):  # before anything that can fail on one process alone
            everywhere |= part
        for file, held in mine.items():
            weights.write(held, folder / file)
        if processes.index == 0:
            if self.stages > 1:
                weights.write_index(folder, everywhere)
            self.config.save_pretrained(folder)
            if self.generation_config is not None:
                self.generation_config.save_pretrained(folder)

    def load(self, folder: str | Path, stages: Mapping[int, Stage]) -> None:
        """Read the stages' weights back, in place. Raises CheckpointError."""
        folder = Path(folder)
        files = weights.weight_files(folder)
        if not files:
            raise CheckpointError(
                str(folder), "it holds no weights", "Give a folder that save_pretrained wrote"
            )
        for stage in stages.values():
            memo: dict[int, Any] = {
                id(p): nn.Parameter(p.to("meta"), p.requires_grad) for p in stage.module.parameters()
            }
            fresh = copy.deepcopy(stage.module, memo)
            weights.load(fresh, files, self.ties)
            read = fresh.state_dict()
            with torch.no_grad():
                for name, own in stage.module.state_dict().items():
                    own.copy_(read[name])

    def _file(self, stage: int) -> str:
        if self.stages == 1:
            return weights.SINGLE
        return f"model-{stage + 1:05d}-of-{self.stages:05d}.safetensors"
