"""QLoRA: the gradients of the same quantised model in one process. torchao lies apart: see the Makefile."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock import AutoPipeline
from penstock.errors import ConfigError
from support import zoo
from support.adapted import adapted, assert_exact, logits, lora, opened
from support.refusals import refuses

TORCHAO = Path(sys.prefix) / "torchao"
SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_key_value_heads": 4,
    "head_dim": 32,
}


def model() -> Any:
    return zoo.tiny_model("llama", **SIZES)


def exact(folder: Path) -> dict[str, Any]:
    """In a process with torchao: PEFT's gradients, a saved adapter, and the bytes of a stage's matrices."""
    from torchao.quantization import NF4Tensor

    from penstock.models.quantized import quantize_base

    batch = zoo.tiny_batch("llama")
    peft = adapted(model())
    pipes = [
        AutoPipeline(ranks=2, microbatches=2, schedule=schedule, quantize="nf4").build(peft)
        for schedule in ("1f1b", "zb_h1")
    ]
    quantize_base(peft.get_base_model())
    for pipe in pipes:
        assert_exact(pipe, peft, batch)
        pipe.verify_against(peft, batch)
    held = [p for p in pipes[0].parameters() if isinstance(p.data, NF4Tensor)]
    assert len(held) == 4 * 7
    assert all(not p.requires_grad for p in held)
    pipes[0].save_pretrained(folder / "adapter")

    base = model()
    base.save_pretrained(folder / "base")
    new = AutoPipeline(ranks=2, microbatches=2, adapter=lora(), quantize="nf4").build(folder / "base")
    new.load_weights(folder / "adapter")
    first, second = (pipe.step(batch).loss for pipe in (new, pipes[0]))
    quantised = logits(peft, batch["input_ids"])
    plain = logits(opened(base, folder / "adapter"), batch["input_ids"])
    assert torch.allclose(quantised, plain, atol=0.3)
    return {"same": first == pytest.approx(second, rel=1e-6), "differs": not torch.equal(quantised, plain)}


@pytest.mark.sweep
@pytest.mark.long
@pytest.mark.skipif(not TORCHAO.is_dir(), reason="make env puts torchao there")
def test_every_gradient_is_that_of_the_quantised_model(tmp_path: Path) -> None:
    paths = [str(TORCHAO), str(Path(__file__).parents[2]), str(Path(__file__).parents[1]), *sys.path]
    code = f"import json, pathlib; from tests.models.test_quantized import exact; " \
           f"print(json.dumps(exact(pathlib.Path({str(tmp_path)!r}))))"  # fmt: skip
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert json.loads(ended.stdout.splitlines()[-1]) == {"same": True, "differs": True}


@pytest.mark.parametrize(
    ("options", "value", "rule"),
    [
        ({"quantize": "nf4"}, "quantize='nf4' without an adapter", "frozen weights"),
        ({"quantize": "int3", "adapter": lora()}, "quantize='int3'", "are in 'nf4'"),
        (
            {"quantize": "nf4", "adapter": lora(use_dora=True)},
            "quantize='nf4' with DoRA",
            "norms of the weights",
        ),
        ({"quantize": "nf4", "adapter": lora()}, "quantize='nf4'", "needs torchao"),
    ],
)
def test_what_cannot_be_quantised_is_refused(
    options: dict[str, Any], value: str, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    with refuses(ConfigError, value, rule):
        AutoPipeline(ranks=2, microbatches=2, **options).build_plan(zoo.tiny_config("llama"))
