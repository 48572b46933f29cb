"""What stands in a stage's model in the place of other stages' layers.

A stage is the whole model object in which the layers of other stages are placeholders without parameters. In
place of the layer just before the stage's own stands the entry: it gives the hidden states that were received
in place of what it gets. The last of the stage's own layers is the exit: what it returns is the stage's
output, and the forward ends there. Whatever the model does before its layers runs on a dummy and is dropped,
and whatever it does between two layers runs once, after the entry. What passes at the doors is kept by the
stage's `Passage`; modules beside the layers have stand-ins of their own (absent.py).

Where the stages before hold the embedding alone, no layer's place is free for the entry: then the model's
first layer takes what was received itself. A first stage with the embedding alone ends at the first layer's
place.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from penstock.models.passage import Passage
from penstock.models.placeholder import Placeholder


class Door(Placeholder):
    """A placeholder that tells the passage when the forward comes by."""

    def __init__(self, layer: nn.Module, form: str, index: int, passage: Passage) -> None:
        super().__init__(layer, form)
        self._index, self._passage = index, passage

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.give(*self._passage.go_by(self._index, args, kwargs))


class LayerDoor(nn.Module):
    """Mixed into the class of a real layer: it tells the passage when it is called, and what it returns.

    Before and after all else that the layer does, hooks too. So activation checkpointing, which stands
    further in, keeps what was received, and calls the layer's inside again, not this.
    """

    passage: Passage
    passage_index: int

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        passage, index = self.passage, self.passage_index
        args, kwargs = passage.arrive(index, args, kwargs)
        return passage.depart(index, args, kwargs, super().__call__(*args, **kwargs))


def make_door(layer: nn.Module, index: int, passage: Passage) -> None:
    """Make the layer, and no other of its class, a door too; everything it holds keeps its name."""
    own = type(layer)
    layer.__class__ = type(own.__name__, (LayerDoor, own), {"__module__": own.__module__})
    layer.passage, layer.passage_index = passage, index  # type: ignore[assignment]
