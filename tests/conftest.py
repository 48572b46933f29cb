from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import transformers
from torch.distributed import HashStore  # type: ignore[attr-defined]

from support.pool import Pool


@pytest.fixture(scope="session", autouse=True)
def _quiet_and_single_threaded() -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[Pool]:
    limit = float(pytestconfig.getoption("timeout") or pytestconfig.getini("timeout"))
    # less, to tell of it before pytest ends the test
    pool = Pool(4, tmp_path_factory.mktemp("stores"), timeout=0.75 * limit)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def eight(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """A pool of its own, of the tests of `make parallel` alone."""
    pool = Pool(8, tmp_path_factory.mktemp("stores of eight"), timeout=240)
    yield pool
    pool.close()


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A world of this process alone, to make meshes in."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests that use the pool run in one xdist worker, so that there is one pool. xdist reads
    groups in this hook too, and must come after."""
    for item in items:
        if "pool" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("pool"))
