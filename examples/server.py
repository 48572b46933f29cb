"""A training server: several clients train and sample one model, whose stages lie on several ranks.

    clients              rank 0                       every rank
    requests --HTTP-->   queue --gather(request)-->   the same call, one after the other
             <--------   the answer

    POST /forward_backward {"microbatches": [{"input_ids": [[5, 1, 7]], "labels": [[-100, 1, 7]]}, ...]}
    POST /optimizer_step   {"learning_rate": 1e-4, "max_norm": 1.0}
    POST /forward          {"microbatches": [...]}                 the loss alone
    POST /sample           {"prompts": [[5, 1]], "max_tokens": 16, "temperature": 0.6, "seed": 0, "stop": []}
    POST /save, /load      {"name": "step-100"}
    GET  /status

A call has any number of microbatches, each of any length. The gradients of all calls of all clients add up
until an optimizer_step, which divides them by all their tokens: it is a step on one batch with all rows.

    python examples/server.py --ranks 2                    # starts its ranks, or uses torchrun's
    python examples/server.py --ranks 2 --one-process      # all ranks in one process, good to debug in
    python examples/server_client.py                       # a client
"""

from __future__ import annotations

import argparse
import math
import os
import secrets
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoConfig

from penstock import AutoPipeline, Pipeline
from penstock.checkpoint.save_load import load_checkpoint, save_checkpoint
from penstock.errors import CheckpointError, ConfigError, PeerError, PenstockError, RunError
from penstock.launch.start import relaunch
from penstock.models.huggingface.generation import COLDEST
from penstock.models.weights.hashes import hashed_meanwhile
from server_front import Front
from server_requests import Limits

SMALL = {
    "model_type": "qwen3", "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
    "max_position_embeddings": 512, "tie_word_embeddings": False,
}  # fmt: skip


class Calls:
    """The calls of clients on a pipeline. Each rank has one, and all run the same calls in the same order.

    A PenstockError is raised on all ranks, and leaves weights and gradients as they were.
    """

    def __init__(self, pipe: Pipeline, folder: Path) -> None:
        """folder: for checkpoints, on a file system that all ranks share"""
        self.pipe, self.folder = pipe, folder
        self.parameters = list(pipe.parameters())
        self.optimizer = torch.optim.AdamW(self.parameters)
        self.steps = self.calls = self.tokens = 0  # the last two since the last optimizer step
        self.sums: list[Tensor | None] = [None] * len(self.parameters)  # of those calls' gradients

    def forward(self, microbatches: Sequence[dict[str, Any]]) -> dict[str, Any]:
        result = self.pipe.evaluate(as_batch(microbatches))
        check_finite(loss=result.loss)
        return {"loss": result.loss, "tokens": result.tokens}

    def forward_backward(self, microbatches: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Add the gradients of the loss's sum. They count only if the whole call succeeds."""
        try:
            result = self.pipe.step(as_batch(microbatches), total_tokens=1)
            norm = self.pipe.clip_grad_norm_(math.inf)  # clips nothing, but reads every gradient
            check_finite(loss=result.loss, norm=norm)
            for at, parameter in enumerate(self.parameters):
                if parameter.grad is not None:
                    before = self.sums[at]
                    self.sums[at] = parameter.grad if before is None else before.add_(parameter.grad)
        finally:
            self.pipe.zero_grad()
        self.calls, self.tokens = self.calls + 1, self.tokens + result.tokens
        return {"loss": result.loss / result.tokens, "tokens": result.tokens, "pending": self.pending}

    def optimizer_step(self, learning_rate: float, max_norm: float | None) -> dict[str, Any]:
        if not self.calls:
            raise ConfigError("optimizer_step", "there are no gradients", "Call forward_backward first")
        for parameter, gradient in zip(self.parameters, self.sums, strict=True):
            parameter.grad = None if gradient is None else gradient.div_(self.tokens)
        tokens = self.tokens
        self._forget_gradients()
        try:
            norm = self.pipe.clip_grad_norm_(max_norm or math.inf)
            check_finite(norm=norm)
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate
            self.optimizer.step()
        finally:
            self.pipe.zero_grad()
        self.steps += 1
        return {"norm": norm, "tokens": tokens, "steps": self.steps}

    def sample(
        self, prompts: list[list[int]], max_tokens: int, temperature: float, seed: int, stop: list[int]
    ) -> dict[str, Any]:
        """Continue the prompts, padded on the left."""
        longest = max(map(len, prompts))
        rows = [[0] * (longest - len(prompt)) + prompt for prompt in prompts]
        mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        no_token = self.pipe.config.get_text_config().vocab_size  # else the model's own end token ended a row
        made = self.pipe.generate(
            torch.tensor(rows), attention_mask=torch.tensor(mask), max_new_tokens=max_tokens, seed=seed,
            eos_token_id=stop or [no_token], pad_token_id=0, **drawing(temperature),
        )  # fmt: skip
        return {"tokens": [up_to_end(row, stop) for row in made[:, longest:].tolist()]}

    def save(self, name: str) -> dict[str, Any]:
        """Weights and optimizer state, without the gradients that wait for a step."""
        path = self.folder / name
        if self.pipe.processes.gather(os.path.lexists(path))[0]:
            raise ConfigError(f"name={name!r}", "a checkpoint has that name", "Take another name")
        try:
            save_checkpoint(path, self.pipe, self.optimizer, {"steps": self.steps})
        except OSError as error:
            raise CheckpointError(str(path), f"it cannot be written: {error}", "Make room") from error
        return {"path": str(path), "steps": self.steps}

    def load(self, name: str) -> dict[str, Any]:
        """Go back to a checkpoint. Gradients that wait for a step are of other weights, and are dropped.

        Its files are hashed first: `load_checkpoint` detects an altered file only when weights have changed.
        """
        path = self.folder / name
        with hashed_meanwhile(path, self.pipe.processes):
            pass
        self.steps = load_checkpoint(path, self.pipe, self.optimizer)["steps"]
        self._forget_gradients()
        return {"steps": self.steps}

    @property
    def pending(self) -> dict[str, int]:
        """The calls and tokens of the next optimizer step."""
        return {"calls": self.calls, "tokens": self.tokens}

    def facts(self) -> dict[str, Any]:
        schedule = self.pipe.schedule
        return {"model": self.pipe.config.model_type, "schedule": schedule.name, "ranks": schedule.ranks,
                "steps": self.steps, "pending": self.pending}  # fmt: skip

    def _forget_gradients(self) -> None:
        self.calls = self.tokens = 0
        self.sums = [None] * len(self.parameters)


def as_batch(microbatches: Sequence[dict[str, Any]]) -> list[dict[str, Tensor]]:
    """Microbatches as Pipeline.step takes them, with labels."""
    tensors = [{name: torch.tensor(rows) for name, rows in one.items() if rows} for one in microbatches]
    return [{"labels": one["input_ids"], **one} for one in tensors]


def drawing(temperature: float) -> dict[str, Any]:
    """How `Pipeline.generate` chooses: from the whole vocabulary, or below COLDEST the likeliest token."""
    if temperature < COLDEST:
        return {"do_sample": False}
    whole = {"do_sample": True, "top_k": 0, "top_p": 1.0}
    return {**whole, "temperature": temperature, "remove_invalid_values": True}  # else a NaN ended the server


def up_to_end(tokens: list[int], stop: Sequence[int]) -> list[int]:
    """The tokens up to the first one of `stop`; padding follows it."""
    ends = (at for at, token in enumerate(tokens, 1) if token in stop)
    return tokens[: next(ends, len(tokens))]


def check_finite(**values: float) -> None:
    """Raise RunError, on all ranks, for numbers that would spoil the model for every client."""
    if not all(map(math.isfinite, values.values())):
        shown = ", ".join(f"{name}={value}" for name, value in values.items())
        rule = "these are finite numbers while a model trains; nothing of this call is kept"
        raise RunError(shown, rule, "Load a checkpoint, and lower the learning rate")


def serve(calls: Calls, front: Front | None) -> None:
    """Run one request after the other until the front stops. Collective; rank 0 has the front.

    Idle ranks meet every half second, so that a rank that dies is noticed.
    Raises PeerError, and any error of one rank alone.
    """
    stopping = False
    while not stopping:
        job = front.take() if front else None
        ours = [front.stopping, job and job.call, job and job.arguments] if front else None
        stopping, call, arguments = calls.pipe.processes.gather(ours)[0]
        if call is None:
            continue
        try:
            answer = getattr(calls, call)(**arguments)
        except PeerError:
            raise
        except PenstockError as error:  # which all ranks raise
            if job:
                job.answer.set_exception(error)
        else:
            if job:
                job.answer.set_result(answer)


def limits_of(pipe: Pipeline, tokens: int) -> Limits:
    text = pipe.config.get_text_config()
    positions = getattr(text, "max_position_embeddings", None) or tokens
    return Limits(text.vocab_size, min(positions, tokens), tokens)


def read_token(path: Path) -> str:
    """The token in a file, which is made if there is none, readable by its owner alone."""
    try:
        with open(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
            file.write(secrets.token_urlsafe(32))
    except FileExistsError:
        pass
    token = path.read_text().strip()
    if len(token) < 16 or not token.isascii():
        raise ConfigError(f"the token in {path}", "it is 16 ASCII characters or more", "Remove the file")
    return token


def main() -> None:
    parser = argparse.ArgumentParser(description="Let clients train a model over HTTP.")
    parser.add_argument(
        "--model", type=Path, help="folder of a Hugging Face model; a small random one without"
    )
    parser.add_argument("--ranks", type=int, default=int(os.environ.get("WORLD_SIZE", "2")))
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--one-process", action="store_true", help="all ranks live in this process")
    parser.add_argument("--checkpoints", type=Path, default=Path("checkpoints"), help="folder of all clients")
    parser.add_argument("--max-tokens", type=int, default=Limits(0, 0).tokens, help="of one call")
    parser.add_argument("--host", default="127.0.0.1", help="all who reach it can use it: there is no TLS")
    parser.add_argument("--port", type=int, default=8765, help="0 takes a free one")
    parser.add_argument(
        "--token-file", type=Path, default=Path("server-token"), help="made if it is not there"
    )
    parser.add_argument("--no-token", action="store_true", help="answer everyone who reaches the port")
    options = parser.parse_args()
    if options.one_process:
        torch.set_num_threads(1)  # as in each rank that `relaunch` starts
    else:
        relaunch(options.ranks)
    pipe = AutoPipeline(ranks=options.ranks, schedule=options.schedule, microbatches=options.ranks).build(
        options.model or AutoConfig.for_model(**SMALL)
    )
    calls = Calls(pipe, options.checkpoints)
    if pipe.processes.index > 0:
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, lambda *_: None)  # rank 0 decides when all end
        serve(calls, None)
    else:
        token = None if options.no_token else read_token(options.token_file)
        address = options.host, options.port
        with Front(address, token, limits_of(pipe, options.max_tokens), calls.facts) as front:
            for signum in (signal.SIGINT, signal.SIGTERM):
                signal.signal(signum, lambda *_: setattr(front, "stopping", True))
            secret = "without a token" if token is None else f"token in {options.token_file}"
            print(f"listening on http://{options.host}:{front.server_port}, {secret}", flush=True)
            serve(calls, front)
    pipe.close()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
