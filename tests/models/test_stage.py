"""A stage of a user's own model: the call of its module, its layers, and what crosses its edges."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from penstock.batch.payload import EdgeSpecs, TensorSpec, declared
from penstock.errors import ModelError, PartitionError, ShapeError
from penstock.models.split.partition import even_split
from penstock.models.stage import (
    DeclaredEdges,
    InferredEdges,
    ProvidedCall,
    StageInfo,
    distribute_layers,
    numbered_layers,
    provided_edges,
)
from penstock.runtime.ranks import Ranks
from support.ranks import on_threads
from support.refusals import refuses

FIRST = object()  # in place of what a first stage does not receive
BATCH = {"x": "x", "y": "y", "z": "z"}


def call(forward: Any, received: Any) -> Any:
    """The result of `forward`, a module's, on `received` and BATCH."""
    module = type("Given", (nn.Module,), {"forward": staticmethod(forward)})()
    return ProvidedCall(module)(() if received is FIRST else (received,), BATCH)


class Pair(NamedTuple):
    one: Any
    other: Any


@pytest.mark.parametrize(
    ("forward", "received", "expected"),
    [
        # the first stage gets entries of the batch
        (lambda x, z: (x, z), FIRST, ("x", "z")),
        (lambda x, unknown=3, *, y: (x, unknown, y), FIRST, ("x", 3, "y")),
        # a single value is the first argument
        (lambda x, y: (x, y), 1, (1, "y")),
        (lambda hidden, *, x: (hidden, x), 1, (1, "x")),
        (lambda x=0: x, None, None),
        (lambda pair: pair, Pair(1, 2), Pair(1, 2)),
        # tuples and lists are given by position
        (lambda a, b, z: (a, b, z), (1, 2), (1, 2, "z")),
        (lambda x, y, z: (x, y, z), [1, 2], (1, 2, "z")),
        # mappings by name, and before the batch's entry of that name
        (lambda x, hidden, y: (x, hidden, y), {"hidden": 1}, ("x", 1, "y")),
        (lambda x, y: (x, y), {"x": 1}, (1, "y")),
        (lambda x, **more: (x, more), {"a": 1, "b": 2}, ("x", {"a": 1, "b": 2})),
        # unreleased: parameters without names counted, so that entries of the batch were left out
        (lambda *rest, x: (rest, x), (1, 2), ((1, 2), "x")),
        (lambda a, *rest, x, y: (a, rest, x, y), (1, 2), (1, (2,), "x", "y")),
        (lambda a, /, x: (a, x), 1, (1, "x")),
        (lambda x, /, y, *, z: (x, y, z), (1,), (1, "y", "z")),
        (lambda a=0, *rest, x=0: (a, rest, x), (), (0, (), "x")),
    ],
)  # fmt: skip
def test_arguments_of_forward(forward: Any, received: Any, expected: Any) -> None:
    assert call(forward, received) == expected


@pytest.mark.parametrize(
    ("forward", "received", "value", "rule"),
    [
        (lambda hiden: 0, {"hidden": 1, "mask": 2},
         "Given.forward(hiden)", "no parameter hidden, mask"),
        (lambda hiden=0: 0, {"hidden": 1}, "Given.forward(hiden)", "no parameter hidden"),
        (lambda hidden: 0, {0: 1}, "Given.forward(hidden)", "no parameter 0"),
        (lambda a, *, x: 0, (1, 2), "Given.forward(a, x)", "2 values, and it takes 1 by position"),
        (lambda *, x: 0, 1, "Given.forward(x)", "1 values, and it takes 0 by position"),
        (lambda hidden, deep: 0, 1, "Given.forward(hidden, deep)", "(x, y, z) has deep"),
        (lambda hidden, x, deep, wide: 0, {"hidden": 1},
         "Given.forward(hidden, x, deep, wide)", "has deep, wide"),
        (lambda deep, **more: 0, {"hidden": 1}, "Given.forward(deep, more)", "has deep"),
        (lambda **more: 0, {0: 1}, "Given.forward(more)", "no parameter 0"),
        (lambda *, deep: 0, 1, "Given.forward(deep)", "1 values, and it takes 0 by position"),
        (lambda a, b, /: 0, 1, "Given.forward(a, b)", "1 values, and it takes 2 by position"),
        (lambda b, x: 0, FIRST, "Given.forward(b, x)", "(x, y, z) has b"),
    ],
)  # fmt: skip
def test_arguments_that_forward_does_not_take(forward: Any, received: Any, value: str, rule: str) -> None:
    with refuses(ModelError, value, rule):
        call(forward, received)


def test_layers_are_dealt_out_evenly() -> None:
    """As the even split does it (test_partition.py), for one stage at a time."""
    for before, after in ((1, 1), (0, 3)):
        found = [distribute_layers(12, StageInfo(s, 5), before=before, after=after) for s in range(5)]
        assert found == even_split(12, 5, before, after)
    with refuses(PartitionError, "4 stages for 3 layers"):
        distribute_layers(3, StageInfo(1, 4))


def test_a_stage_knows_whether_it_is_first_or_last() -> None:
    infos = [*(StageInfo(stage, 3) for stage in range(3)), StageInfo(0, 1)]
    ends = [(info.is_first, info.is_last) for info in infos]
    assert ends == [(True, False), (False, False), (False, True), (True, True)]


def test_layers_are_those_of_the_outermost_lists() -> None:
    """Or of a list within a dict, as nanoGPT keeps them with its embedding and its norm."""
    inner = nn.Sequential(nn.ModuleList([nn.Linear(1, 1)]))
    module = nn.ModuleDict({"4": inner, "5": nn.Linear(2, 2), "last": nn.Linear(3, 3)})
    holder = nn.Module()
    holder.layers = module
    assert list(numbered_layers(holder)) == [(4, module["4"]), (5, module["5"]), (2, module["last"])]
    alone = nn.Linear(1, 1)
    assert list(numbered_layers(alone)) == [(0, alone)]
    model = nn.Module()
    blocks = nn.ModuleList([nn.Sequential(nn.Linear(2, 2)) for _ in range(3)])
    model.transformer = nn.ModuleDict({"wte": nn.Embedding(4, 2), "h": blocks, "ln_f": nn.LayerNorm(2)})
    assert list(numbered_layers(model)) == list(enumerate(blocks))
    experts = nn.ModuleDict({"4": nn.ModuleDict({"ffn": nn.Linear(2, 2)})})
    assert [number for number, _ in numbered_layers(nn.Sequential(experts))] == [0]
    assert [number for number, _ in numbered_layers(nn.ModuleDict({"5": nn.Linear(1, 1)}))] == [5]


def test_all_stages_declare_shapes_or_none() -> None:
    """Each stage no more than is asked of it, but all of them."""

    class Gives(nn.Module):
        def infer_outputs(self, microbatch: Any) -> Any:
            return torch.empty(1)

    class Takes(nn.Module):
        def infer_inputs(self, microbatch: Any) -> Any:
            return torch.empty(1)

    for first, last, kind in (
        (Gives(), Takes(), DeclaredEdges),
        (Takes(), Gives(), InferredEdges),
        (Gives(), nn.Linear(1, 1), InferredEdges),
    ):
        made = provided_edges(lambda info: first, {0: first, 1: last}, 2, Ranks())  # noqa: B023
        assert type(made) is kind


# ---- what crosses the edges

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


def expected(rows: int, length: int) -> EdgeSpecs:
    shape = (rows, length, WIDTH)
    sure = TensorSpec(shape, torch.float32, differentiable=False)
    order = TensorSpec(shape, torch.int64, differentiable=False)
    hidden = TensorSpec(shape, torch.float32)
    return declared({"count": rows, "hidden": hidden, "order": order, "sure": sure})


def batch(rows: int = 2, length: int = 3) -> dict[str, Tensor]:
    return {"x": torch.zeros(rows, length, WIDTH)}


def test_edges_are_inferred_without_values_once_for_each_shape() -> None:
    provider = stages()
    edges = InferredEdges(provider, 3)
    with torch.no_grad():  # as in an evaluation: gradients are inferred all the same
        assert edges(0, batch()) == edges(1, batch()) == expected(2, 3)
    assert edges(1, batch(5, 1)) == expected(5, 1)
    assert edges(0, {"x": batch()["x"] + 1}) == expected(2, 3)
    assert provider.built == [0, 1, 2]  # the last one to see that it takes what comes
    assert provider.runs == [(stage, torch.device("meta")) for stage in (0, 1, 0, 1)]


def test_inferring_draws_no_random_numbers() -> None:
    """Unreleased: a provider that seeds torch decided what the first step's dropout drew."""
    before = torch.get_rng_state()
    InferredEdges(stages(), 3)(0, batch())
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("wish", [lambda x: x[x > 0], lambda x: x * int(x.sum()), lambda x: x.tolist()])
def test_an_output_that_depends_on_values_cannot_be_inferred(wish: Any) -> None:
    """Unreleased: torch's own error came through, which knows of no remedy."""

    class Wishing(nn.Module):
        def __init__(self, info: StageInfo) -> None:
            super().__init__()
            self.stage = info.stage

        def forward(self, x: Tensor) -> Any:
            return wish(x) if self.stage == 1 else x

    with pytest.raises(ShapeError) as refused:
        InferredEdges(Wishing, 3)(0, batch())
    error = refused.value
    assert error.value == "stage 1 run without values, to infer the shapes of its output"
    assert str(error.__cause__) in error.rule
    assert "use shapes='exchanged'" in error.remedy


def test_other_mistakes_come_through() -> None:
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


SPLITS = [((0,), (1, 2)), ((0, 2), (1,)), ((0, 1, 2), ())]


def agree(split: Sequence[Sequence[int]], provider: Any, microbatches: Sequence[Any]) -> list[str]:
    """The error of each of two processes that hold these stages of three, or "agreed"."""

    def work(processes: Ranks) -> None:
        held = {stage: provider(StageInfo(stage, 3)) for stage in split[processes.index]}
        edges = DeclaredEdges(held, 3)
        try:
            edges.agree(microbatches, processes)
        finally:
            agreed = not edges.unseen(microbatches)
        assert agreed

    return [f"{type(e).__name__}: {e}" if e else "agreed" for e in on_threads(2, work)]


@pytest.mark.parametrize("own", [(0,), (1,), (2,), (0, 2)])
def test_a_process_knows_its_own_edges(own: tuple[int, ...]) -> None:
    edges = DeclaredEdges({stage: Declaring(StageInfo(stage, 3)) for stage in own}, 3)
    for edge in (0, 1):
        if {edge, edge + 1} & set(own):
            shape = TensorSpec((2, 3, WIDTH), torch.float32)
            assert edges(edge, batch()) == declared({"hidden": shape, "stage": edge})


def test_nothing_is_run_or_built_for_what_is_declared() -> None:
    Declaring.built.clear()
    own = {0: Declaring(StageInfo(0, 2)), 1: Declaring(StageInfo(1, 2))}
    edges = DeclaredEdges(own, 2)
    edges(0, batch())
    edges.agree([batch()], Ranks())
    assert Declaring.built == [0, 1]
    assert not Declaring.runs


@pytest.mark.parametrize("split", SPLITS)
def test_edges_that_agree(split: Sequence[Sequence[int]]) -> None:
    assert agree(split, Declaring, [batch(), batch(5, 1)]) == ["agreed", "agreed"]


def test_each_shape_is_agreed_on_once() -> None:
    edges = DeclaredEdges({stage: Declaring(StageInfo(stage, 3)) for stage in range(3)}, 3)
    two = [batch(), batch(5, 1)]
    assert [len(microbatch["x"]) for microbatch in edges.unseen([*two, batch()])] == [2, 5]
    edges.agree([two[0]], Ranks())
    assert [len(microbatch["x"]) for microbatch in edges.unseen([*two, batch()])] == [5]
    edges.agree([two[1]], Ranks())
    assert edges.unseen([*two, batch()]) == []


@pytest.mark.parametrize(
    ("taken", "message"),
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
def test_edges_that_do_not_agree(taken: Any, message: str) -> None:
    """Unreleased: a gradient that one end sent and the other did not expect was no difference."""

    class Other(Declaring):
        def infer_outputs(self, microbatch: Any) -> Any:
            return {"hidden": torch.empty(2, 3), "stage": 0}

        def infer_inputs(self, microbatch: Any) -> Any:
            return taken if self.info.stage == 1 else self.infer_outputs(microbatch)

    for answer in (error for split in SPLITS for error in agree(split, Other, [batch()])):
        assert answer.startswith("ShapeError: stage 0 declares the output float32[2, 3], 0 as ")
        assert f": stage 1 declares the input {message}" in answer


@pytest.mark.parametrize("split", SPLITS)
def test_declared_names_that_forward_does_not_take(split: Sequence[Sequence[int]]) -> None:
    class Strict(Declaring):
        def forward(self, x: Tensor, hiden: Tensor | None = None) -> Any:  # type: ignore[override]
            return x

    for answer in agree(split, Strict, [batch()]):
        assert answer.startswith(
            "ModelError: the shapes that stages 0 and 1 declare for the edge between them: a"
        )
        assert "the previous stage returns hidden, stage, and it has no parameter hidden, stage" in answer
