"""What goes over an edge, known before anything is sent."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.batch.payload import EdgeSpecs, TensorSpec, declared
from penstock.errors import ModelError, ShapeError
from penstock.models.stage import DeclaredEdges, InferredEdges, StageInfo, provided_edges
from penstock.runtime.transport.groups import OneProcess

WIDTH = 4


class Stage(nn.Module):
    """Counts how often it was built and run, and draws random numbers while it is built."""

    built: list[int]
    runs: list[tuple[int, torch.device]]

    def __init__(self, info: StageInfo) -> None:
        super().__init__()
        torch.manual_seed(info.stage)
        self.info = info
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.built.append(info.stage)

    def forward(self, x: Tensor, hidden: Tensor | None = None, **more: Any) -> Any:
        self.runs.append((self.info.stage, x.device))
        hidden = self.linear(x if hidden is None else hidden)
        return {"hidden": hidden, "count": len(x), "sure": hidden.detach(), "order": hidden.argsort()}


def stages() -> type[Stage]:
    return type("Counted", (Stage,), {"built": [], "runs": []})


def learnt(rows: int, length: int) -> EdgeSpecs:
    shape = (rows, length, WIDTH)
    sure = TensorSpec(shape, torch.float32, differentiable=False)
    order = TensorSpec(shape, torch.int64, differentiable=False)
    hidden = TensorSpec(shape, torch.float32)
    return declared({"count": rows, "hidden": hidden, "order": order, "sure": sure})


def batch(rows: int = 2, length: int = 3) -> dict[str, Tensor]:
    return {"x": torch.zeros(rows, length, WIDTH)}


def test_edges_are_learnt_without_values_once_for_each_shape() -> None:
    provider = stages()
    edges = InferredEdges(provider, 3)
    with torch.no_grad():  # as in an evaluation: what has a gradient is told all the same
        assert edges(0, batch()) == edges(1, batch()) == learnt(2, 3)
    assert edges(1, batch(5, 1)) == learnt(5, 1)
    assert edges(0, {"x": batch()["x"] + 1}) == learnt(2, 3)
    assert provider.built == [0, 1, 2]  # the last one to see that it takes what comes
    assert provider.runs == [(stage, torch.device("meta")) for stage in (0, 1, 0, 1)]


def test_learning_draws_no_random_numbers() -> None:
    """Unreleased: a provider that seeds torch decided what the first step's dropout drew."""
    before = torch.get_rng_state()
    InferredEdges(stages(), 3)(0, batch())
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("wish", [lambda x: x[x > 0], lambda x: x * int(x.sum()), lambda x: x.tolist()])
def test_what_needs_values_cannot_be_learnt(wish: Any) -> None:
    """Unreleased: torch's own error came through, which knows of no remedy."""

    class Wishing(nn.Module):
        def __init__(self, info: StageInfo) -> None:
            super().__init__()
            self.stage = info.stage

        def forward(self, x: Tensor) -> Any:
            return wish(x) if self.stage == 1 else x

    with pytest.raises(ShapeError) as refused:
        InferredEdges(Wishing, 3)(0, batch())
    told, cause = refused.value, refused.value.__cause__
    assert told.value == "stage 1 run without values, to learn what it gives"
    assert str(cause) in told.rule
    assert "use shapes='exchanged'" in told.remedy


def test_mistakes_that_have_nothing_to_do_with_values_come_through() -> None:
    class Wrong(nn.Module):
        def __init__(self, info: StageInfo) -> None:
            super().__init__()

        def forward(self, x: Tensor) -> Any:
            return self.nothing

    with pytest.raises(AttributeError, match="nothing"):
        InferredEdges(Wrong, 2)(0, batch())


# ---- declared


class Declaring(Stage):
    built: list[int] = []  # noqa: RUF012
    runs: list[tuple[int, torch.device]] = []  # noqa: RUF012

    def infer_outputs(self, microbatch: Any) -> Any:
        rows, length, _ = microbatch["x"].shape
        return {"hidden": torch.empty(rows, length, WIDTH), "stage": self.info.stage}

    def infer_inputs(self, microbatch: Any) -> Any:
        rows, length, _ = microbatch["x"].shape
        return {"stage": self.info.stage - 1, "hidden": torch.empty(rows, length, WIDTH)}


class Together:
    """What each process gathers of all, where they ask one after the other."""

    count = 2

    def __init__(self, index: int, others: Sequence[Any]) -> None:
        self.index = index
        self._others = others

    def gather(self, value: Any) -> list[Any]:
        told = [*self._others]
        told.insert(self.index, json.loads(json.dumps(value)))
        return told


class Listening:
    """Of a process that is asked first."""

    index, count = 0, 2
    heard: Any = None

    def gather(self, value: Any) -> list[Any]:
        self.heard = json.loads(json.dumps(value))
        return [value]


def agree(split: Sequence[Sequence[int]], provider: Any, microbatches: Sequence[Any]) -> list[str]:
    """What each of two processes says that hold these stages of three."""
    held = [{stage: provider(StageInfo(stage, 3)) for stage in own} for own in split]
    heard = []
    for modules in held:
        listening = Listening()
        with suppress(ShapeError, ModelError):  # where both ends are in this process
            DeclaredEdges(modules, 3).agree(microbatches, listening)
        heard.append(listening.heard)
    told = []
    for index, modules in enumerate(held):
        edges = DeclaredEdges(modules, 3)
        try:
            edges.agree(microbatches, Together(index, [heard[1 - index]]))
            told.append("agreed" if not edges.unseen(microbatches) else "not noted")
        except (ShapeError, ModelError) as error:
            told.append(f"{type(error).__name__}: {error}")
            assert edges.unseen(microbatches) == microbatches
    return told


@pytest.mark.parametrize("own", [(0,), (1,), (2,), (0, 2), (0, 1, 2)])
def test_a_process_knows_its_own_edges(own: tuple[int, ...]) -> None:
    edges = DeclaredEdges({stage: Declaring(StageInfo(stage, 3)) for stage in own}, 3)
    for edge in (0, 1):
        if {edge, edge + 1} & set(own):
            shape = TensorSpec((2, 3, WIDTH), torch.float32)
            assert edges(edge, batch()) == declared({"hidden": shape, "stage": edge})


def test_nothing_is_run_or_built_for_what_is_declared() -> None:
    Declaring.built.clear()
    own = {0: Declaring(StageInfo(0, 2)), 1: Declaring(StageInfo(1, 2))}
    edges = provided_edges(Declaring, own, 2, OneProcess())
    assert isinstance(edges, DeclaredEdges)
    edges(0, batch())
    edges.agree([batch()], OneProcess())
    assert Declaring.built == [0, 1]
    assert not Declaring.runs
    assert isinstance(provided_edges(Stage, {0: nn.Linear(1, 1)}, 2, OneProcess()), InferredEdges)


@pytest.mark.parametrize("split", [((0,), (1, 2)), ((0, 2), (1,)), ((0, 1, 2), ())])
def test_edges_that_agree(split: Sequence[Sequence[int]]) -> None:
    assert agree(split, Declaring, [batch(), batch(5, 1)]) == ["agreed", "agreed"]


def test_each_shape_is_agreed_on_once() -> None:
    edges = DeclaredEdges({stage: Declaring(StageInfo(stage, 3)) for stage in range(3)}, 3)
    two = [batch(), batch(5, 1)]
    assert [len(microbatch["x"]) for microbatch in edges.unseen([*two, batch()])] == [2, 5]
    edges.agree([two[0]], OneProcess())
    assert [len(microbatch["x"]) for microbatch in edges.unseen([*two, batch()])] == [5]
    edges.agree([two[1]], OneProcess())
    assert edges.unseen([*two, batch()]) == []


@pytest.mark.parametrize("split", [((0,), (1, 2)), ((0, 2), (1,)), ((0, 1, 2), ())])
@pytest.mark.parametrize(
    ("taken", "told"),
    [
        ({"hidden": torch.empty(3, 2), "stage": 0}, "float32[3, 2], 0 as {'hidden': tensor, 'stage': 0}"),
        ({"hidden": torch.empty(2, 3, dtype=torch.long), "stage": 0}, "int64[2, 3], 0 as "),
        ({"hidden": TensorSpec((2, 3), torch.float32, differentiable=False), "stage": 0},
         "float32[2, 3], 0 as {'hidden': tensor, 'stage': 0}, tensor 0 without a gradient. "),
        ({"hidden": torch.empty(2, 3), "stage": 1}, "float32[2, 3], 1 as "),
        ({"hidden": torch.empty(2, 3), "stage": None}, "float32[2, 3], None as "),
        ({"hidden": [torch.empty(2, 3)], "stage": 0}, "float32[2, 3], 0 as {'hidden': [tensor], 'stage': 0}"),
        ({"hidden": torch.empty(2, 3)}, "float32[2, 3] as {'hidden': tensor}. "),
        (torch.empty(2, 3), "float32[2, 3]. "),
    ],
)  # fmt: skip
def test_edges_that_do_not_agree(split: Sequence[Sequence[int]], taken: Any, told: str) -> None:
    """Unreleased: a gradient that one end sent and the other did not expect was no difference."""

    class Other(Declaring):
        def infer_outputs(self, microbatch: Any) -> Any:
            return {"hidden": torch.empty(2, 3), "stage": 0}

        def infer_inputs(self, microbatch: Any) -> Any:
            return taken if self.info.stage == 1 else self.infer_outputs(microbatch)

    for answer in agree(split, Other, [batch()]):
        assert answer.startswith("ShapeError: stage 0 says that it gives float32[2, 3], 0 as ")
        assert f": stage 1 says that it takes {told}" in answer


@pytest.mark.parametrize("split", [((0,), (1, 2)), ((0, 1, 2), ())])
def test_names_that_forward_lacks(split: Sequence[Sequence[int]]) -> None:
    class Strict(Declaring):
        def forward(self, x: Tensor, hiden: Tensor | None = None) -> Any:  # type: ignore[override]
            return x

    for answer in agree(split, Strict, [batch()]):
        assert answer.startswith("ModelError: what stages 0 and 1 declare of the edge between them: one of")
        assert "(hidden, stage) and the batch (x): got an unexpected keyword argument 'stage'" in answer
