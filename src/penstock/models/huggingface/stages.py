"""A Hugging Face model as stages that run the model's own forward.

`cut` copies the model object with the parameters of one stage only; boundary.py has the placeholders of
the rest. Every stage gets the microbatch, so masks, positions, rotary tables and per-layer arguments come
from the model itself. A stage without any module of the model passes on its input.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from penstock.batch.liger import Chunked
from penstock.batch.loss import UNPAD
from penstock.batch.microbatches import INNER
from penstock.batch.payload import EdgeSpecs, TensorSpec
from penstock.batch.placement import OnDevice
from penstock.batch.shapes import Microbatch, model_input
from penstock.errors import BatchError, ModelError
from penstock.models.adapters import forget_tied_tokens
from penstock.models.huggingface.boundary import (
    Boundary,
    BoundaryPlaceholder,
    PlaceholderAfter,
    PlaceholderBefore,
    StageDone,
    keep_whole_slices,
    make_boundary_layer,
    mark_without_weights,
    pass_features,
)
from penstock.models.huggingface.entries import taken
from penstock.models.huggingface.head import defer_head
from penstock.models.huggingface.masks import Answers, Edits, answering
from penstock.models.huggingface.references import copy_gradient_hooks, refuse_references
from penstock.models.module_names import is_inside
from penstock.models.mtp import PredictionModel
from penstock.models.stage import StageInfo
from penstock.models.tracing.chain import Chain
from penstock.models.tracing.meta import deep_copy
from penstock.models.tracing.towers import tower_inputs, without_pixels
from penstock.runtime.sharded_weights import meta_like


def cut(
    model: PreTrainedModel, chain: Chain, layers: range, info: StageInfo, *, values: bool = True
) -> PreTrainedModel:
    """Copy `model` with the parameters of one stage only; `model` is not changed.

    Parameters on the meta device stay there. Modules of other stages are never copied.
    values: False puts the stage's parameters on the meta device
    """
    boundary = Boundary(chain, layers, info)
    memo: dict[int, Any] = dict(_replaced_tensors(model, values=values))
    memo |= _placeholders(model, chain, layers, info, boundary)
    dropped = [
        name
        for name, is_before in chain.direct_parameters.items()
        if not (info.is_first if is_before else info.is_last)
    ]
    memo |= {id(model.get_parameter(name)): None for name in dropped}
    stage = deep_copy(model, memo)
    forget_tied_tokens(stage)
    mark_without_weights(stage, model.dtype)
    copy_gradient_hooks(model, memo)
    refuse_references(stage, model)
    for name in dropped:
        _put_zeros(stage, name, model.get_parameter(name))
    stage.boundary = boundary
    keep_whole_slices(stage.get_submodule(chain.layers))
    if chain.features:
        pass_features(stage.get_submodule(chain.layers.rpartition(".")[0]), boundary)
    for index in layers:
        takes = bool(chain.early_inputs[index]) and not info.is_first
        enters = index == 0 and not info.is_first
        if takes or enters or (index == layers.stop - 1 and not info.is_last):
            make_boundary_layer(stage.get_submodule(f"{chain.layers}.{index}"), index, boundary)
    return stage


def _replaced_tensors(model: nn.Module, *, values: bool) -> dict[int, Tensor]:
    """By id, what stands for a tensor in the copy: for a parameter one on the meta device, unless `values`.

    A tensor with a graph, kept from an earlier forward such as a recurrent state, is copied without it.
    """
    memo: dict[int, Tensor] = {}
    for parameter in () if values else model.parameters():
        if type(parameter) is nn.Parameter and not isinstance(parameter.data, DTensor):
            memo[id(parameter)] = nn.Parameter(meta_like(parameter), parameter.requires_grad)
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, Tensor) and value.grad_fn is not None:
                memo[id(value)] = value.detach().clone()
    return memo


def _placeholders(
    model: PreTrainedModel, chain: Chain, layers: range, info: StageInfo, boundary: Boundary
) -> dict[int, nn.Module]:
    """By id, the placeholder of each module that another stage holds."""
    memo: dict[int, nn.Module] = {}
    for index, layer in enumerate(model.get_submodule(chain.layers).children()):
        if index not in layers:
            memo[id(layer)] = BoundaryPlaceholder(layer, chain.output_form, index, boundary)
    if not info.is_first:
        memo |= _placeholders_before(model, chain.before, chain.called_before)
    if not info.is_last:
        for name in (*chain.after, *chain.buffers_after):
            module = model.get_submodule(name)
            memo[id(module)] = PlaceholderAfter(module, name)
    return memo


def _put_zeros(stage: nn.Module, name: str, weight: Tensor) -> None:
    """Put zeros in the place of another stage's parameter: code that uses it runs on a dummy input."""
    path, _, attribute = name.rpartition(".")
    owner = stage.get_submodule(path)
    delattr(owner, attribute)
    owner.register_buffer(attribute, torch.zeros(weight.shape, dtype=weight.dtype), persistent=False)


def _placeholders_before(
    model: nn.Module, names: Sequence[str], called: Sequence[str]
) -> dict[int, nn.Module]:
    """Placeholders of modules that run before the layers, and of modules inside them that never run."""
    memo: dict[int, nn.Module] = {}
    for name in names:
        for inner, module in model.get_submodule(name).named_modules(prefix=name):
            if inner in called:
                memo[id(module)] = PlaceholderBefore(module)
            elif not any(is_inside(inner, other) or is_inside(other, inner) for other in called):
                memo[id(module)] = PlaceholderAfter(module, inner)
    return memo


class HFCall:
    """Calls a model made by `cut` as a stage."""

    def __init__(
        self,
        model: PreTrainedModel,
        info: StageInfo,
        entries: frozenset[str] | None = None,
        *,
        callee: nn.Module | None = None,
        defers_head: Chunked = False,
        shape_questions: Callable[[], int] = lambda: 0,
    ) -> None:
        """
        Args:
            entries: the microbatch's entries for the model, from `taken` before axes change its forward;
                other entries are for the loss.
            callee: a wrapper of `model` to call in its place; None: `model` is called.
            defers_head: the option chunked_loss, if the last stage may return HeadLogits.
            shape_questions: returns the number of questions about values in a forward of the whole model that
                only shapes decide (penstock.models.huggingface.masks).
        """
        if defers_head and info.is_last:
            defer_head(model, defers_head)
        self._model, self._taken = model, taken(model) if entries is None else entries
        self._callee = model if callee is None else callee
        self._boundary: Boundary = model.boundary
        self._seen = frozenset[str]() if info.is_first else tower_inputs(model)
        self._shape_questions, self._answers = shape_questions, dict[object, Any]()
        self._edits = Edits(model)
        ends = info.is_first or info.is_last
        self._holds_nothing = not ends and next(model.parameters(), None) is None

    def __call__(self, received: tuple[Any, ...], microbatch: Microbatch) -> Any:
        """The value for the next stage; on the last stage the `outcome` of the model."""
        if self._holds_nothing:
            return received[0]
        arguments = {name: value for name, value in microbatch.items()
                     if name in self._taken or (name.startswith(INNER) and name != UNPAD)}  # fmt: skip
        arguments["use_cache"] = microbatch.get("use_cache", False)  # true only where tokens are generated
        if self._seen:
            arguments = without_pixels(self._seen, arguments)
        self._boundary.begin(received[0] if received else None)
        try:
            with self._answering(arguments, microbatch):
                result = self._callee(**arguments)
        except StageDone:
            return self._boundary.end()
        except BaseException as error:
            self._boundary.begin(None)
            if isinstance(error, ValueError) and _UNEQUAL in str(error):
                raise BatchError(
                    "images that do not fit the tokens of their microbatch",
                    str(error),
                    "Give the images of its rows in their order, as the model's processor makes them",
                ) from error
            raise
        self._boundary.end()
        return outcome(self._model, result)

    def _answering(
        self, arguments: Mapping[str, Any], microbatch: Microbatch
    ) -> AbstractContextManager[None]:
        alone = arguments.keys() == {"input_ids", "use_cache"} and not self._edits
        constant = self._shape_questions() if alone else 0
        if not (constant or isinstance(microbatch, OnDevice)):
            return _ASKED  # values on the host can be read without waiting
        return answering(Answers(microbatch, self._answers, constant))


_UNEQUAL = "features and "  # of transformers' models: "Image features and image tokens do not match"
_ASKED = nullcontext()


def outcome(model: PreTrainedModel, result: Any) -> Any:
    """The loss function's input: logits, or a mapping with "logits" and more (see NextToken.total).

    The auxiliary loss is the routers' loss times its coefficient, if the config asks for router logits.
    """
    more: dict[str, Any] = {}
    if isinstance(loss := getattr(result, "aux_loss", None), Tensor):  # 0 of a model without routers
        more["auxiliary_loss"] = _coefficient(model) * loss
    if isinstance(model, PredictionModel):
        more["mtp_logits"] = result.mtp_logits
        more["mtp_loss_scaling_factor"] = model.mtp_loss_scaling_factor
    return {"logits": result.logits, **more} if more else result.logits


def _coefficient(model: PreTrainedModel) -> float:
    for owner in (model, model.config.get_text_config()):
        for name in ("router_aux_loss_coef", "aux_loss_coef"):
            if (value := getattr(owner, name, None)) is not None:
                return float(value)
    raise ModelError(
        f"the auxiliary loss of {type(model).__name__}",
        "neither the model nor its config has a router_aux_loss_coef as its weight",
        "Set output_router_logits=False in the model's config, or add router_aux_loss_coef to it",
    )


class HFEdges:
    """Shape and dtype on the edges of a Hugging Face model: hidden states of (rows, sequence, width)."""

    def __init__(
        self,
        model: PreTrainedModel,
        chain: Chain,
        computed: torch.dtype | None = None,
        first_trained: int = 0,
        ends: Sequence[int] = (),
    ) -> None:
        """
        Args:
            computed: the dtype of mixed precision; None if the model computes in the dtype of its weights.
            first_trained: the first stage that trains anything; no gradient goes back to those before it.
            ends: for each stage, the number of layers up to its end. Prediction layers among them make the
                hidden states longer.
        """
        self._parts = [chain.parts_after(end) for end in ends]
        self._hidden, self._dtype, self._first_trained = chain.width, chain.dtype, first_trained
        if computed is not None and chain.dtype == model.dtype:  # else the model fixes its stream's dtype
            self._dtype = computed
        self.known = chain.only_hidden_states  # else only a run of the stages shows the shapes

    def __call__(self, stage: int, microbatch: Microbatch) -> EdgeSpecs:
        rows, sequence = model_input(microbatch).shape[:2]
        shape = (rows * (self._parts[stage] if self._parts else 1), sequence, self._hidden)
        return EdgeSpecs((TensorSpec(shape, self._dtype, differentiable=stage >= self._first_trained),))


def refuse_unsupported_options(model: PreTrainedModel, *, own_loss: bool) -> None:
    """Refuse options that would silently change loss or gradients. Raises ModelError.

    own_loss: whether the pipeline computes the loss, without a loss_fn
    """
    if own_loss and "_loss_function" in vars(model):
        raise ModelError(
            f"a loss_function of {type(model).__name__} that was replaced",
            "the pipeline computes the loss itself, over all valid tokens of a step",
            "Pass loss_fn=, a function of (output, microbatch) or an object (penstock.batch.loss.Loss)",
        )
    if any("dynamic" in _rope_types(module) for module in model.modules()):
        raise ModelError(
            "rope_type='dynamic'",
            "its frequencies depend on the longest row so far, and so a step depends on earlier ones",
            "Take rope_type='default', equal for rows within max_position_embeddings, or yarn for longer",
        )
    if model.config.return_dict is False:
        raise ModelError("return_dict=False", "logits are read by name", "Set return_dict=True")
    for name in ("layerdrop", "decoder_layerdrop"):
        if value := getattr(model.config.get_text_config(), name, 0):
            raise ModelError(
                f"{name}={value}",
                "a layer that is dropped at random may be where a stage begins or ends",
                f"Set {name}=0",
            )


def _rope_types(module: nn.Module) -> Collection[str]:
    """The kinds of rotary positions that a module computes: one, or one for each kind of layer."""
    knows = "rope_type" in vars(module) or hasattr(type(module), "rope_type")
    kinds: Any = module.rope_type if knows else ()
    return tuple(kinds.values()) if isinstance(kinds, Mapping) else (kinds,)
