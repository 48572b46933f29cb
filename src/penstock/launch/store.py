"""The store of an attempt: torch's TCPStore, for processes of this user on this machine alone.

    rank -> proxy 127.0.0.1:port -> TCPStore 127.a.b.c:port

Whoever connects to a TCPStore may read, list and delete every key, and ranks connect by code of torch that
has no secret to show. But the kernel knows the user of every local connection. So the proxy takes connections
of its own user alone, and passes their bytes on. Torch accepts at an address of its own, drawn at random, and
a filter of that socket drops all packets but those from the one port that the proxy has just bound.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import secrets
import socket
import struct
import sys
import time
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path
from threading import Thread
from typing import Self

from penstock.errors import RunError

_HERE = "127.0.0.1"
_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_CONNECTED = 1  # other states have no process, and show the user 0
_SOCK_DIAG, _BY_FAMILY, _REQUEST = 4, 20, 1  # a family of netlink; its message, and a flag of that
_HEADER = 16  # bytes of a message of netlink
_ANY = (1 << 32) - 1
_ATTACH_FILTER = 26  # SO_ATTACH_FILTER
_LOAD_HALF, _JUMP_EQUAL, _RETURN = 0x28, 0x15, 0x06  # of classic BPF
_PIECE = 1 << 16  # bytes
_PAUSE = 0.05  # seconds
_OF_CONNECTION, _OTHERS = 3, 12  # open files
_LIMIT = timedelta(seconds=60)


class GuardedStore:
    """A store and its proxy. A context manager, which closes the proxy.

    Attributes:
        port: of 127.0.0.1, for ranks
        full: whether this process has no file descriptor left, so that ranks wait
    """

    def __init__(self, ranks: int = 1) -> None:
        """Raises RunError where this system cannot keep other users out, or allows too few open files."""
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        _make_room(1 + ranks)
        self.full = False
        self._closed = False
        self._sockets = ExitStack()
        self._proxy = self._sockets.enter_context(_listening(_HERE, 0))
        self.port: int = self._proxy.getsockname()[1]
        try:
            self._inner = self._sockets.enter_context(_listening(_drawn_address(), self.port))
            _hear_only(self._inner, 0)
        except OSError as error:
            self._sockets.close()
            rule = f"other users could reach it, as a socket cannot be filtered here ({error.strerror})"
            raise RunError("the store of the ranks", rule, "Start the ranks with torchrun") from error
        Thread(target=self._let_in, name="penstock-proxy", daemon=True).start()
        # its own first connection goes through the proxy, as it has the port of the other socket
        descriptor = os.dup(self._inner.fileno())
        self._store = TCPStore(
            _HERE, self.port, None, True, _LIMIT, wait_for_workers=False, master_listen_fd=descriptor
        )

    def _let_in(self) -> None:
        while not self._closed:
            try:
                client, address = self._proxy.accept()
                if user_of(address, self._proxy.getsockname()) == os.getuid():
                    self._connect(client)
                else:
                    client.close()
            except OSError as error:  # or the proxy is closed
                self.full = self.full or error.errno in (errno.EMFILE, errno.ENFILE)
                time.sleep(_PAUSE)

    def _connect(self, client: socket.socket) -> None:
        with ExitStack() as failed:
            failed.enter_context(client)
            inner = failed.enter_context(socket.socket())
            inner.bind((_HERE, 0))
            _hear_only(self._inner, inner.getsockname()[1])
            inner.connect(self._inner.getsockname())
            failed.pop_all()
        Thread(target=_join, args=(client, inner), name="penstock-store", daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True
        self._proxy.shutdown(socket.SHUT_RDWR)  # ends the wait of the thread
        self._sockets.close()
        del self._store


def user_of(client: tuple[str, int], server: tuple[str, int]) -> int | None:
    """The number of the user whose process has connected `client` to `server`, addresses of this machine.

    None where no such connection is open.
    """
    try:
        return _asked(client, server)
    except OSError:  # there is none, or this kernel has no such messages
        return _looked_up(client, server)


def _asked(client: tuple[str, int], server: tuple[str, int]) -> int | None:
    """The answer of the kernel, which finds one connection by its ends at once (its inet_diag.h)."""
    ports = struct.pack("!HH", client[1], server[1])
    addresses = b"".join(struct.pack("16s", socket.inet_aton(address)) for address, _ in (client, server))
    ends = ports + addresses + struct.pack("III", 0, _ANY, _ANY)  # over any interface, with any cookie
    asks = struct.pack("BBBBI", socket.AF_INET, socket.IPPROTO_TCP, 0, 0, _ANY) + ends
    header = struct.pack("IHHII", _HEADER + len(asks), _BY_FAMILY, _REQUEST, 0, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as kernel:
        kernel.send(header + asks)
        answer = kernel.recv(1 << 12)
    if struct.unpack_from("IH", answer)[1] != _BY_FAMILY:
        raise OSError(-struct.unpack_from("i", answer, _HEADER)[0], "no such connection")
    state, user = struct.unpack_from("xB2x48x12xI", answer, _HEADER)
    return int(user) if state == _CONNECTED else None


def _looked_up(client: tuple[str, int], server: tuple[str, int]) -> int | None:
    """What stands in the kernel's tables, to read which takes milliseconds."""
    ends = tuple(map(_in_table, (client, server)))
    for table in _TABLES:
        with suppress(FileNotFoundError):  # no other error, as one of too many open files is not an answer
            for line in table.read_text().splitlines()[1:]:
                _, local, remote, state, _, _, _, user, *_ = line.split()
                if local.endswith(ends[0]) and remote.endswith(ends[1]) and int(state, 16) == _CONNECTED:
                    return int(user)
    return None


def _in_table(end: tuple[str, int]) -> str:
    """How /proc/net/tcp writes an address and port. In /proc/net/tcp6 zeros and FFFF stand before it."""
    address, port = end
    return f"{int.from_bytes(socket.inet_aton(address), sys.byteorder):08X}:{port:04X}"


def _make_room(connections: int) -> None:
    """Let this process open as many files as it may. Torch waits for ever for one that it cannot open."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    needed = len(os.listdir("/proc/self/fd")) + _OF_CONNECTION * connections + _OTHERS
    if 0 <= most < needed:
        rule = f"to start {connections - 1} ranks takes about {needed} open files"
        raise RunError(f"ulimit -n {most}", rule, "Raise it, as by ulimit -n 1024")


def _listening(address: str, port: int) -> socket.socket:
    listening = socket.socket()
    listening.bind((address, port))
    listening.listen(socket.SOMAXCONN)
    return listening


def _drawn_address() -> str:
    """One of this machine's 16 million: where nobody can have taken every port before."""
    return ".".join(map(str, (127, *(1 + secrets.randbelow(254) for _ in range(3)))))


def _hear_only(listening: socket.socket, port: int) -> None:
    """Drop each packet that is not from this port. A connection keeps the filter with which it began."""
    filters = [(_LOAD_HALF, 0, 0, 0), (_JUMP_EQUAL, 0, 1, port), (_RETURN, 0, 0, 1 << 18), (_RETURN, 0, 0, 0)]
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in filters))
    described = struct.pack("HL", len(filters), ctypes.addressof(program))
    listening.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, described)


def _join(client: socket.socket, inner: socket.socket) -> None:
    """Pass the bytes of two sockets on to each other, and close both once both have ended."""
    with client, inner:
        back = Thread(target=_pass_on, args=(inner, client), name="penstock-store", daemon=True)
        back.start()
        _pass_on(client, inner)
        back.join()


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    """Pass bytes on until the source ends, and end the target then."""
    source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with suppress(OSError):
        while piece := source.recv(_PIECE):
            target.sendall(piece)
    with suppress(OSError):
        target.shutdown(socket.SHUT_WR)
