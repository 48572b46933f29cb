"""Stages between which all sorts of values go, and the plain process that they are compared with."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from penstock import Pipeline
from penstock.batch.payload import TensorSpec
from penstock.batch.shapes import Microbatch
from penstock.errors import BatchError, PenstockError
from penstock.models.stage import StageInfo
from penstock.schedule import Op, Placement, Schedule
from penstock.schedule.choose import ScheduleLike
from support.reference import assert_every_gradient, assert_gradients, gradients_of
from support.refusals import refuses

WIDTH = 3
TYPE = torch.float64
SIZES = ((3, 2), (1, 4), (2, 1), (4, 3))  # rows and length of each microbatch


def squares(output: Tensor, microbatch: Microbatch) -> Tensor:
    difference: Tensor = output - microbatch["y"]
    return difference.square().sum() / len(microbatch["y"])


def like_x(microbatch: Microbatch) -> Tensor:
    return torch.empty(microbatch["x"].shape, dtype=TYPE)


class Part(nn.Module):
    """A stage of one layer. What a subclass sends is the same on every edge; `edge` gives its shapes."""

    loss = staticmethod(squares)

    def __init__(self, info: StageInfo) -> None:
        super().__init__()
        self.info = info
        torch.manual_seed(info.stage)
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=TYPE)

    def turn(self, hidden: Tensor) -> Tensor:
        return torch.tanh(self.linear(hidden))

    def edge(self, microbatch: Microbatch) -> Any:
        return like_x(microbatch)


class Single(Part):
    def forward(self, x: Tensor) -> Any:
        return self.turn(x)


class Tuples(Part):
    def forward(self, hidden: Tensor | None = None, other: Tensor | None = None, *, x: Tensor) -> Any:
        hidden, other = (x, x) if hidden is None or other is None else (hidden, other)
        hidden = self.turn(hidden)
        return hidden * other if self.info.is_last else (hidden, 2 * other + hidden)

    def edge(self, microbatch: Microbatch) -> Any:
        return like_x(microbatch), like_x(microbatch)


class Lists(Part):
    """Of any length: a parameter of no name takes them."""

    def forward(self, *parts: Any, x: Tensor) -> Any:
        hidden, total, count = parts or (x, x.new_ones(()), 2)
        hidden = self.turn(hidden) * total
        return hidden if self.info.is_last else [hidden, total + hidden.mean() / count, count]

    def edge(self, microbatch: Microbatch) -> Any:
        return [like_x(microbatch), torch.empty((), dtype=TYPE), 2]


class Nested(Part):
    """Dicts whose order differs between what is returned and what is declared, and all that is no tensor."""

    def forward(
        self, pair: Any = None, flag: bool = False, name: str = "", rate: float = 0.0, *, x: Tensor
    ) -> Any:
        deep: Any
        hidden, deep = (x, {"more": [x, None], "count": 3}) if pair is None else pair
        if pair is not None:
            assert (flag, name, rate, deep["more"][1]) == (True, "up", 0.5, None)
            hidden = hidden * rate * deep["count"]
        hidden = self.turn(hidden) + deep["more"][0]
        if self.info.is_last:
            return hidden
        deep = {"more": [hidden * 2, None], "count": deep["count"]}
        return {"pair": (hidden, deep), "name": "up", "flag": True, "rate": 0.5}

    def edge(self, microbatch: Microbatch) -> Any:
        deep = {"count": 3, "more": [like_x(microbatch), None]}
        return {"rate": 0.5, "name": "up", "pair": (like_x(microbatch), deep), "flag": True}


class Whole(Part):
    """Tensors of integers and booleans, from the first stage to the last."""

    def forward(
        self, x: Tensor, hidden: Tensor | None = None, order: Tensor | None = None, mask: Tensor | None = None
    ) -> Any:
        if hidden is None or order is None or mask is None:
            hidden, order, mask = x, x.sum(2).argsort(1), x[:, :, :1] > 0
        hidden = self.turn(hidden.take_along_dim(order[:, :, None], 1))
        hidden = torch.where(mask, hidden, -2 * hidden)
        return hidden if self.info.is_last else {"hidden": hidden, "order": order, "mask": mask}

    def edge(self, microbatch: Microbatch) -> Any:
        shape = microbatch["x"].shape
        order = torch.empty(shape[:2], dtype=torch.int64)
        mask = torch.empty((*shape[:2], 1), dtype=torch.bool)
        return {"hidden": like_x(microbatch), "order": order, "mask": mask}


class Detached(Part):
    """A tensor of floats without a gradient, before and behind others."""

    def forward(self, x: Tensor, hidden: Tensor | None = None, size: Tensor | None = None) -> Any:
        hidden = self.turn(x if hidden is None else hidden)
        hidden = hidden if size is None else hidden * size
        return hidden if self.info.is_last else {"size": hidden.detach().abs(), "hidden": hidden}

    def edge(self, microbatch: Microbatch) -> Any:
        size = TensorSpec(tuple(microbatch["x"].shape), TYPE, differentiable=False)
        return {"hidden": like_x(microbatch), "size": size}


class PassedOn(Part):
    """What the first stage made goes unchanged through all others and is used by the last alone."""

    def forward(self, x: Tensor, hidden: Tensor | None = None, first: Tensor | None = None) -> Any:
        hidden = self.turn(x if hidden is None else hidden)
        first = hidden if first is None else first
        return hidden * first if self.info.is_last else {"hidden": hidden, "first": first}

    def edge(self, microbatch: Microbatch) -> Any:
        return {"hidden": like_x(microbatch), "first": like_x(microbatch)}


class OnlyPassing(Single):
    """Stages between the first and the last that compute nothing."""

    def forward(self, x: Tensor) -> Any:
        return self.turn(x) if self.info.is_first or self.info.is_last else x


class Twice(Part):
    def forward(self, one: Tensor | None = None, other: Tensor | None = None, *, x: Tensor) -> Any:
        hidden = self.turn(x if one is None or other is None else one + 2 * other)
        return hidden if self.info.is_last else (hidden, hidden)

    def edge(self, microbatch: Microbatch) -> Any:
        return like_x(microbatch), like_x(microbatch)


class Unused(Part):
    """The next stage takes it, and does nothing with it."""

    def forward(self, x: Tensor, hidden: Tensor | None = None, unused: Tensor | None = None) -> Any:
        hidden = self.turn(x if hidden is None else hidden)
        return hidden if self.info.is_last else {"hidden": hidden, "unused": hidden.exp()}

    def edge(self, microbatch: Microbatch) -> Any:
        return {"hidden": like_x(microbatch), "unused": like_x(microbatch)}


class Differing(Part):
    """A number that is another one for each microbatch."""

    def forward(self, x: Tensor, shift: int, hidden: Tensor | None = None, twice: int = 0) -> Any:
        hidden = self.turn(x if hidden is None else hidden + twice / 10)
        return hidden if self.info.is_last else {"hidden": hidden, "twice": 2 * shift}

    def edge(self, microbatch: Microbatch) -> Any:
        return {"hidden": like_x(microbatch), "twice": 2 * microbatch["shift"]}


class SentWeight(Part):
    """The first stage's weight itself, as one that is used at both ends would be."""

    def forward(self, x: Tensor, hidden: Tensor | None = None, weight: Tensor | None = None) -> Any:
        hidden = self.turn(x if hidden is None else hidden)
        weight = self.linear.weight if weight is None else weight
        return self.use(hidden, weight) if self.info.is_last else {"hidden": hidden, "weight": weight}

    def use(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return hidden * weight.diagonal()

    def edge(self, microbatch: Microbatch) -> Any:
        return {"hidden": like_x(microbatch), "weight": torch.empty(WIDTH, WIDTH, dtype=TYPE)}


class SentFactor(SentWeight):
    """What was received stands where a weight would, in a product."""

    def use(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return hidden @ weight


class NoTensor(Part):
    """Nothing travels, and no gradient comes back: what a stage before the last learns, it cannot."""

    def forward(self, count: int = 1, name: str | None = None, *, x: Tensor) -> Any:
        return self.turn(x) * count if self.info.is_last else {"count": 3, "name": None}

    def edge(self, microbatch: Microbatch) -> Any:
        return {"count": 3, "name": None}


class Frozen(Single):
    """Only the last stage is trained, so that no gradient goes back."""

    def __init__(self, info: StageInfo) -> None:
        super().__init__(info)
        self.requires_grad_(info.is_last)


class Chosen(Part):
    """Only tokens whose first number is above 0 go on: how many that are, at times none, their values say."""

    loss = staticmethod(lambda output, microbatch: output.square().sum() / len(microbatch["x"]))

    def forward(
        self, x: Tensor, hidden: Tensor | None = None, row: Tensor | None = None, left: int = 0
    ) -> Any:
        hidden = self.turn(x if hidden is None else hidden)
        assert row is None or left == len(row) == len(hidden)
        row = torch.arange(len(x))[:, None].expand(hidden.shape[:-1]) if row is None else row
        kept = hidden[..., 0] > 0
        if self.info.is_last:
            return hidden * (row[:, None] + 1)
        return {"hidden": hidden[kept], "row": row[kept], "left": int(kept.sum())}


class Many(Part):
    """Sixty tensors: their shapes take more than the header of 1024 bytes that is sent first."""

    def forward(self, x: Tensor, **more: Tensor) -> Any:
        hidden = self.turn(x + sum(more.values()))
        if self.info.is_last:
            return hidden
        return {f"part of the sum, number {number}": hidden / (number + 1) for number in range(60)}


ONLY_EXCHANGED: tuple[type[Part], ...] = (Chosen, Many)
CASES: tuple[type[Part], ...] = (
    Single, Tuples, Lists, Nested, Whole, Detached, PassedOn, OnlyPassing, Twice, Unused, Differing,
    SentWeight, NoTensor, Frozen, *ONLY_EXCHANGED,
)  # fmt: skip
MODES = ("learnt", "declared", "exchanged")


def ragged() -> list[dict[str, Any]]:
    """Four microbatches that differ in rows, length and a number."""
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(*size, WIDTH, generator=generator, dtype=TYPE) for size in SIZES]
    return [{"x": x, "y": x.flip(0), "shift": number} for number, x in enumerate(drawn)]


def provider(case: type[Part], mode: str) -> Callable[[StageInfo], nn.Module]:
    if mode != "declared":
        return case
    methods = {"infer_inputs": case.edge, "infer_outputs": case.edge}
    declaring: type[Part] = type(f"Declaring{case.__name__}", (case,), methods)
    return declaring


def build(case: type[Part], mode: str, schedule: ScheduleLike, ranks: int) -> Pipeline:
    shapes = "exchanged" if mode == "exchanged" else "inferred"
    return Pipeline.from_provider(
        provider(case, mode), schedule=schedule, ranks=ranks, microbatches=len(SIZES), loss_fn=case.loss,
        shapes=shapes, timeout=30,
    )  # fmt: skip


Loss = Callable[[Any, Mapping[str, Any]], Tensor]


def plain(parts: Sequence[nn.Module], microbatches: Sequence[Mapping[str, Any]], loss_fn: Loss) -> float:
    """All stages in a row in one process, with none of penstock's code: loss, and `.grad` of `parts`."""
    rows = sum(len(microbatch["x"]) for microbatch in microbatches)
    loss = torch.zeros((), dtype=TYPE)
    for microbatch in microbatches:
        value: Any = {}
        for part in parts:
            named = value if isinstance(value, dict) else {}
            placed = () if isinstance(value, dict) else value
            placed = placed if type(placed) in (tuple, list) else (placed,)
            names = list(inspect.signature(part.forward).parameters)
            taken = names[: len(placed)] if names[0] != "parts" else []
            entries = {name: microbatch[name] for name in names if name in microbatch and name not in taken}
            value = part(*placed, **{**entries, **named})
        loss = loss + loss_fn(value, microbatch) * len(microbatch["x"]) / rows
    loss.backward()  # type: ignore[no-untyped-call]
    return float(loss.detach())


def assert_gradients_of(pipe: Pipeline, parts: Sequence[nn.Module]) -> None:
    """This process's gradients are those of `parts`, the stages of one copy of the model."""
    for stage, module in pipe.modules.items():
        found, expected = gradients_of(module), gradients_of(parts[stage % len(parts)])
        assert found.keys() == expected.keys()
        if expected:
            assert_gradients(found, expected, 1e-10)


def assert_exact(case: type[Part], mode: str, schedule: ScheduleLike, ranks: int) -> None:
    """A step of `case` has the loss and the gradients of a plain process."""
    pipe = build(case, mode, schedule, ranks)
    found = pipe.step(ragged()).loss
    depth = pipe.schedule.placement.depth
    parts = [case(StageInfo(stage, depth)) for stage in range(depth)]
    assert found == pytest.approx(plain(parts, ragged(), case.loss), rel=1e-12), case.__name__
    assert_gradients_of(pipe, parts)
    pipe.close()


# ---- what the pool runs


def all_cases(mode: str, schedule: ScheduleLike, ranks: int) -> None:
    for case in CASES:
        if mode == "exchanged" or case not in ONLY_EXCHANGED:
            assert_exact(case, mode, schedule, ranks)


ANOTHER_ORDER = "0F0 0F1 0F2 0F3 0B1 0B0 0B2 0B3 | 1F1 1B1 1F0 1B0 1F3 1F2 1B2 1B3"


def another_order(mode: str) -> None:
    """Messages that are waited for in another order than they were sent in."""
    programs = tuple(tuple(map(Op.parse, rank.split())) for rank in ANOTHER_ORDER.split("|"))
    assert_exact(Tuples, mode, Schedule("own", Placement((0, 1)), len(SIZES), programs), 2)


def example(name: str) -> Any:
    """A file of examples/, which is no package, as a module."""
    path = Path(__file__).parents[2] / "examples" / f"{name}.py"
    found = importlib.util.spec_from_file_location(name, path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


@contextmanager
def in_float64() -> Iterator[None]:
    """Tensors and parameters that are made without a dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(TYPE)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def own_model(ranks: int, schedules: Sequence[str]) -> None:
    """examples/own_model.py has the gradients of one stage that holds everything."""
    own = example("own_model")
    microbatches = own.draw(seed=1)
    with in_float64():
        whole = own.Chunk(StageInfo(0, 1))
        mean = own.MeanOverLabels()
        weight = sum(mean.weight(microbatch) for microbatch in microbatches)
        totals = [mean.total(whole(microbatch["tokens"]), microbatch) for microbatch in microbatches]
        loss = sum(totals, torch.zeros(())) / weight
        loss.backward()
        for schedule in schedules:
            pipe = Pipeline.from_provider(
                own.Chunk, schedule=schedule, ranks=ranks, microbatches=len(own.SIZES), loss_fn=mean,
                timeout=30,
            )  # fmt: skip
            assert pipe.step(microbatches).loss == pytest.approx(float(loss.detach()), rel=1e-12)
            assert_every_gradient(pipe.modules.values(), gradients_of(whole), 1e-10)
            pipe.close()


def from_scratch(microbatches: int) -> None:
    """examples/from_scratch.py has the loss and the gradients of the library's step; a rank of each."""
    own = example("from_scratch")
    own.MICROBATCHES, rank, ranks = microbatches, dist.get_rank(), dist.get_world_size()
    with in_float64():
        x, y = own.batch(step=3)
        assert x.dtype == torch.float64
        stage = own.Stage(own.make_stage(rank, ranks), rank, ranks, x, y)
        loss = stage.step()
        assert (stage.most_live, stage.live) == (min(ranks - rank, microbatches), {})
        pipe = Pipeline.from_provider(
            lambda info: own.make_stage(info.stage, info.stages), schedule="1f1b", ranks=ranks,
            microbatches=microbatches, timeout=30,
            loss_fn=lambda output, microbatch: F.mse_loss(output, microbatch["y"]),
        )  # fmt: skip
        result = pipe.step({"input": x, "y": y})
        assert pipe.proof.peak_live[rank] == stage.most_live
        if rank == ranks - 1:
            assert loss == pytest.approx(result.loss, rel=1e-12)
        (module,) = pipe.modules.values()
        wanted = gradients_of(module)
        assert len(wanted) == 2 * len(own.own_layers(rank, ranks))
        assert all(gradient.any() for gradient in wanted.values())
        assert_gradients(gradients_of(stage.module), wanted, 1e-10)
        pipe.close()


class TooLong(Single):
    """What stage 1 declares to take is no longer what stage 0 declares to give."""

    def infer_outputs(self, microbatch: Microbatch) -> Any:
        return like_x(microbatch)

    def infer_inputs(self, microbatch: Microbatch) -> Any:
        longer = self.info.stage == 1 and len(microbatch["x"]) == SIZES[-1][0]  # the last microbatch alone
        return like_x(microbatch).repeat(1, 2, 1) if longer else like_x(microbatch)


class HalfDetached(Detached):
    """Stage 1 takes for granted that a gradient goes back for what stage 0 says has none."""

    def infer_outputs(self, microbatch: Microbatch) -> Any:
        return self.edge(microbatch)

    def infer_inputs(self, microbatch: Microbatch) -> Any:
        return {"hidden": like_x(microbatch), "size": like_x(microbatch)}


class OtherNames(Single):
    """What is declared has names that the next stage's forward lacks."""

    def infer_outputs(self, microbatch: Microbatch) -> Any:
        return {"hiden": like_x(microbatch)}

    infer_inputs = infer_outputs


DISAGREEING = (TooLong, HalfDetached, OtherNames)


def _must_not_run(module: nn.Module, given: object) -> None:
    raise AssertionError(f"{type(module).__name__} ran")


def disagreements(ranks: int) -> list[str]:
    """How stages that contradict each other are refused on this rank, and that nothing had been sent."""
    errors = []
    for case in DISAGREEING:
        pipe = build(case, "as it is", "1f1b", ranks)
        for module in pipe.modules.values():
            module.register_forward_pre_hook(_must_not_run)
        try:
            pipe.step(ragged())
            errors.append("no error")
        except PenstockError as error:
            errors.append(f"{type(error).__name__}: {error}")
        pipe.close()
    return errors


class Entries(Part):
    """Reads entries of all kinds in addition to what comes from the stage before."""

    loss = staticmethod(lambda output, microbatch: output.square().sum() / len(microbatch["x"]))

    def forward(
        self, x: Tensor, scale: float, mask: Tensor, table: Any, odd: Any, hidden: Tensor | None = None
    ) -> Any:
        hidden = self.turn(x if hidden is None else hidden) * scale
        hidden = torch.where(mask.all(0)[:, None], hidden, table["shift"] - hidden) * odd["weight"]
        return hidden if self.info.is_last else {"hidden": hidden}

    def edge(self, microbatch: Microbatch) -> Any:
        return {"hidden": like_x(microbatch)}


def every_other(odd: Any, count: int) -> list[Any]:
    """Not in the order of the rows: microbatch i gets what is at -i."""
    return [{"weight": odd["weights"][-number]} for number in range(count)]


def three(value: Any, count: int) -> list[Any]:
    """However many are asked for."""
    return [value] * 3


SHARDING = {"mask": 1, "table": None, "odd": every_other, "thirds": three}


def entries(rows: int = 10) -> dict[str, Any]:
    """Of a step, in addition to its batch."""
    generator = torch.Generator().manual_seed(rows)
    return {
        "scale": 2.0,
        "mask": torch.rand(2, rows, generator=generator) > 0.3,
        "table": {"shift": torch.linspace(0, 1, WIDTH, dtype=TYPE)},
        "odd": {"weights": [1.0, 0.5, 0.25, 2.0]},
    }


def rows_of(rows: int = 10) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return {"x": torch.randn(rows, WIDTH, generator=generator, dtype=TYPE)}


def cut_by_hand() -> list[dict[str, Any]]:
    """What microbatches `rows_of()` and `entries()` make, where SHARDING says how."""
    given, weights = entries(), (1.0, 2.0, 0.25, 0.5)
    bounds = ((0, 3), (3, 6), (6, 8), (8, 10))
    return [
        {"x": rows_of()["x"][a:b], "scale": 2.0, "mask": given["mask"][:, a:b], "table": given["table"],
         "odd": {"weight": weight}}
        for (a, b), weight in zip(bounds, weights, strict=True)
    ]  # fmt: skip


def with_entries(ranks: int, mode: str, schedule: ScheduleLike = "1f1b") -> Pipeline:
    return Pipeline.from_provider(
        provider(Entries, mode), schedule=schedule, ranks=ranks, microbatches=4, loss_fn=Entries.loss,
        sharding=SHARDING, shapes="exchanged" if mode == "exchanged" else "inferred", timeout=30,
    )  # fmt: skip


def assert_entries(pipe: Pipeline) -> None:
    """However a step gets its entries, it has the loss and the gradients of a plain process."""
    depth = pipe.schedule.placement.depth
    parts = [Entries(StageInfo(stage, depth)) for stage in range(depth)]
    loss = pytest.approx(plain(parts, cut_by_hand(), Entries.loss), rel=1e-12)
    microbatches = [{"x": part["x"], "mask": part["mask"]} for part in cut_by_hand()]
    rest = {name: entries()[name] for name in ("scale", "table", "odd")}
    given: tuple[tuple[Any, dict[str, Any]], ...] = (
        (rows_of(), entries()),
        ({**rows_of(), **entries()}, {}),
        (microbatches, rest),
        (cut_by_hand(), {}),
    )
    for batch, more in given:
        pipe.zero_grad()
        assert pipe.step(batch, **more).loss == loss
        assert_gradients_of(pipe, parts)
        assert pipe.evaluate(batch, **more).loss == loss


WRONG_ENTRIES: tuple[tuple[str, str, Any, dict[str, Any]], ...] = (
    ("x as an argument", "the batch has it", rows_of(), {**entries(), "x": rows_of()["x"]}),
    ("x: 10, mask: 9", "all tensors of a batch", rows_of(), {**entries(), "mask": entries(9)["mask"]}),
    ("mask of shape [10]", "split along dimension 1",
     rows_of(), {**entries(), "mask": torch.ones(10)}),
    ("3 parts of thirds", "function that sharding names", rows_of(), {**entries(), "thirds": 0}),
    ("a list of 0 microbatches", "this call has 1", [], {}),
    ("mask next to a list of microbatches", "numbers of rows may differ",
     [{"x": part["x"]} for part in cut_by_hand()], entries()),
    ("scale as an argument", "the batch has it", cut_by_hand(), {"scale": 2.0}),
)  # fmt: skip


def refusals(ranks: int) -> None:
    """Wrong batches leave every gradient as it was, and a step that is right may follow."""
    pipe = with_entries(ranks, "learnt")
    assert_entries(pipe)
    cases = [*WRONG_ENTRIES]
    if pipe.processes.count > 1:
        scale = 2.0 + pipe.processes.index
        cases.append(("rank 1: ", "the same batch", rows_of(), {**entries(), "scale": scale}))
    for value, rule, batch, more in cases:
        before = gradients(pipe)
        with refuses(BatchError, value, rule):
            pipe.step(batch, **more)
        assert_unchanged(pipe, before)
        assert_entries(pipe)
    pipe.close()


def gradients(pipe: Pipeline) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in pipe.parameters()]


def assert_unchanged(pipe: Pipeline, before: list[Tensor | None]) -> None:
    torch.testing.assert_close(gradients(pipe), before, rtol=0, atol=0)


class Noisy(Part):
    """Several outputs, and dropout, which an evaluation leaves out."""

    loss = staticmethod(lambda output, microbatch: output["hidden"].square().sum() / len(microbatch["x"]))

    def forward(self, x: Tensor, hidden: Tensor | None = None, length: int = 0) -> Any:
        hidden = torch.dropout(self.turn(x if hidden is None else hidden), 0.5, self.training)
        length = length + x.shape[1]
        if self.info.is_last:
            return {"hidden": hidden, "mean": hidden.mean(), "length": length}
        return {"hidden": hidden, "length": x.shape[1]}

    def edge(self, microbatch: Microbatch) -> Any:
        return {"hidden": like_x(microbatch), "length": microbatch["x"].shape[1]}


def inferred(ranks: int, mode: str, schedule: ScheduleLike) -> list[int]:
    """The microbatches whose results this process has; they are right, and nothing else has changed."""
    pipe = build(Noisy, mode, schedule, ranks)
    depth = pipe.schedule.placement.depth
    parts = nn.ModuleList(Noisy(StageInfo(stage, depth)) for stage in range(depth)).eval()
    if pipe.schedule.trains:
        pipe.step(ragged())
    next(iter(pipe.modules.values())).get_submodule("linear").eval()
    modes = {part: part.training for module in pipe.modules.values() for part in module.modules()}
    before, state = gradients(pipe), torch.get_rng_state()
    seen: list[int] = []

    def doubled(output: Any, number: int) -> Any:
        seen.append(number)
        assert not torch.is_grad_enabled()
        assert not any(part.training for part in modes)
        return 2 * output["hidden"]

    found, kept = pipe.infer(ragged()), pipe.infer(ragged(), collect=doubled)
    assert list(found) == list(kept) == sorted(seen)
    for number, output in found.items():
        value: Any = {}
        with torch.no_grad():
            for part in parts:
                value = part(ragged()[number]["x"], **value)
        assert torch.equal(output["hidden"], value["hidden"])
        assert torch.equal(output["mean"], value["mean"])
        assert output["length"] == value["length"]
        assert torch.equal(kept[number], 2 * value["hidden"])
    assert torch.equal(state, torch.get_rng_state())
    assert modes == {part: part.training for part in modes}
    assert_unchanged(pipe, before)
    # another number of microbatches than training has, with fewer rows
    assert list(pipe.infer(ragged()[:2])) == list(found)[:2]
    assert list(pipe.infer(ragged()[1])) == list(found)[:1]
    pipe.close()
    return list(found)
