"""State of any optimizer by the names of parameters: bit for bit, wherever the parameters go."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adagrad, AdamW, NAdam, Optimizer, RMSprop

from penstock.checkpoint import optimizer_state
from penstock.checkpoint.optimizer_state import (
    NamedParameters,
    Optimizers,
    StoredState,
    check_state,
    state_of,
)
from penstock.checkpoint.save_load import load_checkpoint, save_checkpoint
from penstock.errors import CheckpointError, UnfitError
from penstock.models.weights.reading import HostReader
from penstock.pipeline.pipeline import Pipeline
from penstock.runtime.device.copies import BackgroundCopies
from support.covering import every
from support.jobs_checkpoint import KINDS, advance, make
from support.refusals import refuses

Held = dict[tuple[str, str], Any]


def held(pipe: Pipeline, optimizers: list[Optimizer]) -> Held:
    """Weights, state and learning rates by name."""
    names = {id(parameter): name for name, parameter in pipe.named_parameters(remove_duplicate=False)}
    found: Held = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name = names[id(parameter)]
                found |= {(name, part): value for part, value in optimizer.state[parameter].items()}
                found |= {(name, "lr"): group["lr"], (name, "weight"): parameter.detach()}
    return found


def differences(before: Held, after: Held) -> list[tuple[str, str]]:
    assert before.keys() == after.keys()
    return [key for key, value in before.items() if not same(value, after[key])]


def same(value: Any, other: Any) -> bool:
    if isinstance(value, Tensor):
        return value.dtype == other.dtype and torch.equal(value, other)
    return type(value) is type(other) and bool(value == other)


@pytest.mark.parametrize(("kind", "ranks"), [("adamw", 2), *every(3, [(kind, 3) for kind in KINDS])])
def test_every_kind_comes_back_bit_for_bit(tmp_path: Path, kind: str, ranks: int) -> None:
    """And the next step is the same at another size, bit for bit at the same one."""
    pipe, optimizers = make(2, "1f1b", kind=kind)
    advance(pipe, optimizers, 1, 2)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] *= 0.7
    save_checkpoint(tmp_path / "checkpoint", pipe, optimizers, {})
    saved = {key: value.clone() if isinstance(value, Tensor) else value
             for key, value in held(pipe, optimizers).items()}  # fmt: skip
    again, its = make(ranks, "1f1b", kind=kind)
    advance(again, its, 5, 5)  # what it holds has to go
    load_checkpoint(tmp_path / "checkpoint", again, its)
    assert differences(saved, held(again, its)) == []
    after, expected = (advance(*each, 3, 3) for each in ((again, its), (pipe, optimizers)))
    if ranks == 2:
        assert after == expected
        assert differences(held(pipe, optimizers), held(again, its)) == []
    assert after == pytest.approx(expected, rel=1e-5)


def test_frozen_and_untouched_parameters_have_no_state_and_need_none(tmp_path: Path) -> None:
    pipe, _ = make(2, "1f1b")
    for name, parameter in pipe.named_parameters(remove_duplicate=False):
        parameter.requires_grad_("norm" in name)
    optimizers: list[Optimizer] = [AdamW(pipe.parameters())]
    advance(pipe, optimizers, 1, 1)
    save_checkpoint(tmp_path / "checkpoint", pipe, optimizers)
    before = held(pipe, optimizers)
    load_checkpoint(tmp_path / "checkpoint", pipe, optimizers)
    assert differences(before, held(pipe, optimizers)) == []


def named(count: int = 2, dtype: torch.dtype = torch.float32) -> NamedParameters:
    return [
        (f"layer.{number}.weight", nn.Parameter(torch.ones(2, 3, dtype=dtype))) for number in range(count)
    ]


def stepped(optimizer: Optimizer) -> Optimizer:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def members(of: NamedParameters) -> list[nn.Parameter]:
    return [parameter for _, parameter in of]


def written(folder: Path, optimizer: Optimizer | list[Optimizer], of: NamedParameters) -> StoredState:
    state_of(optimizer, of, BackgroundCopies(None)).write(folder, 0, 1)
    return StoredState(folder, ())


def restore(
    stored: StoredState, optimizers: Optimizers, of: NamedParameters, *, learning_rates: bool = True
) -> None:
    stored.restorer(optimizers, of, learning_rates=learning_rates)()


class Counting(Optimizer):
    """Keeps plain numbers, as optimizers outside of torch do."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] |= {"step": 3, "scale": 0.1, "warm": True, "none": None}


def test_numbers_come_back_as_numbers(tmp_path: Path) -> None:
    here = named()
    stored = written(tmp_path, stepped(Counting(members(here))), here)
    again = Counting(members(here))
    restore(stored, again, here)
    assert again.state[here[1][1]] == {"step": 3, "scale": 0.1, "warm": True, "none": None}
    assert [type(value) for value in again.state[here[1][1]].values()] == [int, float, bool, type(None)]


def test_a_learning_rate_that_is_a_tensor_stays_one(tmp_path: Path) -> None:
    here = named()
    rate = torch.tensor(0.25)
    stored = written(tmp_path, AdamW(members(here), lr=torch.tensor(0.125)), here)
    again = AdamW(members(here), lr=rate)
    restore(stored, again, here)
    assert again.param_groups[0]["lr"] is rate
    assert float(rate) == 0.125


def test_other_options_stay_those_that_the_optimizer_was_made_with(tmp_path: Path) -> None:
    here = named()
    stored = written(tmp_path, stepped(SGD(members(here), lr=0.5, momentum=0.9)), here)
    again = SGD(members(here), lr=0.1, momentum=0.8)
    restore(stored, again, here, learning_rates=False)
    assert (again.param_groups[0]["lr"], again.param_groups[0]["momentum"]) == (0.1, 0.8)
    restore(stored, again, here)
    assert (again.param_groups[0]["lr"], again.param_groups[0]["momentum"]) == (0.5, 0.8)


@pytest.mark.parametrize(("kind", "options"), [(AdamW, {"amsgrad": True}), (SGD, {"momentum": 0.9})])
@pytest.mark.parametrize(
    ("before", "now"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)]
)
def test_state_of_another_dtype_becomes_the_parameters_as_torch_makes_it(
    tmp_path: Path, kind: Any, options: Any, before: torch.dtype, now: torch.dtype
) -> None:
    """0.5.0 left it as it was: SGD went on in the old dtype, and AdamW's next step failed within torch."""
    here, theirs, ours = named(dtype=before), named(dtype=now), named(dtype=now)
    there = stepped(stepped(kind(members(here), lr=0.1, **options)))
    expected, again = (kind(members(of), lr=0.1, **options) for of in (theirs, ours))
    expected.load_state_dict(there.state_dict())
    restore(written(tmp_path, there, here), again, ours)
    for _ in range(2):
        for name, parameter in theirs:
            found, wanted = again.state[dict(ours)[name]], expected.state[parameter]
            assert found.keys() == wanted.keys()
            assert all(same(found[part], value) for part, value in wanted.items())
            assert torch.equal(dict(ours)[name], parameter)
        stepped(expected), stepped(again)


def test_counters_keep_their_dtype_but_for_what_a_fused_step_asks(tmp_path: Path) -> None:
    here = named(1, torch.bfloat16)
    there, again = stepped(NAdam(members(here))), NAdam(members(here))
    restore(written(tmp_path, there, here), again, here)
    ((before,), (after,)) = there.state.values(), again.state.values()
    assert after["mu_product"].dtype == torch.float32
    (state,) = there.state.values()
    state["exp_avg"] = state["exp_avg"].float() + 1e-5  # as an optimizer of one's own may keep it
    restore(written(tmp_path, there, here), again, here)
    ((before,), (after,)) = there.state.values(), again.state.values()
    assert all(same(after[part], value) for part, value in before.items())
    (tmp_path / "fused").mkdir()
    plain, fused = stepped(AdamW(members(here))), AdamW(members(here), fused=True)
    plain.state[here[0][1]]["step"] = plain.state[here[0][1]]["step"].double()
    restore(written(tmp_path / "fused", plain, here), fused, here)
    assert fused.state[here[0][1]]["step"].dtype == torch.float32


@pytest.mark.parametrize(
    ("kind", "option", "value", "part"),
    [(AdamW, "amsgrad", True, "max_exp_avg_sq"), (RMSprop, "centered", True, "grad_avg"),
     (RMSprop, "momentum", 0.5, "momentum_buffer"), (SGD, "momentum", 0.9, "momentum_buffer")],
)  # fmt: skip
@pytest.mark.parametrize("older", [False, True])
def test_an_option_whose_state_is_not_there_is_refused(
    tmp_path: Path, kind: Any, option: str, value: Any, part: str, older: bool
) -> None:
    """0.4.0 let it pass, and the next step failed within torch, or went on as if it were the first."""
    here = named()
    stored = written(tmp_path, stepped(kind(members(here), lr=0.1)), here)
    if older:  # checkpoints without the options; SGD without momentum leaves no trace
        (file,) = tmp_path.glob("optimizer-*.json")
        described = json.loads(file.read_text())
        assert [group.pop("options") for group in described["groups"]]
        file.write_text(json.dumps(described))
        stored = StoredState(tmp_path, ())
    again = kind(members(here), lr=0.1, **{option: value})
    if kind is SGD and older:
        restore(stored, again, here)
        return
    with refuses(UnfitError, f"without {option}", f"{option}={value}, and the state lacks {part}"):
        restore(stored, again, here)
    assert not again.state
    (tmp_path / "other").mkdir()
    stored = written(tmp_path / "other", kind(members(here), lr=0.1, **{option: value}), here)
    restore(stored, again, here)  # with the option, and before the first step


def test_rates_that_no_longer_fit_the_groups_are_refused_unless_they_are_left_out(tmp_path: Path) -> None:
    here = named()
    groups = [{"params": [parameter], "lr": 0.1 * (n + 1)} for n, (_, parameter) in enumerate(here)]
    stored = written(tmp_path, AdamW(groups), here)
    together = AdamW(members(here), lr=0.3)
    with refuses(CheckpointError, "learning rates [0.1, 0.2]", remedy="learning_rates=False"):
        restore(stored, together, here)
    restore(stored, together, here, learning_rates=False)
    assert together.param_groups[0]["lr"] == 0.3


def refused(optimizers: Any, of: NamedParameters) -> str:
    with pytest.raises(CheckpointError) as caught:
        check_state(optimizers, of)
    assert caught.value.remedy
    return str(caught.value)


def test_what_cannot_be_kept_is_refused() -> None:
    here = named()
    parameters = members(here)
    assert "this parameter is not the pipeline's" in refused(SGD([nn.Parameter(torch.ones(3))]), here)
    twice = [SGD(parameters), AdamW(parameters[:1])]
    assert "the parameter layer.0.weight in two optimizers" in refused(twice, here)
    loss = LBFGS(parameters)

    def closure() -> float:
        value = sum((parameter**2).sum() for parameter in parameters)
        assert isinstance(value, Tensor)
        torch.autograd.backward(value)
        return float(value.detach())

    loss.step(closure)  # type: ignore[no-untyped-call]
    assert "nothing that would have to be pickled" in refused(loss, here)


def test_what_does_not_fit_is_refused_before_anything_is_changed(tmp_path: Path) -> None:
    here = named()
    stored = written(tmp_path, stepped(Adagrad(members(here)[:1])), here)
    other = AdamW(members(here)[:1])
    with refuses(UnfitError, "layer.0.weight was trained by Adagrad", "AdamW trains it"):
        restore(stored, other, here)
    more = Adagrad(members(here))
    before = more.state[here[0][1]]["sum"].clone()
    with refuses(UnfitError, "no state of layer.1.weight", "trains this parameter"):
        restore(stored, more, here)
    assert torch.equal(more.state[here[0][1]]["sum"], before)
    (tmp_path / "optimizer-00001-of-00001.json").write_text(json.dumps({"groups": 3, "numbers": {}}))
    with refuses(CheckpointError, "optimizer-00001-of-00001.safetensors", "read"):
        StoredState(tmp_path, ())


def test_a_tied_weight_finds_its_state_under_its_other_name(tmp_path: Path) -> None:
    here = named(1)
    written(tmp_path, stepped(AdamW(members(here))), here)
    stored = StoredState(tmp_path, (("head.weight", "layer.0.weight"),))
    head = [("head.weight", nn.Parameter(torch.ones(2, 3)))]
    again = AdamW(members(head))
    restore(stored, again, head)
    assert float(again.state[head[0][1]]["step"]) == 1
    assert stored.shape("head.weight", "exp_avg") == [2, 3]


def test_the_files_of_0_3_0_are_still_read(tmp_path: Path) -> None:
    """AdamW's tensors alone, and for a parameter that never had a gradient a step of 0."""
    here = named()
    moments = {f"{part}.layer.0.weight": torch.full((2, 3), 2.0) for part in ("exp_avg", "exp_avg_sq")}
    steps = {"step.layer.0.weight": torch.tensor(5.0), "step.layer.1.weight": torch.zeros(())}
    save_file(moments | steps, tmp_path / "optimizer-00001-of-00001.safetensors")
    again = AdamW(members(here), lr=0.3)
    stepped(again)  # what it holds has to go
    restore(StoredState(tmp_path, ()), again, here)
    assert float(again.state[here[0][1]]["step"]) == 5
    assert torch.equal(again.state[here[0][1]]["exp_avg"], torch.full((2, 3), 2.0))
    assert not again.state.get(here[1][1])
    assert again.param_groups[0]["lr"] == 0.3
    with refuses(UnfitError, "layer.0.weight was trained by AdamW", "SGD trains it"):
        restore(StoredState(tmp_path, ()), SGD(members(here), lr=0.3), here)


@pytest.mark.parametrize("rows", [None, slice(1, 3)])
def test_each_byte_is_read_once_and_none_of_another_ranks_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: slice | None
) -> None:
    """0.5.0: a rank of dp_shard=4 read all of each moment; and each was copied once more."""
    weight = nn.Parameter(torch.randn(4, 50_000))
    here = [("weight", weight)]
    optimizer = AdamW([weight], lr=0.1)
    weight.grad = torch.randn_like(weight)
    optimizer.step()
    expected = {part: value.clone() for part, value in optimizer.state[weight].items()}
    stored = written(tmp_path, optimizer, here)
    own = None if rows is None else (rows, slice(0, 50_000))
    monkeypatch.setattr(optimizer_state, "own_part", lambda parameter: own)
    monkeypatch.setattr(
        optimizer_state, "shard_like", lambda value, like: value[rows] if rows and value.ndim else value
    )
    read, preadv = [0], os.preadv

    def count(file: int, buffers: list[memoryview], at: int) -> int:
        found = preadv(file, buffers, at)
        read[0] += found
        return found

    monkeypatch.setattr(os, "preadv", count)
    made: list[Tensor] = []
    empty = HostReader.empty

    def noted(*arguments: Any) -> Tensor:
        made.append(empty(*arguments))
        return made[-1]

    monkeypatch.setattr(HostReader, "empty", noted)
    restore(stored, optimizer, here)
    state = optimizer.state[weight]
    for part, value in expected.items():
        wanted = value[rows] if rows is not None and value.ndim else value
        torch.testing.assert_close(state[part], wanted, rtol=0, atol=0)
    assert read[0] == 4 + 2 * weight.nbytes * (1 if rows is None else 2 / 4)
    straight = {tensor.data_ptr() for tensor in made} >= {value.data_ptr() for value in state.values()}
    assert straight == (rows is None)  # a shard is copied out of the memory of the full tensor
