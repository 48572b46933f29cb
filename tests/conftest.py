from __future__ import annotations

import atexit
import gc
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

from support import pool as processes
from support.pool import Pool

if TYPE_CHECKING:
    from support.faults import Row

# torch and transformers are imported where they are used: xdist's first process starts the others, after this

gc.disable()  # until the first test: what is imported and collected stays, and looking at it takes a fifth

if "PENSTOCK_CACHE" not in os.environ:  # the workers of xdist have it of the process that started them
    os.environ["PENSTOCK_CACHE"] = tempfile.mkdtemp(prefix="penstock-cache-")
    atexit.register(shutil.rmtree, os.environ["PENSTOCK_CACHE"], ignore_errors=True)


settings.register_profile("untimed", deadline=None)  # a busy machine takes any time for an example
settings.load_profile("untimed")


@pytest.fixture(scope="session", autouse=True)
def _quiet_and_single_threaded() -> None:
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    gc.freeze()  # what is imported: a collection takes a tenth of the time without it
    gc.set_threshold(20_000, 50, 100)  # 4 % of the suite's time went into looking for garbage
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _models_remembered(tmp_path_factory: pytest.TempPathFactory) -> None:
    from support import remembered

    base = tmp_path_factory.getbasetemp()  # of this worker of xdist, in the run's
    remembered.share((base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "remembered")


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[Pool]:
    limit = float(pytestconfig.getoption("timeout") or pytestconfig.getini("timeout"))
    # less than a test may take, so that the pool can say which rank hangs before pytest ends the test
    pool = Pool(4, tmp_path_factory.mktemp("stores"), timeout=0.75 * limit)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def eight(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """Eight workers, for the tests of `make parallel` alone."""
    pool = Pool(8, tmp_path_factory.mktemp("stores of eight"), timeout=240)
    yield pool
    pool.close()


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A world of one process, to make meshes in."""
    import torch.distributed as dist
    from torch.distributed import HashStore  # type: ignore[attr-defined]

    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def row(record_property: Callable[[str, object], None]) -> Row:
    """For a test of a fault: what its row of docs/faults.md shows."""
    from support.faults import Row

    return Row(record_property)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--faults", help="a file to write what tests of faults found; with -m fault")
    parser.addoption("--fast", action="store_true", help="only tests that are short and start no process")
    parser.addoption("--cases", type=int, default=1, help="of each test, with --fast")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put all tests that use the pool, or the server that forks its processes, into one xdist worker.

    So there is one pool, and one server, which imports torch and transformers. The other tests of a file are
    together too, as they share fixtures and what they import late; of the sweep and of `make faults`, which
    have long files, they are not. xdist reads groups in this hook too, and must come after.
    """
    for item in items:
        alone = config.getoption("faults") or item.get_closest_marker("sweep")
        if "pool" in getattr(item, "fixturenames", ()) or (_forks(item) and not alone):
            item.add_marker(pytest.mark.xdist_group("pool"))
        elif not alone and not item.get_closest_marker("xdist_group"):
            item.add_marker(pytest.mark.xdist_group(_file(item.nodeid)))
    if config.getoption("fast"):
        kept = _fast(items, config.getoption("cases"))
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept


def _gives_way(item: pytest.Item) -> None:
    """A worker of xdist that does not run the pool's tests takes the time that they leave.

    They are the longest chain, as one runs after another: with equal shares they would be left at the end.
    """
    group = item.get_closest_marker("xdist_group")
    if hasattr(item.config, "workerinput") and group and group.args != ("pool",) and os.nice(0) < GIVES_WAY:
        os.nice(GIVES_WAY - os.nice(0))


def _forks(item: pytest.Item) -> bool:
    """Does the test's file start processes by the pool's server? Of few such files, all tests are counted."""
    from support.faults import attempt

    ways = {"start": processes.start, "attempt": attempt, "PRELOADED": processes.PRELOADED}
    module = getattr(item, "module", None)
    return any(getattr(module, name, None) is way for name, way in ways.items())


def _file(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def _fast(items: list[pytest.Item], most: int) -> list[pytest.Item]:
    """Short tests of this process alone; of a test with many cases some, evenly spread over them."""
    took: dict[str, float] = {}
    if items and (cache := _cache(items[0].config)) is not None:
        took = cache.get(TOOK, {})
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        fixtures = {"pool", "eight", "executed_notebook"} & set(getattr(item, "fixturenames", ()))
        marks = {mark.name for mark in item.iter_markers()} & {"sweep", "parallel", "long"}
        starts_processes = fixtures or hasattr(getattr(item, "module", None), "subprocess")
        if not starts_processes and not marks and took.get(item.nodeid, 0.0) < SHORT:
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    return [item for each in cases.values() for item in each[:: -(-len(each) // most)]]


def _cache(config: pytest.Config) -> pytest.Cache | None:
    """None with `-p no:cacheprovider`."""
    return getattr(config, "cache", None)


GIVES_WAY = 5  # niceness
TOOK = "penstock/took"  # in pytest's cache: seconds of each test when it last ran on this machine
SHORT = 0.15  # seconds


class Durations:
    """Keeps for `_fast` what each test took, in the process that has the reports of all."""

    def __init__(self, cache: pytest.Cache) -> None:
        self._cache = cache
        self._took: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name, _, group = report.nodeid.rpartition("@")  # as xdist writes it, with the test's group
        if group not in ("pool", "syntax", _file(report.nodeid)):
            name = report.nodeid
        self._took[name] = self._took.get(name, 0.0) + report.duration

    def pytest_sessionfinish(self) -> None:
        rounded = {name: round(seconds, 2) for name, seconds in self._took.items()}
        self._cache.set(TOOK, self._cache.get(TOOK, {}) | rounded)


# ---- The table of faults: from the marker of a test, over its report, to the file


def pytest_runtest_setup(item: pytest.Item) -> None:
    """The report of a test has its fault, also where a worker of xdist runs it."""
    _gives_way(item)
    if mark := item.get_closest_marker("fault"):
        place = item.session.items.index(item)
        item.user_properties.append(("fault", json.dumps([*mark.args, place])))


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):  # a worker of xdist, whose reports go to the process that started it
        return
    if (cache := _cache(config)) is not None:
        config.pluginmanager.register(Durations(cache))
    if config.getoption("faults"):
        config.pluginmanager.register(Faults(Path(config.getoption("faults"))))


class Faults:
    """Collects what the tests of faults say, and writes it."""

    def __init__(self, file: Path) -> None:
        self._file, self._found, self._began = file, list[dict[str, Any]](), time.monotonic()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        said = dict(report.user_properties)
        if "fault" in said and (report.when == "call" or report.failed):
            kind, where, place = json.loads(str(said["fault"]))
            self._found.append({
                "place": place, "kind": kind, "where": where, "passed": report.passed,
                "seconds": said.get("seconds", report.duration), "cause": said.get("cause", ""),
                "lost": said.get("lost", ""),
            })  # fmt: skip

    def pytest_sessionfinish(self) -> None:
        from support.faults import results

        found = results(self._found, time.monotonic() - self._began)
        self._file.write_text(json.dumps(found, indent=1) + "\n")
