"""Seeds of what is drawn at random hang on step, content of the microbatch and place in the model alone."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from penstock.runtime.rng import (
    StageRNG,
    draw_seed,
    dropouts,
    generator_of,
    mix,
    next_seed,
    seeded_step,
)
from penstock.runtime.stage_part import WHOLE

PLACES = 3


class Layers(nn.Module):
    """Layers of ones, each of which drops some and keeps what it gave."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Dropout(0.5) for _ in range(PLACES))
        self.after = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> list[Tensor]:
        return [layer(torch.ones(64)) for layer in (*self.layers, self.after)]


def seeded(rng: StageRNG, call: Callable[[Any], Any], microbatch: dict[str, Tensor]) -> Any:
    """A forward of a stage."""
    rng.before_forward(0, microbatch, WHOLE)
    return call(microbatch["x"])


def run(seed: int, stages: list[list[int]], contents: list[int]) -> dict[Any, Tensor]:
    """By microbatch's content and place, what was drawn; `stages` have these layers, the last one the end."""
    found: dict[Any, Tensor] = {}
    for stage, places in enumerate(stages):
        module = Layers()
        own = [(f"layer {place}", module.layers[at]) for at, place in enumerate(places)]
        rng = StageRNG(stage, torch.device("cpu"), [*own, ("after", module.after)])
        given = [{"x": torch.tensor([content])} for content in contents]
        with seeded_step([rng], seed, given, given):
            for content, microbatch in zip(contents, given, strict=True):
                gave = seeded(rng, module, microbatch)
                found |= {(content, place): gave[at] for at, place in enumerate(places)}
                found[content, "after"] = gave[-1]
    return found


def test_the_split_and_the_order_are_no_matter() -> None:
    whole = run(5, [[0, 1, 2]], [10, 11, 12])
    for stages, contents in (([[0], [1, 2]], [12, 10, 11]), ([[2], [1], [0]], [11, 12, 10])):
        found = run(5, stages, contents)
        assert found.keys() == whole.keys()
        assert all(torch.equal(found[key], whole[key]) for key in whole)


def test_each_draws_its_own() -> None:
    """Any two of microbatch, place and step differ."""
    found = [*run(5, [[0, 1, 2]], [10, 11, 12]).values(), *run(6, [[0, 1, 2]], [10, 11, 12]).values()]
    assert len({tuple(each.tolist()) for each in found}) == len(found)
    kept = torch.stack(found) != 0
    assert abs(float(kept.double().mean()) - 0.5) < 0.05


def test_the_generator_goes_on_as_it_was() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    run(5, [[0, 1, 2]], [10])
    assert torch.equal(before, torch.get_rng_state())


def test_what_a_backward_calls_again_draws_what_its_own_forward_did() -> None:
    """0.5.0 seeded by the microbatch whose forward began last: wrong gradients where it is another's."""
    block = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 4, bias=False), nn.Dropout(0.5)).double()
    rng = StageRNG(0, torch.device("cpu"), [("a", block), ("b", block[0]), ("c", block[2])])

    def again(x: Tensor) -> Any:
        return checkpoint(block, x, use_reentrant=False)

    found = []
    for run in (again, block):
        given = [{"x": torch.rand(64, 4, dtype=torch.float64, generator=generator(i))} for i in range(3)]
        block.zero_grad()
        with seeded_step([rng], 5, given, given):
            losses = [seeded(rng, run, each).square().sum() for each in given]
            for loss in losses:
                loss.backward()
        weight: Tensor = block[1].weight  # type: ignore[assignment]
        assert weight.grad is not None
        found.append(weight.grad.clone())
    assert torch.equal(*found)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_what_is_foreseen_is_drawn() -> None:
    assert next_seed() == next_seed() == draw_seed() != draw_seed()


def test_contents_are_looked_at_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU is waited for at each look."""
    looks = []
    plain = torch.Tensor.cpu

    def look(tensor: Tensor) -> Tensor:
        looks.append(tensor)
        return plain(tensor)

    given = [{"x": torch.tensor([content]), "y": torch.ones(2)} for content in range(4)]
    rng = StageRNG(0, torch.device("cpu"), [])
    with seeded_step([rng], 5, given, given):
        expected = list(rng.seeds.values())
    assert len(set(expected)) == len(given)
    monkeypatch.setattr(torch.Tensor, "cpu", look)
    monkeypatch.setattr(torch.Tensor, "is_cpu", False, raising=False)
    with seeded_step([rng], 5, given, given):
        assert list(rng.seeds.values()) == expected
    assert len(looks) == 1


def test_before_and_after_a_step_and_in_evaluation_nothing_is_seeded() -> None:
    """0.5.0 went on to seed torch's generator where a layer was called by itself."""
    layer, x = nn.Dropout(0.5), torch.ones(64)
    rng = StageRNG(0, torch.device("cpu"), [("layer 0", layer)])
    assert not torch.equal(layer(x), layer(x))
    given = [{"x": x}]
    with seeded_step([rng], 5, given, given):
        seeded(rng, layer, given[0])
    assert not torch.equal(layer(x), layer(x))
    state = torch.get_rng_state()
    layer.eval()(x)
    assert torch.equal(state, torch.get_rng_state())


def test_seeds_are_far_apart() -> None:
    seeds = [mix(seed, f"layer {place}") for seed in range(50) for place in range(50)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 1 << 63 for seed in seeds)
    distances = [abs(a - b) for a, b in pairwise(sorted(seeds))]
    assert min(distances) > 1 << 20


class Named(nn.Module):
    def __init__(self, **values: Any) -> None:
        super().__init__()
        vars(self).update(values)


@pytest.mark.parametrize(
    ("module", "found"),
    [
        (nn.Sequential(nn.Dropout(0.1), nn.Dropout(0.0), nn.Linear(2, 2)), [("0", "p", 0.1)]),
        (Named(attention_dropout=0.2, hidden_dropout=0.0, dropout=None), [("", "attention_dropout", 0.2)]),
        (Named(drop_path=True, dropless=1), []),
    ],
)
def test_what_may_drop(module: nn.Module, found: list[tuple[str, str, float]]) -> None:
    assert list(dropouts(module)) == found


def test_a_module_draws_from_the_generator_of_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "default_generators", ("first", "second"))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    found = [str(generator_of(torch.device(name))) for name in ("cuda:1", "cuda")]
    assert found == ["second", "first"]
