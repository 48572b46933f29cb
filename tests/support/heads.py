"""Tiny models of every kind of head, and batches for them; `model(**batch).loss` is the reference."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from unittest import mock

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

from support import zoo
from support.reference import Gradients, gradients_of

ROWS, LENGTH, CLASSES = 7, 9, 5


def tiny(kind: str, model_type: str, **changes: object) -> PreTrainedModel:
    """A model of the class `kind` in float64, in training mode and without dropout."""
    changes = {"num_labels": CLASSES, "pad_token_id": 0, "is_decoder": False, **changes}
    return built(getattr(transformers, kind), model_type, **changes)


def built(kind: type[PreTrainedModel], model_type: str, **changes: object) -> PreTrainedModel:
    layers = changes.pop("layers", 4)
    assert isinstance(layers, int)
    config = zoo.tiny_config(model_type, layers=layers)
    for name, value in changes.items():
        setattr(config, name, value)
    config._experts_implementation = "eager"  # the grouped product takes no float64
    torch.manual_seed(0)
    model = kind(config)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    zoo.unsettle(model, 0)
    return model.double().train()


def tokens(rows: int = ROWS) -> Tensor:
    """Plain tokens; one row ends in padding (0), one begins with it."""
    generator = torch.Generator().manual_seed(rows)
    ids = torch.randint(zoo.FIRST_PLAIN_TOKEN, zoo.VOCABULARY, (rows, LENGTH), generator=generator)
    ids[1, 5:] = 0
    ids[2, :3] = 0
    return ids


def token_batch(classes: int = CLASSES, rows: int = ROWS) -> dict[str, Tensor]:
    """A label for each token; rows differ much in how many count."""
    ids, generator = tokens(rows), torch.Generator().manual_seed(1)
    labels = torch.randint(0, classes, ids.shape, generator=generator)
    labels[0, 1:] = labels[-1, :7] = labels[2, 3] = -100
    return {
        "input_ids": ids,
        "attention_mask": (ids != 0).long(),
        "labels": labels.masked_fill(ids == 0, -100),
    }


def row_batch(labels: Tensor) -> dict[str, Tensor]:
    ids = tokens(len(labels))
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels}


@contextmanager
def double() -> Iterator[None]:
    """transformers narrows logits to float32 for its losses: not here, so that 1e-10 can be asked for."""
    narrow = Tensor.float

    def kept(tensor: Tensor) -> Tensor:
        return tensor if tensor.dtype == torch.float64 else narrow(tensor)

    with mock.patch.object(Tensor, "float", kept):
        yield


def own_step(model: PreTrainedModel, batch: Mapping[str, Tensor]) -> tuple[float, Gradients]:
    """Loss and gradients as transformers computes them, of the whole batch in one forward."""
    model.zero_grad()
    problem = getattr(model.config, "problem_type", None)
    with double():
        loss = model(**batch, use_cache=False).loss
    model.config.problem_type = problem  # transformers writes there what the labels ask for
    loss.backward()
    gradients = gradients_of(model)
    model.zero_grad()
    return float(loss.detach()), gradients


def classes_of(suffixes: tuple[str, ...]) -> Iterator[tuple[str, type[PreTrainedModel]]]:
    """Every class of transformers whose name ends so, by model type."""
    for model_type in CONFIG_MAPPING_NAMES:
        try:
            config = CONFIG_MAPPING[model_type]
            module = importlib.import_module(config.__module__.replace("configuration_", "modeling_"))
        except (ImportError, KeyError):
            continue
        for name, kind in list(vars(module).items()):  # it grows as transformers imports
            if not inspect.isclass(kind) or kind.__module__ != module.__name__ or not name.endswith(suffixes):
                continue
            if issubclass(kind, PreTrainedModel) and getattr(kind, "config_class", None) is config:
                yield model_type, kind
