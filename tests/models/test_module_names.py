"""Stages by the names of their modules."""

from __future__ import annotations

import pytest

from penstock.errors import PartitionError
from penstock.models.module_names import ModuleNames, named_split
from support.layer_counts import counts

NAMES = ModuleNames(
    ("model.embed_tokens",), tuple(f"model.layers.{i}" for i in range(3)), ("model.norm", "lm_head")
)
KNOWN = {"model": True, "model.layers": True, "model.rotary_emb": False, "model.layers.1.mlp": True,
         "model.layers.1.mlp.act_fn": False}  # fmt: skip
FIRST, LAST = ["model.embed_tokens", "model.layers.0"], ["model.norm", "lm_head"]
MIDDLE = ["model.layers.1", "model.layers.2"]


@pytest.mark.parametrize(
    ("modules", "expected"),
    [
        ([FIRST, [*MIDDLE, *LAST]], [1, 2]),
        ([[*FIRST, "model.rotary_emb"], MIDDLE, ["model.rotary_emb", *LAST]], [1, 2, 0]),
        ([FIRST, [], [*LAST[::-1], *MIDDLE]], [1, 0, 2]),  # in any order on one stage
    ],
)
def test_stages_by_the_names_of_their_modules(modules: list[list[str]], expected: list[int]) -> None:
    assert counts(named_split(modules, len(modules), NAMES, KNOWN)) == expected


def test_the_names_on_each_stage() -> None:
    assert NAMES.per_stage([range(1), range(1, 3)]) == [tuple(FIRST), (*MIDDLE, *LAST)]
    assert NAMES.per_stage([range(3)]) == [(*FIRST, *MIDDLE, *LAST)]


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        ([FIRST], "modules_per_stage with 1 stages: the schedule has 2"),
        ([FIRST, LAST], r"without model.layers.1, model.layers.2: .* Name them"),
        ([FIRST, [*MIDDLE, "model.norm"]], "without lm_head: .* Name it"),
        ([FIRST, [*MIDDLE, *LAST, "model.layers.0"]], "'model.layers.0': stage 0 has it already"),
        ([[*FIRST, "lm_head"], [*MIDDLE, "model.norm"]], "'lm_head': it runs after .* Move it to stage 1"),
        ([FIRST[1:], [*MIDDLE, *LAST, FIRST[0]]], "'model.embed_tokens': it runs before .* stage 0"),
        ([[FIRST[0], *MIDDLE], [FIRST[1], *LAST]], "'model.layers.1': model.layers.0 runs before it"),
        ([FIRST, [*MIDDLE, *LAST, "model.layers.3"]], "the model's last layer is model.layers.2. Remove"),
        ([FIRST, [*MIDDLE, *LAST, "model.layers.1.mlp"]], r"stage\[1\] .* part of model.layers.1, which"),
        ([FIRST, [*MIDDLE, *LAST, "model.layers.1.mlp.act_fn"]], "Name model.layers.1"),
        ([FIRST, ["model.layers", *LAST]], "it has modules of several stages. Name each, such"),
        ([["model.embed_token"], [*MIDDLE, *LAST]], "no such module. Did you mean 'model.embed_tokens'"),
        ([["model.rotary"], []], "no such module. Did you mean 'model.rotary_emb'"),
        ([["zzz"], []], "The modules are model.embed_tokens, "),
    ],
)  # fmt: skip
def test_names_that_are_refused(modules: list[list[str]], message: str) -> None:
    with pytest.raises(PartitionError, match=message):
        named_split(modules, 2, NAMES, KNOWN)
