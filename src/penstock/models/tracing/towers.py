"""Vision-language models: the towers, which encode images, videos and sounds in addition to the text.

A model of transformers with towers has a method for each kind of input that they encode:

    get_image_features(pixel_values, image_grid_thw)      get_video_features(...)      get_audio_features(...)

The method's results replace the embeddings of certain tokens, before the layers. So the towers belong to the
first stage. Later stages run the forward of the same text without images: masks and positions depend only on
integers (token ids, types of tokens, sizes of images), which every stage gets.

Some models add further results of the towers to the hidden states between their first layers (DeepStack).
These are arguments of the module around the layers, and cross the edges.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

_ENCODED = ("image", "video", "audio")
_EACH = frozenset({"self", "args", "kwargs"})
# arguments of the module around the layers, in the names of the models that have them
_FEATURES = ("visual_pos_masks", "deepstack_visual_embeds", "vision_mask", "deepstack_features")


def encodes(model: PreTrainedModel) -> tuple[str, ...]:
    """The kinds that the model's towers encode, of image, video and audio; empty for a model of text."""
    return tuple(kind for kind in _ENCODED if hasattr(model.base_model, f"get_{kind}_features"))


def tower_inputs(model: PreTrainedModel) -> frozenset[str]:
    """The entries of a microbatch that the towers take, such as pixel_values and image_grid_thw."""
    methods = (getattr(model.base_model, f"get_{kind}_features") for kind in encodes(model))
    return frozenset({name for method in methods for name in inspect.signature(method).parameters} - _EACH)


def without_pixels(inputs: frozenset[str], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """`arguments` without the floating-point ones of `inputs`, for a stage without the towers."""
    return {
        name: value
        for name, value in arguments.items()
        if not (name in inputs and isinstance(value, Tensor) and value.is_floating_point())
    }


def feature_names(around: nn.Module) -> tuple[str, ...]:
    """The arguments that pass the towers' results to the layers, past the embeddings.

    around: the module around the layers
    """
    taken = inspect.signature(around.forward).parameters
    return tuple(name for name in _FEATURES if name in taken)


def features_from(features: Mapping[str, Any], layer: int) -> dict[str, Any]:
    """The features that a forward from `layer` on adds; empty if all have been added.

    Entry i of a list is added after layer i, entry i of a dict before layer i.
    """
    kept: dict[str, Any] = {}
    left = False
    for name, value in features.items():
        if isinstance(value, Mapping):
            value = {index: added for index, added in value.items() if int(index) >= layer}
            left |= bool(value)
        elif isinstance(value, list | tuple):
            value = [added if index >= layer - 1 else None for index, added in enumerate(value)]
            left |= any(added is not None for added in value)
        kept[name] = value
    return kept if left else {}


def with_zeros(features: Mapping[str, Any], like: Tensor) -> dict[str, Any]:
    """`features` with a zero for each one that was added before: the forward adds it to a dummy."""
    zero = like.new_zeros(())
    return {
        name: [zero if added is None else added for added in value] if isinstance(value, list) else value
        for name, value in features.items()
    }
