"""The HTTP front of examples/server.py, on rank 0: it puts the requests of all clients into one queue.

    a thread for each connection:   token -> size -> arguments -> queue, then it waits for the answer
    the main thread:                takes one request after the other, in the order of arrival

A connection carries one request. It has READING seconds to arrive, so that a client that sends slowly, or
nothing, does not keep a thread. The answer to a wrong request is JSON: value, rule and remedy.
"""

from __future__ import annotations

import hmac
import json
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from penstock.errors import ConfigError, InputError, PenstockError
from server_requests import CALLS, Limits, arguments_of

CONNECTIONS = 64  # at a time; more are closed at once
QUEUE = 32  # requests that wait; status is answered also when it is full
READING = 30.0  # seconds for a request to arrive, and for its answer to be taken
IDLE = 0.5  # seconds after which `take` returns without a request
FORGOTTEN = 1 << 24  # bytes of a refused request that are read, so that its client reads the answer


class RequestError(PenstockError):
    """A request that is refused with an HTTP status."""

    def __init__(self, status: HTTPStatus, value: str, rule: str, remedy: str) -> None:
        super().__init__(value, rule, remedy)
        self.status = status


class Job(NamedTuple):
    """A request in the queue, and the future of its answer."""

    call: str
    arguments: dict[str, Any]
    answer: Future[dict[str, Any]]


class Front(ThreadingHTTPServer):
    """Listens as soon as it is made. As a context manager it answers all waiting clients at its end.

    Args:
        address: host and port; port 0 takes a free one
        token: clients send it as "Authorization: Bearer ..."; None for no token
        facts: returns the entries of `status`, besides the queue
    """

    daemon_threads = True
    request_queue_size = CONNECTIONS

    def __init__(
        self, address: tuple[str, int], token: str | None, limits: Limits, facts: Callable[[], dict[str, Any]]
    ) -> None:
        try:
            super().__init__(address, Handler)
        except (OSError, OverflowError) as error:
            where = f"{address[0]} port {address[1]}"
            raise ConfigError(where, f"nothing can listen there: {error}", "Take another --port") from error
        self.token, self.limits, self.facts = token, limits, facts
        self.stopping = False  # set it to end `serve` after the request under way
        self._free = threading.BoundedSemaphore(CONNECTIONS)
        self._queue: queue.Queue[Job] = queue.Queue(QUEUE)
        self._current: Job | None = None
        self._lock, self._closed = threading.Lock(), False
        threading.Thread(target=self.serve_forever, args=(0.1,), name="front", daemon=True).start()

    # ---- the main thread

    def take(self) -> Job | None:
        """The next request, or None after IDLE seconds without one."""
        self._current = None
        with suppress(queue.Empty):
            self._current = self._queue.get(timeout=IDLE)
        return self._current

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._closed = True
        self.shutdown()
        waiting = [self._current] if self._current else []
        while not self._queue.empty():
            waiting.append(self._queue.get())
        for job in waiting:
            if not job.answer.done():
                job.answer.set_exception(ending())
        until = time.monotonic() + 1
        for _ in range(CONNECTIONS):  # all are free when the last answers have gone out
            self._free.acquire(timeout=max(0, until - time.monotonic()))
        self.server_close()

    # ---- the threads of connections

    def submit(self, call: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Queue a request, wait, and return the answer. Raises what the call raises."""
        job = Job(call, arguments, Future())
        with self._lock:
            if self._closed:
                raise ending()
            try:
                self._queue.put_nowait(job)
            except queue.Full:
                rule = f"{QUEUE} requests wait at most"
                raise RequestError(
                    HTTPStatus.SERVICE_UNAVAILABLE, "a full queue", rule, "Try again"
                ) from None
        return job.answer.result()

    def status(self) -> dict[str, Any]:
        job = self._current
        return {**self.facts(), "busy": job and job.call, "queued": self._queue.qsize()}

    def verify_request(self, *_: object) -> bool:
        return self._free.acquire(blocking=False)

    def process_request_thread(self, *arguments: Any) -> None:
        try:
            super().process_request_thread(*arguments)
        finally:
            self._free.release()

    def handle_error(self, *arguments: Any) -> None:
        if not isinstance(sys.exception(), OSError):  # a client that has gone away
            super().handle_error(*arguments)


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    server: Front
    server_version, sys_version = "penstock", ""
    default_request_version = "HTTP/1.0"  # of a first line that cannot be read: its answer has a head too
    timeout = READING

    def setup(self) -> None:
        super().setup()
        self._late = threading.Timer(READING, self._stop_reading)
        self._late.daemon = True
        self._late.start()

    def finish(self) -> None:
        self._late.cancel()
        super().finish()

    def _stop_reading(self) -> None:
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RD)

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_POST(self) -> None:
        self._answer(self._post)

    def _get(self) -> dict[str, Any]:
        self._check_token()
        if self.path != "/status":
            raise unknown(self.path)
        return self.server.status()

    def _post(self) -> dict[str, Any]:
        self._check_token()
        call = self.path.removeprefix("/")
        if call not in CALLS or call == self.path:
            raise unknown(self.path)
        arguments = arguments_of(call, self._body(), self.server.limits)
        self._late.cancel()
        return self.server.submit(call, arguments)

    def _check_token(self) -> None:
        """In a time that does not depend on how much of the token is right."""
        given, token = self.headers.get("Authorization", ""), self.server.token
        if token is not None and not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
            rule = "this server answers those who have its token"
            remedy = "Send the header 'Authorization: Bearer TOKEN'"
            raise RequestError(HTTPStatus.UNAUTHORIZED, "a wrong or missing token", rule, remedy)

    def _body(self) -> bytes:
        kind, length = self.headers.get_content_type(), self.headers.get("Content-Length", "")
        if kind != "application/json":  # which no page of another site can send from a browser unasked
            rule = "a request is JSON"
            remedy = "Send the header 'Content-Type: application/json'"
            raise RequestError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"a body of {kind}", rule, remedy)
        if self._length is None:
            value, rule = f"Content-Length {length[:20]!r}", "it says how many bytes follow"
            raise RequestError(HTTPStatus.LENGTH_REQUIRED, value, rule, "Send the body whole, not in chunks")
        if self._length > self.server.limits.body:
            value, rule = f"a body of {self._length} bytes", f"it has {self.server.limits.body} at most"
            raise RequestError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, value, rule, "Make several calls")
        body, self._unread = self.rfile.read(self._length), 0
        if len(body) < self._length:
            raise ConnectionAbortedError("the client went away within its request")
        return body

    @property
    def _length(self) -> int | None:
        length = self.headers.get("Content-Length", "")
        return int(length) if length.isascii() and length.isdigit() and len(length) < 16 else None

    def _answer(self, respond: Callable[[], dict[str, Any]]) -> None:
        self._unread = min(self._length or 0, FORGOTTEN)
        try:
            self._send(HTTPStatus.OK, respond())
        except PenstockError as error:
            self._send(status_of(error), in_json(error))
        while self._unread > 0 and (piece := self.rfile.read1(min(self._unread, 1 << 16))):
            self._unread -= len(piece)

    def _send(self, status: int, answer: dict[str, Any]) -> None:
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer a request that the standard library refuses."""
        self.close_connection = True
        rule = "a request is GET /status or POST /CALL, in HTTP"
        self._send(
            code, in_json(ConfigError(message or HTTPStatus(code).phrase, rule, "See examples/server.py"))
        )

    def log_message(self, *_: object) -> None:
        pass


def unknown(path: str) -> RequestError:
    rule, remedy = "there is no such call", f"Use GET /status or POST /{', /'.join(CALLS)}"
    return RequestError(HTTPStatus.NOT_FOUND, path[:100], rule, remedy)


def ending() -> RequestError:
    rule, remedy = "it answers no further requests", "Start it again"
    return RequestError(HTTPStatus.SERVICE_UNAVAILABLE, "a server that ends", rule, remedy)


def status_of(error: PenstockError) -> HTTPStatus:
    if isinstance(error, RequestError):
        return error.status
    return HTTPStatus.BAD_REQUEST if isinstance(error, InputError) else HTTPStatus.INTERNAL_SERVER_ERROR


def in_json(error: PenstockError) -> dict[str, Any]:
    kind = type(error).__name__
    return {"error": {"type": kind, "value": error.value, "rule": error.rule, "remedy": error.remedy}}
