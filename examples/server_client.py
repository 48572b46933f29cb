"""A client of examples/server.py, with nothing but the standard library.

    python examples/server_client.py --url http://127.0.0.1:8765 --token-file server-token

It teaches the server's small model to count, and then lets it continue a row.
"""

from __future__ import annotations

import argparse
import json
import random
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen


class ServerError(Exception):
    """A refused request: the HTTP `status`, and the error's type, value, rule and remedy."""

    def __init__(self, status: int, type: str, value: str, rule: str, remedy: str) -> None:
        super().__init__(f"{value}: {rule}. {remedy}")
        self.status, self.type, self.value, self.rule, self.remedy = status, type, value, rule, remedy


class Client:
    def __init__(self, url: str, token: str | None = None, timeout: float = 600.0) -> None:
        """timeout: seconds for an answer, which comes after those of all earlier requests"""
        self._url, self._timeout = url, timeout
        self._headers = {"Content-Type": "application/json"}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"

    def call(self, name: str, /, **arguments: Any) -> dict[str, Any]:
        """Call by name; `status` takes no arguments. Raises ServerError."""
        body = None if name == "status" else json.dumps(arguments).encode()
        try:
            with urlopen(
                Request(f"{self._url}/{name}", body, self._headers), timeout=self._timeout
            ) as answer:
                return dict(json.load(answer))
        except HTTPError as refused:
            with refused:
                raise ServerError(HTTPStatus(refused.code), **json.load(refused)["error"]) from None


def counting(rng: random.Random) -> list[dict[str, list[list[int]]]]:
    """A random number of microbatches, of rows of random length that count up."""
    return [
        {"input_ids": [[*range(start, start + length)] for start in rng.sample(range(100), 4)]}
        for length in rng.choices(range(8, 32), k=rng.randint(1, 4))
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the model of a server.")
    parser.add_argument("--url", default="http://127.0.0.1:8765")
    parser.add_argument("--token-file", type=Path, default=Path("server-token"))
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    client = Client(options.url, options.token_file.read_text().strip())
    rng = random.Random(0)
    for step in range(options.steps):
        for _ in range(2):  # two calls, and their gradients add up
            answer = client.call("forward_backward", microbatches=counting(rng))
        update = client.call("optimizer_step", learning_rate=3e-3, max_norm=1.0)
        if step % 20 == 0:
            print(f"step {step}: loss {answer['loss']:.3f}, gradient norm {update['norm']:.3f}")
    made = client.call("sample", prompts=[[40, 41, 42]], max_tokens=8)
    print(f"after 40 41 42: {made['tokens'][0]}")


if __name__ == "__main__":
    main()
