"""The requests to examples/server.py: the calls, their arguments, and the limits of both.

Rank 0 checks a whole request before it enters the queue. An accepted request is a dict of plain numbers and
text, which is sent to every rank.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from penstock.errors import BatchError, ConfigError

IGNORED = -100  # the label that the loss ignores

Rows = list[list[int]]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]  # of one folder, never a path


class Limits(NamedTuple):
    """vocabulary: all token ids are below it; positions: tokens of a row; tokens: of a call, in all rows"""

    vocabulary: int
    positions: int
    tokens: int = 16_384
    microbatches: int = 64
    new_tokens: int = 256

    @property
    def body(self) -> int:
        """Bytes of a request: its tokens and their labels, in up to 14 characters each, and its names."""
        return 32 * self.tokens + 4096


class Request(BaseModel):
    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    def check(self, limits: Limits) -> None:
        """Raise BatchError for a request that this model does not accept, or not in one call."""


class Microbatch(Request):
    """Rows of one length. Without labels each token is the label of the one before it."""

    input_ids: Rows
    labels: Rows | None = None

    @property
    def targets(self) -> Rows:
        return self.input_ids if self.labels is None else self.labels


class Forward(Request):
    microbatches: list[Microbatch]

    def check(self, limits: Limits) -> None:
        rows = [row for microbatch in self.microbatches for row in microbatch.input_ids]
        check_size(rows, len(self.microbatches), limits)
        for index, microbatch in enumerate(self.microbatches):
            where = f"microbatches.{index}"
            check_tokens(f"{where}.input_ids", microbatch.input_ids, limits)
            check_tokens(f"{where}.labels", microbatch.targets, limits, IGNORED)
            lengths = [len(row) for row in microbatch.input_ids]
            if len(set(lengths)) > 1 or lengths != [len(row) for row in microbatch.targets]:
                rule = "the rows of a microbatch, and their labels, are of one length"
                raise BatchError(
                    f"{where} with rows of {reprlib.repr(lengths)} tokens", rule,
                    "Put rows of other lengths into a microbatch of their own",
                )  # fmt: skip
        targets = [row for microbatch in self.microbatches for row in microbatch.targets]
        if all(label == IGNORED for row in targets for label in row[1:]):
            rule = "a loss needs one label at least, after the first token of a row"
            raise BatchError("microbatches without a label", rule, f"Give labels other than {IGNORED}")


class ForwardBackward(Forward):
    pass


class OptimizerStep(Request):
    learning_rate: float = Field(ge=0, le=1)
    max_norm: float | None = Field(default=None, gt=0)


class Sample(Request):
    """temperature: 0 takes the likeliest token; stop: tokens that end a row"""

    prompts: Rows
    max_tokens: int = Field(default=16, ge=1)
    temperature: float = Field(default=0.0, ge=0, le=100)
    seed: int = Field(default=0, ge=0, lt=2**63)
    stop: list[int] = []

    def check(self, limits: Limits) -> None:
        check_tokens("prompts", self.prompts, limits)
        if self.stop:
            check_tokens("stop", [self.stop], limits)
        if self.max_tokens > limits.new_tokens:
            raise BatchError(f"max_tokens={self.max_tokens}", f"{limits.new_tokens} at most", "Call it again")
        longest = max(map(len, self.prompts))  # to which all are padded
        check_size([range(longest + self.max_tokens)] * len(self.prompts), len(self.prompts), limits)


class Named(Request):
    name: Name


CALLS: Mapping[str, type[Request]] = {
    "forward": Forward,
    "forward_backward": ForwardBackward,
    "optimizer_step": OptimizerStep,
    "sample": Sample,
    "save": Named,
    "load": Named,
}


def arguments_of(call: str, body: bytes, limits: Limits) -> dict[str, Any]:
    """The arguments in a request's body. Raises ConfigError, BatchError."""
    try:
        request = CALLS[call].model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        value = ".".join(map(str, (call, *first["loc"])))
        if first["type"] != "missing":
            value += f"={reprlib.repr(first['input'])}"
        remedy = f"{call} takes JSON with: {', '.join(CALLS[call].model_fields)}"
        raise ConfigError(value, first["msg"], remedy) from None
    request.check(limits)
    return request.model_dump()


def check_size(rows: Sequence[Sequence[int]], microbatches: int, limits: Limits) -> None:
    """Raise BatchError for rows that are too long, or too many for one call."""
    longest, tokens = max(map(len, rows), default=0), sum(map(len, rows))
    if longest > limits.positions:
        raise BatchError(
            f"a row of {longest} tokens", f"the model takes {limits.positions} positions", "Shorten it"
        )
    if tokens > limits.tokens or microbatches > limits.microbatches:
        raise BatchError(
            f"{tokens} tokens in {microbatches} microbatches",
            f"a call has {limits.tokens} tokens and {limits.microbatches} microbatches at most",
            "Make several calls: their gradients add up",
        )


def check_tokens(name: str, rows: Rows, limits: Limits, *also: int) -> None:
    """Raise BatchError for an empty row, and for a number that is neither a token nor in `also`."""
    if not rows or not all(rows):
        raise BatchError(
            f"{name} with {len(rows)} rows", "there is a row, and each has a token", "Leave it out"
        )
    wrong = {token for row in rows for token in row if not 0 <= token < limits.vocabulary}.difference(also)
    if wrong:
        rule = f"a token is a number from 0 to {limits.vocabulary - 1}"
        more = f", or {also[0]}" if also else ""
        raise BatchError(f"{name} with {reprlib.repr(min(wrong))}", rule + more, "Use the model's tokenizer")
