"""Notes that processes leave for each other in a store, also where the store is gone."""

from __future__ import annotations

import json
import socket
from unittest.mock import ANY, Mock, call

import pytest
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]

from penstock.runtime.health.notes import (
    FailureNotes,
    FirstFailure,
    LimitedStore,
    PeerWait,
)

HOST = socket.gethostname()


@pytest.fixture
def store() -> Store:
    return HashStore()


def notes(store: Store, process: int) -> FailureNotes:
    return FailureNotes(LimitedStore(store), process)


def test_a_store_that_is_gone_is_done_without() -> None:
    gone = Mock(spec=Store)
    gone.clone.return_value = gone
    gone.check.side_effect = gone.set.side_effect = gone.compare_set.side_effect = RuntimeError("refused")
    left = notes(gone, 0)
    left.leave("at work", PeerWait("2F0", 2))
    assert left.read([1]) == {}
    left.fail(FirstFailure(0, HOST, "no"))
    assert left.first_failure("failed", patience=60) is None
    assert gone.mock_calls == [call.clone(), call.set("note/0", ANY)]  # nobody calls it again


def test_a_note_keeps_what_it_is_given(store: Store) -> None:
    notes(store, 1).leave("in 2F3", PeerWait("2F0", None))
    note = notes(store, 0).read([1])[1]
    assert (note.account, note.wait, note.host) == ("in 2F3", PeerWait("2F0", None), HOST)
    assert json.loads(store.get("note/1"))[1] == HOST
