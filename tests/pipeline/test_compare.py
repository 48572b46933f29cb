"""What a comparison with the whole model reports: every tensor, its place, and how far it is off."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch

from penstock import AutoPipeline
from penstock.errors import DifferenceError, EquivalenceError
from penstock.pipeline.compare import Compared, Report
from penstock.runtime.device.free_memory import free_memory
from support.families import pipeline, ragged_batch, tiny_model
from support.reference import gradients_of
from support.refusals import refuses


def compared(name: str, difference: float, size: float = 1.0, tolerance: float = 1e-5) -> Compared:
    return Compared("gradient", name, 1, 3, difference, size, tolerance)


def test_every_tensor_is_reported_with_its_place() -> None:
    model, batch = tiny_model("llama", tied=True), ragged_batch()
    pipe = pipeline(model, schedule="zb_v")
    report = pipe.verify_against(model, batch)
    assert report.passed
    assert report.wrong == ()
    assert report.losses is not None
    assert report.losses[0] == pytest.approx(report.losses[1], rel=1e-6)
    assert 0 <= report.largest <= report.tolerance == 1e-5
    places = sorted((each.name, each.stage) for each in report.tensors)
    assert places == sorted((n, s) for s, m in pipe.modules.items() for n, _ in m.named_parameters())
    assert {(each.stage, each.rank) for each in report.tensors} == {(0, 0), (1, 1), (2, 1), (3, 0)}


def test_a_comparison_leaves_gradients_as_they_were() -> None:
    model, batch = tiny_model("llama"), ragged_batch()
    pipe = pipeline(model)
    pipe.step(batch)
    before = gradients_of(pipe)
    pipe.verify_against(model, batch)
    torch.testing.assert_close(gradients_of(pipe), before, rtol=0, atol=0)


def test_a_parameter_of_whole_numbers_is_compared_too() -> None:
    """It has no gradient, and its dtype no rounding."""
    model = tiny_model("llama")
    model.model.norm.codes = torch.nn.Parameter(torch.arange(3, dtype=torch.int8), requires_grad=False)
    pipe = AutoPipeline(ranks=2, microbatches=2).build(model)
    assert pipe.verify_against(model, ragged_batch())


def test_what_differs_comes_first_and_the_error_has_all_of_it() -> None:
    model, batch = tiny_model("llama"), ragged_batch()
    pipe = pipeline(model)
    for index, name, factor in ((1, "model.norm.weight", 1.001), (0, "model.embed_tokens.weight", 1.1)):
        parameter = pipe.modules[index].get_parameter(name)
        parameter.register_hook(lambda grad, factor=factor: grad * factor)  # type: ignore[no-untyped-call]
    with pytest.raises(EquivalenceError) as caught:
        pipe.verify_against(model, batch)
    assert isinstance(caught.value, DifferenceError)
    report = caught.value.report
    assert [(each.name, each.stage, each.rank) for each in report.wrong] == [
        ("model.embed_tokens.weight", 0, 0),
        ("model.norm.weight", 1, 1),
    ]
    for each, relative in zip(report.wrong, (0.1, 1e-3), strict=True):
        assert each.difference == pytest.approx(relative * each.size, rel=1e-2)
        assert each.tolerance == pytest.approx(1e-5 * each.size)
    said = str(caught.value)
    assert said.startswith("gradient model.embed_tokens.weight: it differs by ")
    assert said.index("embed_tokens") < said.index("model.norm")
    assert pipe.compare(model, batch, tolerance=0.2).passed
    assert pickle.loads(pickle.dumps(caught.value)).report == report


def test_weights_that_differ_are_reported_alone() -> None:
    model, batch = tiny_model("llama"), ragged_batch()
    pipe = pipeline(model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.model.norm.weight[0] += 0.5
    report = pipe.compare(other, batch)
    assert report.losses is None
    assert not report.passed
    (wrong,) = report.tensors
    assert (wrong.kind, wrong.name, wrong.stage, wrong.difference) == ("weight", "model.norm.weight", 1, 0.5)
    smaller = tiny_model("llama", intermediate_size=24)
    assert any("its shape is" in line for line in pipe.compare(smaller, batch).problems())
    with refuses(DifferenceError, "weight model.norm.weight: it differs before any step"):
        pipe.verify_against(other, batch)


def test_gradients_that_one_of_the_two_lacks() -> None:
    model, batch = tiny_model("llama"), ragged_batch()
    pipe = pipeline(model)
    model.model.norm.weight.requires_grad_(False)
    (wrong,) = pipe.compare(model, batch).wrong
    assert wrong.name == "model.norm.weight"
    assert wrong.remark == "only one of the two has it"


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_what_is_no_number_never_passes(number: float) -> None:
    """0.3.0: a split model whose loss was not a number passed, as no comparison with it is true."""
    assert compared("a", number).wrong
    assert Report((number, 1.0), (), 1e-5).loss_differs
    assert Report((1.0, number), (), 1e-5).loss_differs


def test_the_error_names_the_five_worst() -> None:
    tensors = [compared(f"t{number}", 10.0**number) for number in range(8)]
    with pytest.raises(DifferenceError) as caught:
        Report.of((1.0, 2.0), tensors, 1e-5).raise_if_wrong()
    assert caught.value.exit_code == 1
    said = str(caught.value)
    assert said.startswith(
        "loss: 1.0 split, 2.0 whole; gradient t7: it differs by 1e+07 on stage 1 of rank 3"
    )
    assert "t4" in said
    assert "t3" not in said
    assert "; and 4 more: the split model gives" in said


def test_differences_are_worst_by_their_tolerance() -> None:
    report = Report.of(
        (1.0, 1.0), [compared("large", 1e-3, 1e3, 1e-2), compared("small", 1e-7, 1e-3, 1e-8)], 1e-5
    )
    assert [each.name for each in report.tensors] == ["small", "large"]
    assert [each.name for each in report.wrong] == ["small"]
    assert report.largest == pytest.approx(1e-4)


def test_free_memory_is_a_sensible_number() -> None:
    free = free_memory()
    assert free is None or 2**20 < free < 2**50


def test_a_comparison_counts_the_auxiliary_loss_of_each_microbatch() -> None:
    """It is each microbatch's own, on both sides: no false difference, and a true one is seen."""
    model = tiny_model("mixtral", torch.float64, output_router_logits=True)
    losses = []
    for count in (1, 4):
        pipe = pipeline(model, microbatches=count)
        report = pipe.verify_against(model, ragged_batch())
        assert report.losses is not None
        losses.append(report.losses[1])
    assert abs(losses[0] - losses[1]) > 1e-7
    other = tiny_model("mixtral", torch.float64, output_router_logits=True, router_aux_loss_coef=0.002)
    assert not pipe.compare(other, ragged_batch()).passed
