"""A stand-in for the Hugging Face Hub: an HTTP server on the loopback that serves models from memory."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants


def files_in(folder: Path) -> dict[str, bytes]:
    return {
        file.relative_to(folder).as_posix(): file.read_bytes() for file in folder.rglob("*") if file.is_file()
    }


@dataclass
class Hub:
    """Models by name: their commits by revision, and the files of each commit.

    refused: status and error code by name, as of a model that is gated
    stalled: files of which half is sent, and then nothing until `go_on` is set; reached: set by then
    asked: what was requested: method and path
    """

    revisions: dict[str, dict[str, str]] = field(default_factory=dict)
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refused: dict[str, tuple[int, str]] = field(default_factory=dict)
    stalled: set[str] = field(default_factory=set)
    broken: set[str] = field(default_factory=set)
    reached: threading.Event = field(default_factory=threading.Event)
    go_on: threading.Event = field(default_factory=threading.Event)
    asked: list[str] = field(default_factory=list)
    url: str = ""

    def add(self, name: str, files: dict[str, bytes], revision: str = "main") -> str:
        """A commit of these files, which `revision` stands for from now on."""
        content = json.dumps([(file, hashlib.sha1(held).hexdigest()) for file, held in sorted(files.items())])
        commit = hashlib.sha1(f"{name} {content}".encode()).hexdigest()
        self.commits[commit] = files
        self.revisions.setdefault(name, {})[revision] = commit
        return commit

    @property
    def fetched(self) -> list[str]:
        """The names of the files that were sent, in order."""
        return sorted(path.rpartition("/")[2] for method, path in map(str.split, self.asked)
                      if method == "GET" and "/resolve/" in path)  # fmt: skip

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body for a path."""
        parts = [unquote(part) for part in urlsplit(path).path.strip("/").split("/")]
        name = "/".join(parts[2:4] if parts[:2] == ["api", "models"] else parts[:2])
        rest = parts[4:] if parts[:2] == ["api", "models"] else parts[2:]
        if name in self.refused:
            status, code = self.refused[name]
            return status, {"X-Error-Code": code} if code else {}, b"{}"
        if name not in self.revisions:
            return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"
        what, revision, *inner = [*rest, "main"] if len(rest) < 2 else rest
        commit = self.revisions[name].get(revision, revision)
        if commit not in self.commits:
            return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
        files, headers = self.commits[commit], {"X-Repo-Commit": commit}
        if what == "revision":
            listed = [{"rfilename": file} for file in files]
            return 200, headers, json.dumps({"id": name, "sha": commit, "siblings": listed}).encode()
        if what == "tree":
            tree = [{"type": "file", "path": file, "size": len(held), "oid": hashlib.sha1(held).hexdigest()}
                    for file, held in files.items()]  # fmt: skip
            return 200, headers, json.dumps(tree).encode()
        file = "/".join(inner)
        if file not in files:
            return 404, headers | {"X-Error-Code": "EntryNotFound"}, b""
        headers["ETag"] = f'"{hashlib.sha1(files[file]).hexdigest()}"'
        return 200, headers, files[file]


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """Serve `hub` at its `url`."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer()

        def do_HEAD(self) -> None:
            self._answer()

        def _answer(self) -> None:
            hub.asked.append(f"{self.command} {urlsplit(self.path).path}")
            status, headers, body = hub.answer(self.path)
            start = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").partition("-")[0])
            self.send_response(206 if start and status == 200 else status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body) - start))
            self.end_headers()
            if self.command == "GET":
                self._send(self.path.rpartition("/")[2], body[start:])

        def _send(self, file: str, body: bytes) -> None:
            if file in hub.broken | hub.stalled:
                self.wfile.write(body[: len(body) // 2])
                self.wfile.flush()
                hub.reached.set()
                if file in hub.stalled:
                    hub.go_on.wait(60)
                self.close_connection = True
                return
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield hub
    finally:
        hub.go_on.set()
        server.shutdown()
        server.server_close()
        thread.join()


def use(patch: pytest.MonkeyPatch, url: str, cache: Path, *, offline: bool = False) -> None:
    """Let huggingface_hub, which has read its environment by now, take this server and this cache."""
    patch.setattr(constants, "ENDPOINT", url)
    patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
    patch.setattr(constants, "HF_HUB_CACHE", str(cache))
    patch.setattr(constants, "HF_HUB_OFFLINE", offline)
