"""No op of a step makes the host wait for the GPU, and a step in one process makes it wait once."""

from __future__ import annotations

import functools
import types
from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, modeling_flash_attention_utils
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from penstock import AutoPipeline, Pipeline
from penstock.batch.packing import metadata
from penstock.models.huggingface.masks import Edits, shape_questions
from penstock.models.tracing.chain import find_chain
from penstock.models.tracing.meta import without_values
from support import zoo
from support.covering import every
from support.families import tiny_config
from support.reads import Reads, watched

ROWS, LENGTH, MICROBATCHES = 4, 12, 2
WAITS = 2  # of a step in one process: for the losses, at the end of its ops, and for the norm


def batch(seed: int, **entries: Tensor) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(zoo.FIRST_PLAIN_TOKEN, zoo.VOCABULARY, (ROWS, LENGTH), generator=generator)
    labels = ids.masked_fill(torch.rand(ROWS, LENGTH, generator=generator) < 0.2, -100)
    return {"input_ids": ids, "labels": labels, **entries}


def plain(seed: int) -> dict[str, Any]:
    return batch(seed)


def full_rows(seed: int) -> dict[str, Any]:
    return batch(seed, attention_mask=torch.ones(ROWS, LENGTH, dtype=torch.int64))


def padded(seed: int) -> dict[str, Any]:
    lengths = torch.arange(ROWS)[:, None] % 5 + LENGTH - 5 + seed % 2
    return batch(seed, attention_mask=(torch.arange(LENGTH) < lengths).long())


def positioned(seed: int) -> dict[str, Any]:
    return batch(seed, position_ids=torch.arange(LENGTH).expand(ROWS, -1))


def packed(seed: int) -> dict[str, Any]:
    rows = [metadata([4 + seed % 2, LENGTH - 4 - seed % 2])["position_ids"] for _ in range(ROWS)]
    return batch(seed, position_ids=torch.cat(rows))


def bounded(seed: int) -> dict[str, Any]:
    bounds = [row * LENGTH + each for row in range(ROWS) for each in (0, 5 + seed % 2)]
    both = torch.tensor([*bounds, ROWS * LENGTH], dtype=torch.int32)
    return batch(seed, cu_seq_lens_q=both, cu_seq_lens_k=both)


BATCHES = [plain, full_rows, padded, positioned, packed, bounded]


def model(kind: str, **changes: Any) -> PreTrainedModel:
    made = zoo.tiny_model(kind, layers=4, **changes)
    made.config._attn_implementation = "sdpa"
    # whose loop over the experts that any token has chosen reads which these are
    made.set_experts_implementation("batched_mm")
    return made


def mixture() -> PreTrainedModel:
    made = model("mixtral")
    made.config.output_router_logits = True
    return made


def built(whole: PreTrainedModel, **options: Any) -> Pipeline:
    return AutoPipeline(ranks=2, microbatches=MICROBATCHES, **options).build(whole)


def two_steps(whole: PreTrainedModel, make: Any, **options: Any) -> tuple[list[float], list[Tensor]]:
    """Losses and norms of two steps, and the gradients of the second."""
    pipe = built(whole, **options)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2, foreach=True)
    numbers = []
    for seed in (1, 2):
        optimizer.zero_grad()
        numbers += [pipe.step(make(seed)).loss, pipe.clip_grad_norm_(0.5)]
        optimizer.step()
    return numbers, [p.grad for p in pipe.parameters() if p.grad is not None]


def reads_of_a_second_step(whole: PreTrainedModel, make: Any, **options: Any) -> list[tuple[str | None, str]]:
    with watched() as reads:
        pipe = prepared(reads, whole, **options)
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2, foreach=True)
        for seed in (1, 2):
            reads.found.clear()
            optimizer.zero_grad()
            pipe.step(make(seed))
            pipe.clip_grad_norm_(0.5)
            optimizer.step()
        return list(reads.found)


def prepared(reads: Reads, whole: PreTrainedModel, **options: Any) -> Pipeline:
    pipe = built(whole, **options)
    for module in pipe.modules.values():
        for tensor in (*module.parameters(), *module.buffers()):
            reads.put(tensor)
    return pipe


CASES = [
    # each sixth is in the default run
    *(("qwen3", make, "1f1b") for make in (padded, plain, full_rows, packed, positioned, bounded)),
    *(("llama", make, "zb_h1") for make in (plain, padded, packed)),
    *(("gemma3_text", make, "1f1b") for make in (padded, plain, packed)),  # two kinds of masks
    *(("gpt2", make, "1f1b") for make in (plain, padded)),
    ("biogpt", plain, "1f1b"),  # makes a mask by itself
    *(("mixtral", make, "1f1b") for make in (padded, plain)),
]


@pytest.mark.parametrize(("kind", "make", "schedule"), every(6, CASES))
def test_no_op_waits_for_the_gpu(kind: str, make: Any, schedule: str) -> None:
    """0.5.0: each stage's forward waited to know whether rows are packed or a mask hides anything, and the
    loss for its number of tokens where routers have one; a norm took a wait for each rank."""
    whole = mixture() if kind == "mixtral" else model(kind)
    found = reads_of_a_second_step(whole, make, schedule=schedule)
    assert not [(op, where) for op, where in found if op is not None]
    assert len(found) == WAITS, Counter(where for _, where in found)


@pytest.mark.parametrize("make", every(3, BATCHES))
def test_answers_from_the_host_change_no_bit(make: Any) -> None:
    """In the first step what the model makes by itself is asked for, in the second it is known."""
    expected = two_steps(model("gemma3_text"), make)
    with watched():
        found = two_steps(model("gemma3_text"), make)
    assert found[0] == expected[0]
    assert all(map(torch.equal, found[1], expected[1]))


def test_the_loss_of_routers_changes_no_bit() -> None:
    expected = two_steps(mixture(), padded)
    with watched():
        found = two_steps(mixture(), padded)
    assert found[0] == expected[0]
    assert all(map(torch.equal, found[1], expected[1]))


def test_rows_of_one_step_may_be_packed_where_those_of_the_last_were_not() -> None:
    """Of one shape, so that an answer that was kept would be a wrong one."""

    def mixed(seed: int) -> dict[str, Any]:
        return positioned(seed) if seed == 1 else packed(seed)

    expected = two_steps(model("qwen3"), mixed)
    with watched():
        found = two_steps(model("qwen3"), mixed)
    assert found[0] == expected[0]
    assert all(map(torch.equal, found[1], expected[1]))


# ---- what a model makes by itself


@pytest.mark.parametrize(("kind", "questions"), [("qwen3", 1), ("gemma3_text", 2), ("opt", 0)])
def test_what_a_model_makes_from_shapes(kind: str, questions: int) -> None:
    whole = model(kind)
    assert shape_questions(without_values(whole), find_chain(whole)) == questions


@pytest.mark.parametrize("layers", [2, 5])
def test_a_layer_that_asks_stands_for_all_that_are_alike(layers: int) -> None:
    """As those of flash attention do. Of alike layers one runs, whatever their number."""

    def asking(module: Any, *args: Any, **kwargs: Any) -> Any:
        modeling_flash_attention_utils._is_packed_sequence(kwargs["position_ids"], 1)
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, *args, **kwargs)

    ALL_ATTENTION_FUNCTIONS.register("asking", asking)
    ALL_MASK_ATTENTION_FUNCTIONS.register("asking", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    config = tiny_config("llama", layers=layers)
    whole = AutoModelForCausalLM.from_config(config, attn_implementation="asking")
    assert shape_questions(without_values(whole), find_chain(whole)) == 1 + layers


def test_positions_that_depend_on_the_tokens_are_asked_about_each_time() -> None:
    whole = model("qwen3")

    def by_tokens(module: Any, args: Any, kwargs: Any) -> Any:
        ids = kwargs["input_ids"]
        return args, {**kwargs, "position_ids": (ids > zoo.FIRST_PLAIN_TOKEN + 5).long().cumsum(-1)}

    class Odd(type(whole)):  # type: ignore[misc]
        def forward(self, **kwargs: Any) -> Any:
            return super().forward(**by_tokens(self, (), kwargs)[1])

    whole.__class__ = Odd
    assert shape_questions(without_values(whole), find_chain(whole)) == 0
    expected = two_steps(whole, plain)
    with watched():
        found = two_steps(whole, plain)
    assert found[0] == expected[0]
    assert all(map(torch.equal, found[1], expected[1]))


class Sets:
    """Sets positions or a mask in a model's forward: packed or padded in the second step alone."""

    def __init__(self, name: str) -> None:
        self.name, self.seed = name, 1

    def batch(self, seed: int) -> dict[str, Any]:
        self.seed = seed
        return plain(seed)

    @property
    def entry(self) -> dict[str, Tensor]:
        make = {"position_ids": (positioned, packed), "attention_mask": (full_rows, padded)}[self.name]
        return {self.name: make[self.seed - 1](self.seed)[self.name][: ROWS // MICROBATCHES]}

    def by_hook(self, whole: PreTrainedModel) -> None:
        def before(module: Any, args: Any, kwargs: Any) -> Any:  # a stage would have a copy of a method
            return args, kwargs | self.entry

        whole.register_forward_pre_hook(before, with_kwargs=True)

    def by_inner_hook(self, whole: PreTrainedModel) -> None:
        self.by_hook(whole.base_model)

    def by_forward(self, whole: PreTrainedModel) -> None:
        inner: Any = type(whole).forward

        @functools.wraps(inner)
        def forward(model: Any, **kwargs: Any) -> Any:
            return inner(model, **kwargs | self.entry)

        whole.forward = types.MethodType(forward, whole)

    def by_class(self, whole: PreTrainedModel) -> None:
        class Odd(type(whole)):  # type: ignore[misc]
            def forward(odd, **kwargs: Any) -> Any:
                return super().forward(**kwargs | self.entry)

        whole.__class__ = Odd


@pytest.mark.parametrize(("put", "name"), every(5, [
    (put, name)
    for put in (Sets.by_hook, Sets.by_inner_hook, Sets.by_forward, Sets.by_class)
    for name in ("position_ids", "attention_mask")
]))  # fmt: skip
def test_what_somebody_puts_into_a_model_is_asked_about_each_time(put: Any, name: str) -> None:
    """The answers of the first step were kept for their shape: the second attended over all documents."""
    results = []
    for context in (nullcontext, watched):
        sets, whole = Sets(name), model("qwen3")
        put(sets, whole)
        with context():
            results.append(two_steps(whole, sets.batch))
    (expected, gradients), (found, theirs) = results
    assert found == expected
    assert all(map(torch.equal, theirs, gradients))


def test_hooks_of_these_libraries_are_no_edits() -> None:
    whole = model("qwen3")
    edits = Edits(whole)
    whole.register_forward_pre_hook(transformers.utils.logging.get_logger)
    assert not edits
    handle = whole.register_forward_hook(torch.no_grad()(lambda *_: None))
    assert edits
    handle.remove()
    assert not edits


@pytest.mark.parametrize("where", ["class", "function of the class", "call of the class", "module"])
def test_what_changes_between_two_steps_is_asked_about(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """0.5.0 on GPUs: documents were mixed if a model was replaced, or its class, after a first step."""
    whole = model("qwen3")
    kind: Any = type(whole.base_model)

    plain_forward = kind.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        positions = torch.arange(LENGTH).expand(ROWS // MICROBATCHES, -1) % 5
        return plain_forward(self, *args, **kwargs | {"position_ids": positions})

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        positions = torch.arange(LENGTH).expand(ROWS // MICROBATCHES, -1) % 5
        return torch.nn.Module.__call__(self, *args, **kwargs | {"position_ids": positions})

    written = {"__call__": call} if where == "call of the class" else {"forward": forward}
    packs: Any = type("Packs", (kind,), written)
    pipe = AutoPipeline(ranks=1, microbatches=MICROBATCHES).build(whole)
    stage: Any = pipe.modules[0]
    inner = stage.base_model
    before = pipe.step(plain(0)).loss
    if where in ("class", "call of the class"):
        inner.__class__ = packs
    elif where == "module":
        stage.model = packs.__new__(packs)
        vars(stage.model).update(vars(inner))
    else:
        monkeypatch.setattr(kind, "forward", forward)
    found = pipe.step(plain(0)).loss
    expected = AutoPipeline(ranks=1, microbatches=MICROBATCHES).build(stage).step(plain(0)).loss
    assert found == pytest.approx(expected)
    assert found != pytest.approx(before, rel=1e-6)
