"""The command ``penstock``: its commands and options, and the exit codes.

torch takes seconds to import, so each command imports its code when it runs; without the garbage collector,
which would look through all that was imported again and again: a sixth of the time.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

import penstock
from penstock.cli import schedule as schedule_commands
from penstock.cli.shared import ScheduleChoice, ending_quietly, open_streams, taking, usable
from penstock.errors import ConfigError
from penstock.launch import failures
from penstock.launch.server import Rehearsal
from penstock.launch.start import Server, take_defaults
from penstock.launch.stop import Stop, fail, leave, under_torchrun
from penstock.schedule.collector import collector_paused
from penstock.schedule.files import write_text

if TYPE_CHECKING:
    from penstock.planner.hardware import Cluster
    from penstock.train.config.sections import TrainConfig
    from penstock.train.preflight import Prepared


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True)
app.add_typer(schedule_commands.app, name="schedule")
data_commands = typer.Typer(no_args_is_help=True, help="Look at the data of a run.")
app.add_typer(data_commands, name="data")


def main() -> None:
    """Run the command and exit: 0, 1 for a failed run, 2 for the user's errors, 75 for a run that a signal
    stopped and that has saved, 130 after Ctrl-C."""
    open_streams()
    try:
        if "" in sys.argv:  # as from a shell's variable that is not set
            raise ConfigError("an empty argument", "as a path it would be the working folder", "Leave it out")
        commands()(prog_name="penstock")
    except (Exception, KeyboardInterrupt) as error:
        _end(error)


@app.callback(invoke_without_command=True)
def options(
    version: Annotated[bool, typer.Option("--version", help="Show the version and stop.")] = False,
) -> None:
    """Pipeline-parallel training for PyTorch."""
    if version:
        print(f"penstock {penstock.__version__}")
        raise typer.Exit


@app.command()
def train(
    config: Annotated[Path, typer.Argument(metavar="CONFIG.yaml", help="The run's config file.")],
    arguments: Annotated[list[str] | None, typer.Argument(
        metavar="[SECTION.KEY=VALUE]...", help="Override keys of the config file.")] = None,
    dry_run: Annotated[bool, typer.Option(
        "--dry-run", help=
        "Show memory, bubble, stages, mesh and schedule, and stop. Needs neither data nor GPUs.")] = False,
    print_config: Annotated[bool, typer.Option("--print-config", help=
        "Print every key with its value, as YAML, and stop.")] = False,
    world: Annotated[int | None, typer.Option(
        min=1, help="With --dry-run: the number of processes, for sizes of -1.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help=
        "Go on from the checkpoint whose path follows, or else the newest one, if there is any. An argument "
        "with = is no path, unless a / stands before the =.")] = False,
    cluster: Annotated[str | None, typer.Option(help=
        "A file (cluster.yaml), or known hosts: '8 x DGX H100'. With pipeline.schedule=planned, what to plan "
        "for; with --dry-run also whose memory limits a rank. Default: the device at hand.")] = None,
    restarts: Annotated[int, typer.Option(
        min=0, help="After a failure restart from the newest checkpoint: so often without a new one."
    )] = 0,
) -> None:  # fmt: skip
    """Train a Hugging Face model through a pipeline.

    Without torchrun the command starts one process for each rank; under torchrun each process is one rank.
    """
    try:
        with _reported_once() as stop:
            overrides, checkpoint = _sort_arguments(arguments or [], resume)
            settings = _load(config, overrides)
            if print_config:
                return print(settings.to_yaml(), end="")
            _check_train(settings, world, cluster, restarts, dry_run=dry_run)
            if dry_run:
                with collector_paused(all_stay=True):
                    from penstock.cli.dry_run import show

                with ending_quietly():
                    return show(settings, checkpoint, world, cluster)
            starts_ranks = _starts_ranks(settings, restarts)
            if starts_ranks:
                take_defaults()
            with collector_paused(all_stay=True):
                from penstock.train.preflight import preflight
            with _server(settings) if starts_ranks else nullcontext() as server:
                prepared = preflight(settings, checkpoint, _hardware(cluster))
                if server is not None:
                    from penstock.cli.restart import start_ranks

                    code = start_ranks(server, prepared, config, overrides, checkpoint, restarts)
                    raise typer.Exit(code)
        return _train(prepared, stop)
    except KeyboardInterrupt as error:  # typer would call it "Aborted!" and give 1
        _end(error)


def _check_train(
    settings: TrainConfig, world: int | None, cluster: str | None, restarts: int, *, dry_run: bool
) -> None:
    """Raise ConfigError for options of `penstock train` that have no meaning in this run."""
    if world is not None and (not dry_run or under_torchrun()):
        rule = "it is the number of processes for --dry-run, if none were started"
        raise ConfigError(f"--world {world}", rule, "Leave it out, or add --dry-run, without torchrun")
    if restarts and under_torchrun():
        rule = "torchrun starts its processes again by itself"
        remedy = "Leave it out; give torchrun --max-restarts, and --resume to this command"
        raise ConfigError(f"--restarts {restarts}", rule, remedy)
    if cluster is not None and not dry_run and settings.pipeline.schedule != "planned":
        rule = "it is what pipeline.schedule=planned plans for, and a dry run compares with"
        raise ConfigError(f"--cluster {cluster!r}", rule, "Leave it out, or add one of the two")


@app.command()
@taking()
def init(
    model: Annotated[str | None, typer.Option(
        help="A local Hugging Face folder, or a name of the Hub.")] = None,
    data: Annotated[str | None, typer.Option(help="A file or a folder.")] = None,
    gpus: Annotated[int | None, typer.Option(help="How many processes train.")] = None,
    goal: Annotated[Literal["sft", "lora", "pretrain"] | None, typer.Option(help=
        "sft: all weights, on chats; lora: an adapter, on chats; pretrain: all weights, on text.")] = None,
    out: Annotated[Path, typer.Option("--out", "-o", callback=usable, help="The config.")] = Path(
        "train.yaml"),
) -> None:  # fmt: skip
    """Write a first config, with a word on each key. A terminal is asked for what is left out.

    Example: penstock init --model Qwen/Qwen3-8B --data chats.jsonl --gpus 8 --goal lora
    """
    from penstock.cli.init import init as write

    write(out, model, data, gpus, goal)


@app.command("import")
@taking()
def import_config(
    file: Annotated[Path, typer.Argument(metavar="FILE", callback=usable, help=
        "A YAML file of axolotl, LLaMA-Factory or TRL, or a file with a command line of TRL.")],
    gpus: Annotated[int, typer.Option(help="How many processes train.")] = 1,
    out: Annotated[Path | None, typer.Option("--out", "-o", callback=usable, help=
        "The config. Default: standard output.")] = None,
) -> None:  # fmt: skip
    """Write a config of another trainer as one of penstock, and list what has no counterpart.

    A step has the rows that it had there on as many GPUs.

    Example: penstock import axolotl.yaml --gpus 8 --out train.yaml
    """
    from penstock.cli.imports import show

    show(file, gpus, out)


@app.command()
@taking()
def schema(
    out: Annotated[Path | None, typer.Option("--out", "-o", callback=usable, help=
        "Where to write it. Default: standard output.")] = None,
) -> None:  # fmt: skip
    """Print the JSON schema of a config, for editors.

    With the line "# yaml-language-server: $schema=penstock.schema.json" at its top, an editor completes a
    config's keys, shows what they mean, and marks mistakes.

    Example: penstock schema --out penstock.schema.json
    """
    from penstock.train.config.schema import json_schema

    text = json.dumps(json_schema(), indent=2) + "\n"
    if out is None:
        print(text, end="")
    else:
        write_text(out, text, "schema")
        print(f"wrote {out}")


@data_commands.command("show")
def data_show(
    config: Annotated[Path, typer.Argument(metavar="CONFIG.yaml", help="The run's config file.")],
    arguments: Annotated[list[str] | None, typer.Argument(
        metavar="[SECTION.KEY=VALUE]...", help="Override keys of the config file.")] = None,
    rows: Annotated[int, typer.Option(min=0, help="Rows to print.")] = 3,
) -> None:  # fmt: skip
    """Show which tokens the loss counts: totals, lengths, and the first rows in colour.

    It needs no weights. Example: penstock data show configs/sft_full.yaml
    """
    settings = _load(config, arguments or [])
    from penstock.cli.data import show

    with ending_quietly():
        show(settings, rows)


Trust = Annotated[bool, typer.Option(
    "--trust-remote-code", help="Let Python code in the model's folder run.")]  # fmt: skip


@app.command()
@taking()
def check(
    folder: Annotated[str, typer.Argument(metavar="MODEL", callback=usable, help=
        "A local Hugging Face folder, or a Hub name. Without files of weights they are random.")],
    ranks: Annotated[int | None, typer.Option("--ranks", "-r", help="Default: 4.")] = None,
    schedule: Annotated[str, typer.Option(help="A name, or a .csv or .json file.")] = "1f1b",
    microbatches: Annotated[int | None, typer.Option(
        "--microbatches", "-m", help="Microbatches a step. Default: two a rank.")] = None,
    layout: Annotated[str | None, typer.Option(
        help="The layers of each stage, such as 'Et|tt|tt|tL'. Default: evenly.")] = None,
    stages_per_rank: Annotated[int | None, typer.Option(help="For schedules that have it.")] = None,
    dtype: Annotated[
        Literal["float32", "float64", "bfloat16"], typer.Option(help="Of the computation.")] = "float32",
    rows: Annotated[int | None, typer.Option(
        help="Rows of the batch. Default: one more than microbatches.")] = None,
    length: Annotated[int | None, typer.Option(
        help="Tokens a row. Default: 32, or more with a short sliding window.")] = None,
    tolerance: Annotated[float | None, typer.Option(
        help="Largest difference that passes, relative to a gradient's largest entry.")] = None,
    trust_remote_code: Trust = False,
) -> None:  # fmt: skip
    """Check that a model, split into stages, computes what the whole one does.

    Compares the loss and every parameter's gradient on one batch of random tokens, all in this process and
    on the CPU. Exits with 0 if all are equal; with 1, and a table of the tensors that differ, if one does;
    with 2 if the model or an option is refused.

    Example: penstock check models/Qwen3-0.6B --ranks 4 --schedule zb_v
    """
    if not (Path(schedule).suffix or "/" in schedule):  # a file has its own numbers
        ranks = 4 if ranks is None else ranks
        microbatches = 2 * ranks if microbatches is None else microbatches
    options = {} if stages_per_rank is None else {"stages_per_rank": stages_per_rank}
    chosen = ScheduleChoice(schedule, ranks, microbatches, options).schedule()
    from penstock.cli.check import check as compare
    from penstock.models.hub import folder_of

    passed = compare(
        folder_of(folder, None, trusted=trust_remote_code)[0],
        chosen,
        layout=layout,
        dtype=dtype,
        rows=rows,
        length=length,
        tolerance=tolerance,
        trusted=trust_remote_code,
    )
    if not passed:
        raise typer.Exit(1)


@app.command()
@taking()
def plan(
    model: Annotated[str | None, typer.Argument(metavar="MODEL", callback=usable, help=
        "A local Hugging Face folder, its config.json, or a Hub name. No weight is read.")] = None,
    cluster: Annotated[str | None, typer.Option(
        help="A file (cluster.yaml), or known hosts: '8 x DGX H100'.")] = None,
    batch: Annotated[int | None, typer.Option(help="Rows of a step.")] = None,
    length: Annotated[int | None, typer.Option(help="Tokens of a row.")] = None,
    calibrate: Annotated[bool, typer.Option("--calibrate", help=
        "Measure the machine at hand in place of --cluster, in under a minute. Without MODEL the cluster is "
        "printed, or written to --out. Under torchrun links are measured, too.")] = False,
    memory: Annotated[str | None, typer.Option(
        help="What a run may take of a device, as 75GiB. Default: 94 % of it.")] = None,
    precision: Annotated[Literal["mixed", "bfloat16", "float32"], typer.Option(
        help="As train.precision.")] = "mixed",
    out: Annotated[Path | None, typer.Option(
        "--out", "-o", help="Where to write the best run's config, for penstock train.")] = None,
    page: Annotated[Path | None, typer.Option(
        help="Where to write a page: timeline, memory, the field of runs. Ends in .html.")] = None,
    measure: Annotated[int, typer.Option(min=0, max=10, help=
        "Run so many of the best on this machine, which is the cluster, for a few steps each: compare them "
        "with the prediction, correct the cluster's figures, and write the fastest to --out.")] = 0,
    cluster_out: Annotated[Path | None, typer.Option(help=
        "With MODEL: where to write the cluster that --calibrate measured, or --measure corrected.")] = None,
) -> None:  # fmt: skip
    """Plan a run: the fastest meshes, schedules and splits of a model on a cluster, predicted.

    Needs neither weights nor GPUs. What it assumes: docs/planner.md.

    Example: penstock plan models/Llama-3-70B --cluster '8 x DGX H100' --batch 1024 --length 8192
    """
    _check_plan(model, cluster, batch, length, calibrate)
    if cluster_out is not None and (model is None or not (calibrate or measure)):
        rule = "it is the cluster that --calibrate measured for a plan of MODEL, or that --measure corrected"
        raise ConfigError(f"--cluster-out {cluster_out}", rule, "Leave it out, or add what it needs")
    with collector_paused(all_stay=True):
        from penstock.cli.plan import calibrated, show

    hardware: str | Cluster | None = cluster
    if calibrate:
        hardware = calibrated(None if model else out, as_text=model is None)
    if hardware is not None and model is not None and batch is not None and length is not None:
        show(model, hardware, batch, length, memory, out, page, precision, measure, cluster_out)


def _check_plan(
    model: str | None, cluster: str | None, batch: int | None, length: int | None, calibrate: bool
) -> None:
    """Raise ConfigError for arguments of `penstock plan` that are missing, or exclude each other."""
    if calibrate and cluster is not None:
        rule = "it measures the cluster, and --cluster names one"
        raise ConfigError(f"--calibrate with --cluster {cluster!r}", rule, "Leave one of them out")
    needed: dict[str, object] = {"MODEL": model, "--batch": batch, "--length": length}
    if not calibrate:
        needed["--cluster"] = cluster
    missing = [name for name, value in needed.items() if value is None]
    if missing and not (calibrate and len(missing) == len(needed)):
        rule = "a plan is of a model, a cluster, and the rows and tokens of a step"
        remedy = "Give them, or --calibrate alone to measure this machine"
        raise ConfigError(f"penstock plan without {', '.join(missing)}", rule, remedy)


@app.command()
@taking()
def report(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN...", help=
        "The output folder of a run; several to compare them.")],
    out: Annotated[Path | None, typer.Option(
        "--out", "-o", help="The page. Default: report.html in the first folder.")] = None,
) -> None:  # fmt: skip
    """Show a run as one HTML page: curves, timeline, memory, time, config.

    The run may go on, or have been killed. The page needs no network.

    Example: penstock report runs/stdlib
    """
    from penstock.train.report.page import report as write

    print(f"wrote {write(folders, out)}")


@app.command()
@taking()
def watch(
    folder: Annotated[
        Path, typer.Argument(metavar="RUN", callback=usable, help="The output folder of a run.")
    ],
) -> None:
    """Look on while a run goes on: its numbers, curves, and memory and bubble of each rank.

    It reads what the run writes, and ends with the run. In a pipe it prints the last view alone.

    Example: penstock watch runs/stdlib
    """
    from penstock.train.report.live import watch as look_on

    look_on(folder)


@app.command()
def merge(
    folder: Annotated[Path, typer.Argument(metavar="RUN_OR_ADAPTER", callback=usable, help=
        "The output folder of a run, for its newest checkpoint, or a folder with adapter_config.json.")],
    out: Annotated[Path, typer.Option(help="Folder for the merged model.", callback=usable)],
    base: Annotated[Path | None, typer.Option(
        callback=usable,
        help="The base model's folder. Default: the one that adapter_config.json names.")] = None,
    max_shard_size: Annotated[str, typer.Option(help="The largest file of weights.")] = "50GB",
    trust_remote_code: Trust = False,
) -> None:  # fmt: skip
    """Merge an adapter into its base model.

    The result is a folder that transformers opens, in the dtype of the base model. One layer is in memory at
    a time.

    Example: penstock merge runs/sft --out models/merged
    """
    from penstock.cli.merge import merge_folder

    merged = merge_folder(folder, out, base, max_shard_size, trusted=trust_remote_code)
    print(f"{out} holds the base model with {merged}")


def _load(config: Path, overrides: list[str]) -> TrainConfig:
    """The config. It is read before torch is imported, which takes seconds."""
    from penstock.train.config.load import load_config

    return load_config(config, overrides)


def _hardware(cluster: str | None) -> Cluster | None:
    if cluster is None:
        return None
    from penstock.planner.hardware import read_cluster

    return read_cluster(cluster)


@contextmanager
def _reported_once() -> Iterator[Stop]:
    """Report an error in a config once: every rank of a machine raises the same one.

    Yields the signals that this process gets, if it is a rank.
    """
    is_rank = under_torchrun()
    stop = Stop(os.getppid() if is_rank else None)
    with stop if is_rank else nullcontext():
        try:
            yield stop
        except Exception as error:
            if is_rank and os.environ.get("LOCAL_RANK", "0") != "0":
                fail(error, quiet=True)
            raise


def _sort_arguments(arguments: list[str], resume: bool) -> tuple[list[str], str | None]:
    """The overrides, and the checkpoint to resume from: a path, the word for the newest, or None.

    Raises ConfigError for a path that no file can have.
    """
    from penstock.train.config.load import is_override

    others = [argument for argument in arguments if not is_override(argument)]
    if not resume or len(others) > 1:
        return arguments, None  # load_config refuses the others by name
    path = "./newest" if others == ["newest"] else usable(others[0]) if others else "newest"
    return [argument for argument in arguments if is_override(argument)], path


def _starts_ranks(settings: TrainConfig, restarts: int) -> bool:
    """Whether this process starts the ranks: it is none of several, nor the single one of a run."""
    several = settings.pipeline.ranks * settings.parallel.axes.ranks_per_stage not in (1, -1)
    return not under_torchrun() and (several or restarts > 0)


def _server(settings: TrainConfig) -> Server:
    """The server that starts the ranks, a fork of this process. It plans the run while this one does."""
    server = Server(["penstock.train.run", "penstock.cli.main", "penstock.train.config.load"], forks=True)
    server.rehearse(Rehearsal("penstock.train.rehearsal", "rehearse", settings))
    return server


def _train(prepared: Prepared, stop: Stop) -> None:
    with collector_paused(all_stay=True):
        from penstock.train.run import run

    try:
        with stop:
            code = failures.STOPPED if run(prepared, stop).stopped else 0
    except (Exception, KeyboardInterrupt) as error:
        _end(error)
    if under_torchrun():
        leave(code)  # a thread of torch that wakes up while Python shuts down would abort the rank
    raise typer.Exit(code)


@cache
def commands() -> Callable[..., object]:
    """The commands, for typer. A rank that is a fork of this process does not make them again."""
    return typer.main.get_command(app)


def _end(error: BaseException) -> None:
    """Report the error, once, and exit with its code."""
    if under_torchrun():
        fail(error)
    interrupted = isinstance(error, KeyboardInterrupt)
    print("penstock: interrupted" if interrupted else failures.describe(error), file=sys.stderr)
    sys.exit(failures.exit_code(error))
