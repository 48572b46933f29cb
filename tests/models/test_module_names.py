"""Stages by the names of their modules."""

from __future__ import annotations

import pytest

from penstock.errors import PartitionError
from penstock.models.module_names import ModuleNames, named_split
from support.layer_counts import counts
from support.refusals import refuses

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
    ("modules", "value", "rule", "remedy"),
    [
        ([FIRST], "modules_per_stage with 1 stages", "the schedule has 2", ""),
        ([FIRST, LAST], "without model.layers.1, model.layers.2", "on one stage", "Name them"),
        ([FIRST, [*MIDDLE, "model.norm"]], "without lm_head", "on one stage", "Name it"),
        ([FIRST, [*MIDDLE, *LAST, "model.layers.0"]],
         "[1] with 'model.layers.0'", "stage 0 has it already", ""),
        ([[*FIRST, "lm_head"], [*MIDDLE, "model.norm"]], "[0] with 'lm_head'", "after the layers", "stage 1"),
        ([FIRST[1:], [*MIDDLE, *LAST, FIRST[0]]],
         "[1] with 'model.embed_tokens'", "before the layers", "stage 0"),
        ([[FIRST[0], *MIDDLE], [FIRST[1], *LAST]],
         "[0] with 'model.layers.1'", "model.layers.0 runs before it", ""),
        ([FIRST, [*MIDDLE, *LAST, "model.layers.3"]],
         "[1] with 'model.layers.3'", "last layer is model.layers.2", ""),
        ([FIRST, [*MIDDLE, *LAST, "model.layers.1.mlp"]],
         "[1] with 'model.layers.1.mlp'", "part of model.layers.1", ""),
        ([FIRST, [*MIDDLE, *LAST, "model.layers.1.mlp.act_fn"]],
         "[1] with 'model.layers.1.mlp.act_fn'", "part of model.layers.1", "Name model.layers.1"),
        ([FIRST, ["model.layers", *LAST]], "[1] with 'model.layers'", "modules of several stages", ""),
        ([["model.embed_token"], [*MIDDLE, *LAST]],
         "[0] with 'model.embed_token'", "no such module", "'model.embed_tokens'"),
        ([["model.rotary"], []], "[0] with 'model.rotary'", "no such module", "'model.rotary_emb'"),
        ([["zzz"], []], "[0] with 'zzz'", "no such module", "The modules are model.embed_tokens, "),
    ],
)  # fmt: skip
def test_names_that_are_refused(modules: list[list[str]], value: str, rule: str, remedy: str) -> None:
    with refuses(PartitionError, value, rule, remedy):
        named_split(modules, 2, NAMES, KNOWN)
