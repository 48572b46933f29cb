"""What saving needs of a split model: each process looks at its own stages, and collects what they hold."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from penstock import AutoPipeline, Pipeline
from penstock.errors import ModelError
from penstock.models.weights.folder import write_folder
from penstock.pipeline.model_files import ModelFiles
from penstock.runtime.ranks import Ranks
from support.families import tiny_model
from support.refusals import refuses


def made() -> Pipeline:
    return AutoPipeline(ranks=2, schedule="dualpipe_v", microbatches=4).build(tiny_model("llama", tied=True))


def test_each_weight_of_the_model_is_in_one_stage_or_tied() -> None:
    pipe = made()
    (names,) = pipe.files.ties
    assert pipe.files.tied == set(names[1:])
    owned = [name for name, _ in pipe.owned_parameters()]
    assert len(owned) == len(set(owned))
    assert {*owned, *pipe.files.tied} == set(tiny_model("llama", tied=True).state_dict())


def test_weights_under_other_names_are_refused() -> None:
    pipe = made()
    pipe.files.check(pretrained=True)
    layer = pipe.modules[0].get_submodule("model.layers.0.mlp")
    layer.down_proj = nn.Sequential(layer.get_submodule("down_proj"))
    with refuses(ModelError, "down_proj", "from_pretrained reads"):
        pipe.files.check(pretrained=True)


def test_a_provider_alone_knows_its_files() -> None:
    pipe = Pipeline.from_provider(
        lambda info: nn.Linear(2, 2), ranks=2, schedule="gpipe", microbatches=2, shapes="exchanged",
        loss_fn=lambda output, part: output.sum(),
    )  # fmt: skip
    assert (pipe.files.ties, pipe.files.tied) == ((), frozenset())
    with refuses(ModelError, "a pipeline made by from_provider", "provider knows"):
        pipe.files.check(pretrained=True)


def test_what_is_collected_into_memory_is_written_later(tmp_path: Path) -> None:
    pipe = made()
    expected = {name: value.detach().clone() for name, value in pipe.named_parameters()}
    files: ModelFiles = pipe.files
    copies = files.new_copies()
    write = files.collect(copies)
    copies.begin()
    copies.result()
    with torch.no_grad():
        for parameter in pipe.parameters():
            parameter.zero_()
    write_folder(tmp_path / "model", lambda folder: write(folder, Ranks()), Ranks())
    pipe.load_weights(tmp_path / "model")
    for name, value in pipe.named_parameters():
        assert torch.equal(value, expected[name]), name
