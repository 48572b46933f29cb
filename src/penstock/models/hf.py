"""A Hugging Face model as stages that run the model's own forward.

A stage is the whole model object in which the layers of other stages are placeholders without
parameters. Two of them are doors. The entry, in the place of the layer just before the stage's own,
replaces the hidden states by those that were received; so whatever the model does before its layers
runs on a dummy and is dropped, while masks, rotary tables and per-layer arguments come from the model
itself. The exit, just after the stage's own layers, carries their output out and skips the rest.

Where the stages before hold the embedding alone, no layer's place is free for the entry: then the
model's first layer is its own entry, and likewise the last layer its own exit before a stage of the head
alone. A stage with nothing of the model passes on what it received.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from penstock.errors import BatchError, ModelError
from penstock.models.chain import Chain, Placeholder, hidden_of
from penstock.models.protocol import StageInfo
from penstock.runtime.packed import is_packed, refuse_packed, with_positions
from penstock.runtime.parcel import EdgeSpecs, TensorSpec
from penstock.runtime.shapes import Microbatch


class Receiver:
    """Where what was received comes in."""

    received: Tensor | None = None

    def take(self) -> Tensor:
        received, self.received = self.received, None
        if received is None:
            raise skipped("a layer before the stage's own, run twice")
        return received


class Entry(Receiver, Placeholder):
    """Gives what was received in place of what it gets."""

    def _pass(self, hidden: Tensor) -> Tensor:
        return self.take()


class EntryLayer(Receiver, nn.Module):
    """Mixed into the class of a real layer: it works on what was received in place of what it gets.

    The exchange is made before anything else of the layer runs, hooks too. So activation checkpointing, which
    stands further in, keeps what was received, and calls the layer's inside again, not this.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        hidden_of(args, kwargs)  # for its refusal
        if args:
            return super().__call__(self.take(), *args[1:], **kwargs)
        return super().__call__(**{**kwargs, "hidden_states": self.take()})


class _StageDone(BaseException):
    """Carries a stage's output out of the model's forward. No error: nothing may catch it on the way."""

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


class Exit(Placeholder):
    """Ends the forward: what comes in is the stage's output."""

    def _pass(self, hidden: Tensor) -> Tensor:
        raise _StageDone(hidden)


class ExitLayer(nn.Module):
    """Mixed into the class of a real layer: what the layer returns is the stage's output."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = super().__call__(*args, **kwargs)
        raise _StageDone(result if isinstance(result, Tensor) else result[0])


def _mix_into(layer: nn.Module, door: type[nn.Module]) -> None:
    """Make the layer, and no other of its class, a door too; everything it holds keeps its name."""
    own = type(layer)
    layer.__class__ = type(own.__name__, (door, own), {"__module__": own.__module__})


class Before(nn.Module):
    """Stands for a module that runs before the layers, where its result is thrown away.

    In place of an embedding it gives a zero, which fits every shape; in place of anything else (a norm, a
    projection) what it gets.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._embeds = any(isinstance(part, nn.Embedding) for part in module.modules())

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        given = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
        if given is None or self._embeds:
            return torch.zeros((), device=None if given is None else given.device)
        return given


class After(nn.Module):
    """Stands for a module that runs after the layers, on a stage whose forward never gets there."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        raise skipped("a stage before the last")


def skipped(where: str) -> ModelError:
    return ModelError(
        where,
        "the forward passed by the placeholder of a layer, and each layer runs once in a forward",
        "Set the config's layer dropping to 0",
    )


def cut(model: PreTrainedModel, chain: Chain, layers: range, info: StageInfo) -> PreTrainedModel:
    """A copy of `model` that holds the parameters of one stage only; `model` is left as it was.

    Parameters on the meta device stay there. What belongs to other stages is never copied.
    """
    memo: dict[int, Any] = {}
    for index, layer in enumerate(model.get_submodule(chain.layers).children()):
        if index not in layers:
            kind = {layers.start - 1: Entry, layers.stop: Exit}.get(index, Placeholder)
            memo[id(layer)] = kind(layer, chain.form)
    if not info.is_first:
        befores = map(model.get_submodule, chain.before)
        memo |= {id(module): Before(module) for module in befores}
    if not info.is_last:
        memo |= {id(model.get_submodule(name)): After() for name in chain.after}
    stage = copy.deepcopy(model, memo)
    if layers and layers.start == 0 and not info.is_first:
        _mix_into(stage.get_submodule(f"{chain.layers}.0"), EntryLayer)
    if layers and layers.stop == chain.count and not info.is_last:
        _mix_into(stage.get_submodule(f"{chain.layers}.{chain.count - 1}"), ExitLayer)
    return stage


class HFCall:
    """Runs a model made by `cut` as a stage."""

    def __init__(self, model: PreTrainedModel, info: StageInfo) -> None:
        self._model, self._info = model, info
        self._entry = next((module for module in model.modules() if isinstance(module, Receiver)), None)
        ends = info.is_first or info.is_last
        self._holds_nothing = not ends and next(model.parameters(), None) is None

    def __call__(self, received: tuple[Any, ...], microbatch: Microbatch) -> Tensor:
        """Hidden states, or logits on the last stage."""
        output: Tensor
        if self._holds_nothing:
            (output,) = received
            return output
        arguments = {name: value for name, value in microbatch.items() if name != "labels"}
        if self._entry is not None:
            (hidden,) = received
            self._entry.received = hidden
            arguments.pop("input_ids", None)
            arguments["inputs_embeds"] = torch.zeros_like(hidden)  # the dummy; the model may write into it
        try:
            result = self._model(**arguments, use_cache=False)
        except _StageDone as done:
            output = done.hidden
        else:
            output = result.logits
        if self._entry is not None and self._entry.received is not None:
            self._entry.received = None
            raise skipped(f"stage {self._info.stage} of {type(self._model).__name__}")
        return output


class HFEdges:
    """What goes over an edge of a Hugging Face model: hidden states of the batch's rows and sequence."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._hidden: int = model.config.get_text_config().hidden_size
        self._dtype: torch.dtype = model.dtype

    def __call__(self, stage: int, microbatch: Microbatch) -> EdgeSpecs:
        leading = microbatch.get("input_ids", microbatch.get("inputs_embeds"))
        if leading is None:
            rule = "a model reads input_ids or inputs_embeds"
            raise BatchError(f"a batch of {sorted(microbatch)}", rule, "Give one of them")
        return EdgeSpecs((TensorSpec((leading.shape[0], leading.shape[1], self._hidden), self._dtype),))


class Completed:
    """Adds to a microbatch what the model's forward needs to keep packed documents apart.

    Raises ModelError where they would mix in this model, BatchError where the microbatch lets them.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._keeps_apart = False  # not known before it is asked

    def __call__(self, microbatch: Microbatch) -> Microbatch:
        whole = with_positions(microbatch)
        if not self._keeps_apart and is_packed(whole):
            refuse_packed(self._model)
            self._keeps_apart = True
        return whole


def refuse_what_would_not_show(model: PreTrainedModel) -> None:
    """Refuse what would change loss or gradients in silence. Raises ModelError."""
    for name in ("layerdrop", "decoder_layerdrop"):
        if value := getattr(model.config.get_text_config(), name, 0):
            raise ModelError(
                f"{name}={value}", "a layer that is dropped at random may be a stage's door", f"Set {name}=0"
            )
    if getattr(model.config.get_text_config(), "output_router_logits", False):
        raise ModelError(
            "output_router_logits=True",
            "the router's auxiliary loss spans all layers and would be lost between stages",
            "Set output_router_logits=False in the model's config",
        )
