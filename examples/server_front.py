"""The HTTP front of examples/server.py, on rank 0: it puts the requests of all clients into one queue.

    a thread for each connection:   token -> size -> arguments -> queue, then it waits for the answer
    the main thread:                takes one request after the other, in the order of arrival

A connection carries one request. Its headers have HEADERS seconds to arrive and its body has BODY, so that a
client that sends slowly, or nothing, does not keep a thread; and one address has a part of the connections at
most. The answer to a wrong request is JSON: value, rule and remedy.
"""

from __future__ import annotations

import hmac
import json
import sys
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import Full
from socket import socket
from typing import Any

from penstock.errors import ConfigError, InputError, PenstockError
from server_queue import Connections, Job, Requests
from server_requests import CALLS, Limits, arguments_of

CONNECTIONS = 256  # at a time; more are closed at once
OF_ADDRESS = 64  # of them, from one address
QUEUE = 32  # requests that wait; status is answered also when it is full
HEADERS = 10.0  # seconds for the headers of a request to arrive
BODY = 30.0  # seconds for its body, and for its answer to be taken
IDLE = 0.5  # seconds after which `take` returns without a request
FORGOTTEN = 1 << 24  # bytes of a refused request that are read, so that its client reads the answer


class RequestError(PenstockError):
    """A request that is refused with an HTTP status."""

    def __init__(self, status: HTTPStatus, value: str, rule: str, remedy: str) -> None:
        super().__init__(value, rule, remedy)
        self.status = status


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
        self.connections = Connections(CONNECTIONS, OF_ADDRESS)
        self._requests = Requests(QUEUE)
        self._current: Job | None = None
        threading.Thread(target=self.serve_forever, args=(0.1,), name="front", daemon=True).start()

    def service_actions(self) -> None:
        """In the thread that accepts connections, every tenth of a second."""
        self.connections.cut_late()
        self._requests.drop_left()

    # ---- the main thread

    def take(self) -> Job | None:
        """The next request, or None after IDLE seconds without one."""
        self._current = None
        self._current = self._requests.take(IDLE)
        return self._current

    def __exit__(self, *error: object) -> None:
        waiting = self._requests.end()
        self.shutdown()
        for job in (self._current, *waiting):
            if job and not job.answer.done():
                job.answer.set_exception(ending())
        self.connections.wait_for_end(1)  # when the last answers have gone out
        self.server_close()

    # ---- the threads of connections

    def submit(self, call: str, arguments: dict[str, Any], connection: socket) -> dict[str, Any]:
        """Queue a request, wait, and return the answer. Raises what the call raises."""
        job = Job(call, arguments, connection, Future())
        try:
            self._requests.put(job)
            return job.answer.result()
        except Full:
            rule = f"{QUEUE} requests wait at most"
            raise RequestError(HTTPStatus.SERVICE_UNAVAILABLE, "a full queue", rule, "Try again") from None
        except CancelledError:
            if self._requests.ended:
                raise ending() from None
            raise ConnectionAbortedError("the client left while its request waited") from None

    def status(self) -> dict[str, Any]:
        job = self._current
        return {**self.facts(), "busy": job and job.call, "queued": len(self._requests)}

    def verify_request(self, request: Any, client_address: Any) -> bool:
        return self.connections.admit(request, client_address[0])

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.connections.end(request)

    def handle_error(self, *arguments: Any) -> None:
        if not isinstance(sys.exception(), OSError):  # a client that has gone away
            super().handle_error(*arguments)


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    server: Front
    server_version, sys_version = "penstock", ""
    default_request_version = "HTTP/1.0"  # of a first line that cannot be read: its answer has a head too
    timeout = BODY

    def setup(self) -> None:
        super().setup()
        self._expect(HEADERS)

    def _expect(self, seconds: float | None) -> None:
        self.server.connections.expect(self.connection, seconds)

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
        self._expect(None)
        return self.server.submit(call, arguments, self.connection)

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
        self._expect(BODY)
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
