"""``penstock train --dry-run``: the plan of a run. A summary first, then tables."""

from __future__ import annotations

import math
import re
import shutil
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.table import Table
from torch import Tensor

from penstock.cli.shared import echo, table
from penstock.models.source import sdpa_for_flash
from penstock.models.split.multiply_adds import works
from penstock.parallel.axes import LOSS, MESH, Axes
from penstock.parallel.nccl import describe
from penstock.parallel.tensor.plan import assigned, logits_plan
from penstock.pipeline.auto_pipeline import exchange_of
from penstock.pipeline.building.build_plan import BuildPlan, StagePlan
from penstock.pipeline.building.memory import RankMemory
from penstock.planner.at_hand import device_at_hand
from penstock.planner.hardware import Device, read_cluster
from penstock.reading import gib
from penstock.runtime.device.free_memory import room_in_memory
from penstock.schedule import render, simulate
from penstock.schedule.offload import host_copies, offloaded
from penstock.train.config.sections import TrainConfig
from penstock.train.model import has_hub_weights
from penstock.train.optimizers.optimizer import shares_of
from penstock.train.preflight import Planned, dry_run
from penstock.train.settings import largest_microbatch

_INDENT = 14  # of the summary's text
_WIDEST = 120  # characters a line
_LINES = 16  # of the memory's table, and the most ranks of a schedule's drawing


def show(config: TrainConfig, resume: str | None, world: int | None, cluster: str | None = None) -> None:
    """Plan the run and print a summary, stages, memory, mesh, optimizers, schedule and config.

    cluster: the hardware of the run, as `read_cluster` reads it; None: the device at hand
    """
    width = min(shutil.get_terminal_size().columns, _WIDEST)
    with sdpa_for_flash():
        hardware = None if cluster is None else read_cluster(cluster)
        planned = dry_run(config, resume, world, hardware)
        costs = stage_costs(planned)
        bubble = predicted_bubble(planned)
        needs = memory(planned)
    device = device_at_hand(config.train.device == "cpu") if hardware is None else hardware.device
    echo(_filled((*_summary(planned, bubble, needs), *_too_full(planned, needs, device)), width))
    echo("\nstages, with the parameters and the share of all multiply-adds of each", _stages(planned, costs))
    echo("\nmemory of a process of each rank, GiB, without the framework's own")
    echo(_memory(needs, planned.plan.proof.peak_live))
    if planned.axes.ranks_per_stage > 1:
        echo("\nmesh", _filled(mesh(planned.plan.schedule.ranks, planned.axes), width))
    echo("\noptimizers", _filled(_optimizers(planned), width))
    schedule = planned.plan.schedule
    if schedule.ranks <= _LINES:
        title = "schedule, drawn with stages that take equally long"
        drawn, _, _ = render(schedule, width=width, title=title).partition("\nmakespan ")
        echo("\n" + drawn.strip("\n"))  # the summary has the bubble of the stages as they are
    echo("\nconfig", planned.config.to_yaml().strip("\n"))


# ---- The summary


def _summary(planned: Planned, bubble: float, needs: Sequence[RankMemory]) -> Iterator[PlanLine]:
    plan, axes = planned.plan, planned.axes
    model, schedule = plan.source.model, plan.schedule
    parameters = sum(p.numel() for p in model.parameters())
    dtype = str(model.dtype).removeprefix("torch.")
    yield "model", f"{type(model).__name__}, {plan.chain.count} layers, {parameters:,} parameters, {dtype}"
    yield "weights", _weights(planned)
    if planned.teacher is not None:
        yield "teacher", _teacher(planned, planned.teacher)
    if planned.auto.autocast is not None:
        yield "precision", "mixed: products in bfloat16, weights, gradients and states in float32"
    elif model.dtype == torch.bfloat16:
        rounded = "bfloat16: products, weights, gradients and states of the optimizer"
        yield "precision", f"{rounded}; train.precision=mixed keeps the last three in float32"
    sizes = f"pp={schedule.ranks}{'' if axes == Axes() else f' x {axes}'}"
    yield "mesh", f"{_count(schedule.ranks * axes.ranks_per_stage, 'process', 'es')}: {sizes}"
    yield "step", _step(planned)
    names = f"{schedule.name}, {_count(schedule.ranks, 'rank')}, {_count(schedule.stages, 'stage')}"
    yield "schedule", f"{names}, {_count(schedule.microbatches, 'microbatch', 'es')}"
    if schedule.ranks > 1:
        yield "NCCL", describe(schedule, exchange_of(planned.auto, plan))
    if schedule.overlaps:
        yield "pairs", "their ops run one after the other"
    more = ", with what runs again" if planned.auto.checkpointing() is not None else ""
    passes = f"of forwards, input gradients and weight gradients{more}"
    yield "bubble", f"{bubble:.1%} predicted, if time goes by multiply-adds {passes}; messages take none"
    yield from _summary_of_memory(planned, needs)
    for note in planned.notes:
        yield "note", note


def _summary_of_memory(planned: Planned, needs: Sequence[RankMemory]) -> Iterator[PlanLine]:
    """What the fullest rank needs, and what keeps activations elsewhere or computes them again."""
    schedule = planned.plan.schedule
    rank = max(range(len(needs)), key=lambda rank: needs[rank].total)
    more = "" if needs[rank].activations is not None else ", and activations, which only a step shows"
    most = _gib(needs[rank].total, needs[rank].total)
    more += _left_out(planned)
    yield "memory", f"{most} GiB predicted for a process of rank {rank}, which needs the most{more}"
    if planned.config.train.checkpoint_background:
        yield "checkpoint", _copies(planned)
    forwards = schedule.stages * schedule.microbatches
    if planned.auto.checkpointing() is not None:
        again = len(planned.auto.account(planned.plan).recomputed())
        yield "recompute", f"the layers of {again:,} of {forwards:,} forwards run again in the backward"
    if planned.axes.tp > 1:
        yield "logits", _logits(planned)
    if scores := _scores(planned):
        eager = (
            f"eager: a layer keeps the scores of all pairs of tokens, {_gib(scores, scores)} GiB a microbatch"
        )
        yield "attention", f"{eager}; a fused kernel (model.attention) or activation_checkpointing keeps none"
    if (offloading := planned.auto.offloading()) is not None:
        away = len(offloaded(host_copies(schedule, offloading.ahead)))
        yield "offload", f"activations of {away:,} of {forwards:,} forwards wait in host memory"


def _too_full(planned: Planned, needs: Sequence[RankMemory], device: Device | None) -> Iterator[PlanLine]:
    """A line where the fullest rank needs more memory than its device has. Of no device nothing is said."""
    most = max(needs, key=lambda need: need.total)
    if device is None or most.total <= device.memory:
        return
    amounts = f"{_gib(most.total, most.total)} GiB is above the {_gib(device.memory, most.total)} GiB"
    yield "warning", f"{amounts} of {device.name}: {'; '.join(_remedies(planned, most))} would help"


def _remedies(planned: Planned, most: RankMemory) -> Iterator[str]:
    """What makes the fullest rank hold less, that which helps most first."""
    train, rows = planned.config.train, largest_microbatch(planned.config)[0]
    activations = most.activations or 0
    fewer_weights = "more ranks, or a larger parallel.dp_shard"
    if activations <= most.fixed:
        yield fewer_weights
    if activations and train.activation_checkpointing is None:
        yield "train.activation_checkpointing=full"
    if activations and rows > 1:
        yield f"more pipeline.microbatches, of fewer than {rows} rows"
    if activations > most.fixed:
        yield fewer_weights


def _logits(planned: Planned) -> str:
    """Where the logits are with tp, in words."""
    model, tp = planned.plan.source.model, planned.axes.tp
    if not planned.auto.own_loss:
        return "whole on every rank of tp: the loss_fn gets them"
    head, reason = logits_plan(model, assigned(model, tp))
    if head is None:
        return f"whole on every rank of tp: {reason}"
    return f"sharded over tp: a rank has 1/{tp} of the vocabulary, and the loss sums over the ranks"


def _left_out(planned: Planned) -> str:
    """A clause on towers' activations, which the ranks' memory leaves out. Frozen towers keep none."""
    plan = planned.plan
    *_, embedding, _ = works(plan.source.model, plan.chain)
    if planned.config.data.images is None or not embedding.trained:
        return ""
    return f"; rank {plan.stages[0].rank} also holds its towers' activations, which are not counted"


def _scores(planned: Planned) -> int:
    """Bytes of a layer's scores for one microbatch, where its attention keeps them; else 0."""
    model, axes = planned.plan.source.model, planned.axes
    config = model.config.get_text_config(decoder=True)
    heads = getattr(config, "num_attention_heads", None)
    if config._attn_implementation != "eager" or not isinstance(heads, int):
        return 0
    rows, length = largest_microbatch(planned.config)
    return int(rows * heads * length**2 * model.dtype.itemsize / (axes.tp * axes.cp))


def _copies(planned: Planned) -> str:
    """The host memory of a checkpoint while it is written, in words."""
    shares, trained = shares_of(planned.config.optimizer), planned.kinds
    parameters = dict(planned.plan.source.model.named_parameters())
    states = sum(shares[trained[n]].kept(p, p.numel()) for n, p in parameters.items() if n in trained)
    nbytes, room = states + sum(p.nbytes for p in parameters.values()), room_in_memory()
    copied = f"{_gib(nbytes, nbytes)} GiB, copied to host memory and written while training goes on"
    if nbytes <= room:
        return copied
    free = _gib(room, nbytes)
    return f"{copied}; this host has {free} GiB free: with so little, training waits until it is written"


def _teacher(planned: Planned, teacher: BuildPlan) -> str:
    """The teacher of train.loss, its multiply-adds and its memory, in words."""
    model, (rows, length) = teacher.source.model, largest_microbatch(planned.config)
    own, other = (
        sum(work.of(length, length**2) for work in works(plan.source.model, plan.chain))
        for plan in (planned.plan, teacher)
    )
    logits = rows * length * teacher.schedule.microbatches
    logits *= model.config.get_text_config().vocab_size * model.dtype.itemsize
    parameters = sum(p.numel() for p in model.parameters())
    return (
        f"{type(model).__name__}, {teacher.chain.count} layers, {parameters:,} parameters: its forward takes "
        f"{other / (3 * own):.0%} of the multiply-adds of the model's forward and backward; its weights are "
        f"in the memory, and its logits, up to {_gib(logits, logits)} GiB on the last stage's rank, are not"
    )


def _weights(planned: Planned) -> str:
    source, model = planned.plan.source, planned.config.model
    if not source.files and has_hub_weights(model):
        return f"{model.path} at commit {model.commit}: a dry run fetches its config alone"
    if not source.files:
        return f"random, from seed {model.seed}"
    files = _count(len(source.files), "file")
    return f"{source.files[0].parent}: {files}, whose headers have the model's names and shapes"


def _step(planned: Planned) -> str:
    config, parts = planned.config, planned.axes.batch_parts
    rows, length = config.train.batch_size, config.data.sequence_length
    noun = "pair" if config.data.has_pairs else "row"
    whole = f"{_count(rows, noun)} of {'' if config.data.packing == 'stream' else 'at most '}{length} tokens"
    calls = config.train.accumulate
    whole += "" if parts == 1 else f", divided between {parts} pipelines"
    whole += "" if calls == 1 else f", in {calls} calls of the pipeline"
    smaller = config.train.ramp[-1].until if config.train.ramp else 0
    return f"{whole}; smaller up to step {smaller}" if smaller else whole


def _count(count: int, noun: str, plural: str = "s") -> str:
    return f"{count:,} {noun}{'' if count == 1 else plural}"


PlanLine = tuple[str, str]  # a name and a text


def _filled(lines: Iterable[PlanLine], width: int) -> str:
    """Each name with its text, in lines of at most `width` characters, as long as no word is longer."""
    wrap = partial(
        textwrap.fill, width=width, subsequent_indent=" " * _INDENT, break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip
    return "\n".join(wrap(text, initial_indent=f"{name:<{_INDENT}}") for name, text in lines)


def _gib(nbytes: float, largest: float) -> str:
    """Bytes in GiB, with as many digits as suit a table whose largest number is `largest`."""
    return gib(nbytes, 2 if largest >= 2**30 else 4)


# ---- Stages


def predicted_bubble(planned: Planned) -> float:
    """The share of a step in which ranks wait, if time goes by multiply-adds."""
    account = planned.auto.account(planned.plan)
    return simulate(planned.plan.schedule, account.timed(largest_microbatch(planned.config))).bubble


def stage_costs(planned: Planned) -> list[float]:
    """Each stage's multiply-adds in forward and backward, as a share of the most; nothing counts twice."""
    durations = planned.auto.account(planned.plan).durations(largest_microbatch(planned.config))
    columns = (durations[name] for name in ("forward", "input_grad", "weight_grad"))
    depth = planned.plan.schedule.placement.depth
    each = [sum(parts) for parts in zip(*columns, strict=True)]
    times = [each[stage.stage % depth] for stage in planned.plan.stages]
    return [time / (max(times) or 1) for time in times]


def _stages(planned: Planned, costs: Sequence[float]) -> Table:
    """A table of stages; equal stages in a row share a line."""
    stages = planned.plan.stages
    shares = [cost / (sum(costs) or 1) for cost in costs]

    def facts(stage: StagePlan) -> tuple[object, ...]:
        ends = planned.plan.info(stage.stage)
        return ends.is_first, len(stage.layers), f"{stage.parameters:,}", f"{shares[stage.stage]:.1%}"

    rows = []
    for (_, count, parameters, share), alike in groupby(stages, facts):
        group = list(alike)
        layers = range(group[0].layers.start, group[-1].layers.stop)
        apiece = f", {count} each" if len(group) > 1 else ""
        rows.append((
            _spans([stage.stage for stage in group]),
            _spans([stage.rank for stage in group]),
            f"{_spans(layers)}{apiece}" if count else "none",
            parameters,
            share,
        ))  # fmt: skip
    return table(("stages", "ranks", "layers", "parameters", "share"), rows, gap=1)


def _spans(numbers: Sequence[int]) -> str:
    """Text such as 0-3 and 8-56 by 8 for numbers with equal steps; of many such pieces the first and last."""
    pieces: list[list[int]] = []
    for index in numbers:
        last = pieces[-1] if pieces else []
        if last and (len(last) == 1 or index - last[-1] == last[1] - last[0]):
            last.append(index)
        else:
            pieces.append([index])
    shown = list(map(_span, pieces))
    return ", ".join(shown if len(shown) <= 3 else [shown[0], "...", shown[-1]])


def _span(numbers: Sequence[int]) -> str:
    step = numbers[1] - numbers[0] if len(numbers) > 1 else 1
    if len(numbers) < 3 and step != 1:
        return ", ".join(map(str, numbers))
    ends = dict.fromkeys((numbers[0], numbers[-1]))
    return f"{'-'.join(map(str, ends))}{'' if abs(step) == 1 else f' by {step}'}"


# ---- The mesh

_MEANING = {
    "pp": "each is a pipeline, along which activations and their gradients go",
    "dp_replicate": "each has copies of the same weights, and other rows of the batch",
    "dp_shard": "each shards its stages' weights (FSDP2), and has other rows of the batch",
    "cp": "each splits its rows along the sequence, and shards weights as dp_shard does",
    "tp": "each splits single matrices",
}


def mesh(ranks: int, axes: Axes) -> Iterator[PlanLine]:
    """The groups of processes along each axis, and those over which gradients are summed."""
    sizes = [{"pp": ranks, **axes.sizes}[name] for name in MESH]
    processes = np.arange(ranks * axes.ranks_per_stage).reshape(sizes)

    def along(*names: str) -> np.ndarray[Any, Any]:
        """A row for each group."""
        dims = [MESH.index(name) for name in names]
        last = np.moveaxis(processes, dims, range(-len(dims), 0))
        return last.reshape(-1, math.prod(last.shape[-len(dims) :]))

    for name, size in zip(MESH, sizes, strict=True):
        if size > 1:
            yield name, f"{_groups(along(name))}: {_MEANING[name]}"
    if axes.ep > 1:
        folded = along("dp_shard", "cp").reshape(-1, axes.ep)
        yield "ep", f"{_groups(folded)}, inside of dp_shard x cp: each distributes the experts"
    if sum(axes.sizes[name] > 1 for name in LOSS) > 1:
        yield "gradients", f"{_groups(along(*LOSS))}: each sums its gradients"


def _groups(rows: np.ndarray[Any, Any]) -> str:
    """The number and size of groups, and the members of the first, second and last."""
    count, size = rows.shape
    shown = [f"{{{_spans([int(n) for n in row])}}}" for row in (rows if count < 4 else rows[[0, 1, -1]])]
    if count > 3:
        shown.insert(2, "...")
    return f"{_count(count, 'group')} of {size} {', '.join(shown)}"


# ---- Optimizers


class Trained(NamedTuple):
    """The weights that an optimizer trains: parameters, their entries, and names without the layer's."""

    parameters: int
    entries: int
    names: tuple[str, ...]


def optimizers(planned: Planned) -> dict[str, Trained]:
    """The weights of the whole model that each optimizer trains, by the optimizer's name."""
    model, layers = planned.plan.source.model, re.escape(planned.plan.chain.layers)
    trained = {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}
    by_kind = {}
    for kind in shares_of(planned.config.optimizer):
        mine = [name for name in trained if planned.kinds[name] == kind]
        short = dict.fromkeys(re.sub(rf"^{layers}\.\d+\.", "", name) for name in mine)
        if mine:
            by_kind[kind] = Trained(len(mine), sum(trained[name] for name in mine), tuple(short))
    return by_kind


def _optimizers(planned: Planned) -> Iterator[PlanLine]:
    for name, trained in optimizers(planned).items():
        count = f"{trained.entries:,} entries of {_count(trained.parameters, 'parameter')}"
        yield name, f"{count}: {', '.join(trained.names)}"


# ---- Memory


def memory(planned: Planned) -> list[RankMemory]:
    """The memory of each rank of the pipeline."""
    estimate = replace(planned.auto.account(planned.plan), accumulates=planned.config.train.accumulate > 1)
    shares = shares_of(planned.config.optimizer)

    def kept(name: str, parameter: Tensor, entries: int) -> float:
        return shares[planned.kinds[name]].kept(parameter, entries)

    needs = estimate.ranks(largest_microbatch(planned.config), kept)
    if planned.teacher is None:
        return needs
    return [
        need._replace(
            weights=need.weights + other.weights,
            gathered_weights=need.gathered_weights + other.gathered_weights,
            casts=need.casts + other.casts,
        )
        for need, other in zip(needs, planned.auto.account(planned.teacher).ranks(), strict=True)
    ]


def _memory(needs: Sequence[RankMemory], live: Sequence[int]) -> Table:
    """A table of ranks; equal ranks in a row share a line. Of too many lines, those with the most memory."""
    groups = [list(alike) for _, alike in groupby(range(len(needs)), lambda rank: (needs[rank], live[rank]))]
    shown = sorted(sorted(groups, key=lambda group: -needs[group[0]].total)[:_LINES])
    ranks = [group[0] for group in shown]
    largest = max(need.total for need in needs)

    def column(nbytes: Callable[[RankMemory], int]) -> list[str]:
        return [_gib(nbytes(needs[rank]), largest) for rank in ranks]

    columns = {
        "ranks": list(map(_spans, shown)),
        "weights": column(lambda need: need.weights),
        "gradients": column(lambda need: need.gradients),
        "moments": column(lambda need: need.optimizer),
    }
    sometimes: dict[str, Callable[[RankMemory], int]] = {
        "casts": lambda need: need.casts,
        "gathered": lambda need: need.gathered_weights + need.gathered_gradients,
        "host": lambda need: -need.host,
    }
    columns |= {name: column(nbytes) for name, nbytes in sometimes.items() if any(map(nbytes, needs))}
    known = needs[0].activations is not None
    columns["live"] = [str(live[rank]) for rank in ranks]
    columns["activations"] = column(lambda need: need.activations or 0) if known else ["unknown"] * len(ranks)
    columns["total"] = column(lambda need: need.total)
    rows = list(zip(*columns.values(), strict=True))
    if len(shown) < len(groups):
        rows.append(("rest", *[""] * (len(columns) - 2), "less"))
    return table(list(columns), rows, gap=1)
