from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import transformers

from support.pool import Pool


@pytest.fixture(scope="session", autouse=True)
def _quiet_and_single_threaded() -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    pool = Pool(4, tmp_path_factory.mktemp("stores"))
    yield pool
    pool.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests that use the pool run in one xdist worker, so that there is one pool."""
    for item in items:
        if "pool" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("pool"))
