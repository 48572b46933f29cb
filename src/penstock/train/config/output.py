"""The section `output`: where a run writes, and which of its checkpoints stay."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from penstock.errors import ConfigError
from penstock.options import Count, SmallNatural
from penstock.train.config.values import PathText, Section
from penstock.train.records.trackers import TrackerSection

KeptMetric = Literal[
    "held_out_loss", "held_out_token_accuracy", "held_out_accuracy", "held_out_rewards/accuracies",
    "held_out_rewards/margins",
]  # fmt: skip


class KeepSection(Section):
    """Which checkpoints stay when a newer one has been written; the newest always does."""

    # number of the newest that stay; null: all of train.checkpoint_every, and without `best` all
    last: Count | None = None
    # number of those with the best evaluations that stay, too: each of these evaluations is saved, and the
    # link checkpoints/best names the best one; null: 1 with train.early_stop, else 0
    best: SmallNatural | None = None
    # what is best: the lowest held_out_loss, or the highest value of another metric; needs `best`
    metric: KeptMetric = "held_out_loss"
    every: Count | None = None  # and for ever those whose step is a multiple of this

    def check_keys(self) -> None:
        if self.every is not None and self.last is None:
            raise ValueError("every is set and last is not, which keeps all; set last to 1 or more, too")

    def score(self, row: Mapping[str, Any]) -> float:
        """Of an evaluation, by its row of metrics.jsonl; less is better. Raises ConfigError."""
        if self.metric not in row:
            rule = "the held-out rows give no such number: margins need rows of both kinds, accuracy classes"
            remedy = "Take held_out_loss, or hold out other rows"
            raise ConfigError(f"output.keep.metric={self.metric}", rule, remedy)
        value = float(row[self.metric])
        return value if self.metric == "held_out_loss" else -value


class OutputSection(Section):
    """Where the run writes, and which of its checkpoints stay."""

    folder: PathText = "runs/train"  # of checkpoints, metrics.jsonl, run.json and timeline.svg
    keep: KeepSection = KeepSection()
    # Where else the numbers of metrics.jsonl go; a tracker that fails is dropped with a warning
    trackers: Annotated[tuple[TrackerSection, ...], Field(strict=False)] = ()
    sample_prompt: str | None = None  # the trained model continues it at the end; null: no sample
    sample_every: Count | None = None  # and after every so many steps; null: only at the end
    sample_tokens: Count = 128  # of the continuation, at most

    def check_keys(self) -> None:
        if self.sample_every is not None and self.sample_prompt is None:
            raise ValueError("sample_every is set and sample_prompt is not, which it continues; set both")

    @field_validator("trackers")
    @classmethod
    def each_once(cls, trackers: tuple[TrackerSection, ...]) -> tuple[TrackerSection, ...]:
        names = [tracker.name for tracker in trackers]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"{twice.pop()} is listed twice, and a run has one of each; leave one out")
        return trackers

    @property
    def path(self) -> Path:
        return Path(self.folder).expanduser()
