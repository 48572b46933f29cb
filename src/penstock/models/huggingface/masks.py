"""Answers questions of transformers about values before a model's layers, without waiting for a GPU.

    find_packed_sequence_indices(position_ids)   which document has each token? None: each row is one document
    fast_all(mask)                               does the mask hide nothing?
    _is_packed_sequence(position_ids, rows)      is the single row packed? Flash attention asks, in each layer

The host knows the values of a microbatch's own entries, as it has split the batch. Positions and masks that
a model makes itself mostly depend only on shapes: the first answer for a shape holds for all later forwards,
unless a user has put a hook or a forward into the model (`Edits`).

Otherwise the host of a GPU waits in each forward of a stage: once for rows with only ids, with a mask of ones
or with positions; twice for padded rows, and in a model with two kinds of masks (gemma3). With the answers it
never waits. This was counted on an emulated GPU (tests/pipeline/test_reads.py).

These three functions of transformers are replaced. The replacements use the `Answers` of their thread's
current forward. Without `Answers`, and for any other tensor, they call the original function.
"""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable, Hashable
from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, masking_utils, modeling_flash_attention_utils

from penstock.batch.placement import OnDevice, to_device
from penstock.batch.shapes import Microbatch
from penstock.models.tracing.chain import Chain, remembered
from penstock.models.tracing.meta import without_values
from penstock.models.tracing.probe import Identity, after_first, layer_kind
from penstock.models.tracing.provenance import Provenance
from penstock.private import DisableTorchFunction, has_any_global_hook
from penstock.runtime.split_backward.modules import ASKING
from penstock.runtime.unseen import unseen

Ask = Callable[[Tensor], Any]
_USUAL = {"find_packed_sequence_indices": None, "fast_all": True, "_is_packed_sequence": False}
_PROBED = (2, 3)  # rows and tokens
_MOST = 4096  # answers that are kept
_HERE = threading.local()


class Answers:
    """The answers for one forward.

    Args:
        known: a cache of answers for all forwards, by question and shape
        constant: the number of first questions that are about values that depend only on shapes
    """

    def __init__(self, microbatch: Microbatch, known: dict[object, Any], constant: int) -> None:
        self._known, self._constant, self._asked = known, constant, 0
        self._copies: list[tuple[Tensor, int, Tensor]] = []  # on the device, with its version; on the host
        if not isinstance(microbatch, OnDevice):
            return
        for name, there in microbatch.items():
            if isinstance(there, Tensor) and not there.is_floating_point() and not there.is_inference():
                self._add(there, microbatch.host[name])

    def answer(self, question: str, tensor: Tensor, ask: Ask) -> Any:
        """The result of `ask` for `tensor`: a tensor, a boolean or None."""
        self._asked += 1
        if (values := self._values(tensor)) is not None:
            answer = _settled(ask(values))
            return to_device(answer, tensor.device) if isinstance(answer, Tensor) else answer
        if self._asked > self._constant:
            return ask(tensor)
        key = question, self._asked, tensor.shape
        if key not in self._known:
            if len(self._known) >= _MOST:
                self._known.clear()
            self._known[key] = _settled(ask(tensor))
        answer = self._known[key]
        if answer is not _USUAL[question]:  # later questions may differ from those of the probe
            self._constant = 0
        return answer

    def made(self, mask: Any, of_booleans: Any) -> None:
        """Called when transformers has made a boolean mask from the model's argument `mask`."""
        values = self._values(mask) if isinstance(mask, Tensor) else None
        if values is not None and of_booleans is not mask and isinstance(of_booleans, Tensor):
            self._add(of_booleans, values.to(of_booleans.dtype))

    def _add(self, there: Tensor, here: Tensor) -> None:
        if there.stride() != here.stride():  # as of one that the device has a copy of without the gaps
            here = here.contiguous()
        if (there.shape, there.stride(), there.dtype) == (here.shape, here.stride(), here.dtype):
            self._copies.append((there, there._version, here))

    def _values(self, tensor: Tensor) -> Tensor | None:
        """The values on the host of an unmodified entry, or of a view of it; None for any other tensor."""
        storage = tensor.untyped_storage()._cdata
        for there, version, here in self._copies:
            if there.untyped_storage()._cdata == storage and there._version == version:
                start = here.storage_offset() + tensor.storage_offset() - there.storage_offset()
                same = here.dtype == tensor.dtype
                return here.as_strided(tensor.shape, tensor.stride(), start) if same else None
        return None


def _settled(answer: Any) -> Any:
    """A boolean instead of a boolean tensor."""
    return bool(answer) if isinstance(answer, Tensor) and answer.dtype == torch.bool else answer


# ---- Values that a model makes itself


@remembered
def shape_questions(model: PreTrainedModel, chain: Chain) -> int:
    """Count the questions of a forward with only `input_ids`, if only shapes decide the answers; else 0.

    Of layers that are alike, only one runs.

    model: without values; it runs as far as it can
    """
    looking, counts = _Looking(), Counter[Hashable]()
    layers = model.get_submodule(chain.layers)
    kinds = [layer_kind(layer) for layer in layers.children()]
    alike = after_first(layers, kinds, chain.output_form)

    def note(kind: Hashable, sign: int) -> Callable[..., None]:
        return lambda *_: counts.update({kind: sign * looking.count})

    with ExitStack() as stack:
        stack.enter_context(unseen())
        stack.enter_context(DisableTorchFunction())  # nor by a caller's mode around the step
        # eager: torch.compile would give up for good on code that it first meets under a mode
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        whole = without_values(model, alike)
        for kind, layer in zip(kinds, whole.get_submodule(chain.layers).children(), strict=True):
            if not isinstance(layer, Identity):
                layer.register_forward_pre_hook(note(kind, -1))
                layer.register_forward_hook(note(kind, 1))
        ids = torch.zeros(_PROBED, dtype=torch.int64, device="meta")
        looking.provenance.mark(ids, {"ids"})
        stack.enter_context(suppress(Exception))
        stack.enter_context(torch.no_grad())
        stack.enter_context(answering(looking))
        stack.enter_context(looking.provenance)
        whole(input_ids=ids, use_cache=False)
        of_all = Counter(kinds)
        looking.count += sum((of_all[kind] - 1) * count for kind, count in counts.items())
    return 0 if looking.depends else looking.count


class _Looking:
    """Gives the usual answers, and finds out whether the questions depend on values."""

    def __init__(self) -> None:
        self.provenance, self.count, self.depends = Provenance(), 0, False

    def answer(self, question: str, tensor: Tensor, ask: Ask) -> Any:
        self.count += 1
        self.depends |= bool(self.provenance.marks(tensor))
        return _USUAL[question]

    def made(self, mask: Any, of_booleans: Any) -> None:
        """Nothing to do: marks follow the mask."""


class Edits:
    """A user's hooks, forwards, classes and modules in a model of transformers.

    They may change between forwards the values that the model makes from shapes, so no answer can be cached.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._look()

    def _look(self) -> None:
        self._modules = list(self._model.modules())
        self._kinds: list[type[nn.Module]] = list(map(type, self._modules))
        self._classes = [(kind, kind.__call__, kind.forward) for kind in dict.fromkeys(self._kinds)]
        self._own_classes = not all(_is_known(call) and _is_known(fwd) for _, call, fwd in self._classes)
        children = (module._modules for module in self._modules if module._modules)
        self._children = [(inner, tuple(inner.values())) for inner in children]

    def __bool__(self) -> bool:
        if not self._is_same():
            self._look()
        everywhere: bool = has_any_global_hook()  # type: ignore[no-untyped-call]
        return self._own_classes or everywhere or not all(map(_is_known, self._put_in()))

    # each forward asks: loops, as generators are resumed for each module

    def _is_same(self) -> bool:
        """Whether all modules and their classes are unchanged since `_look`."""
        for inner, children in self._children:
            if tuple(inner.values()) != children:
                return False
        for kind, call, forward in self._classes:
            if kind.forward is not forward or kind.__call__ is not call:
                return False
        return list(map(type, self._modules)) == self._kinds

    def _put_in(self) -> list[Callable[..., Any]]:
        """The present hooks and own forwards of modules."""
        functions: list[Callable[..., Any]] = []
        for module in self._modules:
            attributes = module.__dict__
            if "forward" in attributes and getattr(attributes["forward"], "__func__", None) not in ASKING:
                functions.append(attributes["forward"])
            before, after = attributes["_forward_pre_hooks"], attributes["_forward_hooks"]
            if before or after:
                functions += [*before.values(), *after.values()]
        return functions


def _is_known(function: Any) -> bool:
    """Whether it is from these libraries alone, with the functions that it wraps."""
    while function is not None:
        function = getattr(function, "__func__", function)
        written = getattr(function, "__globals__", {}).get("__name__", "").partition(".")[0]
        if written not in ("torch", "transformers", "penstock"):
            return False
        function = getattr(function, "__wrapped__", None)
    return True


# ---- Replacements of transformers' functions


class answering:  # noqa: N801 - used as a function; in each forward, so no generator
    """Inside, `answers` answers this thread's questions."""

    def __init__(self, answers: Answers | _Looking) -> None:
        _install()
        self._answers = answers

    def __enter__(self) -> None:
        _HERE.answers = self._answers

    def __exit__(self, *error: object) -> None:
        _HERE.answers = None


@functools.cache
def _install() -> None:
    """Install the replacements, once in a process."""
    for module in (masking_utils, modeling_flash_attention_utils):
        for question in _USUAL:
            if (plain := vars(module).get(question)) is not None:
                setattr(module, question, _asking(question, plain))
    preprocess: Any = masking_utils._preprocess_mask_arguments

    @functools.wraps(preprocess)
    def followed(config: Any, inputs_embeds: Any, attention_mask: Any, *args: Any, **kwargs: Any) -> Any:
        arguments = preprocess(config, inputs_embeds, attention_mask, *args, **kwargs)
        if (answers := _answers()) is not None:
            answers.made(attention_mask, arguments[1])
        return arguments

    setattr(masking_utils, "_preprocess_mask_arguments", followed)  # noqa: B010


def _asking(question: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def ask(tensor: Any, *args: Any) -> Any:
        answers = _answers()
        if answers is None or tensor is None:
            return plain(tensor, *args)
        return answers.answer(question, tensor, lambda values: plain(values, *args))

    return ask


def _answers() -> Answers | _Looking | None:
    return None if torch.compiler.is_compiling() else getattr(_HERE, "answers", None)
