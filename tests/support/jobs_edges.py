"""Stages between which all sorts of values go, the plain process that they are compared with, and what the
pool's workers run of them."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from penstock import Pipeline
from penstock.batch.payload import TensorSpec
from penstock.batch.shapes import Microbatch
from penstock.errors import BatchError, PenstockError
from penstock.models.stage import StageInfo
from penstock.schedule import Op, Placement, Schedule
from penstock.schedule.choose import ScheduleLike

WIDTH = 3
TYPE = torch.float64
SIZES = ((3, 2), (1, 4), (2, 1), (4, 3))  # rows and length of each microbatch


def squares(output: Tensor, microbatch: Microbatch) -> Tensor:
    difference: Tensor = output - microbatch["y"]
    return difference.square().sum() / len(microbatch["y"])


class Part(nn.Module):
    """One layer of a stage; subclasses say what goes over the edge.

    What they return there is the same on every edge, and `edge` tells it by arithmetic.
    """

    loss = staticmethod(squares)

    def __init__(self, info: StageInfo) -> None:
        super().__init__()
        self.info = info
        torch.manual_seed(info.stage)
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=TYPE)

    def turn(self, hidden: Tensor) -> Tensor:
        return torch.tanh(self.linear(hidden))

    def edge(self, microbatch: Microbatch) -> Any:
        raise NotImplementedError


def like_x(microbatch: Microbatch) -> Tensor:
    return torch.empty(microbatch["x"].shape, dtype=TYPE)


class Single(Part):
    def forward(self, x: Tensor) -> Tensor:
        return self.turn(x)

    def edge(self, microbatch: Microbatch) -> Any:
        return like_x(microbatch)


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


class OnlyPassing(Part):
    """Stages between the first and the last that compute nothing."""

    def forward(self, x: Tensor) -> Any:
        return self.turn(x) if self.info.is_first or self.info.is_last else x

    def edge(self, microbatch: Microbatch) -> Any:
        return like_x(microbatch)


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


class Frozen(Part):
    """Only the last stage is trained, so that no gradient goes back."""

    def __init__(self, info: StageInfo) -> None:
        super().__init__(info)
        self.requires_grad_(info.is_last)

    def forward(self, x: Tensor) -> Tensor:
        return self.turn(x)

    def edge(self, microbatch: Microbatch) -> Any:
        return like_x(microbatch)


CASES: tuple[type[Part], ...] = (
    Single, Tuples, Lists, Nested, Whole, Detached, PassedOn, OnlyPassing, Twice, Unused, Differing,
    SentWeight, NoTensor, Frozen,
)  # fmt: skip
MODES = ("learnt", "declared", "exchanged")


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


def differences(pipe: Pipeline, parts: Sequence[nn.Module]) -> list[str]:
    """Parameters of this process whose gradient is another one than that of `parts`."""
    wrong = []
    for stage, module in pipe.modules.items():
        for name, parameter in module.named_parameters():
            expected = parts[stage % len(parts)].get_parameter(name).grad
            if expected is None or parameter.grad is None:
                if not (expected is parameter.grad is None):
                    wrong.append(f"stage {stage} {name}: {parameter.grad} for {expected}")
                continue
            apart = float((parameter.grad - expected).abs().max())
            if not apart <= 1e-10 * float(expected.abs().max()):
                wrong.append(f"stage {stage} {name}: differs by {apart:.3g}")
    return wrong


def equivalence(case: type[Part], mode: str, schedule: ScheduleLike, ranks: int) -> list[str]:
    """What a step of `case` does otherwise than a plain process."""
    pipe = build(case, mode, schedule, ranks)
    found = pipe.step(ragged()).loss
    depth = pipe.schedule.placement.depth
    parts = [case(StageInfo(stage, depth)) for stage in range(depth)]
    loss = plain(parts, ragged(), case.loss)
    wrong = differences(pipe, parts)
    if abs(found - loss) > 1e-12 * abs(loss):
        wrong.append(f"loss {found} for {loss}")
    pipe.close()
    return [f"{case.__name__}, {mode}, {schedule} on {ranks}: {told}" for told in wrong]


# ---- what the pool runs


def all_cases(mode: str, schedule: ScheduleLike, ranks: int) -> list[str]:
    return [told for case in CASES for told in equivalence(case, mode, schedule, ranks)]


ANOTHER_ORDER = "0F0 0F1 0F2 0F3 0B1 0B0 0B2 0B3 | 1F1 1B1 1F0 1B0 1F3 1F2 1B2 1B3"


def another_order(mode: str) -> list[str]:
    """Messages that are waited for in another order than they were sent in; failures are told, not raised."""
    programs = tuple(tuple(map(Op.parse, rank.split())) for rank in ANOTHER_ORDER.split("|"))
    try:
        return equivalence(Tuples, mode, Schedule("own", Placement((0, 1)), len(SIZES), programs), 2)
    except Exception as error:
        return [f"{type(error).__name__}: {error}"]


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
    """What is made without a dtype, a model's parameters too."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(TYPE)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def own_model(ranks: int, schedules: Sequence[str]) -> list[str]:
    """Where the gradients of examples/own_model.py differ from those of one stage that holds everything."""
    own = example("own_model")
    microbatches = own.draw(seed=1)
    wrong = []
    with in_float64():
        whole = own.Chunk(StageInfo(0, 1))
        mean = own.MeanOverLabels()
        weight = sum(mean.weight(microbatch) for microbatch in microbatches)
        loss = torch.zeros(())
        for microbatch in microbatches:
            loss = loss + mean.total(whole(microbatch["tokens"]), microbatch) / weight
        loss.backward()  # type: ignore[no-untyped-call]
        expected = {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}
        for schedule in schedules:
            pipe = Pipeline.from_provider(
                own.Chunk, schedule=schedule, ranks=ranks, microbatches=len(own.SIZES), loss_fn=mean,
                timeout=30,
            )  # fmt: skip
            result = pipe.step(microbatches)
            if abs(result.loss - float(loss.detach())) > 1e-12 * result.loss:
                wrong.append(f"{schedule}: loss {result.loss} for {float(loss.detach())}")
            found = {
                name: p.grad
                for name, p in pipe.named_parameters(remove_duplicate=False)
                if p.grad is not None
            }
            missing = dict(pipe.named_parameters(remove_duplicate=False)).keys() - found.keys()
            if missing or not found or found.keys() - expected.keys():
                wrong.append(f"{schedule}: gradients of {sorted(found)}")
            for name, gradient in found.items():
                apart = float((gradient - expected[name]).abs().max() / expected[name].abs().max())
                if not apart <= 1e-10:
                    wrong.append(f"{schedule}: {name} differs by {apart:.3g}")
            pipe.close()
    return wrong


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
    told = []
    for case in DISAGREEING:
        pipe = build(case, "as it is", "1f1b", ranks)
        for module in pipe.modules.values():
            module.register_forward_pre_hook(_must_not_run)
        try:
            pipe.step(ragged())
            told.append("no error")
        except PenstockError as error:
            told.append(f"{type(error).__name__}: {error}")
        pipe.close()
    return told


class Many(Part):
    """Sixty tensors: telling of them takes more than the header that is sent first."""

    def forward(self, x: Tensor, **more: Tensor) -> Any:
        hidden = self.turn(x + sum(more.values()))
        if self.info.is_last:
            return hidden
        return {f"part of the sum, number {number}": hidden / (number + 1) for number in range(60)}


def exchanged(ranks: int, schedule: ScheduleLike) -> list[str]:
    """All that can be told ahead alone: much to tell of, and shapes that values decide."""
    wrong = []
    for case in (Many, Chosen):
        wrong += equivalence(case, "exchanged", schedule, ranks)
    return wrong


class Entries(Part):
    """Reads entries of all kinds beside what comes from the stage before."""

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


SHARDING = {"mask": 1, "table": None, "odd": every_other}


def entries(rows: int = 10) -> dict[str, Any]:
    """Of a step beside its batch."""
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


def entries_of(pipe: Pipeline) -> list[str]:
    """What a step with entries of all kinds does otherwise than a plain process."""
    depth = pipe.schedule.placement.depth
    parts = [Entries(StageInfo(stage, depth)) for stage in range(depth)]
    loss = plain(parts, cut_by_hand(), Entries.loss)
    wrong = []
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
        found = pipe.step(batch, **more).loss
        wrong += differences(pipe, parts)
        if abs(found - loss) > 1e-12 * loss:
            wrong.append(f"loss {found} for {loss}")
        if abs(pipe.evaluate(batch, **more).loss - loss) > 1e-12 * loss:
            wrong.append("another loss in an evaluation")
    return wrong


WRONG_ENTRIES: tuple[tuple[str, Any, dict[str, Any]], ...] = (
    ("x as an argument: the batch has it", rows_of(), {**entries(), "x": rows_of()["x"]}),
    ("x: 10, mask: 9: all tensors of a batch", rows_of(), {**entries(), "mask": entries(9)["mask"]}),
    ("mask of shape [10]: it is to be split along dimension 1",
     rows_of(), {**entries(), "mask": torch.ones(10)}),
    ("3 parts of thirds: the function that sharding names", rows_of(), {**entries(), "thirds": 0}),
    ("a list of 3 microbatches: the schedule has 4", cut_by_hand()[:3], {}),
    ("a list of 0 microbatches: the schedule has 4", [], {}),
    ("mask next to a list of microbatches: they may differ in rows",
     [{"x": part["x"]} for part in cut_by_hand()], entries()),
    ("scale as an argument: the batch has it", cut_by_hand(), {"scale": 2.0}),
)  # fmt: skip


def refusals(ranks: int) -> list[str]:
    """Wrong batches, each followed by a step that is right; what went otherwise."""
    sharding = {**SHARDING, "thirds": lambda value, count: [value] * 3}
    pipe = Pipeline.from_provider(
        Entries, schedule="1f1b", ranks=ranks, microbatches=4, loss_fn=Entries.loss, sharding=sharding,
        timeout=30,
    )  # fmt: skip
    wrong = entries_of(pipe)
    cases = [*WRONG_ENTRIES]
    if pipe.processes.count > 1:
        scale = 2.0 + pipe.processes.index
        cases.append(
            ("all ranks of a pipeline step on the same batch", rows_of(), {**entries(), "scale": scale})
        )
    for told, batch, more in cases:
        before = [None if p.grad is None else p.grad.clone() for p in pipe.parameters()]
        try:
            pipe.step(batch, **more)
            wrong.append(f"no error for {told}")
        except BatchError as error:
            if told not in str(error):
                wrong.append(f"{error} for {told}")
        for gradient, p in zip(before, pipe.parameters(), strict=True):
            if gradient is not None and (p.grad is None or not torch.equal(gradient, p.grad)):
                wrong.append(f"a gradient was touched by {told}")
        wrong += [f"after {told}: {what}" for what in entries_of(pipe)]
    pipe.close()
    return wrong


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


def inferred(ranks: int, mode: str, schedule: ScheduleLike) -> tuple[list[int], list[str]]:
    """The microbatches whose results this process has, and what is wrong with them."""
    pipe = build(Noisy, mode, schedule, ranks)
    depth = pipe.schedule.placement.depth
    parts = nn.ModuleList(Noisy(StageInfo(stage, depth)) for stage in range(depth)).eval()
    wrong: list[str] = []
    if pipe.schedule.trains:
        pipe.step(ragged())
    next(iter(pipe.modules.values())).get_submodule("linear").eval()
    modes = {part: part.training for module in pipe.modules.values() for part in module.modules()}
    before = [None if p.grad is None else p.grad.clone() for p in pipe.parameters()]
    state = torch.get_rng_state()

    seen: list[int] = []

    def doubled(output: Any, number: int) -> Any:
        seen.append(number)
        if torch.is_grad_enabled() or any(part.training for part in modes):
            wrong.append("a forward that is no evaluation")
        return 2 * output["hidden"]

    found, kept = pipe.infer(ragged()), pipe.infer(ragged(), collect=doubled)
    if not list(found) == list(kept) == sorted(seen):
        wrong.append(f"results of {list(found)}, {list(kept)}, {seen}")
    for number, output in found.items():
        value: Any = {}
        with torch.no_grad():
            for part in parts:
                value = part(ragged()[number]["x"], **value)
        same = torch.equal(output["hidden"], value["hidden"]) and torch.equal(output["mean"], value["mean"])
        if not same or output["length"] != value["length"]:
            wrong.append(f"another output of microbatch {number}")
        if not torch.equal(kept[number], 2 * value["hidden"]):
            wrong.append(f"another result of microbatch {number}")
    if not torch.equal(state, torch.get_rng_state()):
        wrong.append("random numbers were drawn")
    if modes != {part: part.training for part in modes}:
        wrong.append("parts are in another mode than before")
    for gradient, p in zip(before, pipe.parameters(), strict=True):
        if gradient is None or p.grad is None:
            if gradient is not p.grad:
                wrong.append("a gradient was made")
        elif not torch.equal(gradient, p.grad):
            wrong.append("a gradient was touched")
    # another number of microbatches than training has, with fewer rows
    if list(pipe.infer(ragged()[:2])) != list(found)[:2] or list(pipe.infer(ragged()[1])) != list(found)[:1]:
        wrong.append("another number of microbatches")
    pipe.close()
    return list(found), [f"{schedule} on {ranks}: {told}" for told in wrong]
