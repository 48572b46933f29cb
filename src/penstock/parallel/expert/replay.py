"""Which experts tokens are to choose, as given with a batch, and which ones they chose in a step.

Both in one form, that of inference engines: whole numbers of shape (rows, sequence, mixtures, top_k), with
the mixtures in the order of the layers. -1 in all places of a token leaves it to the router: what an engine
tells nothing of (the last token of a row is never its input), and padding.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from penstock.batch.padding import ROUTED
from penstock.batch.shapes import Microbatch
from penstock.errors import BatchError, ConfigError, ModelError, PenstockError
from penstock.parallel.context.sequence import WHOLE
from penstock.parallel.expert.experts import count_of, mixtures
from penstock.parallel.expert.routing import (
    Choosing,
    RoutingReplay,
    Seat,
    What,
    are_choices,
    is_whole,
    not_top_k,
    one_too_many,
)

# ---- The mixtures of a whole model, and how their routers choose, found by a forward without values.
#
# What routing replay would find out in a stage's first forward, on the rank of that stage alone, is found
# here by all ranks alike, before anything is sent.


_log = logging.getLogger(__name__)
_NOTHING = What(None, None)


class Mixture(NamedTuple):
    """experts: how many there are; top_k: how many a token chooses, None where only a real forward tells"""

    experts: int
    top_k: int | None


def survey(shadow: PreTrainedModel) -> dict[str, Mixture]:
    """The modules of experts by name, in the order of the layers.

    shadow: a copy of the model for this alone, of fake tensors (torch's FakeTensorMode is on)
    Raises ConfigError where there are none, ModelError where routers choose in a way that is not replayed.
    """
    counts = {name: count_of(part) for name, part in mixtures(shadow).items()}
    if not counts:
        said, rule = f"routing replay of {type(shadow).__name__}", "it has no experts to choose among"
        raise ConfigError(said, rule, "Leave replay_routing out")
    blocks: set[str] = set()
    for name in counts:
        block = name.rpartition(".")[0]
        if block in blocks:
            raise one_too_many(name, f"a second mixture in {block}")
        blocks.add(block)
    chosen = _chosen(shadow.eval(), list(counts))
    return {name: Mixture(count, chosen.get(name)) for name, count in counts.items()}


def _chosen(shadow: PreTrainedModel, names: list[str]) -> dict[str, int]:
    """By mixture that the forward has come to, how many experts a token chooses."""
    found: dict[str, int] = {}
    for name in names:
        block = shadow.get_submodule(name.rpartition(".")[0])
        _watch(name, block, shadow.get_submodule(name), found)
    try:
        with torch.no_grad():
            shadow(input_ids=torch.zeros(1, 2, dtype=torch.int64), use_cache=False)
    except PenstockError:
        raise
    except Exception as error:  # for want of values
        _log.debug("a forward of %s without values ended in %r", type(shadow).__name__, error)
    return found


def _watch(name: str, block: nn.Module, experts: nn.Module, found: dict[str, int]) -> None:
    """Look, in the forward of `block`, for the top-k whose result `experts` are called with."""
    plain: Callable[..., Any] = block.forward
    running: list[Choosing] = []

    def in_block(*args: Any, **kwargs: Any) -> Any:
        running.append(Choosing(Seat(name, lambda *_: None), _NOTHING))
        try:
            with running[-1]:
                return plain(*args, **kwargs)
        finally:
            running.pop()

    def in_place_of_experts(hidden: Tensor, chosen: Tensor, *_: Any) -> Tensor:
        if name in found:
            raise one_too_many(name, "called twice in one forward")
        if not running or not running[-1].candidates(chosen):
            raise not_top_k(name)
        found[name] = chosen.shape[-1]
        return hidden.clone()

    block.forward = in_block
    experts.forward = in_place_of_experts


class Routed:
    """The mixtures of a whole model whose choices are recorded and replayed."""

    def __init__(self, shadow: PreTrainedModel) -> None:
        """shadow: as `survey` takes it. Raises ConfigError, ModelError."""
        self._mixtures: Mapping[str, Mixture] = survey(shadow)
        self._name = type(shadow).__name__

    def of_stage(self, part: nn.Module) -> StageRouting | None:
        """Of a stage without activation checkpointing yet; None where it has no mixture. In place."""
        replay = RoutingReplay(part)
        order = list(self._mixtures)
        places = {name: order.index(name) for name in replay.names}
        return StageRouting(replay, places) if places else None

    def check(self, microbatch: Microbatch) -> None:
        """Raises BatchError, ModelError for choices that the model cannot make."""
        given = microbatch.get(ROUTED)
        if given is None:
            return
        form = (*_rows(microbatch), len(self._mixtures), self._top_k())
        if not isinstance(given, Tensor) or given.shape != form:
            shown = list(given.shape) if isinstance(given, Tensor) else type(given).__name__
            raise BatchError(
                f"{ROUTED} of shape {shown}",
                f"the rows' tokens, mixtures and choices are {list(form)}",
                "Give (rows, sequence, mixtures, top_k), with -1 for tokens that are left to the router",
            )
        if not is_whole(given) or not given.dtype.is_signed:
            rule = "they are whole numbers, and -1 where the router is to choose"
            raise BatchError(f"{ROUTED} of {given.dtype}", rule, "Give them as int16, int32 or int64")
        experts = [mixture.experts for mixture in self._mixtures.values()]
        fine = are_choices(given, torch.tensor(experts, device=given.device))
        if not bool(fine.all()):
            row, token, place = (~fine).nonzero()[0].tolist()
            raise BatchError(
                f"{ROUTED} {given[row, token, place].tolist()} in row {row}, token {token}, mixture {place}",
                f"a token chooses different ones of its {experts[place]} experts, counted from 0",
                "Give what that model's routers chose, or -1 in all places to leave it to the router",
            )

    def _top_k(self) -> int:
        found = {mixture.top_k for mixture in self._mixtures.values()}
        top_k = found.pop()
        if found or top_k is None:
            raise ModelError(
                f"{ROUTED} for {self._name}",
                "its mixtures are known to choose as many experts each, so that one tensor holds all choices",
                "Leave them out, and let its routers choose",
            )
        return top_k


def _rows(microbatch: Microbatch) -> tuple[int, int]:
    """Rows and tokens of each."""
    leading = microbatch.get("input_ids", microbatch.get("inputs_embeds"))
    if not isinstance(leading, Tensor):
        rule = "a model reads input_ids or inputs_embeds"
        raise BatchError(f"a batch of {sorted(microbatch)}", rule, "Give one of them")
    return leading.shape[0], leading.shape[1]


class Recorded(NamedTuple):
    """What a microbatch chose in the mixtures of a stage.

    places: which ones, counted over the whole model
    chosen: int32 (rows, sequence, mixtures, top_k), of this rank
    length: tokens a row of the whole microbatch, where this rank has a part of them
    """

    places: tuple[int, ...]
    chosen: Tensor
    length: int | None


class _Form(NamedTuple):
    rows: int
    tokens: int
    length: int | None


class StageRouting:
    """What the routers of one stage choose, for its ops (penstock.runtime.stage.Routing).

    recorded: by microbatch, what was chosen in the last step: of those whose backward has ended
    """

    def __init__(self, replay: RoutingReplay, places: Mapping[str, int]) -> None:
        self._replay, self._places = replay, places
        self._forms: dict[int, _Form] = {}
        self.recorded: dict[int, Recorded] = {}

    def forward(self, number: int, microbatch: Microbatch) -> AbstractContextManager[None]:
        """For a forward that a backward follows: its choices are those given, or the routers', and kept."""
        self.recorded.pop(number, None)
        whole = microbatch.get(WHOLE)
        self._forms[number] = _Form(*_rows(microbatch), None if whole is None else whole.length)
        if ROUTED not in microbatch:
            return self._replay.record(number)
        self._replay.give_checked(number, self._told(microbatch))
        return self._replay.replay_forward(number)

    def inference(self, microbatch: Microbatch) -> AbstractContextManager[None]:
        """For a forward that nothing follows: its choices are those given, or the routers'."""
        return self._replay.forced(self._told(microbatch)) if ROUTED in microbatch else nullcontext()

    @contextmanager
    def backward(self, number: int, last: bool) -> Iterator[None]:
        """For a backward, or a half of it: what is run again chooses as before. last: no other one follows"""
        with self._replay.replay_backward(number):
            yield
        if last:
            self._release(number)

    def _release(self, number: int) -> None:
        kept, form = self._replay.kept(number), self._forms.pop(number)
        self._replay.release(number)
        if kept:  # nothing in evaluation mode
            chosen = [kept[name].view(form.rows, form.tokens, -1) for name in self._places]
            together = torch.stack(chosen, 2).to(torch.int32)
            self.recorded[number] = Recorded(tuple(self._places.values()), together, form.length)

    def _told(self, microbatch: Microbatch) -> dict[str, Tensor]:
        given = microbatch[ROUTED].long()
        return {name: given[:, :, place].flatten(0, 1) for name, place in self._places.items()}

    @property
    def held(self) -> list[int]:
        """The microbatches that are on their way: none between steps."""
        return self._replay.held

    def reset(self) -> None:
        """Forget a step that failed half-way."""
        for number in self._replay.held:
            self._replay.release(number)
        self._forms.clear()
        self.recorded.clear()
