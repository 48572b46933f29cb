"""Every type of docs/models.md comes back from its files: in transformers, in other stages, in a resume."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from penstock import AutoPipeline, Pipeline
from penstock.checkpoint.save_load import load_checkpoint, save_checkpoint
from penstock.errors import ModelError
from support import census, zoo
from support.reference import TOLERANCE, assert_gradients, gradients_of

# a plain one, Mamba-2 with its infinity, tied ends without a prefix in files, experts that files hold apart
FEW = ("llama", "mamba2", "gpt2", "mixtral")
# their configs name the whole that they are a part of, or a type that AutoModelForCausalLM does not know
NO_AUTO_CLASS = (*zoo.PART_OF_WHOLE, "emu3")
NO_TOWER = "gemma3n"  # its files make a tower of timm, which is not installed
TYPES = [
    pytest.param(kind, marks=[] if kind in FEW else [pytest.mark.sweep])
    for kind in zoo.TYPES
    if kind not in zoo.SKIPPED and kind != NO_TOWER
]


def optimizer_of(pipe: Pipeline) -> Optimizer:
    return SGD(pipe.parameters(), lr=0.1, momentum=0.9)


def weights_of(pipe: Pipeline) -> dict[str, Tensor]:
    return {name: value.detach() for name, value in pipe.named_parameters(remove_duplicate=False)}


@pytest.mark.parametrize("kind", TYPES)
def test_it_is_saved_loaded_resumed_and_stepped(tmp_path: Path, kind: str) -> None:
    """0.5.0: checkpoints of five types could not be resumed: no test resumed every type."""
    model, batch = zoo.tiny_model(kind), zoo.tiny_batch(kind)
    two, four = (AutoPipeline(ranks=ranks, microbatches=census.MICROBATCHES) for ranks in (2, 4))
    try:
        pipe = two.build(model)
        pipe.step(batch)
    except ModelError as refused:
        pytest.skip(f"refused by name: {refused.rule}")
    optimizer = optimizer_of(pipe)
    optimizer.step()
    save_checkpoint(tmp_path / "one", pipe, optimizer)

    theirs, report = type(model).from_pretrained(tmp_path / "one", output_loading_info=True)
    assert not any(report.values()), report
    for name, value in weights_of(pipe).items():
        assert torch.equal(value, theirs.get_parameter(name)), name

    resumed = four.build(theirs if kind in NO_AUTO_CLASS else tmp_path / "one")
    again = optimizer_of(resumed)
    load_checkpoint(tmp_path / "one", resumed, again)
    loss, gradients = census.plain(theirs.train(), batch)
    assert abs(resumed.step(batch).loss - loss) <= TOLERANCE[torch.float32] * max(1.0, abs(loss))
    found = gradients_of(resumed)
    assert found.keys() == weights_of(resumed).keys() & gradients.keys()
    assert_gradients(found, gradients, TOLERANCE[torch.float32])

    pipe.zero_grad()
    pipe.step(batch)
    for each in (optimizer, again):
        each.step()
    expected = weights_of(pipe)
    after = {name: value for name, value in weights_of(resumed).items() if name in expected}
    assert_gradients(after, expected, TOLERANCE[torch.float32])
