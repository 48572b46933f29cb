"""What keys mean is what stands beside them in the source."""

from __future__ import annotations

from penstock.train.config.meanings import meanings_of, section_of
from penstock.train.config.model import PipelineSection
from penstock.train.config.output import KeepSection
from penstock.train.config.training import TrainSection


def test_a_comment_behind_a_key_or_above_it_is_its_meaning() -> None:
    meanings = meanings_of(TrainSection)
    assert meanings["batch_size"].means.startswith("rows a step, over all microbatches")
    assert meanings["accumulate"].means.startswith("pipeline calls a step, each with its part of the rows")
    assert meanings["accumulate"].means.endswith("that of one call with its part")


def test_an_option_that_a_pipeline_has_too_means_the_same() -> None:
    assert meanings_of(PipelineSection)["microbatches"].means.startswith("number of microbatches in a step")


def test_a_section_is_found_by_the_name_of_its_class() -> None:
    assert section_of("KeepSection") is KeepSection
