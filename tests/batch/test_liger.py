"""The loss by Liger's own kernels, which Triton's interpreter runs on a CPU: gradients of one process.

Triton and Liger lie apart, see the Makefile, and one process of their own runs all that needs them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock import AutoPipeline, Axes, Pipeline
from penstock.batch import liger
from penstock.batch.head_logits import HeadLogits
from penstock.batch.hits import NoHits
from penstock.batch.logit_sums import Penalties
from penstock.batch.loss import NextToken
from penstock.errors import ConfigError, ModelError
from penstock.models.stage import StageInfo
from penstock.pipeline.building import build_stages
from penstock.train.config.sections import TrainConfig
from penstock.train.settings import check_machine
from support.families import pipeline, ragged_batch, tiny_config, tiny_model
from support.reference import assert_every_gradient, plain_step
from support.refusals import refuses

LIGER = Path(sys.prefix) / "liger"


# ---- Facts, each a function that the process with Liger runs


def _exact(family: str, changes: dict[str, Any], **how: Any) -> None:
    model, batch = tiny_model(family, **changes), ragged_batch()
    pipe = pipeline(model, chunked_loss="liger", **how)
    loss, expected = plain_step(model, batch)
    assert pipe.step(batch).loss == pytest.approx(loss, rel=1e-5)
    assert_every_gradient(pipe.modules.values(), expected, 1e-5)
    assert pipe.evaluate(batch).loss == pytest.approx(loss, rel=1e-5)
    pipe.close()


def tied_1f1b() -> None:
    _exact("llama", {"tied": True}, schedule="1f1b")


def split() -> None:
    _exact("llama", {}, schedule="zb_h1")


def several_live() -> None:
    _exact("qwen3", {}, schedule="gpipe", microbatches=2)


def v_and_checkpointing() -> None:
    _exact("mixtral", {}, schedule="zb_v", activation_checkpointing=True)


def _terms(changed: bool) -> tuple[Tensor, ...]:
    """Loss and gradients of a head with a bias, by Liger where `changed`, else by our blocks.

    The hidden states need no gradient, as under frozen layers.
    """
    torch.manual_seed(0)
    hidden, labels = torch.randn(9, 8), torch.randint(0, 24, (9,))
    weight, bias = torch.randn(24, 8, requires_grad=True), torch.randn(24, requires_grad=True)
    labels[2] = -100
    logits = HeadLogits(hidden, weight, bias, by_liger=changed)
    total = logits.cross_entropy(labels, -100, Penalties(0.1, 1e-2), NoHits())
    (total / 7).backward()  # type: ignore[no-untyped-call]
    assert weight.grad is not None
    assert bias.grad is not None
    return total.detach(), weight.grad, bias.grad


def terms_and_bias() -> None:
    torch.testing.assert_close(_terms(True), _terms(False), rtol=1e-5, atol=1e-6)


def mixed() -> None:
    """Under autocast, where Liger rounds logits and their gradient as a plain backward does."""
    model, batch, found = tiny_model("llama"), ragged_batch(), list[tuple[float, dict[str, Tensor]]]()
    for chunked in ("liger", False):
        pipe = pipeline(model, chunked_loss=chunked, autocast=torch.bfloat16)
        loss = pipe.step(batch).loss
        found.append((loss, {name: p.grad for name, p in pipe.named_parameters() if p.grad is not None}))
    (by_liger, gradients), (plain, expected) = found
    assert by_liger == pytest.approx(plain, rel=1e-3)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        assert gradient.dtype == torch.float32
        assert (gradient - expected[name]).abs().max() <= 0.02 * expected[name].abs().max(), name


def frozen_head() -> None:
    """Liger makes no gradient of a weight that is not trained."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(5, 8, requires_grad=True), torch.randn(24, 8)
    labels = torch.arange(5)
    liger.liger_cross_entropy(hidden, weight, None, labels, -100, 0.0, 0.0).backward()  # type: ignore[no-untyped-call]
    plain = hidden.detach().requires_grad_()
    F.cross_entropy(F.linear(plain, weight), labels, reduction="sum").backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(hidden.grad, plain.grad)


def predicted_memory() -> None:
    """The last stage holds the gradients of the head's weight and of its input, from its forward on."""
    model, auto = tiny_model("llama"), AutoPipeline(ranks=2, microbatches=4, chunked_loss="liger")
    expected = auto.memory_costs(auto.build_plan(model), (2, 10))
    pipe = auto.build(model)
    pipe.step(ragged_batch())
    measured = pipe.costs().activation
    assert expected is not None
    assert isinstance(expected.activation, list)
    assert isinstance(measured, list)
    # of the loss a scalar is held for the step's report; Triton's interpreter holds the arguments of its last
    # call: the logits of 2 tokens, and losses and labels of 18
    more = 4 + 4 * (2 * 64 + 18) + 8 * 18
    assert measured[1] == [expected.activation[1] + more] * 4, (measured, expected.activation)


FACTS: list[Callable[[], None]] = [
    *(tied_1f1b, split, several_live, v_and_checkpointing),
    *(terms_and_bias, mixed, frozen_head, predicted_memory),
]


def run_all() -> dict[str, str]:
    """In a process with Liger: what failed of each fact, and how often its kernels ran."""
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as Fused

    calls, apply = [0], Fused.apply

    def counted(*args: Any) -> Any:
        calls[0] += 1
        return apply(*args)

    Fused.apply = counted
    torch.set_num_threads(1)
    results = {}
    for fact in FACTS:
        calls[0] = 0
        try:
            fact()
            results[fact.__name__] = "" if calls[0] else "Liger did not run"
        except Exception:
            results[fact.__name__] = traceback.format_exc()
    return results


@pytest.fixture(scope="module")
def results() -> dict[str, str]:
    paths = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1]), *sys.path, str(LIGER)]
    code = "import json; from tests.batch.test_liger import run_all; print(json.dumps(run_all()))"
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=110,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1",
             "TRITON_INTERPRET": "1"},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-3000:]
    found: dict[str, str] = json.loads(ended.stdout.splitlines()[-1])
    return found


@pytest.mark.long
@pytest.mark.sweep
@pytest.mark.skipif(not LIGER.is_dir(), reason="make sweep puts Liger there")
@pytest.mark.parametrize("fact", [fact.__name__ for fact in FACTS])
def test_losses_and_gradients_by_liger_are_those_of_one_process(fact: str, results: dict[str, str]) -> None:
    assert not results[fact], results[fact]


# ---- What does not fit


@pytest.mark.parametrize(
    ("family", "changes", "dtype", "value", "rule"),
    [
        ("gemma2", {"final_logit_softcapping": 2.0}, torch.float32, "for Gemma2", "its forward changes"),
        ("granite", {}, torch.float32, "for Granite", "its forward changes"),
        ("cohere2", {"logit_scale": 0.25}, torch.float32, "for Cohere2", "its forward changes"),
        ("llama", {}, torch.float64, "in float64", "in float32"),
    ],
)
def test_logits_that_liger_cannot_make_are_refused(
    family: str, changes: dict[str, Any], dtype: torch.dtype, value: str, rule: str
) -> None:
    auto = AutoPipeline(ranks=2, microbatches=4, chunked_loss="liger")
    with refuses(ModelError, value, rule):
        auto.build_plan(tiny_model(family, dtype, **changes))


def test_a_head_that_is_no_plain_layer_is_refused() -> None:
    model = tiny_model("llama")
    model.lm_head = type("Scaled", (nn.Linear,), {})(32, 64, bias=False)
    with refuses(
        ModelError,
        "chunked_loss='liger' for LlamaForCausalLM",
        "Liger needs a plain linear head, and this one is Scaled",
    ):
        AutoPipeline(ranks=2, microbatches=4, chunked_loss="liger").build_plan(model)


@pytest.mark.parametrize(
    ("options", "value", "rule"),
    [
        ({"chunked_loss": "triton"}, "chunked_loss='triton'", "large logits"),
        (
            {"loss_fn": lambda output, batch: output.sum()},
            "chunked_loss='liger' with a loss_fn",
            "next-token loss",
        ),
        ({"axes": Axes(tp=2)}, "tp=2", "whole weights"),
        ({"axes": Axes(dp_shard=2, cp=-1)}, "dp_shard=2", "whole weights"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], value: str, rule: str) -> None:
    with refuses(ConfigError, value, rule):
        AutoPipeline(**{"ranks": 2, "microbatches": 4, "chunked_loss": "liger", **options}).build_plan(
            tiny_config("llama")
        )


def test_a_provider_is_refused() -> None:
    def provider(info: StageInfo) -> nn.Module:
        raise AssertionError

    with refuses(ConfigError, "chunked_loss='liger' with from_provider", "head is known"):
        Pipeline.from_provider(provider, ranks=2, microbatches=4, chunked_loss="liger")


# a model that is made fails at _Build._model, before any public call returns
@pytest.mark.parametrize(
    ("found", "value", "rule"),
    [
        (None, "chunked_loss='liger'", "needs Liger"),
        (object(), "chunked_loss='liger' on a CPU", "for GPUs"),
    ],
)
def test_a_machine_without_it_is_told_before_weights_are_loaded(
    found: object, value: str, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: found)
    monkeypatch.setattr(build_stages.StagesBuild, "_model", lambda self, index: pytest.fail("too late"))
    auto = AutoPipeline(ranks=2, microbatches=4, chunked_loss="liger", device="cpu")
    auto.build_plan(tiny_config("llama"))  # a plan is for another machine, perhaps
    with refuses(ConfigError, value, rule):
        auto.build(tiny_config("llama"))


def test_a_config_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    sections = {"model": {"path": "m"}, "data": {"path": "d"}, "train": {"chunked_loss": "liger"}}
    config = TrainConfig.model_validate(sections)
    assert config.train.chunked_loss == "liger"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with refuses(ConfigError, "train.chunked_loss=liger"):
        check_machine(config)


def test_without_tokens_the_loss_is_zero() -> None:
    weight = torch.randn(24, 8, requires_grad=True)
    batch = {name: torch.zeros(1, 1, dtype=torch.long) for name in ("input_ids", "labels")}
    loss = NextToken().total(HeadLogits(torch.randn(1, 1, 8), weight, by_liger=True), batch)
    assert float(loss.detach()) == 0
