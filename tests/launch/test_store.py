"""The store of an attempt: open to ranks of this user, closed to everyone else."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from penstock.errors import RunError
from penstock.launch import store as module
from penstock.launch.store import GuardedStore, user_of
from support.pool import start
from support.refusals import refuses
from support.second_user import as_root, by_another_user

LIMIT = timedelta(seconds=10)


@pytest.fixture(name="store")
def _store() -> Iterator[GuardedStore]:
    with GuardedStore() as store:
        yield store


def client(store: GuardedStore) -> TCPStore:
    return TCPStore("127.0.0.1", store.port, is_master=False, timeout=LIMIT)


def answers(address: tuple[str, int]) -> bool:
    """Whether a store answers there: a first byte that it knows, and the number that torch sends with it."""
    with socket.create_connection(address, timeout=1) as connection:
        connection.sendall(b"\0" + (0x3C85F7CE).to_bytes(4, "little"))
        connection.sendall(b"\x0d\0\0\0\0\0\0\0\0\0\0\0\0")  # PING in newer forms, else an end
        return bool(connection.recv(1))


def test_ranks_share_keys_over_many_connections(store: GuardedStore) -> None:
    first, second = client(store), client(store)
    first.set("key", "x" * 1_000_000)
    assert second.get("key") == b"x" * 1_000_000
    threads = [threading.Thread(target=lambda: client(store).add("count", 1)) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert first.add("count", 0) == 20


def test_nothing_listens_to_other_machines(store: GuardedStore) -> None:
    """Unreleased: it listened at every address of the machine, IPv4 and IPv6."""
    listening = [
        line.split()[1]
        for table in ("/proc/net/tcp", "/proc/net/tcp6")
        for line in Path(table).read_text().splitlines()[1:]
        if line.split()[1].endswith(f":{store.port:04X}") and line.split()[3] == "0A"
    ]
    assert len(listening) == 2
    assert all(len(end) == 13 and end[6:8] == "7F" for end in listening)  # 127.x.x.x, the low byte last


# _inner: the address that is drawn at random, which an attacker would read in /proc/net/tcp
def test_torchs_socket_hears_the_proxy_alone(store: GuardedStore) -> None:
    """Also where this very user connects: the proxy alone says who may."""
    with pytest.raises(TimeoutError):
        socket.create_connection(store._inner.getsockname(), timeout=0.5)
    client(store).set("key", "value")


@as_root
def test_another_user_is_turned_away(store: GuardedStore) -> None:
    """Unreleased: any user of the machine read the ranks' notes, and deleted keys."""
    address = ("127.0.0.1", store.port)
    assert not by_another_user(lambda: answers(address))
    ours = client(store)
    ours.set("key", "value")
    assert ours.get("key") == b"value"


@as_root
def test_another_user_would_be_answered_without_the_proxy(
    store: GuardedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That the test before can fail."""
    monkeypatch.setattr(module, "user_of", lambda *_: os.getuid())
    assert by_another_user(lambda: answers(("127.0.0.1", store.port)))


WAYS = ("messages", "tables")


@pytest.fixture
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel answers by this way alone."""
    # _BY_FAMILY, _TABLES: of the two ways to ask the kernel
    if request.param == "tables":
        monkeypatch.setattr(module, "_BY_FAMILY", 9999)  # a message that no kernel knows
    else:
        monkeypatch.setattr(module, "_TABLES", ())


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("way", WAYS, indirect=True)
@as_root
def test_the_user_of_a_connection_is_that_of_its_process() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        at = server.getsockname()

        def connects() -> bool:
            with socket.create_connection(at) as connection:
                mine = connection.getsockname()
                return user_of(mine, at) == os.getuid() != 0

        assert by_another_user(connects)


# a client may speak IPv4 through a socket of IPv6
@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("way", WAYS, indirect=True)
@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_a_connection_that_is_closed_has_no_user(family: socket.AddressFamily) -> None:
    """The tables show such a connection as one of root."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        here, port = server.getsockname()
        connection = socket.socket(family)
        connection.connect((here if family == socket.AF_INET else f"::ffff:{here}", port))
        accepted, client = server.accept()
        assert user_of(client, (here, port)) == os.getuid()
        connection.close()
        assert user_of(client, (here, port)) is None
        accepted.close()
        assert user_of((here, port), ("127.0.0.1", 9)) is None  # it listens, to nobody there


# _ATTACH_FILTER: an option that no kernel knows
def test_where_sockets_cannot_be_filtered_the_store_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ATTACH_FILTER", 9999)
    with refuses(RunError, rule="other users", remedy="torchrun"):
        GuardedStore()


def test_a_store_that_is_closed_answers_nobody() -> None:
    with GuardedStore() as store:
        pass
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", store.port), timeout=1)


def full(folder: str) -> None:
    """Open a store and use up the descriptors that this process may have; a rank then connects."""
    os.chdir(folder)
    with GuardedStore() as store:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        opened = []
        with contextlib.suppress(OSError):
            while True:
                opened.append(os.open("/dev/null", os.O_RDONLY))
        os.close(opened.pop())
        with socket.socket() as rank:
            rank.connect(("127.0.0.1", store.port))
            end = time.monotonic() + 60
            while not store.full and time.monotonic() < end:
                time.sleep(0.05)
        os._exit(0 if store.full else 1)


def test_a_launcher_without_descriptors_knows_it(tmp_path: Path) -> None:
    """Unreleased: ranks waited for the store, and the log blamed one of them."""
    process = start(full, str(tmp_path))
    process.join(120)
    assert process.exitcode == 0


def too_few(folder: str) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (20, 20))
    with refuses(RunError, "ulimit -n 20", "to start 2 ranks takes about"):
        GuardedStore(2)


def test_a_store_that_could_open_no_connections_is_refused(tmp_path: Path) -> None:
    """Unreleased: torch waited for its own connection for ever, and heard no signal."""
    process = start(too_few, str(tmp_path))
    process.join(60)
    assert process.exitcode == 0
