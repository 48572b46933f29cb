"""examples/server.py: what it trains is exact, and no request harms another one or ends the server."""

from __future__ import annotations

import copy
import http.client
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

import server
import server_client
import server_front
from penstock import AutoPipeline
from penstock.errors import BatchError, ConfigError, PeerLostError
from server import Calls, limits_of, read_token, serve
from server_client import Client, ServerError
from server_front import Front
from server_queue import Connections, Job, Requests
from server_requests import Limits
from support.pool import Pool
from support.refusals import refuses
from support.tiny import QWEN3

TOKEN = "a token of sixteen letters"
ROWS = [{"input_ids": [[1, 2, 3, 4, 5]]}]
FILE = Path(server.__file__)


class Served:
    """A server whose ranks all live in this process, and a client of it."""

    def __init__(self, front: Front, calls: Calls) -> None:
        self.front, self.calls, self.port = front, calls, front.server_port
        self.url = f"http://127.0.0.1:{self.port}"
        self.client = Client(self.url, TOKEN, timeout=30)

    def loss(self) -> float:
        return float(self.client.call("forward", microbatches=ROWS)["loss"])

    def connect(self, address: str = "127.0.0.1") -> socket.socket:
        """A connection from an address of the loopback, which has many."""
        return socket.create_connection(("127.0.0.1", self.port), 20, source_address=(address, 0))

    def send(self, request: bytes, address: str = "127.0.0.1") -> bytes:
        """The whole answer to raw bytes. After a request that is not whole, the connection's end follows."""
        with self.connect(address) as connection:
            connection.sendall(request)
            begun = connection.recv(1 << 16) if is_whole(request) else b""
            with suppress(OSError):  # it may have ended by now
                connection.shutdown(socket.SHUT_WR)
            return begun + b"".join(iter(lambda: connection.recv(1 << 16), b""))


def is_whole(request: bytes) -> bool:
    """Whether a POST has all the bytes that it promises."""
    head, _, body = request.partition(b"\r\n\r\n")
    length = re.search(rb"^Content-Length: (\d{1,9})$", head, re.MULTILINE)
    return head.startswith(b"POST /") and length is not None and int(length[1]) == len(body)


@contextmanager
def fronted(calls: Calls, **limits: int) -> Iterator[Front]:
    allowed = limits_of(calls.pipe, 4096)._replace(**limits)
    with Front(("127.0.0.1", 0), TOKEN, allowed, calls.facts) as front:
        yield front


@contextmanager
def served(
    folder: Path, schedule: str = "1f1b", ends_with: type[Exception] | None = None, **limits: int
) -> Iterator[Served]:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**QWEN3))
    calls = Calls(AutoPipeline(ranks=2, schedule=schedule, microbatches=2, device="cpu").build(model), folder)
    with ThreadPoolExecutor() as threads, fronted(calls, **limits) as front:
        running = threads.submit(serve, calls, front)
        try:
            yield Served(front, calls)
        finally:
            front.stopping = True
            with nullcontext() if ends_with is None else pytest.raises(ends_with):
                running.result(timeout=20)
    calls.pipe.close()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """For tests that leave the model as it is."""
    with served(tmp_path_factory.mktemp("checkpoints"), tokens=512, new_tokens=8) as running:
        yield running


# ---- what it trains


def drawn(seed: int) -> list[dict[str, list[list[int]]]]:
    """Microbatches of any number and length, with labels left out at random."""
    rng = random.Random(seed)
    made = []
    for _ in range(rng.randint(1, 5)):
        rows, length = rng.randint(1, 3), rng.randint(2, 24)
        ids = [rng.choices(range(256), k=length) for _ in range(rows)]
        made.append(
            {"input_ids": ids, "labels": [[t if rng.random() < 0.7 else -100 for t in r] for r in ids]}
        )
    made[0]["labels"][0][1] = 7
    return made


def call_at_once(clients: list[Client], seeds: list[int]) -> list[dict[str, Any]]:
    """A forward-backward call of each client, at one time."""
    with ThreadPoolExecutor() as threads:
        asked = [
            threads.submit(client.call, "forward_backward", microbatches=drawn(seed))
            for client, seed in zip(clients, seeds, strict=True)
        ]
        return [each.result() for each in asked]


# norms of qwen3 compute in float32 whatever the dtype; its embedding is the head's weight too
GPT2 = {"model_type": "gpt2", "vocab_size": 256, "n_embd": 16, "n_layer": 4, "n_head": 2, "n_positions": 64,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}  # fmt: skip
STEPS = [[1, 2, 3], [4, 5]]  # the seeds of the calls before each optimizer step


def two_clients(url: str) -> list[float]:
    """Two clients train together: the mean loss of each step."""
    clients, losses = [Client(url, TOKEN, 60), Client(url, TOKEN, 60)], []
    for seeds in STEPS:
        answers = [clients[0].call("forward_backward", microbatches=drawn(seed)) for seed in seeds[2:]]
        answers += call_at_once(clients, seeds[:2])
        tokens = sum(each["tokens"] for each in answers)
        losses.append(sum(each["loss"] * each["tokens"] for each in answers) / tokens)
        update = clients[1].call("optimizer_step", learning_rate=1e-2, max_norm=0.5)
        assert update["tokens"] == tokens
    return losses


def plain(model: Any) -> list[float]:
    """The same steps of the same rows, in plain torch."""
    optimizer, losses = torch.optim.AdamW(model.parameters()), []
    for seeds in STEPS:
        total, tokens = torch.zeros(()), 0
        for microbatch in (each for seed in seeds for each in drawn(seed)):
            logits = model(torch.tensor(microbatch["input_ids"])).logits[:, :-1].flatten(0, 1)
            labels = torch.tensor(microbatch["labels"])[:, 1:].flatten()
            total = total + torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
            tokens += int((labels != -100).sum())
        losses.append(float(total.detach()) / tokens)
        torch.autograd.backward(total / tokens)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.param_groups[0]["lr"] = 1e-2
        optimizer.step()
        optimizer.zero_grad()
    return losses


def exact(ranks: int, schedule: str, folder: Path) -> None:
    """Every parameter after two steps of two clients is that of one plain process."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**GPT2)).double()
    before = copy.deepcopy(model.state_dict())
    pipe = AutoPipeline(
        ranks=ranks, schedule=schedule, microbatches=2, head_weight=1, device="cpu", timeout=30
    ).build(model)
    calls, losses = Calls(pipe, folder), [0.0]
    expected = plain(model)
    if pipe.processes.index > 0:
        serve(calls, None)
    else:
        with ThreadPoolExecutor() as threads, fronted(calls) as front:
            asked = threads.submit(two_clients, f"http://127.0.0.1:{front.server_port}")
            asked.add_done_callback(lambda _: setattr(front, "stopping", True))
            serve(calls, front)
            losses = asked.result()
        assert losses == pytest.approx(expected, rel=1e-12)
    weights = dict(model.named_parameters())
    for name, parameter in pipe.named_parameters():
        moved = (weights[name] - before[name]).abs().max()
        assert moved > 1e-3
        assert (parameter - weights[name]).abs().max() <= 1e-10 * weights[name].abs().max(), name
    pipe.close()


@pytest.mark.parametrize("schedule", [pytest.param("1f1b", marks=pytest.mark.sweep), "zb_v"])
def test_two_clients_train_as_one_plain_process(schedule: str, tmp_path: Path) -> None:
    exact(2, schedule, tmp_path)


def test_two_clients_train_as_one_plain_process_over_two_ranks(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, exact, 2, "1f1b", tmp_path)


def test_a_call_that_fails_halfway_leaves_the_gradients_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(tmp_path) as running:
        running.client.call("forward_backward", microbatches=ROWS)
        step = running.calls.pipe.step

        def fails(*arguments: Any, **keywords: Any) -> None:
            step(*arguments, **keywords)
            raise BatchError("a batch", "it is refused halfway", "Give another")

        with monkeypatch.context() as patch:
            patch.setattr(running.calls.pipe, "step", fails)
            with refuses(ServerError, "a batch"):
                running.client.call("forward_backward", microbatches=drawn(1))
        gradients = [each.clone() for each in running.calls.sums if each is not None]
        assert running.client.call("status")["pending"] == {"calls": 1, "tokens": 4}
        running.client.call("optimizer_step", learning_rate=0.0)
        running.client.call("forward_backward", microbatches=ROWS)
        again = [each for each in running.calls.sums if each is not None]
        assert all(map(torch.equal, gradients, again))


def test_what_is_not_finite_is_refused_and_a_checkpoint_mends_it(tmp_path: Path) -> None:
    with served(tmp_path) as running:
        loss = running.loss()
        running.client.call("save", name="good")
        with torch.no_grad():
            next(running.calls.pipe.parameters()).fill_(float("nan"))
        for call in ("forward", "forward_backward"):
            with refuses(ServerError, rule="finite numbers") as refused:
                running.client.call(call, microbatches=ROWS)
            assert refused.value.status == 500
        assert running.client.call("status")["pending"] == {"calls": 0, "tokens": 0}
        running.client.call("load", name="good")
        assert running.loss() == loss


def test_a_checkpoint_has_the_optimizer_and_its_name_is_taken_once(tmp_path: Path) -> None:
    def step(client: Client) -> None:
        client.call("forward_backward", microbatches=drawn(1))
        client.call("optimizer_step", learning_rate=1e-2)

    with served(tmp_path) as running:
        client = running.client
        step(client)
        assert client.call("save", name="one")["steps"] == 1
        step(client)
        loss = running.loss()
        client.call("forward_backward", microbatches=ROWS)  # of the weights before `load`
        assert client.call("load", name="one") == {"steps": 1}
        assert client.call("status")["pending"]["calls"] == 0
        step(client)
        assert running.loss() == loss
        with refuses(ServerError, "name='one'"):
            client.call("save", name="one")
        with refuses(ServerError, "none"):
            client.call("load", name="none")
        assert running.loss() == loss
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "one").config.model_type == "qwen3"


@pytest.mark.parametrize("kind", ["model", "random"])
def test_an_altered_checkpoint_is_refused_before_anything_changes(tmp_path: Path, kind: str) -> None:
    """Weights became NaN, for all clients: the library finds the altered byte while it reads."""
    with served(tmp_path) as running:
        running.client.call("save", name="one")
        path = next((tmp_path / "one").glob(f"{kind}*.safetensors"))
        content = bytearray(path.read_bytes())
        content[-9] ^= 1
        path.write_bytes(content)
        running.client.call("forward_backward", microbatches=ROWS)
        loss = running.loss()
        with refuses(ServerError, rule="contents differ"):
            running.client.call("load", name="one")
        assert running.loss() == loss
        assert running.client.call("status")["pending"]["calls"] == 1


def test_greedy_samples_are_those_of_transformers(shared: Served) -> None:
    prompts = [[1, 2, 3], [9], [7, 7, 7, 7, 7]]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**QWEN3))
    made = shared.client.call("sample", prompts=prompts, max_tokens=6)["tokens"]
    for prompt, tokens in zip(prompts, made, strict=True):
        ids = torch.tensor([prompt])
        expected = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False, pad_token_id=0
        )
        assert [*prompt, *tokens] == expected[0].tolist()
    stopped = shared.client.call("sample", prompts=prompts, max_tokens=6, stop=[made[0][2]])["tokens"]
    assert stopped[0] == made[0][: made[0].index(made[0][2]) + 1]


def test_a_sample_follows_from_its_seed_and_its_temperature(shared: Served) -> None:
    def sample(**changed: Any) -> Any:
        asked = {"prompts": [[1, 2, 3]], "max_tokens": 8, "temperature": 1.0, "seed": 1, **changed}
        return shared.client.call("sample", **asked)["tokens"][0]

    first = sample()
    assert sample() == first
    assert sample(seed=2) != first
    greedy = sample(temperature=0.0)
    assert set(greedy) != {0}
    for nearly in (1e-9, 1e-45, 1e-309, 5e-324):  # over the last two, float32 divides by 0: token 0 always
        assert sample(temperature=nearly) == greedy


def test_a_sample_draws_from_the_whole_vocabulary(shared: Served) -> None:
    """At temperature 1 it is transformers' own draw; near 100 every token is about as likely as any other."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**QWEN3))
    ids = torch.tensor([[1, 2, 3]])
    torch.manual_seed(5)
    expected = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=True, pad_token_id=0, top_k=0
    )
    made = shared.client.call("sample", prompts=ids.tolist(), max_tokens=8, temperature=1.0, seed=5)["tokens"]
    assert [*ids[0].tolist(), *made[0]] == expected[0].tolist()
    hot = [{"prompts": [[1]] * 8, "max_tokens": 8, "temperature": 100.0, "seed": seed} for seed in range(4)]
    drawn = [
        token for asked in hot for row in shared.client.call("sample", **asked)["tokens"] for token in row
    ]
    assert (
        len(set(drawn)) > 150
    )  # of 256 tokens in 256 draws 162 on average; the likeliest 50 alone are too few


def test_weights_that_are_not_finite_do_not_end_the_server(tmp_path: Path) -> None:
    with served(tmp_path) as running:
        with torch.no_grad():
            next(running.calls.pipe.parameters()).fill_(float("nan"))
        assert len(running.client.call("sample", prompts=[[1]], temperature=1.0)["tokens"][0]) == 16
        assert running.client.call("status")["steps"] == 0


# ---- what it refuses


def post(
    call: str, body: bytes, *, token: str = TOKEN, length: str = "", kind: str = "application/json"
) -> bytes:
    lines = [
        f"POST /{call} HTTP/1.1",
        "Host: here",
        f"Authorization: Bearer {token}",
        f"Content-Type: {kind}",
    ]
    lines.append(f"Content-Length: {length or len(body)}")
    return "\r\n".join([*lines, "", ""]).encode() + body


def batch(**changed: Any) -> bytes:
    return json.dumps({"microbatches": [{"input_ids": [[1, 2, 3]], **changed}]}).encode()


GOOD = batch()
DEEP = b'{"microbatches":' + b"[" * 10_000
BAD: list[tuple[int, bytes, str]] = [
    # HTTP
    (400, b"nonsense\r\n\r\n", "Bad request"),
    (400, b"GET /status HTTP/9.9.9\r\n\r\n", "Bad request version"),
    (501, b"DELETE /status HTTP/1.1\r\n\r\n", "Unsupported method"),
    (414, b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n", "Too Long"),
    (431, b"GET /status HTTP/1.1\r\n" + b"a: b\r\n" * 200 + b"\r\n", "headers"),
    (401, b"GET /status HTTP/1.1\r\n\r\n", "token"),
    (401, post("forward", GOOD, token=TOKEN[:-1]), "token"),
    (401, post("forward", GOOD, token="\xff\N{SNOWMAN}"), "token"),
    (401, post("nowhere", GOOD, token=""), "token"),
    (404, post("nowhere", GOOD), "POST /forward"),
    (404, post("status", GOOD), "/status"),
    (404, post("_forget_gradients", b"{}"), "no such call"),
    (404, post("../forward", GOOD), "no such call"),
    (415, post("forward", GOOD, kind="text/plain"), "application/json"),
    (411, post("forward", GOOD, length="-1"), "Content-Length"),
    (411, post("forward", GOOD, length="9" * 5000), "Content-Length"),
    (413, post("forward", GOOD, length="1000000000"), "at most"),
    (413, post("forward", b" " * 100_000 + GOOD), "at most"),
    # JSON
    (400, post("forward", b""), "Invalid JSON"),
    (400, post("forward", GOOD[:-2]), "Invalid JSON"),
    (400, post("forward", b"\xff\xfe" + GOOD), "Invalid JSON"),
    (400, post("forward", DEEP), "recursion"),
    (400, post("forward", b"[]"), "object"),
    (400, post("forward", b"{}"), "Field required"),
    (400, post("forward", GOOD[:-1] + b', "more": 1}'), "not permitted"),
    (400, post("optimizer_step", b'{"learning_rate": NaN}'), "finite"),
    (400, post("optimizer_step", b'{"learning_rate": 1e999}'), "finite"),
    (400, post("optimizer_step", b'{"learning_rate": -1}'), "greater than or equal to 0"),
    (400, post("optimizer_step", b'{"learning_rate": "1"}'), "number"),
    (400, post("optimizer_step", b'{"learning_rate": 0.1, "max_norm": 0}'), "greater than 0"),
    (400, post("optimizer_step", b'{"learning_rate": 0.1}'), "Call forward_backward first"),
    # batches
    (400, post("forward", b'{"microbatches": []}'), "without a label"),
    (400, post("forward", batch(input_ids=[])), "0 rows"),
    (400, post("forward", batch(input_ids=[[]])), "has a token"),
    (400, post("forward", batch(input_ids=[[1, 2], [3]])), "of one length"),
    (400, post("forward", batch(input_ids=[[1, 2.0]])), "integer"),
    (400, post("forward", batch(input_ids=[[1, True]])), "integer"),
    (400, post("forward", batch(input_ids=[[1, 256]])), "from 0 to 255"),
    (400, post("forward", batch(input_ids=[[1, -1]])), "from 0 to 255"),
    (400, post("forward", batch(input_ids=[[1, 10**30]])), "from 0 to 255"),
    (400, post("forward", batch(labels=[[1, 2]])), "of one length"),
    (400, post("forward", batch(labels=[])), "0 rows"),
    (400, post("forward", batch(labels=[[1, 2, -1]])), "or -100"),
    (400, post("forward_backward", batch(labels=[[1, -100, -100]])), "without a label"),
    (400, post("forward_backward", batch(input_ids=[[1] * 65])), "64 positions"),
    (400, post("forward_backward", batch(input_ids=[[1] * 60] * 9)), "512 tokens"),
    (400, post("forward", json.dumps({"microbatches": [{"input_ids": [[1, 2]]}] * 65}).encode()), "64 mi"),
    # samples and names
    (400, post("sample", b'{"prompts": []}'), "0 rows"),
    (400, post("sample", b'{"prompts": [[1, 256]]}'), "from 0 to 255"),
    (400, post("sample", b'{"prompts": [[1]], "stop": [3, 256]}'), "stop with 256"),
    (400, post("sample", b'{"prompts": [[1]], "max_tokens": 9}'), "8 at most"),
    (400, post("sample", b'{"prompts": [[1]], "max_tokens": 0}'), "greater than or equal to 1"),
    (400, post("sample", json.dumps({"prompts": [[1] * 60]}).encode()), "8 at most"),
    (400, post("sample", json.dumps({"prompts": [[1] * 60], "max_tokens": 5}).encode()), "64 positions"),
    (400, post("sample", b'{"prompts": [[1]], "temperature": -1}'), "greater than or equal to 0"),
    (400, post("save", b'{"name": "../../etc"}'), "pattern"),
    (400, post("save", b'{"name": "a/b"}'), "pattern"),
    (400, post("save", b'{"name": ".."}'), "pattern"),
    (400, post("save", b'{"name": "a\\n"}'), "pattern"),
    (400, post("load", b'{"name": ""}'), "pattern"),
    (400, post("load", b'{"name": "missing"}'), "missing"),
]  # fmt: skip


def answer_of(raw: bytes) -> tuple[int, dict[str, Any]]:
    head, _, body = raw.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


@pytest.mark.parametrize(("status", "request_", "words"), BAD)
def test_a_bad_request_is_answered(shared: Served, status: int, request_: bytes, words: str) -> None:
    found, answer = answer_of(shared.send(request_))
    assert found == status, answer
    assert answer["error"].keys() == {"type", "value", "rule", "remedy"}
    assert words in " ".join(answer["error"].values())
    assert len(json.dumps(answer)) < 1000  # it does not send back what it was sent
    assert shared.client.call("status")["pending"] == {"calls": 0, "tokens": 0}


def test_bad_requests_leave_the_model_as_it_was(shared: Served) -> None:
    loss = shared.loss()
    with ThreadPoolExecutor(16) as threads:
        list(threads.map(shared.send, [request for _, request, _ in BAD]))
    assert shared.loss() == loss


def test_a_number_of_microbatches_that_the_schedule_refuses_is_answered(tmp_path: Path) -> None:
    with served(tmp_path, "dualpipe") as running:
        with refuses(ServerError, "microbatches=3") as refused:
            running.client.call("forward_backward", microbatches=ROWS * 3)
        assert (refused.value.status, refused.value.type) == (400, "ConfigError")
        assert running.client.call("forward_backward", microbatches=ROWS * 4)["tokens"] == 16


def test_clients_that_go_away_are_forgotten(shared: Served) -> None:
    loss = shared.loss()
    for cut in (1, 20, 150, -10):  # within its headers, and its body
        with socket.create_connection(("127.0.0.1", shared.port)) as connection:
            connection.sendall(post("forward", GOOD)[:cut])
    assert shared.send(post("forward", GOOD, length=str(len(GOOD) + 5))) == b""
    with socket.create_connection(("127.0.0.1", shared.port)) as connection:  # while it waits
        connection.sendall(post("forward", GOOD))
    assert shared.loss() == loss


@pytest.mark.parametrize(
    ("limit", "start"),
    [("HEADERS", b""), ("HEADERS", b"GET /sta"), ("BODY", post("forward", GOOD)[:-10])],
    ids=["nothing", "half a line", "half a body"],
)
def test_a_client_that_sends_slowly_is_cut_off(
    shared: Served, monkeypatch: pytest.MonkeyPatch, limit: str, start: bytes
) -> None:
    monkeypatch.setattr(server_front, limit, 0.3)
    with shared.connect() as connection:
        connection.sendall(start)
        connection.recv(1 << 16)  # it ends, and the client did not end it
    assert shared.loss() > 0


def test_a_client_that_sends_a_byte_now_and_then_is_cut_off(
    shared: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A time limit for each read alone never ends such a request."""
    monkeypatch.setattr(server_front, "HEADERS", 0.5)
    began = time.monotonic()
    with shared.connect() as connection, suppress(OSError):
        while time.monotonic() - began < 10:
            connection.sendall(b"GET /status HTTP/1.1\r\n"[:1])
            time.sleep(0.05)
    assert time.monotonic() - began < 5


def hold(
    running: Served, monkeypatch: pytest.MonkeyPatch
) -> tuple[threading.Event, threading.Event, list[int]]:
    """Have `forward` wait: events of its start and for its end, and the first token of each call so far."""
    begun, may_end, seen = threading.Event(), threading.Event(), list[int]()

    def forward(microbatches: Any) -> dict[str, Any]:
        seen.append(microbatches[0]["input_ids"][0][0])
        begun.set()
        assert may_end.wait(20)
        return {}

    monkeypatch.setattr(running.calls, "forward", forward)
    return begun, may_end, seen


def queued(running: Served, count: int) -> bool:
    return bool(running.front.status()["queued"] == count)


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_requests_run_in_the_order_of_arrival_and_status_answers_at_once(
    shared: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_end, seen = hold(shared, monkeypatch)
    count = server_front.QUEUE + 1
    with ThreadPoolExecutor(count) as threads:
        asked = []
        for number in range(count):
            asked.append(threads.submit(shared.send, post("forward", batch(input_ids=[[number, 1]]))))
            wait_for(begun.is_set)
            wait_for(partial(queued, shared, number))
        status = shared.client.call("status")
        assert (status["busy"], status["queued"]) == ("forward", count - 1)
        found, answer = answer_of(shared.send(post("forward", GOOD)))
        assert (found, answer["error"]["value"]) == (503, "a full queue")
        may_end.set()
        assert {answer_of(each.result())[0] for each in asked} == {200}
    assert seen == list(range(count))


def test_clients_that_left_cost_no_step(shared: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """0.5.0: nine of ten such requests were computed, one after the other, for nobody."""
    begun, may_end, seen = hold(shared, monkeypatch)
    with ThreadPoolExecutor() as threads:
        first = threads.submit(shared.send, post("forward", batch(input_ids=[[1, 1]])))
        wait_for(begun.is_set)
        leaving = [shared.connect() for _ in range(10)]
        for connection in leaving:
            connection.sendall(post("forward", batch(input_ids=[[2, 1]])))
        wait_for(partial(queued, shared, 10))
        stays = threads.submit(shared.send, post("forward", batch(input_ids=[[3, 1]])))
        wait_for(partial(queued, shared, 11))
        for connection in leaving:
            connection.close()
        wait_for(partial(queued, shared, 1))  # others may have their places at once
        may_end.set()
        assert answer_of(first.result())[0] == answer_of(stays.result())[0] == 200
    assert seen == [1, 3]


def test_a_client_that_leaves_as_its_turn_comes_costs_no_step() -> None:
    """Before anyone has looked whether it is still there."""
    ours, theirs = socket.socketpair()
    requests, answer = Requests(1), Future[dict[str, Any]]()
    with ours:
        requests.put(Job("forward", {}, ours, answer))
        theirs.close()
        assert requests.take(0.0) is None
    assert answer.cancelled()


def test_slow_connections_of_one_address_leave_room_for_others(shared: Served) -> None:
    """0.5.0: 80 of them shut every other client out. Here more than all may have."""
    with ExitStack() as stack:
        for _ in range(300):
            stack.enter_context(shared.connect()).send(b"P")
        status, answer = answer_of(shared.send(post("forward", batch()), "127.0.0.2"))
    assert (status, answer["tokens"]) == (200, 2)
    wait_for(lambda: works(shared.loss))


def test_64_connections_of_one_address_are_all_answered(shared: Served) -> None:
    """And no more at a time; they come back as connections end."""
    request = f"GET /status HTTP/1.1\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode()
    with ExitStack() as stack:
        opened = [stack.enter_context(shared.connect()) for _ in range(64)]
        assert not works(shared.loss)  # closed without an answer
        for connection in opened:
            connection.sendall(request)
        assert all(connection.recv(1 << 16).startswith(b"HTTP/1.0 200 ") for connection in opened)
    wait_for(lambda: works(shared.loss))


def test_connections_of_all_addresses_are_limited() -> None:
    connections = Connections(most=3, of_address=2)
    opened = [socket.socket() for _ in range(4)]
    admitted = [connections.admit(each, at) for each, at in zip(opened, "aaab", strict=True)]
    assert admitted == [True, True, False, True]
    assert not connections.admit(opened[2], "c")
    connections.end(opened[0])
    assert connections.admit(opened[2], "c")
    for each in opened:
        each.close()


def works(call: Callable[[], object]) -> bool:
    try:
        call()
    except (OSError, http.client.HTTPException):
        return False
    return True


def test_an_error_of_one_rank_ends_the_server_and_answers_who_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(tmp_path, ends_with=PeerLostError) as running:

        def lost(microbatches: Any) -> None:
            raise PeerLostError("rank 0 waiting for rank 1", "it is gone", "See why")

        monkeypatch.setattr(running.calls, "forward", lost)
        with ThreadPoolExecutor() as threads:
            asked = threads.submit(running.client.call, "forward", microbatches=ROWS)
            wait_for(lambda: running.front.status()["busy"] == "forward")
            running.front.__exit__()
            with refuses(ServerError, "a server that ends") as refused:
                asked.result()
        assert refused.value.status == 503


# ---- at random

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just(-100),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(
        ["microbatches", "input_ids", "labels", "prompts", "max_tokens", "name", "learning_rate", "x"]
    ), inner, max_size=3), max_leaves=12,
)  # fmt: skip
FIELDS = {
    "forward": {"microbatches": [{"input_ids": [[1, 2, 3], [4, 5, 6]], "labels": [[1, -100, 3], [4, 5, 6]]}]},
    "sample": {"prompts": [[1, 2], [3]], "max_tokens": 2, "temperature": 1.0, "seed": 3, "stop": [4]},
    "load": {"name": "missing"},
    "optimizer_step": {"learning_rate": 0.1, "max_norm": 1.0},
}  # fmt: skip


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """A good request with one of its values replaced, and perhaps with bytes changed."""
    call = draw(st.sampled_from(sorted(FIELDS)))
    body: Any = copy.deepcopy(FIELDS[call])
    place = body
    while True:
        key = draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
        if not isinstance(place[key], dict | list) or not place[key] or draw(st.booleans()):
            break
        place = place[key]
    place[key] = draw(JSON)
    raw = bytearray(post(call, json.dumps(body).encode()))
    for _ in range(draw(st.sampled_from([0, 0, 1, 3]))):
        raw[draw(st.integers(0, len(raw) - 1))] = draw(st.integers(0, 255))
    return bytes(raw)


REQUESTS = mutated() | st.binary(max_size=64) | st.builds(
    lambda call, tree: post(call, json.dumps(tree).encode()), st.sampled_from(sorted(FIELDS)), JSON
)  # fmt: skip
CHECKS = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


def check_any_request(running: Served, request: bytes, loss: float) -> None:
    raw = running.send(request)
    if raw:  # nothing comes for a request that ends early
        status, answer = answer_of(raw)
        assert status == 200 or answer["error"].keys() == {"type", "value", "rule", "remedy"}
        assert status != 500
    assert running.client.call("status")["pending"] == {"calls": 0, "tokens": 0}
    assert running.loss() == loss


@settings(max_examples=30, deadline=None, suppress_health_check=CHECKS, derandomize=True)
@given(request_=REQUESTS)
def test_any_request_leaves_the_server_as_it_was(shared: Served, request_: bytes) -> None:
    check_any_request(shared, request_, shared.loss())


@pytest.mark.sweep
@settings(max_examples=600, deadline=None, suppress_health_check=CHECKS, database=None)
@given(request_=REQUESTS)
def test_any_request_leaves_the_server_as_it_was_at_length(shared: Served, request_: bytes) -> None:
    check_any_request(shared, request_, shared.loss())


# ---- around it


def test_a_token_is_made_once_for_its_owner_alone(tmp_path: Path) -> None:
    file = tmp_path / "token"
    token = read_token(file)
    assert len(token) > 40
    assert file.stat().st_mode & 0o777 == 0o600
    assert read_token(file) == token
    file.write_text("short")
    with refuses(ConfigError, str(file), "16 ASCII"):
        read_token(file)


def test_a_port_that_is_taken_is_one_error(shared: Served) -> None:
    with refuses(ConfigError, f"port {shared.port}", remedy="--port"):
        Front(("127.0.0.1", shared.port), TOKEN, Limits(1, 1), dict)


def test_without_a_token_everyone_is_answered(shared: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared.front, "token", None)
    assert Client(shared.url).call("status")["ranks"] == 2


def test_the_client_teaches_the_model_to_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "token").write_text(TOKEN)
    with served(tmp_path) as running:
        options = ["--url", running.url, "--token-file", str(tmp_path / "token"), "--steps", "2"]
        monkeypatch.setattr(sys, "argv", ["server_client.py", *options])
        server_client.main()
        assert running.calls.steps == 2
    assert re.search(
        r"step 0: loss 5\.\d+, gradient norm .*\nafter 40 41 42: \[(\d+, ){7}\d+\]", capsys.readouterr().out
    )


@contextmanager
def started(folder: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], Client]]:
    """The server as its users start it. Whatever it started is gone at the end."""
    command = [sys.executable, str(FILE), "--ranks", "2", "--port", "0", *options]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"http://127.0.0.1:\d+", line)
        assert found is not None, process.communicate(timeout=30)
        yield process, Client(found[0], (folder / "server-token").read_text(), timeout=60)
    finally:
        process.kill()
        process.communicate()


def ranks_of(process: subprocess.Popen[str]) -> list[int]:
    """The processes of its ranks, which run in the folder of the test."""
    found, folder = [], os.readlink(f"/proc/{process.pid}/cwd")
    for each in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            in_folder = os.readlink(each / "cwd") == folder and int(each.name) != process.pid
            found += [int(each.name)] if in_folder and b"server.py" in (each / "cmdline").read_bytes() else []
    assert len(found) == 2
    return sorted(found)


@pytest.mark.sweep
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_end_it_and_leave_no_rank(number: signal.Signals, code: int, tmp_path: Path) -> None:
    with started(tmp_path) as (process, client):
        ranks = ranks_of(process)
        assert client.call("forward", microbatches=ROWS)["tokens"] == 4
        process.send_signal(number)
        _, errors = process.communicate(timeout=30)
    assert process.returncode in (0, code)  # 0 where all ranks ended before the launcher looked
    assert len(errors.splitlines()) <= 1
    assert not any(Path(f"/proc/{rank}").exists() for rank in ranks)


@pytest.mark.sweep
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_it_in_one_process(number: signal.Signals, tmp_path: Path) -> None:
    with started(tmp_path, "--one-process") as (process, client):
        assert client.call("forward", microbatches=ROWS)["tokens"] == 4
        process.send_signal(number)
        assert process.communicate(timeout=30)[1] == ""
    assert process.returncode == 0


@pytest.mark.sweep
def test_a_rank_that_dies_ends_it_with_the_summary(tmp_path: Path) -> None:
    with started(tmp_path) as (process, client):
        ranks = ranks_of(process)
        assert client.call("forward", microbatches=ROWS)["tokens"] == 4
        os.kill(ranks[1], signal.SIGKILL)
        _, errors = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "penstock: error: rank " in errors
    assert "SIGKILL" in errors
    assert not any(Path(f"/proc/{rank}").exists() for rank in ranks)
