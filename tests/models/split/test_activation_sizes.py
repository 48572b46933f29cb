"""Estimated sizes of activations."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from penstock.batch.loss import NextToken
from penstock.models.activation_offloading import Offloading
from penstock.models.huggingface.entries import taken
from penstock.models.huggingface.stages import HFCall, HFEdges, cut
from penstock.models.split.activation_sizes import StageSizes, stage_sizes
from penstock.models.stage import StageInfo
from penstock.models.tracing.chain import find_chain
from penstock.pipeline.building.memory import Account
from penstock.planner.candidate import Candidate
from penstock.planner.workload import Workload
from penstock.schedule import build
from support import zoo
from support.covering import some
from support.families import tiny_model
from support.planning import LENGTH, small_config


def test_estimated_activation_bytes_are_what_autograd_holds() -> None:
    """Counted without values, and counted in a real forward of the same stage; token ids are the batch's."""
    model = tiny_model("llama", layers=2, hidden_size=64)
    chain, info, ids = find_chain(model), StageInfo(0, 2), torch.zeros(4, 32, dtype=torch.long)
    stage = cut(model, chain, range(1), info)
    found = stage_sizes(stage, info, HFEdges(model, chain), (4, 32))
    held: dict[int, int] = {}
    weights = {p.untyped_storage().data_ptr() for p in stage.parameters()}
    keep = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        keep.append(tensor)
        if tensor.untyped_storage().data_ptr() not in weights:
            held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = HFCall(stage, info)((), {"input_ids": ids})
    assert found is not None
    predicted, in_forward, in_backward, _ = found
    assert output.shape == (4, 32, 64)
    assert predicted.activation == sum(held.values()) - ids.nbytes
    assert predicted.buffer == predicted.sent == output.nbytes
    assert in_backward > predicted.activation
    assert in_forward > predicted.activation


def test_casts_of_weights_and_the_input_are_not_offloaded() -> None:
    """1.0: the casts of autocast counted as offloaded: dry runs promised more memory than there is."""
    plan = Workload(small_config(), "mixed").plan(build("gpipe", ranks=1, microbatches=1), (6,))
    options = Candidate().parallel_options()
    account = Account(plan, options=options, offloading=Offloading(min_bytes=0))
    kept, _, _, stays = account.of_part((2, LENGTH), range(1, 2), 1, split=False)
    assert stays == 2 * LENGTH * 64 * 4
    assert kept.offloaded + stays == kept.activation


@pytest.mark.parametrize(
    "family",
    some(("deepseek_v3", "deepseek_v32", "kimi_linear", "mixtral", "doge"), "deepseek_v3", "mixtral", "doge"),
)
def test_families_whose_sizes_were_unknown_are_told(family: str) -> None:
    """1.0: an error of a kernel without values counted as a forward that looks at values, or came out."""
    assert sizes_of(family) is not None


def test_a_forward_that_looks_at_values_is_unknown() -> None:
    assert sizes_of("jetmoe") is None


def test_any_other_error_comes_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """1.0 took every RuntimeError for a forward that looks at values."""

    def fails(*_: object) -> None:
        raise RuntimeError("our bug")

    monkeypatch.setattr(NextToken, "total", fails)
    with pytest.raises(RuntimeError, match="our bug"):
        sizes_of("llama")


def sizes_of(family: str) -> StageSizes | None:
    """Of the last stage, with the loss."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(zoo.tiny_config(family))
    chain, info = find_chain(model), StageInfo(1, 2)
    part = cut(model, chain, range(2, chain.count), info, values=False)
    return stage_sizes(part, info, HFEdges(model, chain), (2, 32), True, taken(model))
