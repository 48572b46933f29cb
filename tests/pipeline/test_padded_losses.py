"""A loss_fn gets rows and outputs as they are without padding.

Version 0.5.0: with shapes='padded' (buckets, a multiple, a fixed length) a loss_fn was handed padded logits
and padded entries, so that padding counted: .01396 for .01382, and once the wrong sign.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from penstock import AutoPipeline, Axes, Pipeline, StageInfo
from penstock.batch.padding import Padding, PadEntry
from penstock.errors import ModelError
from support.families import tiny_model
from support.mesh import full
from support.mixtures import mixture
from support.mutations import CASES, seeded
from support.pool import Pool
from support.ragged import Microbatches, documents, packed, ragged
from support.reference import Gradients, assert_gradients, gradients_of
from support.refusals import refuses

SHAPES: Mapping[str, str | Padding] = {
    "padded": "padded",
    "buckets": Padding(buckets=(5, 8, 16), multiple=4),
    "multiple": Padding(multiple=7),
    "static": Padding(length=20),
}


def logits_of(output: Any) -> Tensor:
    found: Tensor = output["logits"] if isinstance(output, Mapping) else output
    return found


def mean_of_all(output: Any, microbatch: Mapping[str, Any]) -> Tensor:
    """Counts each position, and each entry, whatever its label."""
    logits, ids = logits_of(output), microbatch["input_ids"]
    assert logits.shape[:2] == ids.shape == microbatch["labels"].shape
    own = logits.log_softmax(-1).gather(-1, ids[..., None])
    extra = output["auxiliary_loss"] if isinstance(output, Mapping) else 0.0
    total: Tensor = logits.square().mean() - own.mean() + ids.double().mean() + extra
    return total


def by_number(output: Any, microbatch: Mapping[str, Any], number: int) -> Tensor:
    return mean_of_all(output, microbatch) * (number + 1)


class Positions:
    """An object: each position is an item."""

    def weight(self, microbatch: Mapping[str, Any]) -> int:
        return int(microbatch["input_ids"].numel())

    def total(self, output: Any, microbatch: Mapping[str, Any]) -> Tensor:
        return mean_of_all(output, microbatch) * self.weight(microbatch)


def plain(model: PreTrainedModel, parts: Microbatches, loss: Any) -> tuple[float, Gradients]:
    """One process, one forward a microbatch, nothing of penstock."""
    model.zero_grad()
    items = [loss.weight(part) if hasattr(loss, "weight") else len(part["input_ids"]) for part in parts]
    total = 0.0
    for number, (part, count) in enumerate(zip(parts, items, strict=True)):
        result = model(**{name: value for name, value in part.items() if name != "labels"}, use_cache=False)
        output: Any = result.logits
        if getattr(result, "aux_loss", None) is not None:
            output = {"logits": output, "auxiliary_loss": model.config.router_aux_loss_coef * result.aux_loss}
        if hasattr(loss, "total"):
            share = loss.total(output, part) / sum(items)
        else:
            share = loss(output, part, *([number] if loss is by_number else [])) * count / sum(items)
        share.backward()
        total += float(share.detach())
    found = gradients_of(model)
    model.zero_grad()
    return total, found


LOSSES: dict[str, Any] = {"function": mean_of_all, "number": by_number, "object": Positions()}


# four of the twelve pairs in every run, in which each shape and each loss occurs
@pytest.mark.parametrize(("shapes", "kind"), [
    pytest.param(shapes, kind, marks=() if place % 3 == turn else pytest.mark.sweep)
    for place, shapes in enumerate(SHAPES) for turn, kind in enumerate(LOSSES)
])  # fmt: skip
def test_padding_does_not_count(shapes: str, kind: str) -> None:
    """Steps, evaluations, token counts and comparisons are those of one process, and of shapes='inferred'."""
    model, parts, loss = tiny_model("llama", torch.float64), ragged(4), LOSSES[kind]
    expected_loss, expected = plain(model, parts, loss)
    auto = AutoPipeline(ranks=2, microbatches=4, shapes=SHAPES[shapes], loss_fn=loss)
    pipe = auto.build(model)
    assert pipe.step(parts).loss == pytest.approx(expected_loss, rel=1e-10)
    assert_gradients(gradients_of(pipe), expected, 1e-10)
    assert pipe.evaluate(parts).loss == pytest.approx(expected_loss, rel=1e-10)
    outputs = pipe.evaluate(parts, outputs=True)
    assert outputs.loss == pytest.approx(expected_loss, rel=1e-10)
    items = sum(
        part["input_ids"].numel() if isinstance(loss, Positions) else len(part["input_ids"]) for part in parts
    )
    assert outputs.tokens == pipe.count_tokens(parts) == items
    pipe.verify_against(model, parts)


def test_an_auxiliary_loss_comes_with_unpadded_logits() -> None:
    model = mixture("mixtral", torch.float64, output_router_logits=True)
    parts = [{**part, "attention_mask": torch.ones_like(part["input_ids"])} for part in ragged(3)]
    expected_loss, expected = plain(model, parts, mean_of_all)
    pipe = AutoPipeline(ranks=2, microbatches=3, shapes="padded", loss_fn=mean_of_all).build(model)
    assert pipe.step(parts).loss == pytest.approx(expected_loss, rel=1e-10)
    assert_gradients(gradients_of(pipe), expected, 1e-10)


@pytest.mark.parametrize("schedule", ["1f1b", "zb_v"])
def test_packed_documents_come_as_they_were(schedule: str) -> None:
    seen = list[tuple[int, Mapping[str, Any]]]()
    # positions are added to padded rows
    parts = [{n: v for n, v in part.items() if n != "position_ids"} for part in packed(documents(4))]

    def loss(output: Tensor, microbatch: Mapping[str, Any], number: int) -> Tensor:
        seen.append((number, microbatch))
        return mean_of_all(output, microbatch)

    model = tiny_model("llama", torch.float64)
    inferred, found = dict[int, Any](), dict[int, Any]()
    for shapes, kept in (("inferred", inferred), (Padding(multiple=8), found)):
        seen.clear()
        pipe = AutoPipeline(ranks=2, schedule=schedule, microbatches=4, shapes=shapes, loss_fn=loss).build(
            model
        )
        pipe.step(parts)
        kept.update(seen)
    for number, part in inferred.items():
        assert found[number].keys() == part.keys() >= parts[number].keys()
        for name, value in part.items():
            same = torch.equal(found[number][name], value) if isinstance(value, Tensor) else None
            assert same if same is not None else found[number][name] == value, name


class Chunk(nn.Module):
    """A stage of a user's own model on (rows, sequence), whose last one may give something else."""

    def __init__(self, info: StageInfo, form: str) -> None:
        super().__init__()
        self.info, self.form = info, form
        torch.manual_seed(info.stage)
        self.linear = nn.Linear(3, 3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Any:
        hidden = torch.tanh(self.linear(x))
        if not self.info.is_last or self.form == "sequence":
            return hidden
        return {"pooled": hidden.mean(1), "scores": hidden.mean(2), "object": iter([hidden])}[self.form]


def own(form: str, parts: Sequence[Mapping[str, Tensor]], shapes: Any) -> tuple[float, Gradients]:
    pipe = Pipeline.from_provider(
        lambda info: Chunk(info, form),
        schedule="1f1b",
        ranks=2,
        microbatches=len(parts),
        shapes=shapes,
        loss_fn=lambda output, microbatch: (output - microbatch["y"]).square().mean(),
    )
    loss = pipe.step(list(parts)).loss
    found = {f"{at}.{n}": g for at, module in pipe.modules.items() for n, g in gradients_of(module).items()}
    pipe.close()
    return loss, found


def own_parts() -> list[dict[str, Tensor]]:
    torch.manual_seed(5)
    return [
        {name: torch.randn(2, length, 3, dtype=torch.float64) for name in ("x", "y")} for length in (3, 5, 4)
    ]


OWN = Padding(entries={"x": PadEntry(1, 0.0), "y": PadEntry(1, 9.0)})


def test_stages_of_a_users_own_model() -> None:
    loss, expected = own("sequence", own_parts(), "exchanged")
    found_loss, found = own("sequence", own_parts(), OWN)
    assert found_loss == pytest.approx(loss, rel=1e-10)
    assert_gradients(found, expected, 1e-10)


@pytest.mark.parametrize("form", ["pooled", "scores", "object"])
def test_an_output_of_unknown_form_is_refused(form: str) -> None:
    """What was pooled over a padded row has padding in it."""
    with refuses(ModelError, "for padded rows of 5 tokens", "without padding"):
        own(form, own_parts(), OWN)


def on_a_mesh(shapes: Any) -> tuple[float, Gradients]:
    torch.set_num_threads(1)
    model, parts = tiny_model("llama", torch.float64), ragged(4)
    pipe = AutoPipeline(
        ranks=1, microbatches=2, axes=Axes(dp_shard=2), shapes=shapes, loss_fn=mean_of_all, timeout=30
    ).build(model)
    first = 2 * pipe.batch_part[0]
    loss = pipe.step(parts[first : first + 2]).loss
    found = {name: full(gradient) for name, gradient in gradients_of(pipe).items()}
    pipe.close()
    return loss, found


def test_over_data_parallel_ranks(pool: Pool) -> None:
    expected_loss, expected = plain(tiny_model("llama", torch.float64), ragged(4), mean_of_all)
    for loss, found in pool.run(2, on_a_mesh, Padding(multiple=7)):
        assert loss == pytest.approx(expected_loss, rel=1e-10)
        assert_gradients(found, expected, 1e-10)


@pytest.mark.parametrize("cases", CASES)
def test_random_padding_is_exact(cases: range) -> None:
    """Lengths, paddings and losses, with steps of one pipeline each."""
    model = tiny_model("llama", torch.float64)
    for case in cases[::10]:
        with seeded(case) as choices:
            count = choices.choice((1, 2, 4))
            loss = choices.choice((mean_of_all, by_number, Positions()))
            padding = choices.choice((
                Padding(), Padding(multiple=choices.randint(1, 9)), Padding(length=choices.randint(12, 30)),
                Padding(buckets=tuple(sorted({choices.randint(1, 14) for _ in range(3)}))),
            ))  # fmt: skip
            schedule = choices.choice(("gpipe", "1f1b", "zb_h1", "zb_v"))
            parts = ragged(count, seed=case)
            expected_loss, expected = plain(model, parts, loss)
            pipe = AutoPipeline(
                ranks=2, schedule=schedule, microbatches=count, shapes=padding, loss_fn=loss
            ).build(model)
            assert pipe.step(parts).loss == pytest.approx(expected_loss, rel=1e-10)
            assert_gradients(gradients_of(pipe), expected, 1e-10)
