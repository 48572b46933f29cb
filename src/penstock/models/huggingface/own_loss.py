"""The loss that a model's own forward computes from labels, identified by running the forward.

    input_ids, labels (values)  ->  embed (meta) -> placeholders of layers -> head (meta)  ->  logits, loss

Names of classes say little: some causal models compare each token with its own label, and a user's subclass
may compute anything. So the model's real forward runs once, with labels, where weights have no values and the
layers are placeholders. Every result of a weight without values becomes random numbers, so the logits are
random, and the model's own code computes the loss of them. It is compared with the losses that penstock
computes over microbatches: in training and in evaluation, and with special tokens among ids and labels.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from inspect import signature
from typing import Any, NoReturn, get_args

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from penstock.batch.loss import IGNORED, NextToken, OwnLoss, ProblemType, RowLabels, TokenLabels
from penstock.errors import ModelError
from penstock.models.mtp import PredictionModel
from penstock.models.tracing.chain import Chain, remembered
from penstock.models.tracing.meta import without_values
from penstock.models.tracing.placeholder import hidden_of
from penstock.models.tracing.probe import Identity
from penstock.models.weights.reading import ran_out_of_memory
from penstock.private import LOCAL_SCALAR_DENSE, TorchDispatchMode, tree_leaves, tree_map_only
from penstock.runtime.sharded_weights import meta_like
from penstock.runtime.unseen import unseen

_SHAPE = (2, 5)  # rows and sequence
_CLOSE = 1e-4  # relative
_MOST_CLASSES = 64  # classes up to which all get a label


def own_loss(model: PreTrainedModel, chain: Chain) -> OwnLoss:
    """The model's own loss, with `of_model` set. Raises ModelError for a loss that penstock does not compute.

    A language model whose forward takes no labels has none: it gets the next-token loss, without `of_model`.
    Cached for models of transformers' own classes that are built the same way.
    """
    if isinstance(model, PredictionModel):  # penstock's own forward, which adds the prediction layers' losses
        return NextToken().as_own()
    takes = signature(model.forward).parameters
    reads = "labels" in takes or any(argument.kind is argument.VAR_KEYWORD for argument in takes.values())
    if not reads and model.get_output_embeddings() is not None:
        return NextToken()
    return _find(model, chain)


@remembered
def _find(model: PreTrainedModel, chain: Chain) -> OwnLoss:
    with unseen(), torch.no_grad(), torch.compiler.set_stance("force_eager"):
        trial = _Trial(model, chain)
        try:
            loss = trial.loss()
        except Exception as error:  # any error of the model's own code
            if ran_out_of_memory(error):
                raise
            said = next(iter(str(error).splitlines()), type(error).__name__).rstrip(".")
            _refuse(model, f"its own loss could not be followed: {said}", error)
    if loss is None:
        _refuse(model, "its own loss is none that penstock computes: of next tokens, tokens or rows")
    return loss.as_own()


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Float32 in place of half precision, whose rounding error would hide or imitate a difference."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def _refuse(model: PreTrainedModel, rule: str, error: Exception | None = None) -> NoReturn:
    raise ModelError(
        f"{type(model).__name__} without a loss_fn",
        rule,
        "Give loss_fn=, a function of (output, microbatch) that returns the mean over its rows, or "
        "penstock.batch.loss.NextToken() for the loss of next tokens",
    ) from error


class _Trial:
    """Forwards of a model without values, whose logits and losses have values."""

    def __init__(self, model: PreTrainedModel, chain: Chain) -> None:
        layers = model.get_submodule(chain.layers).children()
        memo: dict[int, Any] = {id(layer): _Layer(layer, chain.output_form) for layer in layers}
        self._model = without_values(model, memo, lambda tensor: meta_like(tensor).to(_wide(tensor.dtype)))
        for module in self._model.modules():
            module._forward_hooks.clear()
            module._forward_pre_hooks.clear()
        self._config = self._model.config
        text = self._config.get_text_config()
        text.output_router_logits = False  # the placeholders have no routers
        self._text, self._generator = text, torch.Generator().manual_seed(0)
        self._special = self._special_tokens()
        self._ids = torch.randint(1, 3, _SHAPE, generator=self._generator)

    def _special_tokens(self) -> list[int]:
        names = ("pad_token_id", "eos_token_id", "bos_token_id")
        tokens = (getattr(self._text, name, None) for name in names)
        return [token for token in tokens if isinstance(token, int) and token >= 0]

    def loss(self) -> OwnLoss | None:
        """The loss that the model computes; None if penstock has no such loss. Raises the model's errors."""
        one_row = ""
        try:
            logits = self._run().logits
        except ValueError as error:
            if self._text.pad_token_id is not None:
                raise
            one_row, self._text.pad_token_id = str(error), 0
            logits = self._run().logits
        classes: int = logits.shape[-1]
        if logits.shape == (_SHAPE[0], classes):
            longer = self._run(input_ids=self._ids[:, [0, *range(_SHAPE[1])]]).logits
            return self._of_rows(classes, one_row) if longer.shape == logits.shape else None
        if logits.shape == (*_SHAPE, classes):
            return self._of_tokens(classes)
        return None

    def _of_tokens(self, classes: int) -> OwnLoss | None:
        (plain, inputs), *others = self._trials_of_tokens(classes)
        for loss in (NextToken(), TokenLabels(classes)):
            if self._computes(loss, plain, **inputs) and all(
                self._may_compute(loss, labels, **inputs) for labels, inputs in others
            ):
                return loss
        return None

    def _trials_of_tokens(self, classes: int) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        """Labels and inputs that show whether masked and special tokens, and each of few classes, count."""
        labels = self._classes(classes, _SHAPE)
        labels[0, 2] = labels[1, 1] = labels[1, 2] = IGNORED
        yield labels, {}
        mask = torch.ones(_SHAPE, dtype=torch.long)
        mask[1, 3:] = 0
        yield labels, {"attention_mask": mask}
        ids, named = self._ids.clone(), labels.clone()
        for at, token in enumerate(self._special):
            ids[at % 2, 3 + at // 2] = token
            named[at % 2, 3 + at // 2] = min(token, classes - 1)
        yield labels, {"input_ids": ids}
        yield named, {}
        for first in range(0, classes, 4) if classes <= _MOST_CLASSES else ():
            several = labels.clone()
            several[:, 3:] = (torch.arange(4).view(2, 2) + first) % classes
            yield several, {}

    def _of_rows(self, classes: int, one_row: str) -> OwnLoss | None:
        rows, asked = _SHAPE[0], getattr(self._config, "problem_type", None)
        several = torch.rand((rows, classes), generator=self._generator).round()
        numbers = [torch.tensor([at, (at + 1) % classes]) for at in range(min(classes, _MOST_CLASSES))]
        labels: dict[ProblemType, list[Tensor]] = {
            "regression": [torch.randn((rows, classes)[: 1 + (classes > 1)], generator=self._generator)],
            "single_label_classification": [*numbers, torch.tensor([IGNORED, classes - 1])],
            "multi_label_classification": [several, 1 - several],
        }
        chosen = ("regression",) if classes == 1 else get_args(ProblemType)[1:]
        proven: list[ProblemType] = []
        for problem in chosen if asked is None else (asked,):
            loss = RowLabels(classes, asked, [problem])
            try:
                if all(self._computes(loss, given) for given in labels[problem]):
                    proven.append(problem)
            except Exception:  # a model with other kinds of labels only
                continue
        return RowLabels(classes, asked, proven, one_row) if proven else None

    def _may_compute(self, loss: OwnLoss, labels: Tensor, **inputs: Tensor) -> bool:
        """As `_computes`, in training mode only; true if the model does not accept these arguments."""
        try:
            return self._computes(loss, labels, (True,), **inputs)
        except Exception:
            return True

    def _computes(
        self, loss: OwnLoss, labels: Tensor, modes: Collection[bool] = (True, False), **inputs: Tensor
    ) -> bool:
        """Whether the model's loss of these labels is `loss`. modes: values of `training` to try"""
        microbatch = {"input_ids": self._ids, "labels": labels}
        problem = getattr(self._config, "problem_type", None)
        for training in modes:
            output = self._run(training=training, labels=labels, **inputs)
            self._config.problem_type = problem  # transformers writes there what it chooses
            expected = loss.total(output.logits, microbatch) / loss.weight(microbatch)
            own = output.loss
            if own is None or not torch.isclose(own.double(), expected.double(), _CLOSE, 0.0):
                return False
        return True

    def _run(self, *, training: bool = False, **inputs: Tensor) -> Any:
        with _ValuesWhereNeeded(self._generator):
            return self._model.train(training)(**{"input_ids": self._ids, **inputs}, use_cache=False)

    def _classes(self, count: int, shape: tuple[int, ...]) -> Tensor:
        return torch.randint(0, count, shape, generator=self._generator)


class _Layer(Identity):
    """A placeholder of a layer, whose results have values."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = hidden_of(args, kwargs)
        return self.give(torch.randn(hidden.shape).to(hidden.dtype) if hidden.is_meta else hidden)


class _ValuesWhereNeeded(TorchDispatchMode):
    """Gives random values to results of both meta and other tensors, and to tensors moved from meta."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._generator = generator

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        without = [leaf.is_meta for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        device = kwargs.get("device")
        leaves = any(without) and device is not None and torch.device(device).type != "meta"
        if func is LOCAL_SCALAR_DENSE and without[0]:
            return 1.0 if args[0].is_floating_point() else 1
        if not any(without) or (all(without) and not leaves):
            return func(*args, **kwargs)
        if func.overloadpacket.__name__ == "copy_" and not without[0]:
            return args[0]
        if device is not None:
            kwargs["device"] = "meta"
        args, kwargs = tree_map_only(Tensor, meta_like, (args, kwargs))
        return tree_map_only(Tensor, self._random, func(*args, **kwargs))

    def _random(self, like: Tensor) -> Tensor:
        if like.is_floating_point():
            return torch.randn(like.shape, generator=self._generator).to(like.dtype)
        return torch.zeros(like.shape, dtype=like.dtype)


# ---- the model's own loss as a reference


def own_mean(model: PreTrainedModel, microbatch: Mapping[str, Any]) -> Tensor:
    """The loss of the model's own forward, a mean over the valid items of `microbatch`.

    transformers narrows logits to float32 for it. Here float64 logits are not narrowed, so that the
    comparison has that precision.
    """
    with _kept(model), _in_double(model):
        loss: Tensor | None = model(**microbatch, use_cache=False).loss
    if loss is None:
        rule = "its forward returns no loss for this batch, and the pipeline computes one"
        raise ModelError(type(model).__name__, rule, "Compare with a model whose own loss is the pipeline's")
    return loss


@contextmanager
def _kept(model: PreTrainedModel) -> Iterator[None]:
    """Restore the config after a forward, which writes the problem type of its labels there."""
    before = getattr(model.config, "problem_type", None)
    try:
        yield
    finally:
        if getattr(model.config, "problem_type", None) != before:
            model.config.problem_type = before


@contextmanager
def _in_double(model: PreTrainedModel) -> Iterator[None]:
    compute, replaced = model.loss_function, "_loss_function" in vars(model)

    def wide(*args: Any, **kwargs: Any) -> Any:
        with _StaysDouble():
            return compute(*args, **kwargs)

    if replaced or model.dtype != torch.float64:
        yield
        return
    model._loss_function = wide
    try:
        yield
    finally:
        del model._loss_function


class _StaysDouble(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is Tensor.float and args[0].dtype == torch.float64:
            return args[0]
        return func(*args, **(kwargs or {}))
