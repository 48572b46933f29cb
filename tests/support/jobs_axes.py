"""What pipelines beside other axes refuse, give back and are trained by, run by the pool's workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from penstock import AutoPipeline, Axes, Pipeline
from penstock.batch.loss import NextToken
from penstock.errors import InputError
from penstock.parallel.muon import Muon
from penstock.runtime import sharded_weights as spread
from support import zoo
from support.families import FAMILIES, tiny_config, tiny_model
from support.jobs_mesh import batch, full, own_part
from support.reference import plain_step

LAYERS = 2
Built = tuple[str, int, Axes, dict[str, Any]]  # family, ranks, axes, options


def told(call: Callable[[], Any]) -> str:
    """The kind and words of the error that it ends in."""
    try:
        call()
    except InputError as error:
        complete = all((error.value, error.rule, error.remedy))
        return f"{type(error).__name__}: {error}" if complete else f"not complete: {error!r}"
    return "accepted"


def model_of(family: str, **sizes: Any) -> PreTrainedModel:
    if family not in FAMILIES:
        return zoo.tiny_model(family)
    return tiny_model(family, torch.float64, **{"layers": LAYERS, **sizes})


def made(family: str, ranks: int, axes: Axes | None, options: Mapping[str, Any]) -> Pipeline:
    """options: AutoPipeline's, and the model's sizes as "model"."""
    options = dict(options)
    model = model_of(family, **options.pop("model", {}))
    common: dict[str, Any] = {"schedule": "1f1b", "microbatches": 2, "timeout": 30.0, **options}
    return AutoPipeline(ranks=ranks, axes=axes, **common).build(model)


def refused_builds(cases: list[Built]) -> list[str]:
    torch.set_num_threads(1)
    return [told(lambda case=case: made(*case)) for case in cases]  # type: ignore[misc]


def built(cases: list[Built]) -> list[float]:
    """The loss of one step of each, for axes that come out as 1 or as all that are left."""
    torch.set_num_threads(1)
    losses = []
    for case in cases:
        pipe = made(*case)
        losses.append(pipe.step(own_part(batch(), *pipe.batch_part)).loss)
        pipe.close()
    return losses


def refused_meshes(cases: list[tuple[tuple[int, ...], tuple[str, ...], int, Axes]]) -> list[str]:
    """Meshes of the caller's own, by sizes and names, with ranks and axes that do not fit them."""
    torch.set_num_threads(1)
    found = []
    for sizes, names, ranks, axes in cases:
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
        found.append(told(lambda: made("llama", ranks, axes, {"mesh": mesh})))  # noqa: B023
    return found


def refused_provider(axes: Axes) -> str:
    return told(
        lambda: Pipeline.from_provider(
            lambda info: nn.Linear(4, 4), ranks=2, schedule="1f1b", microbatches=2, axes=axes
        )
    )


class Piece(nn.Module):
    """y = tanh(W x), with values of its stage, or of this process where they are to differ."""

    def __init__(self, stage: int, *, random: bool = False) -> None:
        super().__init__()
        torch.manual_seed(stage + (100 * dist.get_rank() if random else 0))
        self.own = nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = torch.tanh(self.own(x))
        return result


def pieces(ranks: int, axes: Axes, options: dict[str, Any], *, random: bool = False) -> Pipeline:
    return Pipeline.from_provider(
        lambda info: Piece(info.stage, random=random), ranks=ranks, schedule="1f1b", microbatches=2,
        axes=axes, timeout=5, **{"loss_fn": lambda output, part: output.square().mean(), **options},
    )  # fmt: skip


def modules_of_ones_own(ranks: int, axes: Axes) -> tuple[str, list[float]]:
    """What replicas that differ are told, and by how much the loss and each gradient of alike ones differ
    from those of one process."""
    torch.set_num_threads(1)
    refused = told(lambda: pieces(ranks, axes, {}, random=True))
    pipe = pieces(ranks, axes, {})
    whole = {"x": torch.arange(64, dtype=torch.float64).view(16, 4) / 64}
    loss = pipe.step(own_part(whole, *pipe.batch_part)).loss
    plain = nn.Sequential(*(Piece(stage) for stage in range(ranks)))
    expected = plain(whole["x"]).square().mean()
    expected.backward()
    differences = [abs(loss - float(expected))]
    for stage, module in pipe.modules.items():
        for name, parameter in module.named_parameters():
            assert parameter.grad is not None
            other = plain[stage].get_parameter(name).grad
            assert other is not None
            differences.append(float((spread.full_tensor(parameter.grad) - other).abs().max()))
    pipe.close()
    return refused, differences


class Doubled(NextToken):
    """A loss of one's own as an object, which sees a part of each row beside cp."""

    def total(self, output: Any, microbatch: Any) -> Tensor:
        return 2 * super().total(output, microbatch)


def own_loss(ranks: int, axes: Axes) -> list[float]:
    """By how much loss and gradients of an object as loss_fn differ from one process's."""
    torch.set_num_threads(1)
    pipe = made("llama", ranks, axes, {"loss_fn": Doubled()})
    loss, expected = plain_step(model_of("llama"), batch())
    differences = [abs(pipe.step(own_part(batch(), *pipe.batch_part)).loss - 2 * loss)]
    for name, parameter in pipe.named_parameters(remove_duplicate=False):
        assert parameter.grad is not None
        differences.append(float((full(parameter.grad) - 2 * expected[name]).abs().max()))
    pipe.close()
    return differences


def after_a_failure(axes: Axes) -> list[str]:
    """What each of two steps says on this process, where the loss fails on the first one in the first."""
    torch.set_num_threads(1)
    failing = [dist.get_rank() == 0]

    def loss(output: Tensor, part: Any) -> Tensor:
        if failing[0]:
            raise ValueError("no loss today")
        return output.square().mean()

    pipe = pieces(1, axes, {"loss_fn": loss})
    given = own_part({"x": torch.ones(16, 4, dtype=torch.float64)}, *pipe.batch_part)
    found = []
    for _ in range(2):
        try:
            pipe.step(given)
            found.append("no error")
        except Exception as error:
            found.append(type(error).__name__)
        failing[0] = False
    pipe.close()
    return found


def other_models(axes: Axes) -> str:
    """What replicas of a pipeline of one rank are told of models that each process made at random."""
    kind, config = type(tiny_model("llama")), tiny_config("llama")
    torch.manual_seed(dist.get_rank())
    model = kind(config)
    return told(lambda: AutoPipeline(ranks=1, microbatches=2, timeout=20, axes=axes).build(model))


def refused_batches(
    family: str, ranks: int, axes: Axes, wrongs: list[str], options: dict[str, Any]
) -> dict[str, Any]:
    """By what was wrong in the batch, what the step and the evaluation said; the loss of a good one after."""
    torch.set_num_threads(1)
    pipe = made(family, ranks, axes, options)
    part, _ = pipe.batch_part
    good = own_part(batch(), *pipe.batch_part)
    found: dict[str, Any] = {}
    for wrong in wrongs:
        given: Any = dict(good)
        if wrong == "few rows" and part:
            given = {name: value[:1] for name, value in good.items()}
        if wrong == "short" and part == 0:
            given = {name: value[:, :3] for name, value in good.items()}
        if wrong == "other data" and dist.get_rank() == dist.get_world_size() - 1:
            given["input_ids"] = (good["input_ids"] + 1) % 64
        if wrong == "list":
            halves = [{name: value[at::2] for name, value in good.items()} for at in range(2)]
            given = halves[: 2 if part else 1]
        found[wrong] = [told(lambda: pipe.step(given))]  # noqa: B023
        if wrong != "few rows":  # an evaluation makes fewer microbatches of it
            found[wrong].append(told(lambda: pipe.evaluate(given)))  # noqa: B023
        pipe.zero_grad()
        found[wrong].append(pipe.step(good).loss)
        if wrong == "few rows":
            found[wrong].append(pipe.evaluate(given).loss)
    pipe.close()
    return found


def outputs(ranks: int, axes: Axes, options: dict[str, Any], length: int) -> list[float]:
    """By how much each way to get at logits differs from the whole model's."""
    torch.set_num_threads(1)
    pipe = made("llama", ranks, axes, options)
    mine = own_part(batch(length=length), *pipe.batch_part)
    model = model_of("llama").eval()
    with torch.no_grad():
        expected = model(input_ids=mine["input_ids"]).logits
    found = []
    for given in (mine, {"input_ids": mine["input_ids"]}):
        result = pipe.evaluate(given, outputs=True, everywhere=True)
        found.append(float((result.outputs - expected).abs().max()))
    lengths = pipe.evaluate(mine, outputs=lambda output, number: [*output.shape], everywhere=True).outputs
    assert lengths == [[len(mine["input_ids"]) // 2, length, 64]] * 2, lengths
    inferred = pipe.infer(mine)
    if inferred:  # on the rank of the last stage
        whole = torch.cat([inferred[number] for number in sorted(inferred)])
        found.append(float((whole - expected).abs().max()))
    pipe.close()
    return found


def ragged(parts: int) -> list[list[dict[str, Tensor]]]:
    """For each part of the batch two microbatches, all of different lengths."""
    return [[batch(2, 9 + 4 * part + 3 * at) for at in range(2)] for part in range(parts)]


def padded(ranks: int, axes: Axes, options: dict[str, Any]) -> list[tuple[float, dict[str, Tensor]]]:
    """Loss and gradients of two steps, of lengths that microbatches and parts of the batch differ in."""
    torch.set_num_threads(1)
    pipe = made("llama", ranks, axes, options)
    index, parts = pipe.batch_part
    found = []
    for _ in range(2):
        loss = pipe.step(ragged(parts)[index]).loss
        gradients = {name: full(p.grad).clone() for name, p in pipe.named_parameters() if p.grad is not None}
        found.append((loss, gradients))
        pipe.zero_grad()
    pipe.close()
    return found


def optimizers(kind: str, parameters: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
    """AdamW as "foreach" or "fused" or neither, or "muon" of hidden matrices with AdamW for the rest."""
    if kind == "muon":
        hidden = [p for p in parameters if p.ndim > 1 and p.shape[0] != 64]  # 64: embedding and head
        rest = [p for p in parameters if not any(p is other for other in hidden)]
        own: list[torch.optim.Optimizer] = [Muon(hidden, lr=0.02)] if hidden else []
        return [*own, torch.optim.AdamW(rest, lr=1e-2)]
    how: dict[str, Any] = {kind: True} if kind in ("foreach", "fused") else {}
    return [torch.optim.AdamW(parameters, lr=1e-2, **how)]


STEPS = 3


def trained(
    family: str, ranks: int, axes: Axes, kinds: list[str], options: dict[str, Any]
) -> dict[str, tuple[list[float], list[float], dict[str, Tensor]]]:
    """By kind of optimizer, the losses and norms of some steps, and the weights after them."""
    torch.set_num_threads(1)
    found = {}
    for kind in kinds:
        pipe = made(family, ranks, axes, options)
        mine = own_part(batch(), *pipe.batch_part)
        own = optimizers(kind, list(pipe.parameters()))
        losses, norms = [], []
        for _ in range(STEPS):
            losses.append(pipe.step(mine).loss)
            norms.append(pipe.clip_grad_norm_(0.5))
            for optimizer in own:
                optimizer.step()
            pipe.zero_grad()
        weights = {name: full(p.detach()).clone() for name, p in pipe.named_parameters()}
        found[kind] = losses, norms, weights
        pipe.close()
    return found


def compiled_layers(module: nn.Module) -> nn.Module:
    for part in module.modules():
        if isinstance(part, GradientCheckpointingLayer):
            part.compile(backend="aot_eager")
    return module


def compiled(family: str, ranks: int, axes: Axes, options: dict[str, Any]) -> tuple[str, float]:
    """What two steps of compiled layers end in: "exact" with how far gradients are off, or the refusal."""
    torch.set_num_threads(1)
    torch._dynamo.reset()
    model = model_of(family)
    loss, expected = plain_step(model, batch())
    try:
        pipe = made(family, ranks, axes, {**options, "parallelize_fn": compiled_layers})
        results = [pipe.step(own_part(batch(), *pipe.batch_part)) for _ in range(2)]
    except InputError as error:
        return f"{type(error).__name__}: {error}", 0.0
    worst = max(abs(result.loss - loss) for result in results)
    for name, p in pipe.named_parameters():
        name = name.replace("_orig_mod.", "")
        assert p.grad is not None, name
        difference = (full(p.grad) / 2 - expected[name]).abs().max() / expected[name].abs().max()
        worst = max(worst, float(difference))
    pipe.close()
    return "exact", worst


def saved(folder: str, family: str, ranks: int, axes: Axes) -> None:
    torch.set_num_threads(1)
    pipe = made(family, ranks, axes, {})
    pipe.save_pretrained(folder)
    pipe.close()
