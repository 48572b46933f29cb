"""The pipeline's loss is the model's own: exact, or refused by name."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from random import Random
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    BertForNextSentencePrediction,
    BertForQuestionAnswering,
    GPT2ForSequenceClassification,
    LlamaForCausalLM,
    LlamaForQuestionAnswering,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    PreTrainedModel,
)

from penstock import AutoPipeline
from penstock.batch.loss import NextToken, OwnLoss, ProblemType, RowLabels
from penstock.errors import BatchError, ConfigError, DifferenceError, InputError, ModelError
from penstock.models.huggingface.own_loss import own_loss
from penstock.models.tracing.chain import find_chain
from penstock.parallel.axes import Axes
from support import heads, zoo
from support.families import ragged_batch, tiny_model
from support.mutations import CASES, seeded
from support.reference import assert_gradients, gradients_of
from support.refusals import refuses

CLASS_NUMBERS = torch.tensor([0, 4, 2, 2, -100, 1, 3])
SEVERAL = torch.rand((7, 5), generator=torch.Generator().manual_seed(0)).round().double()
NUMBERS = SEVERAL - 0.3
KINDS: dict[str, tuple[str, str, dict[str, Any], Mapping[str, Tensor]]] = {
    "tokens": ("LlamaForTokenClassification", "llama", {}, heads.token_batch()),
    "tokens, inline": ("GPT2ForTokenClassification", "gpt2", {}, heads.token_batch()),
    "masked": ("BertForMaskedLM", "bert", {}, heads.token_batch(zoo.VOCABULARY)),
    "one class": ("LlamaForSequenceClassification", "llama", {}, heads.row_batch(CLASS_NUMBERS)),
    "several classes": ("LlamaForSequenceClassification", "llama", {}, heads.row_batch(SEVERAL)),
    "a number": ("GPT2ForSequenceClassification", "gpt2", {"num_labels": 1}, heads.row_batch(NUMBERS[:, 0])),
    "numbers": (
        "BertForSequenceClassification", "bert", {"problem_type": "regression"}, heads.row_batch(NUMBERS)
    ),
    "pooled by its own code": ("OPTForSequenceClassification", "opt", {}, heads.row_batch(CLASS_NUMBERS)),
}  # fmt: skip
UNEQUAL = [slice(0, 1), slice(1, 5), slice(5, 7)]


def exact(pipe: Any, model: PreTrainedModel, batch: Mapping[str, Tensor], parts: Any = None) -> None:
    loss, expected = heads.own_step(model, batch)
    pipe.zero_grad()
    assert pipe.step(batch if parts is None else parts).loss == pytest.approx(loss, rel=1e-10)
    found = gradients_of(pipe)
    trained = {name for name, _ in pipe.named_parameters(remove_duplicate=False)}
    assert found.keys() == trained & expected.keys()
    assert_gradients(found, expected, 1e-10)


# of the 24 cases each kind has one in every run, with the schedules in turn
@pytest.mark.parametrize(("kind", "schedule", "ranks"), [
    pytest.param(kind, schedule, ranks, marks=() if place % 3 == turn else pytest.mark.sweep)
    for place, kind in enumerate(KINDS)
    for turn, (schedule, ranks) in enumerate((("1f1b", 2), ("1f1b", 4), ("zb_v", 2)))
])  # fmt: skip
def test_gradients_are_those_of_the_models_own_loss(kind: str, schedule: str, ranks: int) -> None:
    """0.5.0: the shifted cross-entropy was taken for every head: no model's own loss was read."""
    name, model_type, changes, batch = KINDS[kind]
    model = heads.tiny(name, model_type, **changes)
    pipe = AutoPipeline(schedule=schedule, ranks=ranks, microbatches=4).build(model)
    exact(pipe, model, batch)
    for count in (1, 3):
        pipe.zero_grad()
        pipe.step(batch, microbatches=count)
        assert_gradients(gradients_of(pipe), heads.own_step(model, batch)[1], 1e-10)
    exact(pipe, model, batch, [{n: v[part] for n, v in batch.items()} for part in UNEQUAL])
    assert pipe.verify_against(model, batch).note == ""
    assert model.config.problem_type == changes.get("problem_type")


class Sharper(LlamaForCausalLM):  # type: ignore[misc]
    """Its loss has half the temperature."""

    def forward(self, *args: Any, labels: Tensor | None = None, **inputs: Any) -> Any:
        output = super().forward(*args, **inputs)
        if labels is not None:
            output.loss = self.loss_function(2 * output.logits, labels, self.config.vocab_size)
        return output


def test_a_loss_that_is_not_known_is_refused() -> None:
    """0.5.0: a subclass whose forward computes another loss trained the next-token loss in silence."""
    model = Sharper(tiny_model("llama").config)
    with refuses(ModelError, "Sharper without a loss_fn", "own loss"):
        AutoPipeline(ranks=2, microbatches=2).build(model)
    AutoPipeline(ranks=2, microbatches=2, loss_fn=NextToken()).build(model).step(ragged_batch())


class Reweighted(LlamaForTokenClassification):  # type: ignore[misc]
    """Its loss is one that `how` changes in a place that a plain batch does not show."""

    how = ""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.weights = [1.0] * config.num_labels

    def forward(self, input_ids: Tensor, *, labels: Tensor | None = None, **inputs: Any) -> Any:
        output = super().forward(input_ids=input_ids, **inputs)
        if labels is None:
            return output
        if self.how == "padding ids":
            labels = labels.masked_fill(input_ids == self.config.pad_token_id, -100)
        if self.how == "padding labels":
            labels = labels.masked_fill(labels == self.config.pad_token_id, -100)
        smoothing = 0.2 if self.how == "training" and self.training else 0.0
        weight = torch.tensor(self.weights).to(output.logits)
        output.loss = nn.functional.cross_entropy(
            output.logits.flatten(0, 1), labels.flatten(), weight, label_smoothing=smoothing
        )
        return output


@pytest.mark.parametrize("how", ["padding ids", "padding labels", "training", "weights"])
def test_a_loss_that_differs_in_some_batches_is_refused(how: str) -> None:
    """Unreleased: these trained another loss in silence. The probe ran in evaluation, without special tokens,
    and was remembered for every object of a class, whatever its plain attributes held.
    """
    config = heads.tiny("LlamaForTokenClassification", "llama").config
    kind = type("Reweighted", (Reweighted,), {"__module__": __name__})
    model = kind(config)
    AutoPipeline(ranks=2, microbatches=2).build_plan(model)
    model = kind(config)
    model.how = how
    if how == "weights":
        model.weights[3] = 9.0
    with refuses(ModelError, "Reweighted without a loss_fn", "own loss"):
        AutoPipeline(ranks=2, microbatches=2).build_plan(model)


class RareClass(LlamaForSequenceClassification):  # type: ignore[misc]
    """Its loss counts one class more than the others."""

    def forward(self, *args: Any, labels: Tensor | None = None, **inputs: Any) -> Any:
        output = super().forward(*args, **inputs)
        if labels is not None:
            weight = torch.ones(self.num_labels).index_fill(0, torch.tensor(2), 9.0).to(output.logits)
            output.loss = nn.functional.cross_entropy(output.logits, labels, weight)
        return output


def test_a_class_that_counts_more_is_seen() -> None:
    """Unreleased: a loss with weights of classes passed where the probe's two labels had one weight."""
    model = RareClass(heads.tiny("LlamaForSequenceClassification", "llama").config)
    with refuses(ModelError, "RareClass without a loss_fn", "own loss"):
        AutoPipeline(ranks=2, microbatches=2).build_plan(model)


def test_a_loss_for_each_token_of_two_kinds_is_refused() -> None:
    """Unreleased: logits (rows, sequence) were taken for classes of rows, as the probe's rows had as many
    tokens, and tokens that the mask hides counted.
    """
    with refuses(ModelError, "ElectraForPreTraining without a loss_fn", "own loss"):
        AutoPipeline(ranks=2, microbatches=2).build_plan(heads.tiny("ElectraForPreTraining", "electra"))


# each kind in one of the two in every run, in turn
@pytest.mark.parametrize(("kind", "dtype"), [
    pytest.param(kind, dtype, marks=() if turn == place % 2 else pytest.mark.sweep)
    for place, kind in enumerate(KINDS) for turn, dtype in enumerate((torch.bfloat16, torch.float16))
])  # fmt: skip
def test_heads_in_half_precision_have_the_loss_that_they_have_in_float32(
    kind: str, dtype: torch.dtype
) -> None:
    """Unreleased: most were refused, since the probe compared losses rounded to half precision."""
    name, model_type, changes, _ = KINDS[kind]
    model = heads.tiny(name, model_type, **changes)
    found, half = (own_loss(each, find_chain(each)) for each in (model.float(), model.to(dtype)))
    assert type(half) is type(found)
    assert vars(half) == vars(found)


def test_a_comparison_takes_the_models_own_loss() -> None:
    """0.5.0: `verify_against` passed for any loss, as it computed the pipeline's own a second time."""
    model = tiny_model("llama")
    other = Sharper(model.config)
    other.load_state_dict(model.state_dict())
    for loss_fn in (None, NextToken()):
        pipe = AutoPipeline(ranks=2, microbatches=2, loss_fn=loss_fn).build(model)
        assert pipe.verify_against(model, ragged_batch()).note == ""
        with refuses(DifferenceError, "loss: "):
            pipe.verify_against(other, ragged_batch())


def test_a_comparison_says_where_it_takes_another_loss() -> None:
    model, batch = tiny_model("llama"), ragged_batch()
    shifted = nn.functional.pad(batch.pop("labels")[:, 1:], (0, 1), value=-100)
    pipe = AutoPipeline(ranks=2, microbatches=2).build(model)
    assert "shift_labels" in pipe.verify_against(model, {**batch, "shift_labels": shifted}).note
    smooth = AutoPipeline(ranks=2, microbatches=2, loss_fn=NextToken(0.1)).build(model)
    assert "a loss of its own" in smooth.verify_against(model, ragged_batch()).note


def test_a_microbatch_without_labels_counts_for_nothing_in_a_comparison() -> None:
    model = heads.tiny("LlamaForTokenClassification", "llama")
    batch = heads.token_batch()
    batch["labels"][:2] = -100
    AutoPipeline(ranks=2, microbatches=7).build(model).verify_against(model, batch)


@pytest.mark.parametrize(
    ("kind", "model_type", "value"),
    [
        (LlamaForQuestionAnswering, "llama", "LlamaForQuestionAnswering"),
        (BertForQuestionAnswering, "bert", "BertForQuestionAnswering"),
    ],
)
def test_other_heads_are_refused(kind: type[PreTrainedModel], model_type: str, value: str) -> None:
    with refuses(ModelError, value, "no logits, but start_logits"):
        AutoPipeline(ranks=2, microbatches=2).build(heads.built(kind, model_type))


def test_rows_need_a_padding_token_as_in_transformers() -> None:
    """0.5.0: transformers refuses several rows without one; a microbatch of one row passed."""
    model = heads.tiny("GPT2ForSequenceClassification", "gpt2", pad_token_id=None)
    pipe = AutoPipeline(ranks=2, microbatches=7).build(model)
    batch = heads.row_batch(CLASS_NUMBERS)
    with pytest.raises(ValueError, match="no padding token is defined") as whole:
        model(**batch)
    with refuses(BatchError, "a batch of 7 rows", str(whole.value).rstrip(".")):
        pipe.step(batch)
    one = {name: value[:1] for name, value in batch.items()}
    exact(AutoPipeline(ranks=2, microbatches=1).build(model), model, one)


def test_a_model_of_two_sentences_takes_class_numbers_alone() -> None:
    model = heads.built(BertForNextSentencePrediction, "bert", is_decoder=False)
    found = own_loss(model, find_chain(model))
    assert isinstance(found, RowLabels)
    pipe = AutoPipeline(ranks=2, microbatches=2).build(model)
    exact(pipe, model, heads.row_batch(CLASS_NUMBERS.clamp(0, 1)))
    with refuses(BatchError, "labels of torch.float64", "multi_label_classification, which the model's"):
        pipe.step(heads.row_batch(SEVERAL[:, :2]))


@pytest.mark.parametrize(
    ("labels", "value", "rule"),
    [
        (torch.tensor([0, 1, 2, 3, 4, 5, 0]), "labels with 5", "5 classes"),
        (torch.tensor([0, 1, 2, 3, 4, -1, 0]), "labels with -1", "or -100"),
        (torch.rand(7, 1), "labels of torch.float32 and shape [7, 1]", "floats of shape [7, 5]"),
        (torch.rand(7), "labels of torch.float32 and shape [7]", "floats of shape [7, 5]"),
        (
            torch.zeros(7, 5, dtype=torch.int64),
            "labels of torch.int64 and shape [7, 5]",
            "int64 of shape [7]",
        ),
        (torch.zeros(7, 4), "labels of torch.float32 and shape [7, 4]", "shape [7, 5]"),
    ],
)
def test_labels_are_those_of_the_loss(labels: Tensor, value: str, rule: str) -> None:
    pipe = AutoPipeline(ranks=2, microbatches=2).build(heads.tiny("LlamaForSequenceClassification", "llama"))
    with refuses(BatchError, value, rule):
        pipe.step(heads.row_batch(labels))


def test_labels_of_tokens_are_below_the_number_of_classes() -> None:
    """0.5.0: they were checked against the vocabulary, and torch failed with an index error in the step."""
    pipe = AutoPipeline(ranks=2, microbatches=2).build(heads.tiny("LlamaForTokenClassification", "llama"))
    with refuses(BatchError, "labels with 5, at [1, 4]", "5 tokens"):
        pipe.step(heads.token_batch(6))
    batch = heads.token_batch()
    with refuses(BatchError, "shift_labels in a batch"):
        pipe.step({**batch, "shift_labels": batch["labels"]})
    with refuses(BatchError, rule="reads 'labels'"):
        pipe.step({"input_ids": batch["input_ids"]})


def test_outputs_need_no_labels() -> None:
    model, batch = heads.tiny("LlamaForSequenceClassification", "llama"), heads.row_batch(CLASS_NUMBERS)
    found = (
        AutoPipeline(ranks=2, microbatches=3).build(model).evaluate({"input_ids": batch["input_ids"]}, True)
    )
    assert found.loss is None
    torch.testing.assert_close(found.outputs, model(input_ids=batch["input_ids"]).logits)


def test_what_only_the_next_token_takes_is_refused() -> None:
    tokens = heads.tiny("LlamaForTokenClassification", "llama").float()
    with refuses(ConfigError, "the axes cp=2 for LlamaForTokenClassification", "supports cp"):
        AutoPipeline(ranks=2, microbatches=2, axes=Axes(cp=2)).build_plan(tokens)
    model = heads.tiny("LlamaForSequenceClassification", "llama").float()
    with refuses(ConfigError, "shapes='padded' for LlamaForSequenceClassification"):
        AutoPipeline(ranks=2, microbatches=2, shapes="padded").build_plan(model)
    with refuses(ModelError, "LlamaForSequenceClassification with the loss of next tokens", "head"):
        AutoPipeline(ranks=2, microbatches=2, loss_fn=NextToken()).build_plan(model)


def test_the_probe_is_not_seen_from_outside() -> None:
    """Hooks, buffers, the config and random numbers are as without it."""
    model = GPT2ForSequenceClassification(heads.tiny("GPT2ForSequenceClassification", "gpt2").config)
    model.config.pad_token_id = None
    chain = find_chain(model)
    seen: list[str] = []
    model.score.register_forward_hook(lambda *_: seen.append("hook"))
    config, state = model.config.to_dict(), torch.get_rng_state()
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    assert isinstance(own_loss(model, chain), OwnLoss)
    assert seen == []
    assert model.config.to_dict() == config
    assert torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close(dict(model.named_buffers()), buffers)


HEADS = (
    ("LlamaForTokenClassification", "llama"), ("LlamaForSequenceClassification", "llama"),
    ("BertForSequenceClassification", "bert"), ("BertForMaskedLM", "bert"), ("XLNetLMHeadModel", "xlnet"),
)  # fmt: skip


@pytest.mark.parametrize("numbers", CASES)
def test_a_random_head_is_exact_or_refused(numbers: range) -> None:
    """0.5.0: another loss than the model's own, for all of these: no head but a causal one was known."""
    kept, chosen = 0, numbers[:: 20 if numbers.start == 0 else 1]
    for number in chosen:
        with seeded(number) as random:
            kept += own_or_typed(random)
    assert kept > len(chosen) / 5


@functools.cache
def of_head(name: str, model_type: str, classes: int, problem: ProblemType | None, pad: int | None) -> Any:
    """A model, and a pipeline of it."""
    changes = {"num_labels": classes, "problem_type": problem, "pad_token_id": pad, "layers": 2}
    model = heads.tiny(name, model_type, **changes)
    return model, AutoPipeline(ranks=2, microbatches=1).build(model)


def own_or_typed(random: Random) -> bool:
    """Random classes, problems, labels, padding and microbatches. Returns whether the batch was taken."""
    (name, model_type), rows = random.choice(HEADS), random.randint(1, 5)
    per_token, classes = "Sequence" not in name, random.choice([1, 3])
    problem = None if per_token else random.choice([None, None, *get_args(ProblemType)])
    model, pipe = of_head(name, model_type, classes, problem, None if random.random() < 0.2 else 0)
    tokens = (rows, heads.LENGTH)
    shape = random.choice([(rows,), (rows, 1), (rows, classes), tokens])
    shape = tokens if per_token and random.random() < 0.9 else shape
    generator = torch.Generator().manual_seed(random.randrange(1 << 30))
    labels = torch.randint(0, classes + (random.random() < 0.1), shape, generator=generator)
    if random.random() < 0.5:
        labels = torch.where(torch.rand(shape, generator=generator) < 0.3, -100, labels)
    if random.random() < (0.1 if per_token else 0.5):
        labels = torch.rand(shape, generator=generator, dtype=torch.float64)
    batch = {"input_ids": torch.randint(0, zoo.VOCABULARY, tokens, generator=generator), "labels": labels}
    pipe.zero_grad()
    try:
        result = pipe.step(batch, microbatches=random.randint(1, rows))
    except InputError:
        return False
    loss, expected = heads.own_step(model, batch)
    assert result.loss == pytest.approx(loss, rel=1e-10, abs=1e-12)
    assert_gradients(gradients_of(pipe), expected, 1e-10)
    return True


@pytest.mark.sweep
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("suffix", ["ForTokenClassification", "ForSequenceClassification", "ForMaskedLM"])
def test_every_class_has_the_loss_that_it_returns_or_is_refused(suffix: str) -> None:
    """Of all classes of the installed transformers: their real forward's loss, with other values."""
    exact_ones = 0
    for model_type, kind in heads.classes_of((suffix,)):
        try:
            model = heads.built(kind, model_type, is_decoder=False, num_labels=3, pad_token_id=0)
            model = model.float().eval()  # some compute a part in float32
        except Exception:  # no such tiny model
            continue
        try:
            found = own_loss(model, find_chain(model))
        except ModelError:
            continue
        batch = heads.row_batch(CLASS_NUMBERS % 3) if isinstance(found, RowLabels) else heads.token_batch(3)
        del batch["attention_mask"]
        try:
            with torch.no_grad():
                output = model(**batch, use_cache=False)
        except Exception:  # of the whole model itself
            continue
        expected = found.total(output.logits, batch) / found.weight(batch)
        torch.testing.assert_close(expected, output.loss, equal_nan=True, msg=kind.__name__)
        exact_ones += 1
    assert exact_ones >= 30
