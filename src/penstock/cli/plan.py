"""``penstock plan``: the best runs of a model on a cluster, predicted: a table, a config, a page."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml
from rich.table import Table
from transformers import PretrainedConfig

from penstock.cli.shared import echo, table
from penstock.errors import ConfigError
from penstock.launch.stop import under_torchrun
from penstock.models import hub
from penstock.models.model_folder import config_of
from penstock.models.source import sdpa_for_flash
from penstock.planner.at_hand import check_at_hand
from penstock.planner.calibrate import calibrate
from penstock.planner.candidate import Precision
from penstock.planner.estimate import Estimate
from penstock.planner.hardware import Cluster, read_cluster, to_yaml
from penstock.planner.page import page
from penstock.planner.ranking import HEADS, WORDS, ranked_rows
from penstock.planner.run_config import run_config
from penstock.planner.search import Plans, plan
from penstock.planner.workers import processors
from penstock.planner.workload import Workload
from penstock.reading import gib, parse_size
from penstock.schedule.files import write_text

_CONFIG = "config.json"
_MOST_LAYERS = 4096  # of a config: each is made, without values
_SECONDS = 30.0  # of a calibration
_MOST_ROWS = 10**7  # of a step
_WORDS = {
    "compute": "computes",
    "bubble": "idles in the bubble",
    "tp": "waits for tp",
    "cp": "waits for cp",
    "ep": "waits for experts (ep)",
    "dp": "waits for FSDP's gatherings and reductions",
    "pp": "waits for messages between stages",
    "host": "waits for its link to host memory",
    "optimizer": "spends in the optimizer",
}


def show(
    model: str,
    cluster: str | Cluster,
    batch: int,
    length: int,
    memory: str | None = None,
    out: Path | None = None,
    page_path: Path | None = None,
    precision: Precision = "mixed",
    finalists: int = 0,
    cluster_out: Path | None = None,
) -> None:
    """Search, and print the best runs; write the first one's config and a page.

    finalists: how many of the best are run, after which the first is the fastest of these
    """
    hardware = cluster if isinstance(cluster, Cluster) else read_cluster(cluster)
    if cluster_out is not None:
        check_ending(cluster_out, "--cluster-out")
    if finalists:
        check_at_hand(hardware)
    limit = _limit(memory)
    named, config = opened(model)
    check_sizes(config, batch, length)
    workload = Workload(config, precision)
    with sdpa_for_flash():
        plans = plan(workload, hardware, batch, length, limit=limit, processes=processors())
    echo(*_head(workload, hardware, plans, batch, length))
    echo("", ranked(plans.best))
    echo("", *_reasons(plans))
    echo("\nmemory of the fullest rank, GiB, and what the run has it hold", _memory(plans.best[0]))
    first, measured, better = plans.best[0], None, hardware
    if finalists:
        from penstock.cli.measured import compared, fastest, measured_finalists  # imports training

        runs = list(measured_finalists(workload, plans.best[:finalists], hardware, named))
        better = compared(workload, runs, hardware)
        first, measured = fastest(runs)
    if out is not None:
        write_text(out, written(first, hardware, named, measured), "plan")
        echo(f"\nwrote {out}: start it with penstock train {out}, once data: names your own")
    if cluster_out is not None:
        write_text(cluster_out, to_yaml(better), "cluster")
        echo(f"wrote {cluster_out}: give it as --cluster {cluster_out}")
    if page_path is not None:
        write_text(page_path, page(plans, hardware, type(workload.source.model).__name__), "page")
        echo(f"wrote {page_path}")


def calibrated(out: Path | None, *, as_text: bool) -> Cluster | None:
    """Measure this machine; under torchrun in all processes, of which the first alone goes on.

    as_text: write the cluster to `out`, or print it. Returns None in the other processes of torchrun.
    """
    if out is not None:
        check_ending(out)  # before a minute of measuring
    group = under_torchrun()
    if group:
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    try:
        cluster = calibrate(_SECONDS)
        if group and dist.get_rank():
            return None
    finally:
        if group:
            dist.destroy_process_group()
    if as_text:
        text = to_yaml(cluster)
        if out is None:
            echo(text.rstrip("\n"))
        else:
            write_text(out, text, "cluster")
            links = "" if group else "; one process has no links: start it with torchrun to measure them"
            echo(f"wrote {out}: give it as --cluster {out}{links}")
    return cluster


def check_ending(out: Path, option: str = "--out") -> None:
    """Raise ConfigError for the path of a cluster that `read_cluster` would take for a name."""
    if out.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"{option} {out}", "a cluster is a YAML file", "End it in .yaml")


def opened(model: str) -> tuple[dict[str, Any], PretrainedConfig]:
    """The keys of a config's section `model`, and the model's config. No weight is fetched or read.

    model: a folder, its config.json, or a Hub name. Raises ModelError, HubError.
    """
    if hub.is_name(model):
        return {"path": model}, config_of(hub.fetch(model, None, "config"))
    path = Path(model).expanduser()
    folder = path.parent if path.name == _CONFIG else path
    return {"path": str(folder)}, config_of(folder)


def check_sizes(config: PretrainedConfig, batch: int, length: int) -> None:
    """Raise ConfigError for sizes that no run has, before anything of such a size is made."""
    text = config.get_text_config()
    layers, longest = getattr(text, "num_hidden_layers", 0), getattr(text, "max_position_embeddings", None)
    for value, wrong, rule, remedy in (
        (f"num_hidden_layers={layers:,}", layers > _MOST_LAYERS,
         f"a plan makes every layer of the model, and takes {_MOST_LAYERS:,} of them", "Fix the config"),
        (f"--batch {batch}", not 1 <= batch <= _MOST_ROWS,
         f"it is the number of rows of a step, 1 to {_MOST_ROWS:,}", "Give as many rows"),
        (f"--length {length}", length < 2,
         "it is the number of tokens of a row, of which the first predicts nothing", "Give 2 or more"),
        (f"--length {length}", longest is not None and 0 < longest < length,
         f"the model takes {longest} positions (max_position_embeddings)", f"Give {longest} or less"),
    ):  # fmt: skip
        if wrong:
            raise ConfigError(value, rule, remedy)


def _limit(memory: str | None) -> float | None:
    if memory is None:
        return None
    if (nbytes := parse_size(memory)) is None or nbytes <= 0:
        raise ConfigError(f"--memory {memory!r}", "it is an amount of memory", "Write it like 75GiB")
    return nbytes


def written(best: Estimate, cluster: Cluster, model: dict[str, Any], measured: float | None = None) -> str:
    """The config of a run, as YAML. measured: seconds of its step"""
    tree = run_config(best.candidate, model)
    measurement = (
        ""
        if measured is None
        else f"# Measured: {measured:.3g} s a step, the fastest of the runs measured.\n"
    )
    head = (
        f"# penstock plan: {best.candidate.mesh} on {cluster.hosts} x {cluster.host}. Predicted: "
        f"{best.seconds:.3g} s a step,\n# {best.tokens_per_second:,.0f} tokens/s, MFU {best.mfu:.1%}, "
        f"{gib(best.nbytes)} GiB on the fullest rank.\n{measurement}"
        "# The data is made up: name your own.\n"
    )
    return head + yaml.safe_dump(tree, sort_keys=False, default_flow_style=None, width=100)


# ---- What is printed


def _head(workload: Workload, cluster: Cluster, plans: Plans, batch: int, length: int) -> Iterator[str]:
    name = type(workload.source.model).__name__
    size = f"{workload.layers} layers, {workload.parameters:,} parameters"
    yield f"{name}, {size}, {workload.precision} precision"
    yield (
        f"{cluster.hosts} x {cluster.host}: {cluster.world} devices ({cluster.device.name}), "
        f"{gib(plans.limit)} GiB of {gib(cluster.device.memory)} GiB a device"
    )
    yield f"{batch:,} rows of {length:,} tokens a step, all of them attended to as one document"
    yield (
        f"{plans.runs:,} runs, of which {len(plans.fitting):,} were drafted and fit. "
        f"No other of them beats the first by over {plans.gap_of_field:.1%}, "
        f"and in another split none by over {plans.gap:.1%}"
    )


def ranked(best: Sequence[Estimate]) -> Table:
    """The best runs, the fastest first."""
    return table(HEADS, ranked_rows(best), left=WORDS, gap=1)


def _reasons(plans: Plans) -> Iterator[str]:
    """Where the first run's time goes, and why the second loses."""
    first, *others = plans.best
    parts = ", ".join(
        f"{name} {time / first.seconds:.1%}"
        for name, time in sorted(first.spent.items(), key=lambda of: -of[1])
    )
    yield f"a step of 1 is, as a mean over ranks: {parts}"
    yield f"layers of its stages: {first.candidate.split_in_words}"
    if not others:
        yield "no other run fits"
        return
    second = others[0]
    names = dict.fromkeys((*first.spent, *second.spent))
    more = {name: second.spent.get(name, 0.0) - first.spent.get(name, 0.0) for name in names}
    worst = max(more, key=lambda name: more[name])
    late = second.seconds - first.seconds
    yield (
        f"2 loses {late:.3g} s a step ({late / first.seconds:.1%}): "
        f"it {_WORDS[worst]} {more[worst]:.3g} s longer"
    )


def _memory(run: Estimate) -> Table:
    rank = run.memory[run.fullest]
    columns: dict[str, int] = {
        "weights": rank.weights,
        "gradients": rank.gradients,
        "moments": rank.optimizer,
        "casts": rank.casts,
        "gathered": rank.gathered_weights + rank.gathered_gradients,
        "activations": rank.activations or 0,
        "total": rank.total,
        "in host memory": int(run.host[run.fullest]),
    }
    if not any(run.host):
        del columns["in host memory"]
    row = [str(run.fullest), *(gib(nbytes, 2) for nbytes in columns.values())]
    return table(["rank", *columns], [row], gap=1)
