"""An edited model as a pipeline and in a plain process: the same gradients, or an error that says why not.

The pipeline's ranks live in one process, or each in a worker of a pool, with other axes of the mesh.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss

from penstock import AutoPipeline, Axes, Sharded
from penstock.errors import PenstockError
from support.edits import EDITS
from support.families import FLOAT32_INSIDE
from support.mesh import full
from support.pool import Pool
from support.reference import gradients_of

SIZES = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "max_position_embeddings": 64,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {"tie_word_embeddings": True},
    "llama": {},
    "gemma2": {"sliding_window": 4},
    "gpt_neox": {"hidden_dropout": 0.0, "attention_dropout": 0.0},
    "mixtral": {"num_local_experts": 4, "experts_implementation": "eager"},
    "doge": {"keep_window_size": 4},  # cannot be padded: it chooses keys by their values
}
SCHEDULES: dict[str, tuple[int, int]] = {  # ranks, microbatches
    "gpipe": (2, 2), "1f1b": (2, 4), "interleaved_1f1b": (2, 2), "zb_h1": (2, 4), "zb_v": (2, 4),
    "dualpipe": (2, 4),
    "1f1b of one": (1, 2),
}  # fmt: skip
ROWS, LENGTH = 8, 8
# axes around the pipeline, and what is chosen with them
MESHES: dict[str, tuple[Axes, dict[str, Any]]] = {
    "processes": (Axes(), {}),
    "dp_shard": (Axes(dp_shard=2), {}),
    "dp_shard, resharded": (Axes(dp_shard=2), {"sharded": Sharded(reshard_after_forward=True)}),
    "dp_replicate": (Axes(dp_replicate=2), {}),
    "cp by ulysses": (Axes(cp=2), {}),
    "cp by ring": (Axes(cp=2), {"context": "ring"}),
    "tp": (Axes(tp=2), {}),
    "tp with sequence_parallel": (Axes(tp=2), {"sequence_parallel": True}),
    "ep": (Axes(dp_shard=2, ep=2), {}),
    "ep over cp": (Axes(cp=2, ep=2), {}),
    "dp_shard, tp": (Axes(dp_shard=2, tp=2), {}),
    "dp_shard, cp": (Axes(dp_shard=2, cp=2), {}),
    "dp_replicate, dp_shard": (Axes(dp_replicate=2, dp_shard=2), {}),
    "cp, tp": (Axes(cp=2, tp=2), {}),
    "ep of 4, half": (Axes(dp_shard=4, ep=2), {}),
}


SHAPES = ("inferred", "exchanged", "padded")
RAGGED = ("ragged", "ragged and masked")


class Case(NamedTuple):
    """An edited model, its batch, and how the pipeline runs it.

    mesh: a name of MESHES, with a process for each rank; None for one process with all ranks
    batch: of BATCHES, or of RAGGED: microbatches that differ in length
    after: what is done to the pipeline's modules between two steps, of AFTER; None for a single step
    """

    family: str
    edits: tuple[str, ...]
    batch: str
    schedule: str
    checkpointing: str | bool
    seed: int
    mesh: str | None = None
    shapes: str = "inferred"
    after: str | None = None

    @property
    def axes(self) -> Axes | None:
        return None if self.mesh is None else MESHES[self.mesh][0]

    @property
    def world(self) -> int:
        """Number of processes."""
        return 1 if self.axes is None else SCHEDULES[self.schedule][0] * self.axes.ranks_per_stage


def build_model(case: Case) -> PreTrainedModel:
    """The same values for the same case; the edits are applied in turn."""
    torch.manual_seed(case.seed)
    config = AutoConfig.for_model(case.family, **{**SIZES, **FAMILIES[case.family]})
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    model.train()
    for number, name in enumerate(case.edits):
        EDITS[name](model, Random(case.seed + number))
    return model


# ---- batches


def _ids(seed: int) -> Tensor:
    return torch.randint(0, 64, (ROWS, LENGTH), generator=torch.Generator().manual_seed(seed))


def _plain(ids: Tensor) -> dict[str, Any]:
    labels = ids.clone()
    labels[0, :3] = -100
    return {"input_ids": ids, "labels": labels}


def _masked(ids: Tensor) -> dict[str, Any]:
    mask = torch.ones_like(ids)
    mask[1, ids.shape[1] * 5 // 8 :] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def _packed(ids: Tensor) -> dict[str, Any]:
    positions = torch.tensor([0, 1, 2, 0, 1, 2, 3, 4]).expand(ROWS, LENGTH)
    labels = ids.masked_fill(positions == 0, -100)
    return {"input_ids": ids, "position_ids": positions, "labels": labels}


def _shifted(ids: Tensor) -> Tensor:
    return torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100)


def _with(**entries: Any) -> Callable[[Tensor], dict[str, Any]]:
    return lambda ids: {**_plain(ids), **entries}


def _labels(change: Callable[[Tensor], Any]) -> Callable[[Tensor], dict[str, Any]]:
    return lambda ids: {"input_ids": ids, "labels": change(ids.clone())}


def _inputs(change: Callable[[Tensor], Any]) -> Callable[[Tensor], dict[str, Any]]:
    return lambda ids: {**_plain(ids), "input_ids": change(ids.clone())}


def _marked(value: int) -> Callable[[Tensor], Tensor]:
    def mark(ids: Tensor) -> Tensor:
        ids[2, 3] = value
        return ids

    return mark


BATCHES: dict[str, Callable[[Tensor], dict[str, Any]]] = {
    "plain": _plain,
    "masked": _masked,
    "packed": _packed,
    "shift_labels": lambda ids: {**_plain(ids), "shift_labels": _shifted(ids.flip(0))},
    "shift_labels only": lambda ids: {"input_ids": ids, "shift_labels": _shifted(ids.flip(0))},
    "num_items_in_batch": _with(num_items_in_batch=7),
    "num_items_in_batch as a tensor": _with(num_items_in_batch=torch.tensor(7)),
    "ignore_index": lambda ids: {**_plain(ids), "ignore_index": int(ids[0, 5])},
    "valid_items": _with(valid_items=torch.tensor(3)),
    "context": _with(context=torch.tensor(3)),
    "routed_experts": _with(routed_experts=torch.zeros(ROWS, LENGTH)),
    "attention_masks": lambda ids: {**_plain(ids), "attention_masks": torch.ones_like(ids)},
    "logits_to_keep": _with(logits_to_keep=2),
    "output_hidden_states": _with(output_hidden_states=True),
    "positions in one dimension": _with(position_ids=torch.arange(1, LENGTH + 1)),
    "positions of one row": _with(position_ids=torch.arange(1, LENGTH + 1)[None]),
    "labels of int32": _labels(lambda ids: ids.int()),
    "labels of float": _labels(lambda ids: ids.double()),
    "a label of -1": _labels(_marked(-1)),
    "a label out of range": _labels(_marked(64)),
    "an id out of range": _inputs(_marked(64)),
    "a negative id": _inputs(_marked(-1)),
    "ids of float": _inputs(lambda ids: ids.double()),
    "ids of int32": _inputs(lambda ids: ids.int()),
    "lists": lambda ids: {"input_ids": ids.tolist(), "labels": ids.tolist()},
    "labels as a list": _labels(lambda ids: ids.tolist()),
    "arrays": lambda ids: {"input_ids": ids.numpy(), "labels": ids.numpy()},
    "no tokens": lambda ids: {"input_ids": ids[:, :0], "labels": ids[:, :0]},
    "a mask of one row": _with(attention_mask=torch.ones(1, LENGTH, dtype=torch.long)),
    "a mask of bools": _with(attention_mask=torch.ones(ROWS, LENGTH, dtype=torch.bool)),
}


def _ragged(case: Case) -> list[dict[str, Any]]:
    """Microbatches of two rows and of 3 to 8 tokens, for all parts of the batch."""
    parts = 1 if case.axes is None else case.axes.batch_parts
    found: list[dict[str, Any]] = []
    for number in range(SCHEDULES[case.schedule][1] * parts):
        ids = _ids(case.seed + number)[:2, : 3 + (case.seed + 5 * number) % 6]
        found.append(_masked(ids) if case.batch == "ragged and masked" else _plain(ids))
    return found


def batch_of(case: Case) -> Any:
    """A mapping, or a list with one for each microbatch."""
    return _ragged(case) if case.batch in RAGGED else BATCHES[case.batch](_ids(case.seed))


def _in_double(*args: Any, **kwargs: Any) -> Tensor:
    """transformers' own loss, which rounds logits to float32, without the rounding."""
    with mock.patch.object(Tensor, "float", Tensor.double):
        loss: Tensor = ForCausalLMLoss(*args, **kwargs)
    return loss


def plain(
    model: PreTrainedModel, batch: Any, microbatches: int, after: str | None
) -> tuple[float, dict[str, Tensor]]:
    """One process that accumulates over the same microbatches, by transformers' own loss; once or twice."""
    if "loss_function" not in vars(model) and "_loss_function" not in vars(model):
        model.loss_function = _in_double
    parts = (
        batch if isinstance(batch, list) else [_rows(batch, at, microbatches) for at in range(microbatches)]
    )
    for part in parts:  # transformers computes no loss without labels
        part["labels"] = part.get("labels", part["input_ids"]).long()
    shifted = [part.get("shift_labels", part["labels"][:, 1:]) for part in parts]
    counts = [int((labels != -100).sum()) for labels in shifted]

    def run() -> float:
        total = 0.0
        for part, count in zip(parts, counts, strict=True):
            loss = model(**part, use_cache=False).loss * count / sum(counts)
            loss.backward()
            total += float(loss)
        return total

    total = run()
    if after is not None:
        model.zero_grad()
        AFTER[after]([model])
        total = run()
    return total, gradients_of(model)


def _rows(batch: Any, index: int, count: int) -> Any:
    """A part of the microbatches, or of the rows of everything that has a value for each."""
    if isinstance(batch, list):
        return batch[len(batch) // count * index : len(batch) // count * (index + 1)]
    rows = slice(ROWS // count * index, ROWS // count * (index + 1))
    single = {name for name, value in batch.items() if np.ndim(value) == 0 or len(value) != ROWS}
    return {name: value if name in single else value[rows] for name, value in batch.items()}


# ---- between two steps, what a user does to the modules of a pipeline, or to the model


def _load_assigned(modules: list[nn.Module]) -> None:
    """As a checkpoint is loaded into a model on the meta device."""
    for module in modules:
        state = {name: value * 5 / 4 for name, value in module.state_dict().items()}
        module.load_state_dict(state, assign=True)


def _renew(modules: list[nn.Module], pattern: str) -> None:
    """A new parameter in place of the last one whose name has `pattern`."""
    found = [(module, name) for module in modules
             for name, _ in module.named_parameters(remove_duplicate=False)
             if re.search(pattern, name)]  # fmt: skip
    for module, path in found[-1:]:
        owner, _, name = path.rpartition(".")
        new = nn.Parameter(module.get_parameter(path).detach() * 5 / 4)
        setattr(module.get_submodule(owner), name, new)


def _set_trained(modules: list[nn.Module], pattern: str, trained: bool) -> None:
    for module in modules:
        for name, parameter in module.named_parameters():
            if re.search(pattern, name):
                parameter.requires_grad_(trained)


AFTER: dict[str, Callable[[list[nn.Module]], None]] = {
    "nothing": lambda modules: None,
    "load_state_dict(assign=True)": _load_assigned,
    "a new weight of a layer": lambda modules: _renew(modules, r"layers\.3\..*weight$"),
    "a new head": lambda modules: _renew(modules, r"^(lm_head|embed_out)\."),
    "a layer frozen": lambda modules: _set_trained(modules, r"layers\.1\.", False),
    "all trained": lambda modules: _set_trained(modules, "", True),
}


class Ran(NamedTuple):
    """What one process found.

    error: type and text, or empty; gradients: of its parameters, by name, as often as it has them
    """

    error: str
    loss: float = 0.0
    norm: float = 0.0
    gradients: tuple[tuple[str, Tensor | None], ...] = ()


def run(case: Case) -> Ran:
    """A step of the pipeline. Collective."""
    batch = batch_of(case)
    ranks, microbatches = SCHEDULES[case.schedule]
    given = build_model(case)
    before = copy.deepcopy({name: value.detach() for name, value in given.named_parameters()})
    options = {} if case.mesh is None else MESHES[case.mesh][1]
    pipe = None
    try:
        pipe = AutoPipeline(
            ranks=ranks, schedule=case.schedule.split()[0], microbatches=microbatches, timeout=30,
            activation_checkpointing=case.checkpointing, device="cpu", axes=case.axes,
            shapes=case.shapes, **options,
        ).build(given)  # fmt: skip
        result = pipe.step(_rows(copy.deepcopy(batch), *pipe.batch_part))
        if case.after is not None:
            pipe.zero_grad()
            AFTER[case.after]([pipe.modules[stage] for stage in sorted(pipe.modules)])
            result = pipe.step(_rows(copy.deepcopy(batch), *pipe.batch_part))
        norm = pipe.clip_grad_norm_(1e9)
    except PenstockError as error:
        return Ran(f"{type(error).__name__}: {error}")
    finally:
        if pipe is not None:
            pipe.close()
        assert all(p.grad is None for p in given.parameters()), "the caller's model got gradients"
        assert all(torch.equal(value, before[name]) for name, value in given.named_parameters())
    named = [pair for module in pipe.modules.values()
             for pair in module.named_parameters(remove_duplicate=False)]  # fmt: skip
    found = ((n.replace("_orig_mod.", ""), None if p.grad is None else full(p.grad)) for n, p in named)
    return Ran("", result.loss, norm, tuple(found))


def the_error(found: list[str]) -> str:
    """The error of all processes, or the one within a step that the others were told of."""
    first = next((error for error in found if not error.startswith("PeerLostError")), found[0])
    assert all(error == first or (first and first in error) for error in found), found
    return first


def outcome(case: Case, pool: Pool | None = None) -> str:
    """'exact', or the error's type and text. Raises AssertionError for anything else.

    pool: runs the case's processes
    """
    results: list[Ran] = [run(case)] if pool is None else pool.run(case.world, run, case)
    if error := the_error([result.error for result in results]):
        return error
    model, parts = build_model(case), 1 if case.axes is None else case.axes.batch_parts
    loss, expected = plain(model, batch_of(case), SCHEDULES[case.schedule][1] * parts, case.after)
    once = [expected[name] for name, _ in model.named_parameters() if name in expected]
    norm = float(torch.stack([gradient.norm() for gradient in once]).norm())
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    # sums in the same order come out alike
    rounds = case.mesh or case.shapes == "padded"
    allowed = 1e-5 if rounds and case.family in FLOAT32_INSIDE else 1e-10
    for result in results:
        assert abs(result.loss - loss) <= allowed * max(1, abs(loss)), f"loss {result.loss}, expected {loss}"
        for name, found in result.gradients:
            wanted = expected.get(name)
            if wanted is None or found is None:
                assert found is None or not found.any(), f"{name} has a gradient that it should not have"
                assert wanted is None or not wanted.any(), f"{name} has no gradient"
            else:
                difference = float((found - wanted).abs().max())
                size = max(float(wanted.abs().max()), 1e-4 * largest)  # or it is rounding
                assert difference <= allowed * size, (
                    f"{name}: differs by {difference:.3g}, largest {size:.3g}"
                )
    for result in results:
        assert abs(result.norm - norm) <= 10 * allowed * norm, f"norm {result.norm}, expected {norm}"
    missing = set(expected).difference(*({name for name, _ in result.gradients} for result in results))
    assert not missing, f"no stage has {sorted(missing)}"
    return "exact"
