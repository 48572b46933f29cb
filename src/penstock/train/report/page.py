"""The report of one run, or of several to compare: one HTML page that loads nothing else.

The timeline is that of `penstock.schedule.render`, with its style. All text that comes from a run is escaped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from html import escape
from importlib.resources import files
from pathlib import Path
from statistics import median
from string import Template
from typing import NamedTuple

import yaml

from penstock.errors import ConfigError
from penstock.schedule.files import write_text
from penstock.schedule.render.drawing import Drawing, Panel, number, percent
from penstock.schedule.render.page import parts, read
from penstock.train.records.metrics import kind_of, leaves
from penstock.train.report.charts import STYLES, Chart, Line, draw
from penstock.train.report.lost_time import CAUSES, duration, lost_time
from penstock.train.report.recorded import RecordedRun, finite, read_run

_ROWS = 12  # of the table of numbers
_PARTS = {  # of a run's time, in the order of a step
    "data": "waiting for the batch",
    "step": "forwards and backwards",
    "clip": "norm and clipping of the gradients",
    "optimizer": "the optimizer's step",
    "rest": "the rest of the steps",
    "evaluation": "held-out loss",
    "checkpoint": "waiting for checkpoints",
    "sample": "samples",
}
_MEMORY = {
    "peak_allocated": "GPU, by tensors",
    "peak_reserved": "GPU, by torch's allocator",
    "peak_resident": "host",
}


def report(folders: Sequence[Path], out: Path | None = None) -> Path:
    """Write the page, and return its path.

    out: by default report.html in the first folder

    Raises: ConfigError for a folder without a run, and for a page that cannot be written.
    """
    runs = _named_apart([read_run(folder) for folder in folders])
    path = folders[0] / "report.html" if out is None else out
    write_text(path, page(runs), "report")
    return path


def page(runs: Sequence[RecordedRun]) -> str:
    """The page of these runs."""
    *others, last = (run.name for run in runs)
    title = f"{', '.join(others)} and {last}" if others else last
    return Template(_read("report.html")).substitute(
        head=read("page_head.html"),
        style="\n".join([read("page.css"), _read("report.css")]),
        title=escape(title),
        states="\n".join(_state(run, len(runs) > 1) for run in runs),
        facts=_facts(runs),
        charts="\n".join(filter(None, map(draw, charts(runs)))) or _note("No step has a row yet."),
        timeline=_timeline(runs),
        memory=_memory(runs) if len(runs) > 1 else "",
        runs="\n".join(_of_run(run, len(runs) > 1) for run in runs),
        differences=_differences(runs),
        script=_read("report.js"),
    )


def _read(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8").rstrip()


def _named_apart(runs: list[RecordedRun]) -> list[RecordedRun]:
    """The runs, named by their paths if two folders have the same name."""
    names = [run.name for run in runs]
    if len(set(names)) == len(names):
        return runs
    paths = [str(run.folder) for run in runs]
    if len(set(paths)) < len(paths):
        raise ConfigError(f"runs {paths}", "one of them is listed twice", "Give each run once")
    return [replace(run, name=str(run.folder)) for run in runs]


# ---- The state of a run


def state(run: RecordedRun) -> tuple[str, str]:
    """The state in one word, and a sentence on it."""
    done, asked = run.done, run.asked
    where = f"step {done:,}" + ("" if asked is None else f" of {asked:,}")
    end = run.starts[-1].get("end") if run.starts else None
    if isinstance(end, dict):
        how = str(end.get("how"))
        return how, f"{where}, ended {_moment(end.get('at'))}" + (f": {end['why']}" if end.get("why") else "")
    if not run.starts and asked is not None and done >= asked:  # of a version that does not record it
        return "finished", where
    return "no end recorded", f"{where}; it goes on, or was killed"


def notes(run: RecordedRun) -> list[str]:
    """What else there is to say of how it went."""
    said = []
    skipped = [row["step"] for row in run.steps if "skipped" in row]
    if skipped:
        first = ", ".join(map(str, skipped[:8])) + (", ..." if len(skipped) > 8 else "")
        said.append(f"steps skipped, for their loss or gradients: {len(skipped)} (step {first})")
    if left_out := [row["rows_left_out"] for row in run.steps if "rows_left_out" in row]:
        said.append(f"rows left out, as the run went back after spikes of the loss: {left_out[-1]}")
    if len(run.starts) > 1:
        said.append(f"started {len(run.starts)} times")
    return said


def _state(run: RecordedRun, named: bool) -> str:
    word, sentence = state(run)
    known = {"finished": "good", "failed": "bad", "interrupted": "bad"}
    unreadable = [f"unreadable lines of metrics.jsonl: {run.unreadable}"] if run.unreadable else []
    text = "; ".join([sentence, *unreadable, *notes(run)])
    pill = f'<span class="pill {known.get(word, "")}">{escape(word)}</span>'
    name = f"<b>{escape(run.name)}</b> " if named else ""
    return f'<p class="state">{name}{pill} {escape(text)}</p>'


class Fact(NamedTuple):
    """A number of a run, with its name and a remark."""

    name: str
    value: str
    more: str = ""


def facts(run: RecordedRun) -> list[Fact]:
    """The numbers to show first. Rates are medians over the steps."""
    stats = []
    for name, key in (("Loss", "loss"), ("Held-out loss", "held_out_loss")):
        known = [(value, step) for step, value in run.points(key) if value is not None]
        if known:
            least, at = min(known)
            stats.append(Fact(name, number(known[-1][0]), f"least {number(least)}, step {at:,}"))
    of_evaluations = (*run.points("held_out_token_accuracy"), *run.points("held_out_accuracy"))  # one of them
    if shares := [(value, step) for step, value in of_evaluations if value is not None]:
        most, at = max(shares)
        stats.append(Fact("Held-out accuracy", percent(shares[-1][0]), f"most {percent(most)}, step {at:,}"))
    rates: list[tuple[str, str, Callable[[float], str]]] = [
        ("Tokens a second", "tokens_per_second", lambda value: f"{value:,.0f}"),
        ("TFLOP/s a device", "tflops_per_device", number),
        ("MFU", "mfu", percent),
        ("Bubble", "bubble", percent),
        ("Padding", "padding", percent),
    ]
    for name, key, written in rates:
        values = [value for _, value in run.points(key) if value is not None]
        if values and (key != "padding" or any(values)):
            stats.append(Fact(name, written(median(values)), "median"))
    for key, name in (("peak_allocated", "Peak GPU memory"), ("peak_resident", "Peak host memory")):
        peaks = run.by_process(key)
        if any(peaks):
            stats.append(Fact(name, in_bytes(max(peaks)), f"process {peaks.index(max(peaks))}"))
    if (account := lost_time(run)) is not None and account.seconds > 0:
        stats.append(Fact("Effective time", percent(account.effective), f"of {duration(account.seconds)}"))
    spent = sum(seconds_by_part(run).values())
    return [*stats, Fact("Time", duration(spent), "in steps, evaluations, checkpoints")] if spent else stats


def _facts(runs: Sequence[RecordedRun]) -> str:
    """Tiles for one run, a table for several."""
    if len(runs) == 1:
        tiles = "".join(
            f"<div><dt>{escape(fact.name)}</dt><dd>{escape(fact.value)}<small>{escape(fact.more)}</small></dd></div>"
            for fact in facts(runs[0])
        )
        return f'<dl class="tiles">{tiles}</dl>'
    by_run = [{fact.name: fact for fact in facts(run)} for run in runs]
    names = dict.fromkeys(name for by_name in by_run for name in by_name)
    rows = [[run.name, *(by_name[name].value if name in by_name else "-" for name in names)]
            for run, by_name in zip(runs, by_run, strict=True)]  # fmt: skip
    return _table(["run", *names], rows, caption="By run")


# ---- Curves


def charts(runs: Sequence[RecordedRun]) -> list[Chart]:
    """All charts; some may have no line. Several runs share each chart."""
    several = len(runs) > 1

    def lines(*curves: tuple[str, str | None, str, bool]) -> list[Line]:
        all_lines: list[Line] = []
        for index, run in enumerate(runs):
            for key, inner, label, dots in curves:
                points = run.points(key, inner)
                name = label if not several else run.name if len(curves) == 1 else f"{run.name}: {label}"
                all_lines.append(Line(name, points, index if several else len(all_lines), dots))
        return [line for line in all_lines if line.points]

    def single(key: str, label: str) -> list[Line]:
        return lines((key, None, label, False))

    groups = list(dict.fromkeys(name for run in runs for name in run.keys_of("learning_rates")))
    rates: list[tuple[str, str | None, str, bool]]
    rates = [("learning_rates", name, name, False) for name in groups]
    rates = rates or [("learning_rate", None, "learning rate", False)]
    padding = single("padding", "padding")
    training, held_out = (("loss", None, "training", False), ("held_out_loss", None, "held out", True))
    losses = [Chart("Loss", "nats a token", lines(training, held_out))]
    if several:  # two lines a run would hide each other
        losses = [
            Chart("Loss", "nats a token", lines(training)),
            Chart("Held-out loss", "nats a token", lines(held_out)),
        ]
    return [
        *losses,
        *(Chart(title, "share of the labels", lines(
            (key, None, "training", False), (f"held_out_{key}", None, "held out", True)), percent)
          for title, key in (("Token accuracy", "token_accuracy"), ("Accuracy", "accuracy"))),
        Chart("Gradient norm", "before clipping", single("grad_norm", "norm"), log=True),
        Chart("Learning rate", "", lines(*rates), lambda value: f"{value:.3g}", from_zero=True),
        Chart("Tokens a second", "without padding", single("tokens_per_second", "tokens/s"),
              lambda value: f"{value:,.0f}", from_zero=True),
        Chart("MFU", "share of the devices' peak", single("mfu", "MFU"), percent, from_zero=True),
        Chart("Model TFLOP/s", "of each device", single("tflops_per_device", "TFLOP/s"), from_zero=True),
        Chart("Bubble", "share of the ranks' time without compute", single("bubble", "bubble"), percent,
              from_zero=True),
        Chart("Padding", "share of the tokens", [line for line in padding if any(v for _, v in line.points)],
              percent, from_zero=True),
        Chart("Peak memory", _memory_unit(runs), _memory_lines(runs), from_zero=True),
    ]  # fmt: skip


def _memory_unit(runs: Sequence[RecordedRun]) -> str:
    kinds = dict.fromkeys(
        "GPUs, by tensors" if run.memory_key == "peak_allocated" else "host" for run in runs
    )
    return f"GiB of the {' or '.join(kinds)}" + (", of the process with the most" if len(runs) > 1 else "")


def _memory_lines(runs: Sequence[RecordedRun]) -> list[Line]:
    """Of one run a line for each process, or the most and the least of many; of several runs the most."""
    lines: list[Line] = []
    for index, run in enumerate(runs):
        peaks = run.by_process(run.memory_key)
        order = sorted(range(len(peaks)), key=peaks.__getitem__, reverse=True)
        shown = (
            order[:1] if len(runs) > 1 else sorted(order) if len(order) <= STYLES else [order[0], order[-1]]
        )
        for process in shown:
            points = [(step, None if value is None else value / 2**30)
                      for step, value in run.points(run.memory_key, process)]  # fmt: skip
            several = len(runs) > 1
            lines.append(
                Line(run.name if several else f"process {process}", points, index if several else len(lines))
            )
    return lines


# ---- The timeline


def _timeline(runs: Sequence[RecordedRun]) -> str:
    """Predicted and measured, of one run; the measured ones of several."""
    timelines, said = runs[0].timelines
    unit = "s" if "measured" in timelines else ""
    if len(runs) > 1:
        measured = {run.name: run.timelines[0].get("measured") for run in runs}
        timelines = {name: timeline for name, timeline in measured.items() if timeline is not None}
        unit, said = "s", "The last recorded step of each run, if any."
    inner = _note(said)
    if timelines:
        name = next(iter(timelines.values())).name
        panels = tuple(Panel(label, timeline) for label, timeline in timelines.items())
        drawn = parts(Drawing(f"Timeline of a step, {name}", panels, unit), embedded=True)
        inner += drawn["toolbar"] + drawn["timeline"]
    return _block("Timeline of a step", inner)


# ---- Of each run: time, time lost, memory, starts, numbers, config, environment


def _of_run(run: RecordedRun, named: bool) -> str:
    blocks = (_time(run), _lost(run), "" if named else _memory([run]), _starts(run))
    details = (_numbers(run), _samples(run), _config(run), _environment(run))
    name = f"<h2>{escape(run.name)}</h2>" if named else ""
    joined = "".join(filter(None, blocks))
    return f'{name}<div class="blocks">{joined}</div>' + "".join(filter(None, details))


def seconds_by_part(run: RecordedRun) -> dict[str, float]:
    """The seconds of the whole run by part, as far as its rows have them."""
    totals = dict.fromkeys(_PARTS, 0.0)
    for row in run.rows:
        seconds = finite(row.get("seconds")) or 0.0
        kind = "rest" if kind_of(row) == "step" else kind_of(row)
        inner = row.get("seconds_by_part")
        pairs = inner.items() if isinstance(inner, dict) else ()
        known = {name: finite(value) or 0.0 for name, value in pairs}
        for name, value in known.items():
            totals[name] = totals.get(name, 0.0) + value
        totals[kind] += seconds - sum(known.values())
    return {name: value for name, value in totals.items() if value > 0}


def _time(run: RecordedRun) -> str:
    spent = seconds_by_part(run)
    whole = sum(spent.values())
    if not whole:
        return ""
    shares = [(index, name, value / whole) for index, (name, value) in enumerate(spent.items())]
    bar = "".join(f'<i class="p{index}" style="flex-grow:{share:.5f}"></i>' for index, _, share in shares)
    rows = []
    for index, name, share in shares:
        swatch, about = f'<i class="p{index}"></i>', f"<small>{escape(_PARTS.get(name, ''))}</small>"
        rows.append([f"{swatch}{escape(name)} {about}", duration(spent[name]), percent(share)])
    table = _table(["part", "time", "share"], rows, escaped=True)
    note = _note("By the clock of the first process's host: a GPU's work counts where the host waits for it.")
    return _block("Time by part", f'<div class="stack" aria-hidden="true">{bar}</div>{table}{note}')


def _lost(run: RecordedRun) -> str:
    """A table of the time that was lost, by cause, over all starts."""
    account = lost_time(run)
    if account is None or not account.seconds:
        return ""
    rows = []
    for cause, seconds in account.lost.items():
        named = f"{escape(cause)} <small>{escape(CAUSES[cause])}</small>"
        rows.append([named, duration(seconds), percent(seconds / account.seconds)])
    note = f"Of {duration(account.seconds)}, over all starts, {percent(account.effective)} were effective."
    return _block("Time lost", _table(["cause", "time", "share"], rows, escaped=True) + _note(note))


def _memory(runs: Sequence[RecordedRun]) -> str:
    """The peaks of each process, of all runs in one table."""
    columns = {
        f"{run.name}: {name}" if len(runs) > 1 else name: peaks
        for run in runs
        for key, name in _MEMORY.items()
        if any(peaks := run.by_process(key))
    }
    if not columns:
        return ""
    kinds = {name: name.rpartition(": ")[2] for name in columns}
    most = {
        kind: max(max(columns[name]) for name in columns if kinds[name] == kind) for kind in kinds.values()
    }
    rows = []
    for at in range(max(map(len, columns.values()))):
        cells = [f"process {at}"]
        for name, values in columns.items():
            cells.append(_memory_bar(values[at], most[kinds[name]]) if at < len(values) else "-")
        rows.append(cells)
    return _block("Peak memory", _table(["process", *columns], rows, escaped=True))


def _memory_bar(value: float, most: float) -> str:
    bar = f'<span class="bar"><i style="width:{100 * value / most:.1f}%"></i></span>'
    return f'{bar}<span class="share">{in_bytes(value)}</span>'


def _starts(run: RecordedRun) -> str:
    rows = []
    for start in run.starts:
        end = start.get("end")
        ended = f"{end.get('how')} {_moment(end.get('at'))}" if isinstance(end, dict) else "no end recorded"
        rows.append([_moment(start.get("at")), f"after step {start.get('step', 0)}",
                     f"{start.get('processes', '?')}", ended])  # fmt: skip
    return _block("Starts", _table(["started", "from", "processes", "ended"], rows)) if rows else ""


def _numbers(run: RecordedRun) -> str:
    """A table of some steps: the values of the curves as text."""
    keys = [key for key in ("loss", "grad_norm", "learning_rate", "tokens_per_second", "seconds", "bubble")
            if any(key in row for row in run.steps)]  # fmt: skip
    if not run.steps:
        return ""
    count = min(_ROWS, len(run.steps))
    chosen = [run.steps[round(at * (len(run.steps) - 1) / max(1, count - 1))] for at in range(count)]
    rows = [[f"{row['step']:,}", *(_plain(finite(row.get(key))) for key in keys)] for row in chosen]
    heads = ["step", *(key.replace("_", " ") for key in keys)]
    return _details(f"Numbers of {count} of {len(run.steps):,} steps", _table(heads, rows))


def _samples(run: RecordedRun) -> str:
    rows = [
        [f"{row['step']:,}", f"<pre>{escape(str(row['sample']))}</pre>"]
        for row in run.rows
        if "sample" in row
    ]
    return _details(f"Samples, {len(rows)}", _table(["step", "text"], rows, escaped=True)) if rows else ""


def _config(run: RecordedRun) -> str:
    text = yaml.safe_dump(run.config, sort_keys=False, allow_unicode=True) if run.config else ""
    return _details("Config", f"<pre>{escape(text.strip())}</pre>") if text else ""


def _environment(run: RecordedRun) -> str:
    versions = run.about.get("environment")
    rows = [[str(name), str(value)] for name, value in versions.items()] if isinstance(versions, dict) else []
    return _details("Environment", _table(["", "version or number"], rows)) if rows else ""


def _differences(runs: Sequence[RecordedRun]) -> str:
    """The keys of the configs that differ."""
    if len(runs) == 1:
        return ""
    configs = [dict(leaves(run.config)) for run in runs]
    keys = list(dict.fromkeys(key for config in configs for key in config))
    rows = [[key, *(str(config.get(key, "-")) for config in configs)] for key in keys
            if len({repr(config.get(key)) for config in configs}) > 1]  # fmt: skip
    table = _table(["key", *(run.name for run in runs)], rows)
    return _block("Differences of the configs", table if rows else _note("All keys are the same."))


# ---- Pieces


def _block(title: str, inner: str) -> str:
    return f'<section class="block"><h2>{escape(title)}</h2>{inner}</section>'


def _details(title: str, inner: str) -> str:
    return f"<details><summary>{escape(title)}</summary>{inner}</details>"


def _note(text: str) -> str:
    return f'<p class="note">{escape(text)}</p>'


def _table(
    heads: Sequence[str], rows: Sequence[Sequence[str]], *, caption: str = "", escaped: bool = False
) -> str:
    """escaped: the cells of the rows are HTML"""
    cell: Callable[[str], str] = str if escaped else escape
    head = "".join(f'<th scope="col">{escape(text)}</th>' for text in heads)
    lines = []
    for first, *others in rows:
        cells = "".join(f"<td>{cell(text)}</td>" for text in others)
        lines.append(f'<tr><th scope="row">{cell(first)}</th>{cells}</tr>')
    title, body = f"<caption>{escape(caption)}</caption>" if caption else "", "\n".join(lines)
    return f"""<div class="scroll"><table>{title}<thead><tr>{head}</tr></thead>
<tbody>{body}</tbody></table></div>"""


def _plain(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.5g}"


def in_bytes(value: float) -> str:
    return f"{value / 2**30:.2f} GiB" if value >= 2**30 else f"{value / 2**20:.0f} MiB"


def _moment(at: object) -> str:
    """To the minute."""
    return str(at)[:16].replace("T", " ")
