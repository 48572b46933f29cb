"""The vocabulary-parallel loss compared with one process, with logits computed at once and in blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from penstock import Axes
from penstock.batch import head_logits
from penstock.batch.deferred_logits import whole
from penstock.batch.head_logits import HeadLogits
from penstock.batch.loss import IGNORED, NextToken
from penstock.parallel.fsdp import Sharded
from penstock.parallel.tensor.sharded_logits import ShardedLogits
from support.families import FLOAT32_INSIDE
from support.mesh import (
    batch,
    build_pipe,
    build_whole,
    later,
    model_of,
    own_part,
    same_on_all,
    worst_gradient,
)
from support.pool import Pool
from support.reference import TOLERANCE, plain_step
from support.sharded_matrices import tp_mesh

ROWS, SEQUENCE, WIDTH, VOCABULARY = 2, 5, 8, 24
PENALTIES = [(0.0, 0.0), (0.1, 0.0), (0.0, 1e-2), (0.2, 1e-3)]
FORWARDS: dict[str, Callable[[Any], Any]] = {
    "plain": lambda logits: logits,
    "scale": lambda logits: logits * 0.25,
    "soft cap": lambda logits: torch.tanh(logits / 3.0) * 3.0,
    "rows": lambda logits: logits[0:2],
}
NARROW = 4 * ROWS * (SEQUENCE - 1) * 5  # bytes of blocks of 5 tokens of the vocabulary, the last smaller


class Head:
    """A head's input, weight and bias, and the labels: equal on every rank."""

    def __init__(self, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)
        shapes = (ROWS, SEQUENCE, WIDTH), (VOCABULARY, WIDTH), (VOCABULARY,)
        drawn = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
        self.hidden, self.weight, self.bias = (value.to(dtype).requires_grad_() for value in drawn)
        self.labels = torch.randint(VOCABULARY, (ROWS, SEQUENCE), generator=generator)
        self.labels[0, 2] = IGNORED

    def shard(self, make: Callable[..., Tensor]) -> ShardedLogits:
        """This rank's logits by `make`: F.linear, or HeadLogits for blocks."""
        mesh = tp_mesh()
        index = mesh.get_local_rank()
        weight, bias = (value.chunk(mesh.size())[index] for value in (self.weight, self.bias))
        return ShardedLogits(make(self.hidden, weight, bias), mesh)

    def result(self, loss: NextToken, logits: Tensor) -> list[Tensor]:
        """The loss, and the gradients of `hidden`, `weight` and `bias`."""
        total = loss.total(logits, {"labels": self.labels})
        (total / 7).backward()  # type: ignore[no-untyped-call]
        gradients = (value.grad for value in (self.hidden, self.weight, self.bias))
        return [total.detach(), *(gradient for gradient in gradients if gradient is not None)]


def summed(gradients: list[Tensor]) -> list[Tensor]:
    """Gradients with those of all ranks added: a row of the head has its gradient on one rank alone."""
    for gradient in gradients:
        torch.distributed.all_reduce(gradient)
    return gradients


def compared(penalties: tuple[float, float], dtype: torch.dtype) -> float:
    """The largest difference of loss and gradients from whole logits, relative to the largest entry."""
    worst = 0.0
    for forward in FORWARDS.values():
        for make in (F.linear, HeadLogits):
            loss, plain, sharded = NextToken(*penalties), Head(dtype), Head(dtype)
            expected = plain.result(loss, forward(F.linear(plain.hidden, plain.weight, plain.bias)))
            with (
                mock.patch.object(ShardedLogits, "whole", side_effect=AssertionError("gathered logits")),
                mock.patch.object(head_logits, "HELD_BYTES", NARROW),
            ):
                total, *gradients = sharded.result(loss, forward(sharded.shard(make)))
            for mine, right in zip([total, *summed(gradients)], expected, strict=True):
                assert mine.dtype == right.dtype
                worst = max(worst, float((mine - right).abs().max() / right.abs().max()))
    return worst


@pytest.mark.parametrize("penalties", PENALTIES, ids=str)
def test_loss_and_gradients_are_those_of_whole_logits(pool: Pool, penalties: tuple[float, float]) -> None:
    assert max(pool.run(2, compared, penalties, torch.float64)) < 1e-13
    assert max(pool.run(4, compared, penalties, torch.float32)) < 1e-5


def half_precision() -> list[bool]:
    """For blocks and for whole shards: whether bfloat16 is as near to float64 as whole logits are."""
    head, verdicts = Head(torch.float64), []
    exact = head.result(NextToken(), F.linear(head.hidden, head.weight, head.bias))
    for make in (F.linear, HeadLogits):
        usual, mine = Head(torch.bfloat16), Head(torch.bfloat16)
        expected = usual.result(NextToken(), F.linear(usual.hidden, usual.weight, usual.bias))
        total, *gradients = mine.result(NextToken(), mine.shard(make))
        assert total.dtype == torch.float32
        for value, other, right in zip([total, *summed(gradients)], expected, exact, strict=True):
            error, known = (float((each.double() - right).norm()) for each in (value, other))
            verdicts.append(error < 1.5 * known + 1e-3)
    return verdicts


def test_half_precision_is_summed_in_float32(pool: Pool) -> None:
    assert all(same_on_all(pool.run(2, half_precision)))


def other_uses() -> list[str]:
    """Uses that need whole logits and differ from plain ones."""
    head, wrong = Head(torch.float64), []
    plain = F.linear(head.hidden, head.weight, head.bias).detach()
    uses: dict[str, Callable[[Any], Any]] = {
        "sum": lambda logits: logits.sum(-1),
        "columns": lambda logits: logits[..., :3],
        "softmax": lambda logits: logits.softmax(-1),
        "in place": lambda logits: [logits.mul_(2.0), logits * 3][1],
        "whole": whole,
    }
    for make in (F.linear, HeadLogits):
        for name, use in uses.items():
            logits = head.shard(make)
            assert (logits.shape, logits.dtype) == (plain.shape, plain.dtype)
            with torch.no_grad():
                value = use(logits)
            if type(value) is not Tensor or not torch.allclose(value, use(plain.clone()), rtol=1e-13):
                wrong.append(name)
    return wrong


def test_any_other_use_has_whole_logits(pool: Pool) -> None:
    assert same_on_all(pool.run(2, other_uses)) == []


def after_a_change() -> float:
    """The loss of logits that were modified in place, with labels that need no slice."""
    head = Head(torch.float64)
    logits = head.shard(F.linear)
    with torch.no_grad():
        logits.mul_(0.0)
        return float(NextToken().total(logits, {"shift_labels": head.labels}))


def test_a_change_in_place_counts(pool: Pool) -> None:
    tokens = ROWS * SEQUENCE - 1
    assert same_on_all(pool.run(2, after_a_change)) == pytest.approx(tokens * float(torch.tensor(24.0).log()))


# ---- pipelines

Case = tuple[str, int, Axes, dict[str, Any]]  # family, ranks of the pipeline, axes, options
CASES: list[Case] = [
    ("llama", 1, Axes(tp=2), {}),
    ("llama", 2, Axes(tp=2), {"model": {"tied": True, "layers": 4}, "schedule": "zb_v"}),
    ("llama", 1, Axes(dp_shard=2, tp=2), {"sequence_parallel": True}),
]
MORE: list[Case] = [
    ("qwen3", 1, Axes(tp=4), {"model": {"num_attention_heads": 4, "num_key_value_heads": 4}}),
    ("gemma2", 1, Axes(tp=2), {}),  # a soft cap
    ("gemma3_text", 1, Axes(tp=2), {"model": {"tied": True}}),
    ("cohere2", 1, Axes(tp=2), {}),  # a scale
    ("llama", 1, Axes(dp_replicate=2, tp=2), {}),
    ("llama", 1, Axes(dp_shard=2, tp=2), {"sharded": Sharded(reshard_after_forward=True)}),
    ("llama", 1, Axes(cp=2, tp=2), {"context": "ulysses"}),
]
LARGE = 4 * 48 * 13  # bytes of blocks of 13 tokens of the vocabulary, of a microbatch of `batch`
MODES = [(True, True), (False, True), (False, False), (True, False)]  # are logits large, and chunked_loss


def differences(case: Case, modes: Sequence[tuple[bool, bool]]) -> list[float]:
    """For each of `modes`, how far loss and gradients of a step are from the plain process's, at most.

    Asserts that no logits are gathered, and that blocks are computed where they should be.
    """
    family, ranks, axes, options = case
    model, worst = model_of(family, **options.get("model", {})), []
    loss, expected = plain_step(model, batch())
    for large, chunked in modes:
        with (
            mock.patch.object(head_logits, "HELD_BYTES", LARGE if large else 1 << 28),
            mock.patch.object(HeadLogits, "sums", autospec=True, side_effect=HeadLogits.sums) as blocks,
            mock.patch.object(ShardedLogits, "whole", side_effect=AssertionError("gathered logits")),
        ):
            pipe = build_pipe(family, ranks, axes, {**options, "chunked_loss": chunked})
            result = pipe.step(own_part(batch(), *pipe.batch_part))
        is_last = pipe.schedule.stages - 1 in pipe.modules
        assert blocks.called == (large and chunked and is_last and not axes.uses_fsdp)
        worst.append(max(worst_gradient(pipe, expected)[0], abs(result.loss - loss) / loss))
        pipe.close()
    return worst


FIRST = [(CASES[0], MODES), *((case, MODES[:1]) for case in CASES[1:])]


@pytest.mark.parametrize(
    ("case", "modes"), [*FIRST, *later(*((case, MODES) for case in (*CASES[1:], *MORE)))]
)
def test_a_pipeline_is_as_one_process(pool: Pool, case: Case, modes: list[tuple[bool, bool]]) -> None:
    for worst in pool.run(case[1] * case[2].ranks_per_stage, differences, case, modes):
        inside = torch.float32 if case[0] in FLOAT32_INSIDE else torch.float64
        assert max(worst) < TOLERANCE[inside], worst


def with_loss(options: dict[str, Any]) -> tuple[bool, bool]:
    """Whether a step's loss saw sharded logits, and whether an evaluation returned those of the model."""
    seen: list[bool] = []
    sums = ShardedLogits.cross_entropy

    def seeing(self: ShardedLogits, *args: Any) -> Tensor:
        seen.append(True)
        return sums(self, *args)

    with mock.patch.object(ShardedLogits, "cross_entropy", seeing):
        pipe = build_pipe("llama", 1, Axes(tp=2), options)
        pipe.step(batch())
    outputs = list(pipe.evaluate(batch(), lambda output, number: output).outputs or [])
    with torch.no_grad():
        expected = model_of("llama", **options.get("model", {}))(batch()["input_ids"]).logits
    pipe.close()
    plain = all(type(output) is Tensor for output in outputs)
    return bool(seen), plain and torch.allclose(torch.cat(outputs), expected, rtol=1e-10)


def test_a_loss_fn_gets_whole_logits(pool: Pool) -> None:
    assert same_on_all(pool.run(2, with_loss, {"loss_fn": mean_of_logits})) == (False, True)
    assert same_on_all(pool.run(2, with_loss, {"loss_fn": NextToken(z_loss=1e-3)})) == (True, True)
    odd = {"model": {"vocab_size": 65}}  # whose head stays whole
    assert not any(sharded for sharded, _ in pool.run(2, with_loss, odd))


def mean_of_logits(output: Tensor, microbatch: object) -> Tensor:
    assert type(output) is Tensor
    return output.square().mean()


# ---- hooks


def seen_by_hooks(at: str, kind: str, ranks: tuple[int, ...]) -> tuple[bool, list[tuple[int, ...]], float]:
    """Whether the loss saw sharded logits, the shapes that hooks of the module `at` saw, and the difference.

    ranks: those that have the hook.
    """
    model, shapes = model_of("llama"), list[tuple[int, ...]]()

    def see(module: object, args: object, result: Any) -> None:
        logits = getattr(result, "logits", result)
        with torch.no_grad():
            logits.sum()
        shapes.append(tuple(logits.shape))

    def see_gradient(module: object, inputs: object, gradients: tuple[Tensor, ...]) -> None:
        shapes.append(tuple(gradients[0].shape))

    loss, expected = plain_step(model_of("llama"), batch())
    hooked = model.get_submodule(at)
    if torch.distributed.get_rank() in ranks:
        hooked.register_forward_hook(see) if kind == "forward" else hooked.register_full_backward_hook(
            see_gradient
        )
    with (
        mock.patch.object(head_logits, "HELD_BYTES", LARGE),
        mock.patch.object(
            ShardedLogits, "cross_entropy", autospec=True, side_effect=ShardedLogits.cross_entropy
        ) as sums,
    ):
        pipe = build_whole(model, 1, Axes(tp=2))
        result = pipe.step(batch())
    worst = max(worst_gradient(pipe, expected)[0], abs(result.loss - loss) / loss)
    pipe.close()
    return sums.called, shapes, worst


# one rank alone is the harder case: the other has no hook that tells it to gather
@pytest.mark.parametrize(("at", "kind", "ranks"), [
    ("lm_head", "forward", (1,)), ("", "forward", (1,)), ("lm_head", "backward", (1,)),
    ("lm_head", "forward", (0, 1)),
    *later(("", "forward", (0, 1)), ("lm_head", "backward", (0, 1)), mark=pytest.mark.sweep),
])  # fmt: skip
def test_hooks_see_whole_logits(pool: Pool, at: str, kind: str, ranks: tuple[int, ...]) -> None:
    """Also where one rank alone has the hook: the others gather with it."""
    for rank, (sharded, shapes, worst) in enumerate(pool.run(2, seen_by_hooks, at, kind, ranks)):
        assert not sharded
        assert shapes == ([(4, 12, 64)] * 2 if rank in ranks else [])
        assert worst < TOLERANCE[torch.float64]


def hooked_later() -> tuple[bool, list[tuple[int, ...]]]:
    """As `seen_by_hooks`, of hooks of the logits' gradient that each rank registers after the build."""
    shapes = list[tuple[int, ...]]()
    pipe = build_pipe("llama", 1, Axes(tp=2), {})
    (module,) = pipe.modules.values()
    module.get_submodule("lm_head").register_forward_hook(
        lambda module, args, logits: (
            logits.register_hook(lambda gradient: shapes.append(tuple(gradient.shape))) and None
        )
    )
    loss, expected = plain_step(model_of("llama"), batch())
    result = pipe.step(batch())
    exact = max(worst_gradient(pipe, expected)[0], abs(result.loss - loss) / loss) < TOLERANCE[torch.float64]
    pipe.close()
    return exact, shapes


def test_a_hook_of_the_gradient_sees_all_of_it(pool: Pool) -> None:
    assert same_on_all(pool.run(2, hooked_later)) == (True, [(4, 12, 64)] * 2)
