"""A stage in the middle calls its layers itself: only where the model's own forward would do the same."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from penstock import AutoPipeline, Pipeline
from penstock.models.huggingface import layer_calls, stages
from penstock.models.huggingface.masks import made_by_shape
from penstock.models.tracing.chain import find_chain
from penstock.models.tracing.meta import bare
from support import zoo
from support.covering import every

RANKS, MICROBATCHES, LENGTH = 4, 4, 7  # two stages in the middle


@pytest.fixture
def short() -> Iterator[list[int]]:
    """How many layers each forward has run that called its layers itself."""
    counts: list[int] = []
    plain = layer_calls.call_layers

    def counted(kept: Any, hidden: Tensor) -> Tensor:
        counts.append(len(kept.calls))
        return plain(kept, hidden)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stages, "call_layers", counted)
        yield counts


def batch(seed: int = 0, **entries: Tensor) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(zoo.FIRST_PLAIN_TOKEN, zoo.VOCABULARY, (MICROBATCHES, LENGTH), generator=generator)
    return {"input_ids": ids, "labels": ids.clone(), **entries}


def model(kind: str = "llama", **changes: Any) -> PreTrainedModel:
    return zoo.tiny_model(kind, layers=8, **changes).double()


def built(whole: PreTrainedModel, schedule: str = "1f1b", **options: Any) -> Pipeline:
    return AutoPipeline(RANKS, schedule, microbatches=MICROBATCHES, **options).build(whole)


def gradients(pipe: Pipeline) -> dict[str, Tensor]:
    return {name: p.grad for module in pipe.modules.values() for name, p in module.named_parameters()
            if p.grad is not None}  # fmt: skip


def same_as_without(short: list[int], make: Callable[[], Pipeline], steps: int = 2) -> int:
    """Check that steps give the bits of the model's own forwards. Returns how many were short."""

    def run() -> dict[str, Tensor]:
        pipe = make()
        for seed in range(steps):
            pipe.step(batch(seed))
        return gradients(pipe)

    found, count = run(), len(short)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer_calls.LayerCalls, "find", lambda calls, ids: None)
        expected = run()
    assert len(short) == count
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    return count


@pytest.mark.parametrize(
    "kind", every(3, ["llama", "gemma3_text", "gpt_neox", "qwen3", "opt", "gpt2", "olmo2"])
)
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_it_changes_no_bit(short: list[int], kind: str, schedule: str) -> None:
    same_as_without(short, lambda: built(model(kind), schedule))


def test_all_but_the_first_forward_of_a_step_are_short(short: list[int]) -> None:
    """0.5.0: each stage made masks and rotary tables anew: with layers of 64, a fifth of a step of zb_v."""
    pipe = built(model())
    for _ in range(3):
        pipe.step(batch())
    in_the_first = 2 * (MICROBATCHES - 2)  # the first two may run under other modes
    assert in_the_first + 4 * (MICROBATCHES - 1) <= len(short) <= 6 * (MICROBATCHES - 1)
    assert set(short) == {2}
    pipe.verify_against(model(), batch())


def test_activation_checkpointing_changes_no_bit(short: list[int]) -> None:
    count = same_as_without(short, lambda: built(model(), activation_checkpointing="full"))
    assert count


def around(pipe: Pipeline, change: Callable[[Any], None]) -> None:
    for module in pipe.modules.values():
        change(module.model)


def scales_positions(inner: Any) -> None:
    inner.rotary_emb.attention_scaling = 2.0


def writes_frequencies(inner: Any) -> None:
    inner.rotary_emb.inv_freq.mul_(2)


def replaces_frequencies(inner: Any) -> None:
    inner.rotary_emb.inv_freq = nn.Buffer(inner.rotary_emb.inv_freq * 2, persistent=False)


def hooks_positions(inner: Any) -> None:
    inner.rotary_emb.register_forward_hook(lambda module, args, output: (output[0] * 2, output[1]))


def has_another_forward(inner: Any) -> None:
    rotary, plain = inner.rotary_emb, type(inner.rotary_emb).forward
    rotary.forward = lambda *args, **kwargs: tuple(t * 2 for t in plain(rotary, *args, **kwargs))


EDITS = [scales_positions, writes_frequencies, replaces_frequencies, hooks_positions, has_another_forward]


@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_between_steps_counts(short: list[int], edit: Callable[[Any], None]) -> None:
    whole = model()
    pipe = built(copy.deepcopy(whole))
    pipe.step(batch())
    around(pipe, edit)
    edit(whole.model)
    pipe.verify_against(whole, batch())
    assert short


@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_within_a_step_counts(short: list[int], edit: Callable[[Any], None]) -> None:
    """The hook of a weight's gradient makes it, when the first microbatch's backward is through."""

    def edited() -> Pipeline:
        pipe = built(model())
        once = [lambda: around(pipe, edit)]
        stage: Any = pipe.modules[0]
        weight = stage.model.layers[0].mlp.up_proj.weight
        weight.register_hook(lambda gradient: once.pop()() if once else None)
        return pipe

    assert same_as_without(short, edited, steps=1)


def test_a_table_that_somebody_has_written_into_is_made_anew(short: list[int]) -> None:
    stage = built(model())._built.stages[1]
    call: Any = stage._call
    ids, hidden = batch()["input_ids"], torch.randn(MICROBATCHES, LENGTH, 32, dtype=torch.float64)
    call.begin_step()
    expected = call((hidden,), {"input_ids": ids})
    assert torch.equal(call((hidden,), {"input_ids": ids}), expected)
    assert len(short) == 1
    [kept] = call._layer_calls._kept.values()
    with torch.no_grad():
        kept.tables[0][0].mul_(2)
    assert torch.equal(call((hidden,), {"input_ids": ids}), expected)
    assert len(short) == 1
    call.end_step()


@pytest.mark.parametrize("entries", [
    {"attention_mask": torch.ones(MICROBATCHES, LENGTH, dtype=torch.int64)},
    {"position_ids": torch.arange(LENGTH).expand(MICROBATCHES, -1) + 1},
])  # fmt: skip
def test_a_batch_with_more_than_tokens_runs_the_models_forward(
    short: list[int], entries: dict[str, Any]
) -> None:
    whole = model()
    built(copy.deepcopy(whole)).verify_against(whole, batch(**entries))
    assert not short


def test_layers_that_take_something_of_the_tokens_are_called_by_the_model() -> None:
    """A mask that a model makes of its tokens is another one in the next microbatch."""
    whole = bare(model())
    chain = find_chain(whole)
    assert made_by_shape(whole, chain).layers
    inner: Any = whole.model
    plain = inner.rotary_emb.forward

    def by_tokens(hidden: Tensor, position_ids: Tensor) -> Any:
        return plain(hidden, position_ids + inner.seen.cumsum(-1))

    def see(module: Any, args: Any, kwargs: Any) -> None:
        inner.seen = kwargs["input_ids"] if "input_ids" in kwargs else args[0]

    inner.register_forward_pre_hook(see, with_kwargs=True)
    inner.rotary_emb.forward = by_tokens
    assert not made_by_shape(whole, chain).layers


def test_nothing_is_kept_between_steps() -> None:
    pipe = built(model())
    pipe.step(batch())
    for stage in pipe._built.stages:
        assert not list(stage._keeps.storages)  # type: ignore[union-attr]
        stage._keeps.begin_step()  # type: ignore[union-attr]
        stage.reset()
