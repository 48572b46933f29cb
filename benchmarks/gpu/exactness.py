"""A: a pipeline has the gradients of a plain loop, whatever the schedule, the precision and the attention.

All ranks are in one process. Every parameter's gradient and the loss are compared, of both copies where a
schedule keeps two. The plain loop runs the same microbatches, one after the other.

float32: the largest difference over the gradient's largest entry, at most 1e-5. TF32 is off.

bfloat16 and autocast: the same difference over the spread of two plain runs, at most 2. The two runs differ
in one thing: the second takes the microbatches in reverse order. That is all that a schedule may change, the
order in which a gradient's parts are added. Kernels and shapes of an op are the same, so what else differs is
an error. A comparison with a float32 run would be blind to it: that allows for every rounding of the forward
and the backward, which are the same in both. In a small gradient two orders may round alike by chance, so
that the spread is taken as sqrt(m) roundings of bfloat16 at the gradient's largest entry at least: what m
sums amount to. On a CPU other orders of m = 8 differed by 0.9 to 1.3 spreads, 2.0 with one rounding in
place of sqrt(m), and a run that lost a microbatch by 12 or more in every gradient.

dropout: the reference is penstock's own pipeline of a single rank, as no plain loop can draw what it draws.
With another seed its gradients must differ.

repeats: with deterministic kernels one pipeline repeats its step, and not a bit of a gradient may differ. So
a race between streams shows, or memory that is read too late.

offloading: with activations that wait in host memory, each of these steps has the bits of one without.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend
from transformers import PreTrainedModel

from benchmarks.gpu.models import (
    Batch,
    Size,
    attention,
    batch_of,
    compile_layers,
    copy_on,
    gradients,
    graphs_compiled,
    microbatches_of,
    model_of,
    plain_step,
    qwen3,
    valid_tokens,
)
from benchmarks.gpu.part import Part
from penstock import AutoPipeline, Offloading, Pipeline

SCHEDULES = ("1f1b", "zb_h1", "zb_v", "interleaved_zero_bubble", "dualpipe", "dualpipe_v")
ATTENTION = {
    "math": SDPBackend.MATH,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
}
TOLERANCE, SPREADS = 1e-5, 2.0
OFFLOADED = ("interleaved_zero_bubble", "zb_v")
ROUNDING = torch.finfo(torch.bfloat16).eps / 2  # of one sum, relative to it
DROPOUT, EXPERTS, SEED = 0.1, 8, 1
LOSS = "the loss"  # its name among the gradients


class Sizes(NamedTuple):
    """every: take every so manieth case; repeats: of a step; backend: of torch.compile"""

    model: Size
    every: int
    repeats: int
    backend: str


FULL = Sizes(Size(8, 512, 1536, 8, 4, 64, 1024, 2, 256, 8, 4), 1, 20, "inductor")
TINY = Sizes(Size(4, 32, 48, 4, 2, 8, 64, 1, 12, 4, 2), 7, 3, "eager")


class Setting(NamedTuple):
    """What is the same for all schedules. precision: float32, bfloat16, or autocast over float32 weights"""

    precision: str
    attention: str = ""  # torch's choice
    checkpointing: bool = False
    dropout: float = 0.0
    experts: int = 0
    compiled: bool = False

    def __str__(self) -> str:
        variants = {
            "checkpointing": self.checkpointing, "dropout": self.dropout, "mixture": self.experts,
            "compiled layers": self.compiled,
        }  # fmt: skip
        return ", ".join(
            [self.precision, *filter(None, [self.attention]), *(n for n, on in variants.items() if on)]
        )


SETTINGS = (
    *(
        Setting(precision, kernel)
        for precision in ("float32", "bfloat16", "autocast")
        for kernel in ATTENTION
    ),
    *(Setting(precision, checkpointing=True) for precision in ("float32", "bfloat16", "autocast")),
    Setting("float32", dropout=DROPOUT),
    Setting("float32", dropout=DROPOUT, checkpointing=True),
    Setting("bfloat16", experts=EXPERTS),
    Setting("bfloat16", compiled=True),
)


class Reference(NamedTuple):
    """The plain gradients, and for each what a difference is divided by."""

    gradients: Mapping[str, Tensor]
    scales: Mapping[str, float]


def run(part: Part, sizes: Sizes) -> None:
    part.notes += [
        str(sizes.model),
        "float32 without TF32; labels are left out, of another number in each row",
    ]
    cases = [(setting, schedule) for setting in SETTINGS for schedule in SCHEDULES][:: sizes.every]
    with full_float32():
        for setting in SETTINGS:
            chosen = [schedule for each, schedule in cases if each == setting]
            if (obstacle := missing_kernel(part, setting)) is not None:
                for schedule in chosen:
                    part.not_run(f"{setting}: {schedule}", quantity(setting), obstacle, bar(setting))
            elif chosen:
                _compare(part, sizes, setting, chosen)
        kernel = "flash" if part.on_gpu else "math"
        for schedule in SCHEDULES[:: min(sizes.every, 3)]:
            run = partial(_repeat, part, sizes, Setting("bfloat16", kernel), schedule)
            part.measure(f"repeats: {schedule}", 60, run)
        for schedule in OFFLOADED:
            run = partial(_offload, part, sizes, Setting("bfloat16", kernel), schedule)
            part.measure(f"offloading: {schedule}", 60, run)


def quantity(setting: Setting) -> str:
    if setting.precision == "float32":
        return "difference / largest entry of the gradient"
    return "difference / spread of two plain runs"


def bar(setting: Setting) -> str:
    return f"at most {limit(setting):g}"


def limit(setting: Setting) -> float:
    return TOLERANCE if setting.precision == "float32" else SPREADS


def missing_kernel(part: Part, setting: Setting) -> str | None:
    """Why torch has no such attention here; None where it has."""
    if part.on_gpu and setting.attention == "flash" and setting.precision == "float32":
        return "a GPU's flash attention takes half precision only"
    if not part.on_gpu and setting.attention == "efficient":
        return "torch has this kernel for GPUs only"
    return None


# ---- one setting


def _compare(part: Part, sizes: Sizes, setting: Setting, schedules: list[str]) -> None:
    """All schedules of a setting, whose plain runs are made once."""

    def plain() -> tuple[PreTrainedModel, Batch, Reference]:
        torch._dynamo.utils.counters.clear()
        model, batch = whole_model(sizes, setting), batch_of(sizes.model, part.device, ignored=True)
        return model, batch, of_plain_runs(part, sizes, setting, model, batch)

    def compare(model: PreTrainedModel, batch: Batch, reference: Reference, schedule: str) -> None:
        pipe = pipeline(part, sizes, setting, schedule, model)
        gradients = of_pipeline(setting, pipe, batch, part.device)
        number, name = worst(gradients, reference)
        pipe.close()
        part.add(
            f"{setting}: {schedule}", quantity(setting), number, at_most=limit(setting), why=f"of {name}"
        )

    made = part.measure(f"{setting}: the plain runs", 180, plain)
    if made is None:
        return  # the row that says why is there
    for schedule in schedules:
        seconds = 180 if setting.compiled else 60
        part.measure(f"{setting}: {schedule}", seconds, partial(compare, *made, schedule))
    if setting.compiled:
        part.add(str(setting), "graphs compiled", graphs_compiled(), at_least=1)
        torch._dynamo.reset()


def whole_model(sizes: Sizes, setting: Setting) -> PreTrainedModel:
    size = sizes.model
    if setting.attention == "efficient":  # this kernel takes no groups of heads
        size = size._replace(kv_heads=size.heads)
    config = qwen3(size, experts=setting.experts, attention_dropout=setting.dropout)
    return model_of(config, torch.bfloat16 if setting.precision == "bfloat16" else torch.float32)


def of_plain_runs(
    part: Part, sizes: Sizes, setting: Setting, model: PreTrainedModel, batch: Batch
) -> Reference:
    """Raises RuntimeError where dropout drops nothing."""
    device, count = part.device, sizes.model.microbatches
    if setting.dropout:
        single = pipeline(part, sizes, setting._replace(checkpointing=False), "1f1b", model, ranks=1)
        (first,) = of_pipeline(setting, single, batch, device)
        (other,) = of_pipeline(setting, single, batch, device, seed=SEED + 1)
        single.close()
        if all(torch.equal(first[name], other[name]) for name in first):
            raise RuntimeError("gradients with dropout do not depend on the seed")
        return Reference(first, {name: largest(value) for name, value in first.items()})
    plain = copy_on(model, device)
    if setting.compiled:
        compile_layers(sizes.backend)(plain)
    parts, runs = microbatches_of(batch, count), []
    for order in (parts, parts[::-1]):
        plain.zero_grad()
        with attention(ATTENTION.get(setting.attention)):
            loss = plain_step(plain, order, valid_tokens(batch), partial(autocast, setting, device))
        runs.append({**gradients(plain), LOSS: loss})
    first, other = runs
    if setting.precision == "float32":
        return Reference(first, {name: largest(value) for name, value in first.items()})
    least = ROUNDING * math.sqrt(count)
    spreads = {
        name: max(largest(value - other[name]), least * largest(value)) for name, value in first.items()
    }
    return Reference(first, spreads)


def pipeline(
    part: Part,
    sizes: Sizes,
    setting: Setting,
    schedule: str,
    model: PreTrainedModel,
    ranks: int | None = None,
    offloading: bool | Offloading = False,
) -> Pipeline:
    """All of its ranks are in this process."""
    size = sizes.model
    return AutoPipeline(
        ranks=ranks or size.ranks, schedule=schedule, microbatches=size.microbatches, device=part.device,
        activation_checkpointing=setting.checkpointing, activation_offloading=offloading,
        parallelize_fn=compile_layers(sizes.backend) if setting.compiled else None,
    ).build(model)  # fmt: skip


def of_pipeline(
    setting: Setting, pipe: Pipeline, batch: Batch, device: torch.device, seed: int = SEED
) -> list[dict[str, Tensor]]:
    """The gradients and the loss of a step, by stage: two copies of a stage have equal names."""
    pipe.zero_grad()
    torch.manual_seed(seed)
    with attention(ATTENTION.get(setting.attention)), autocast(setting, device):
        loss = torch.tensor(pipe.step(batch).loss, device=device)
    return [{**gradients(module), LOSS: loss} for module in pipe.modules.values()]


def autocast(setting: Setting, device: torch.device) -> AbstractContextManager[Any]:
    if setting.precision != "autocast":
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)


# ---- differences


def largest(value: Tensor) -> float:
    return float(value.abs().max().double())


def worst(found: list[dict[str, Tensor]], reference: Reference) -> tuple[float, str]:
    """The largest difference over its scale, and the gradient's name; infinite where one is missing."""
    missing = reference.gradients.keys() - {name for of_stage in found for name in of_stage}
    number, at = (math.inf, min(missing)) if missing else (0.0, "none")
    for of_stage in found:
        for name, value in of_stage.items():
            expected, scale = reference.gradients[name], reference.scales[name]
            difference = largest(value.double() - expected.double())
            share = difference / scale if scale else (math.inf if difference else 0.0)
            if not share <= number:  # also where it is not a number
                number, at = (share if share == share else math.inf), name
    return number, at


@contextmanager
def full_float32() -> Iterator[None]:
    """Products of float32 without TF32."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


# ---- repeats


@contextmanager
def deterministic() -> Iterator[None]:
    """Kernels that give the same bits each time. A GPU's flash attention adds in any order else.

    New memory is filled with NaN, so that one which is read before it is written shows.
    """
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def differences(one: list[dict[str, Tensor]], other: list[dict[str, Tensor]]) -> int:
    """Gradients that differ in any bit."""
    pairs = zip(one, other, strict=True)
    return sum(not torch.equal(value, b[name]) for a, b in pairs for name, value in a.items())


def _offload(part: Part, sizes: Sizes, setting: Setting, schedule: str) -> None:
    model, batch = whole_model(sizes, setting), batch_of(sizes.model, part.device, ignored=True)
    without = pipeline(part, sizes, setting, schedule, model)
    pipe = pipeline(part, sizes, setting, schedule, model, offloading=Offloading(min_bytes=0))
    with deterministic():
        expected = of_pipeline(setting, without, batch, part.device)
        found = [of_pipeline(setting, pipe, batch, part.device) for _ in range(sizes.repeats)]
    differing = sum(differences(expected, each) for each in found)
    without.close()
    pipe.close()
    case = f"{schedule}, {setting}, activations offloaded, {sizes.repeats} steps"
    part.add(case, "gradients that differ in any bit", differing, at_most=0)


def _repeat(part: Part, sizes: Sizes, setting: Setting, schedule: str) -> None:
    model, batch = whole_model(sizes, setting), batch_of(sizes.model, part.device, ignored=True)
    pipe = pipeline(part, sizes, setting, schedule, model)
    differing = 0
    with deterministic():
        first = of_pipeline(setting, pipe, batch, part.device)
        for _ in range(sizes.repeats - 1):
            differing += differences(first, of_pipeline(setting, pipe, batch, part.device))
    pipe.close()
    case = f"{schedule}, {setting}, {sizes.repeats} steps"
    part.add(case, "gradients that differ in any bit", differing, at_most=0)
