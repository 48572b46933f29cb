"""``penstock schedule``: build, prove, compare, search, draw and convert schedules, without torch."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from penstock.cli import schedule_tables as view
from penstock.cli.shared import ScheduleChoice, chosen, costs_of, echo, taking
from penstock.errors import ConfigError, InputError, ScheduleError
from penstock.schedule import Costs, Entry, Schedule, loop, render, slow_rank_costs, verify, wave
from penstock.schedule import compare as all_schedules
from penstock.schedule import sample as sampled_steps
from penstock.schedule import search as best_schedule
from penstock.schedule import simulate as run_on_paper
from penstock.schedule.files import check_path, dump
from penstock.schedule.simulation.compare import share

app = typer.Typer(no_args_is_help=True, help="Build, prove, predict, compare, search and draw schedules.")

Json = Annotated[bool, typer.Option("--json", help="For machines.")]
Limit = Annotated[
    float | None, typer.Option(help="The most that a rank may hold, in the unit of --activation.")
]
Buffer = Annotated[float, typer.Option(
    help="Memory of a message between two ranks, in the unit of --activation.")]  # fmt: skip
RanksOption = Annotated[int, typer.Option("--ranks", "-r", help="Number of ranks.")]
Microbatches = Annotated[int, typer.Option("--microbatches", "-m", help="Microbatches a step.")]


@app.command()
@taking(choice=chosen)
def show(
    choice: ScheduleChoice,
    programs: Annotated[bool, typer.Option("--programs", help="Each rank's ops as a list.")] = False,
) -> None:
    """Show a schedule: the stages of each rank, when each op runs, and its proof.

    Example: penstock schedule show 1f1b --ranks 4 --microbatches 8
    """
    schedule = choice.schedule()
    try:
        proof = verify(schedule)
    except ScheduleError:  # list its programs all the same, and then its violations
        echo(view.title(schedule), view.programs(schedule))
        raise
    echo(view.title(schedule))
    echo(view.programs(schedule) if programs else render(schedule, title="").strip("\n"), "")
    echo(*view.proven(proof))


@app.command("verify")
@taking(choice=chosen)
def prove(
    choice: ScheduleChoice,
    memory_limit: Annotated[int | None, typer.Option(
        min=0, help="The most live activations that a rank may hold.")] = None,
) -> None:  # fmt: skip
    """Prove a schedule, or list every violation and exit with code 2.

    Example: penstock schedule verify my.csv --memory-limit 8
    """
    schedule = choice.schedule()
    try:
        proof = verify(schedule, memory_limit)
    except ScheduleError as error:
        echo(*map(str, error.violations))
        typer.echo(
            f"penstock: error: schedule {error.name!r} breaks {len(error.violations)} rule(s)", err=True
        )
        raise typer.Exit(error.exit_code) from error
    echo(view.title(schedule), *view.proven(proof))


@app.command()
@taking(choice=chosen, costs=costs_of)
def simulate(
    choice: ScheduleChoice,
    costs: Costs,
    buffer: Buffer = 0.0,
    memory_limit: Limit = None,
    as_json: Json = False,
) -> None:
    """Simulate a schedule: step time, the parts of the bubble, memory, and the critical path.

    Exits with code 2 if a rank holds more than --memory-limit.

    Example: penstock schedule simulate 1f1b -r 4 -m 8 --forward 1,1,1,1.5 --communication 0.1
    """
    if memory_limit is not None and not memory_limit >= 0:  # also for NaN
        rule = "it is the most that a rank may hold"
        raise ConfigError(f"--memory-limit {memory_limit}", rule, "Give 0 or more, or leave it out")
    schedule = choice.schedule(costs)
    timeline = run_on_paper(schedule, replace(costs, buffer=buffer))
    if as_json:
        echo(json.dumps(view.timeline_data(schedule, timeline, memory_limit)))
    else:
        echo(view.title(schedule), *view.timeline(timeline, memory_limit))
    if memory_limit is not None and max(timeline.peak_memory) > memory_limit:
        raise typer.Exit(ConfigError.exit_code)


@app.command()
@taking(choice=chosen, costs=costs_of)
def sample(
    choice: ScheduleChoice,
    costs: Costs,
    jitter: Annotated[float, typer.Option(
        help="Standard deviation of an op's time, as a share of it.")] = 0.0,
    spread: Annotated[float, typer.Option(
        help="Standard deviation of a rank's speed, which all its ops of a step share.")] = 0.0,
    slow: Annotated[list[str] | None, typer.Option(
        metavar="RANK=FACTOR", help="A slow rank of one replica, as 3=1.01. May be repeated.")] = None,
    replicas: Annotated[int, typer.Option(help="Pipelines that sum their gradients.")] = 1,
    samples: Annotated[int, typer.Option(help="Steps to sample.")] = 100,
    seed: Annotated[int, typer.Option(help="The same seed draws the same steps.")] = 0,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Sample steps whose ops vary, on one pipeline or on thousands: what jitter and slow ranks cost.

    Example: penstock schedule sample 1f1b -r 8 -m 32 --jitter 0.02 --slow 3=1.01 --replicas 1250
    """
    schedule = choice.schedule(costs)
    of_ranks = dict(map(_slow_rank, slow or ()))
    drawn = sampled_steps(
        schedule, costs, jitter=jitter, spread=spread, slow=of_ranks, replicas=replicas, samples=samples,
        seed=seed,
    )  # fmt: skip
    if as_json:
        echo(json.dumps(view.sampled_data(schedule, drawn)))
    else:
        echo(view.title(schedule), *view.sampled(drawn))


def _slow_rank(text: str) -> tuple[int, float]:
    rank, _, factor = text.partition("=")
    try:
        return int(rank), float(factor)
    except ValueError:
        rule = "a slow rank is its number and a factor of its times"
        raise ConfigError(f"--slow {text!r}", rule, "Write it like --slow 3=1.01") from None


@app.command()
@taking(choice=chosen, costs=costs_of)
def draw(
    choice: ScheduleChoice,
    costs: Costs,
    buffer: Buffer = 0.0,
    out: Annotated[Path | None, typer.Option(
        "--out", "-o", help="Ends in .txt, .svg, .html or .json (a trace for ui.perfetto.dev).")] = None,
) -> None:  # fmt: skip
    """Draw when each op runs, to a file or as text.

    Example: penstock schedule draw zb_v -r 4 -m 8 --out zb_v.svg
    """
    drawing = render(run_on_paper(choice.schedule(costs), replace(costs, buffer=buffer)), out)
    echo(drawing.rstrip("\n") if out is None else f"wrote {out}")


@app.command()
@taking(choice=chosen)
def convert(
    choice: ScheduleChoice,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Ends in .json, or in .csv for PyTorch's.")],
) -> None:
    """Write a schedule to a file: a named one, or one from another file, to convert CSV and JSON.

    Example: penstock schedule convert 1f1b 1f1b.csv --ranks 4 --microbatches 8
    """
    dump(choice.schedule(), out)
    echo(f"wrote {out}")


@app.command()
@taking(costs=costs_of)
def compare(
    costs: Costs,
    ranks: Annotated[int | None, typer.Option("--ranks", "-r", help="Number of ranks.")] = None,
    microbatches: Annotated[int | None, typer.Option(
        "--microbatches", "-m", help="Microbatches a step.")] = None,
    config: Annotated[Path | None, typer.Option(metavar="CONFIG.yaml", help=
        "A training config, for the costs of its model: times in 10^12 multiply-adds, memory in GiB. Its "
        "ranks and microbatches count where none are given.")] = None,
    buffer: Buffer = 0.0,
    memory_limit: Limit = None,
    search: Annotated[float | None, typer.Option(
        metavar="SECONDS", min=0.01, help="Also search for a better schedule, for so many seconds.")] = None,
    slow_rank: Annotated[float | None, typer.Option(
        metavar="FACTOR", help="Also what a rank costs whose ops take so much longer, as 1.01.")] = None,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Compare all schedules for one model, with advice for those that do not fit.

    Costs are those of one stage per rank: with v stages per rank each stage takes and holds 1/v.

    Example: penstock schedule compare -r 4 -m 8 --memory-limit 4 --communication 0.1
    """
    costs, ranks, microbatches = _compared(config, replace(costs, buffer=buffer), ranks, microbatches)
    searched = [] if search is None else _searched(ranks, microbatches, costs, memory_limit, search)
    entries = all_schedules(
        ranks=ranks,
        microbatches=microbatches,
        costs=costs,
        memory_limit=memory_limit,
        extra=searched,
    )
    slowed = {} if slow_rank is None else _slowed(entries, costs, slow_rank)
    if as_json:
        echo(json.dumps(view.comparison_data(entries, ranks, microbatches, memory_limit, slowed)))
    else:
        echo(*view.comparison(entries, ranks, microbatches, memory_limit, slowed))
        if config is not None:
            units = "times in 10^12 multiply-adds, memory of activations in GiB"
            echo(f"The costs are those of {config}: {units}.")


def _compared(
    config: Path | None, costs: Costs, ranks: int | None, microbatches: int | None
) -> tuple[Costs, int, int]:
    """Costs, ranks and microbatches of a comparison: those of the command line, or of a config's model."""
    if config is None:
        if ranks is None or microbatches is None:
            missing = "--ranks" if ranks is None else "--microbatches"
            rule = f"a comparison needs the number of {missing[2:]}"
            raise ConfigError(missing, rule, f"Give {missing}, or --config with a training config")
        return costs, ranks, microbatches
    if costs != Costs():
        rule = "the costs are those of its model, in units of their own"
        raise ConfigError(f"--config {config} with costs", rule, "Leave out one of the two")
    from penstock.cli.schedule_costs import config_costs  # imports torch

    return config_costs(config, ranks, microbatches)


def _slowed(entries: Iterable[Entry], costs: Costs, factor: float) -> dict[str, tuple[float, ...]]:
    """By the label of each schedule that was simulated, what each rank costs if it alone is slow."""
    return {
        entry.label: slow_rank_costs(entry.schedule, share(costs, entry.schedule.placement), factor)
        for entry in entries
        if entry.schedule is not None and entry.timeline is not None
    }


def _searched(
    ranks: int, microbatches: int, costs: Costs, memory_limit: float | None, seconds: float
) -> list[tuple[str, Schedule]]:
    """The results of a search with one stage per rank and one on a V with two, in half the time each."""
    schedules: list[tuple[str, Schedule]] = []
    for name, placement in (("loop", loop(ranks)), ("v", wave(ranks))):
        try:
            best = best_schedule(
                ranks=ranks,
                microbatches=microbatches,
                costs=share(costs, placement),
                memory_limit=memory_limit,
                placement=placement,
                seconds=seconds / 2,
            )
        except InputError as error:  # compare the others all the same
            typer.echo(f"penstock: no schedule found with placement={name}: {error}", err=True)
        else:
            schedules.append((f"searched placement={name}", best.schedule))
    return schedules


@app.command()
@taking(costs=costs_of)
def search(
    ranks: RanksOption,
    microbatches: Microbatches,
    costs: Costs,
    memory_limit: Limit = None,
    placement: Annotated[
        Literal["loop", "v"], typer.Option(help="Stages around the ranks, or out and back.")
    ] = "loop",
    stages_per_rank: Annotated[int | None, typer.Option(help="By default 1 on a loop and 2 on a V.")] = None,
    objective: Annotated[
        Literal["makespan", "extent"],
        typer.Option(help="What to minimize. extent: the longest time from a rank's first op to its last."),
    ] = "makespan",
    seconds: Annotated[float, typer.Option(help="How long to search.")] = 30.0,
    seed: Annotated[int, typer.Option(help="The same seed and seconds find the same schedule.")] = 0,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="The file to write: .json or .csv.")] = None,
) -> None:
    """Search for the fastest schedule within a memory limit. Costs are those of its stages.

    Example: penstock schedule search -r 4 -m 8 --memory-limit 4 --seconds 10 --out best.csv
    """
    if out is not None:
        check_path(out)  # before the search, which may take long
    best = best_schedule(
        ranks=ranks,
        microbatches=microbatches,
        costs=costs,
        memory_limit=memory_limit,
        placement=placement,
        stages_per_rank=stages_per_rank,
        objective=objective,
        seconds=seconds,
        seed=seed,
    )
    echo(view.title(best.schedule), *view.timeline(best.timeline, memory_limit), *view.outcome_lines(best))
    if out is not None:
        dump(best.schedule, out)
        echo(f"wrote {out}")
