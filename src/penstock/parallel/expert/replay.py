"""Routing replay: the experts that tokens choose, recorded in a step and replayed, or given with a batch.

A choice depends on rounding: a forward that runs twice, in activation checkpointing or on another machine,
may choose another expert where two are nearly tied, and then its gradients belong to another forward. So the
choices of each microbatch's forward are kept until its last backward:

    forward     the router chooses, or takes the choices of the batch; its choices are kept
    backward    a forward that runs again takes the choices of the microbatch's forward
    inference   the router chooses, or takes the choices of the batch

Only the choice is fixed. Weights and gradients come from the router's current logits.

Choices of a batch have the form of inference engines: integers of shape (rows, sequence, mixtures, top_k),
with the mixtures in the order of the layers. For a token with -1 in all entries the router chooses: padding,
and tokens that an engine does not report (the last token of a row is never its input).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from penstock.batch.padding import ROUTED
from penstock.batch.shapes import Microbatch, model_input
from penstock.errors import BatchError, ConfigError, ModelError, PenstockError
from penstock.parallel.context.sequence import FULL_SEQUENCE
from penstock.parallel.expert.experts import count_of, mixtures
from penstock.parallel.expert.routing import Marks, Router, Task, TopKs, not_top_k, one_too_many
from penstock.private import current_graph_task_id
from penstock.runtime.stage_part import Forward, StagePart
from penstock.schedule.ops import Kind

_log = logging.getLogger(__name__)
Choices = Mapping[str, Tensor]  # by the name of the module of experts: (tokens, top_k)


class ModelRouting:
    """The mixtures of a whole model whose choices are recorded and replayed.

    Args:
        shadow: a copy of the model for this use only, of fake tensors (torch's FakeTensorMode is on)
        marks: an active mode, which follows in `shadow` the tensors that choose experts

    Raises ConfigError for a model without mixtures, ModelError for routers whose choice is not one top-k. A
    forward without values detects these, so every rank raises the same error before anything is sent.
    """

    def __init__(self, shadow: PreTrainedModel, marks: Marks) -> None:
        self._name = type(shadow).__name__
        self._experts = {name: count_of(part) for name, part in mixtures(shadow).items()}
        if not self._experts:
            value, rule = f"routing replay of {self._name}", "it has no experts to choose among"
            raise ConfigError(value, rule, "Leave replay_routing out")
        blocks: set[str] = set()
        for name in self._experts:
            block = name.rpartition(".")[0]
            if block in blocks:
                raise one_too_many(name, f"a second mixture in {block}")
            blocks.add(block)
        kinds = {name: type(shadow.get_submodule(name.rpartition(".")[0])) for name in self._experts}
        seen = _choices(shadow.eval(), list(self._experts), marks)
        top_ks = {choice.top_k for choice in seen.values()}
        self._top_k = top_ks.pop() if len(top_ks) == 1 and len(seen) == len(kinds) else None
        of_kind = {kinds[name]: choice.position for name, choice in seen.items()}
        if unseen := [name for name, kind in kinds.items() if kind not in of_kind]:
            raise not_top_k(f"{unseen[0]}, which a forward without values does not reach")
        self._numbers = {name: of_kind[kind] for name, kind in kinds.items()}

    def for_stage(self, module: nn.Module) -> StageRouting | None:
        """Record and replay in a stage, before activation checkpointing; None without mixtures. In place."""
        order = list(self._experts)
        places = {name: order.index(name) for name in mixtures(module)}
        return StageRouting(module, places, self._numbers) if places else None

    def check(self, microbatch: Microbatch) -> None:
        """Raise BatchError, ModelError for choices in a batch that the model cannot make."""
        choices = microbatch.get(ROUTED)
        if choices is None:
            return
        shape = (*model_input(microbatch).shape[:2], len(self._experts), self._common_top_k())
        if not isinstance(choices, Tensor) or choices.shape != shape:
            shown = list(choices.shape) if isinstance(choices, Tensor) else type(choices).__name__
            raise BatchError(
                f"{ROUTED} of shape {shown}",
                f"the rows' tokens, mixtures and choices are {list(shape)}",
                "Give (rows, sequence, mixtures, top_k), with -1 where the router is to choose",
            )
        if choices.is_floating_point() or choices.is_complex() or not choices.dtype.is_signed:
            rule = "they are whole numbers, and -1 where the router is to choose"
            raise BatchError(f"{ROUTED} of {choices.dtype}", rule, "Give them as int16, int32 or int64")
        counts = list(self._experts.values())
        ordered = choices.sort(-1).values.long()
        different = (ordered.diff(dim=-1) > 0).all(-1) & (ordered[..., 0] >= 0)
        below = ordered[..., -1] < torch.tensor(counts, device=choices.device)
        fine = (different & below) | (ordered == -1).all(-1)
        if not bool(fine.all()):
            row, token, mixture = (~fine).nonzero()[0].tolist()
            wrong = choices[row, token, mixture].tolist()
            raise BatchError(
                f"{ROUTED} {wrong} in row {row}, token {token}, mixture {mixture}",
                f"a token chooses different ones of its {counts[mixture]} experts, counted from 0",
                "Give the choices of that model's routers, or -1 in all entries to let the router choose",
            )

    def _common_top_k(self) -> int:
        if self._top_k is None:
            raise ModelError(
                f"{ROUTED} for {self._name}",
                "one tensor has all choices, so all mixtures must choose equally many experts",
                "Leave them out, and let its routers choose",
            )
        return self._top_k


class _Choice(NamedTuple):
    """How a router chooses: by top-k `position` of its block's forward, `top_k` experts for each token."""

    position: int
    top_k: int


def _choices(shadow: PreTrainedModel, names: list[str], marks: Marks) -> dict[str, _Choice]:
    """How each mixture chooses, for those that a forward without values reaches."""
    seen: dict[str, _Choice] = {}
    for name in names:
        block = shadow.get_submodule(name.rpartition(".")[0])
        _look(name, block, shadow.get_submodule(name), marks, seen)
    try:
        with torch.no_grad():
            shadow(input_ids=torch.zeros(1, 2, dtype=torch.int64), use_cache=False)
    except PenstockError:
        raise
    except Exception as error:  # for want of values
        _log.debug("a forward of %s without values ended in %r", type(shadow).__name__, error)
    return seen


def _look(name: str, block: nn.Module, experts: nn.Module, marks: Marks, seen: dict[str, _Choice]) -> None:
    """Add hooks that find the top-k in a forward of `block` whose result `experts` are called with."""
    plain: Callable[..., Any] = block.forward
    running: list[TopKs] = []

    def in_block(*args: Any, **kwargs: Any) -> Any:
        running.append(TopKs(name, marks=marks))
        try:
            with running[-1]:
                return plain(*args, **kwargs)
        finally:
            running.pop()

    def in_place_of_experts(hidden: Tensor, chosen: Tensor, *_: Any) -> Tensor:
        if name in seen:
            raise one_too_many(name, "called twice in one forward")
        if not running:
            raise not_top_k(name)
        seen[name] = _Choice(running[-1].number_of(chosen), chosen.shape[-1])
        return hidden.clone()

    block.forward = in_block
    experts.forward = in_place_of_experts


class Recorded(NamedTuple):
    """The choices of a microbatch in the mixtures of a stage.

    places: indices of these mixtures in the whole model
    chosen: int32 (rows, sequence, mixtures, top_k), of this rank
    length: tokens per row of the full sequence; None where it is not split
    """

    places: tuple[int, ...]
    chosen: Tensor
    length: int | None


class _MicrobatchChoices(NamedTuple):
    """The choices of a microbatch, kept until its last backward."""

    rows: int
    tokens: int
    length: int | None
    kept: dict[str, Tensor]  # choices by mixture


class StageRouting(StagePart):
    """Records and replays the choices in one stage.

    Forwards outside of an op, in evaluation mode or without values are not changed. A router whose choice is
    not one top-k raises ModelError in its first forward.

    Args:
        module: a stage, before activation checkpointing is put into its layers; changed in place
        places: name of a mixture in the stage -> its index in the whole model
        numbers: name of a mixture -> which top-k of its block is the choice

    Attributes:
        recorded: choices in the last step, by microbatch, once its backward has ended
    """

    def __init__(self, module: nn.Module, places: Mapping[str, int], numbers: Mapping[str, int]) -> None:
        self.recorded: dict[int, Recorded] = {}
        self._places = places
        self._microbatches: dict[int, _MicrobatchChoices] = {}
        self._forward: tuple[Choices | None, dict[str, Tensor] | None] = None, None  # to replay, and kept
        self._backward: int | None = None  # the microbatch whose backward runs
        for name in places:
            Router(name, numbers[name], self._task).attach(module)

    def begin_step(self) -> None:
        self.reset()  # an equal microbatch index may belong to another copy of the model

    def before_forward(self, index: int, microbatch: Microbatch, how: Forward) -> None:
        """Keep the choices of this forward for its backward."""
        self.recorded.pop(index, None)
        full = microbatch.get(FULL_SEQUENCE)
        rows, tokens = model_input(microbatch).shape[:2]
        kept: dict[str, Tensor] = {}
        self._microbatches[index] = _MicrobatchChoices(
            rows, tokens, None if full is None else full.length, kept
        )
        self._forward = self._batch_choices(microbatch), kept

    def after_forward(self) -> None:
        self._forward = None, None

    def before_inference(self, microbatch: Microbatch) -> None:
        """Keep no choices of a forward without a backward."""
        self._forward = self._batch_choices(microbatch), None

    def after_inference(self) -> None:
        self._forward = None, None

    def before_backward(self, index: int) -> None:
        """Replay the choices in forwards that run again in this backward."""
        self._backward = index

    def after_backward(self, index: int, kind: Kind) -> None:
        self._backward = None
        if kind != "I":  # after I, W follows
            self._release(index)

    @property
    def left_over(self) -> int:
        """Microbatches whose backward has not ended: none between steps."""
        return len(self._microbatches)

    def kept(self, index: int) -> Choices:
        """The choices of a microbatch whose backward has not ended; none in evaluation mode."""
        return self._microbatches[index].kept

    def reset(self) -> None:
        """Forget the choices of the last step, complete or failed."""
        self._microbatches.clear()
        self.recorded.clear()
        self._forward, self._backward = (None, None), None

    def _release(self, index: int) -> None:
        rows, tokens, length, kept = self._microbatches.pop(index)
        if kept:  # empty in evaluation mode
            chosen = torch.stack([kept[name].view(rows, tokens, -1) for name in self._places], 2)
            self.recorded[index] = Recorded(tuple(self._places.values()), chosen.to(torch.int32), length)

    def _batch_choices(self, microbatch: Microbatch) -> Choices | None:
        if ROUTED not in microbatch:
            return None
        choices = microbatch[ROUTED].long()
        return {name: choices[:, :, index].flatten(0, 1) for name, index in self._places.items()}

    def _task(self, name: str, trains: bool) -> Task | None:
        """The task of mixture `name` in the forward that begins in this thread; None: leave it alone."""
        if current_graph_task_id() != -1:  # in a backward, on any thread of the engine
            if not trains or not self._microbatches:
                return None
            assert self._backward is not None, f"{name} runs again outside of a microbatch's backward"
            kept = self.kept(self._backward)
            if name not in kept:  # e.g. reentrant checkpointing, whose first forward has no gradients
                raise ConfigError(
                    f"{name}, to be replayed",
                    "the forward of its microbatch has recorded no choice",
                    "Run the forward in training and with gradients enabled: checkpoint with "
                    "use_reentrant=False",
                )
            return Task(kept[name])
        choices, keeping = self._forward
        if choices is None and not (trains and keeping is not None):
            return None
        return Task(None if choices is None else choices[name], keeping if trains else None)
