"""What the ranks of tp, cp and ep send one another within the forward and backward of a part of the model.

    axis   forward of a layer                               input gradient
    tp     an all-reduce behind each row-wise projection    one for each input of column-wise projections
           with sequence_parallel: and an all-gather of     a reduce-scatter and an all-gather of each
           each part's input
    cp     all-to-all of queries, keys, values; of results  the same back (ulysses)
    ep     all-to-all of tokens to experts; of results      the same back

W sends nothing. FSDP's gatherings and reductions are a stage's, not a layer's (estimate.py).
What runs of other frameworks send is in practice.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Literal, NamedTuple

from torch import nn
from transformers import PreTrainedModel

from penstock.models.tracing.chain import Chain
from penstock.parallel.context.ulysses import repeats
from penstock.parallel.expert.experts import mixtures
from penstock.parallel.tensor.plan import assigned, is_token_wise, logits_plan
from penstock.parallel.tensor.styles import COLUMNS, COLUMNS_GATHERED, ROWS, ROWS_SPLIT, VOCABULARY
from penstock.planner.candidate import Candidate
from penstock.planner.communication import (
    Group,
    all_gather,
    all_reduce,
    all_to_all,
    exchange,
    reduce_scatter,
)
from penstock.planner.hardware import Cluster
from penstock.planner.practice import AXES, Axis, TokenCopies

_COLLECTIVES: dict[str, Callable[[float, Group, Cluster], float]] = {
    "all_reduce": all_reduce,
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "all_to_all": all_to_all,
}


class Collective(NamedTuple):
    """A collective of a forward, or of an input gradient. nbytes: as communication.py counts them

    copies: of tokens that are exchanged, in place of `kind`
    """

    axis: Axis
    kind: Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]
    nbytes: float
    backward: bool = False
    copies: TokenCopies | None = None

    def seconds(self, group: Group, cluster: Cluster) -> float:
        if self.copies is not None:
            return exchange(self.nbytes, self.copies, group, cluster)
        return _COLLECTIVES[self.kind](self.nbytes, group, cluster)


class Traffic(NamedTuple):
    """The collectives of the parts of a model, as in `ModelWork`."""

    kinds: tuple[tuple[Collective, ...], ...]
    embedding: tuple[Collective, ...]
    head: tuple[Collective, ...]

    def times(self, rows: int) -> Traffic:
        """Of so many times the rows."""

        def grown(collectives: Iterable[Collective]) -> tuple[Collective, ...]:
            return tuple(one._replace(nbytes=rows * one.nbytes) for one in collectives)

        return Traffic(tuple(map(grown, self.kinds)), grown(self.embedding), grown(self.head))


def traffic(model: PreTrainedModel, chain: Chain, firsts: Iterable[int], candidate: Candidate) -> Traffic:
    """What a microbatch of `candidate` sends within each part. firsts: a layer of each kind"""
    axes, itemsize = candidate.axes, candidate.computed.itemsize
    rows, length = axes.local_shape(candidate.shape)
    hidden = float(rows * length * itemsize)  # bytes of one number a token
    styles = assigned(model, axes.tp) if axes.tp > 1 else {}
    head, sums = logits_plan(model, styles).head, tuple[Collective, ...]()
    if head is not None:
        styles, sums = {**styles, head: COLUMNS}, (_sums(rows * length, axes.tp),)
    practice = candidate.practice
    context = _gathered_keys if practice.gathered_keys else _heads
    inside = set(mixtures(model)) if axes.ep > 1 else set[str]()
    layers = model.get_submodule(chain.layers)

    def of_layer(index: int) -> Iterator[Collective]:
        path, layer = f"{chain.layers}.{index}", layers.get_submodule(str(index))
        for one in _tensor(path, layer, styles, hidden, candidate.sequence_parallel):
            scatters = practice.scattered and candidate.sequence_parallel and one.kind == "all_reduce"
            yield one._replace(kind="reduce_scatter") if scatters else one
        if axes.cp > 1:
            yield from context(model, hidden, axes.cp, axes.tp)
        if any(name.startswith(f"{path}.") for name in inside):
            yield from _experts(model, hidden, practice.copies)

    def outside(modules: Iterable[str]) -> Iterator[Collective]:
        for name in modules:
            yield from _tensor(name, model.get_submodule(name), styles, hidden, split=False)

    return Traffic(
        tuple(tuple(of_layer(index)) for index in firsts),
        tuple(outside(chain.before)),
        (*outside(chain.after), *sums),
    )


def collective_seconds(
    collectives: Iterable[Collective], groups: Mapping[str, Group], cluster: Cluster, *, backward: bool
) -> dict[Axis, float]:
    """Seconds of the collectives of a forward, or of an input gradient, by axis."""
    spent = dict.fromkeys(AXES, 0.0)
    for one in collectives:
        if one.backward is backward:
            spent[one.axis] += one.seconds(groups[one.axis], cluster)
    return {axis: time for axis, time in spent.items() if time}


def _tensor(
    path: str, module: nn.Module, styles: Mapping[str, str], hidden: float, split: bool
) -> Iterator[Collective]:
    """Of tp. split: whether the sequence is sharded between the parts of a layer"""
    inputs: dict[str, int] = {}  # by module whose column-wise projections share an input: its width
    for name, part in module.named_modules(prefix=path):
        style, weight = styles.get(name), part._parameters.get("weight")
        if weight is None:
            continue
        if style in (ROWS, ROWS_SPLIT):
            yield Collective("tp", "all_reduce", hidden * weight.shape[0])
        elif style == VOCABULARY:
            yield Collective("tp", "all_reduce", hidden * weight.shape[1])
        elif style in (COLUMNS, COLUMNS_GATHERED):
            inputs[name.rpartition(".")[0]] = weight.shape[1]
            if style == COLUMNS_GATHERED:
                yield Collective("tp", "all_gather", hidden * weight.shape[0])
    if not split:
        for width in inputs.values():
            yield Collective("tp", "all_reduce", hidden * width, backward=True)
        return
    width = max(inputs.values(), default=0)
    for name, child in module.named_children() if inputs else ():
        if not is_token_wise(child):
            yield Collective("tp", "all_gather", hidden * width)
            yield Collective("tp", "all_gather", hidden * width, backward=True)
            if f"{path}.{name}" in inputs:
                yield Collective("tp", "reduce_scatter", hidden * width, backward=True)


def _sums(tokens: int, tp: int) -> Collective:
    """Of the vocabulary-parallel loss: each rank's sum of exponentials and logit of the label, in float32."""
    return Collective("tp", "all_gather", 2.0 * 4 * tokens * tp)


def _heads(model: PreTrainedModel, hidden: float, cp: int, tp: int) -> Iterator[Collective]:
    """Of ulysses: queries, keys and values to where their heads are, and the result back."""
    heads, key_heads, key_width, value_width = _attention(model, tp)
    sent = key_heads * repeats(heads, key_heads, cp) * (key_width + value_width)
    for backward in (False, True):
        yield Collective("cp", "all_to_all", hidden * (heads * key_width + sent), backward)
        yield Collective("cp", "all_to_all", hidden * heads * value_width, backward)


def _gathered_keys(model: PreTrainedModel, hidden: float, cp: int, tp: int) -> Iterator[Collective]:
    """Keys and values of the whole sequence; in the backward again, and then their gradients."""
    _, key_heads, key_width, value_width = _attention(model, tp)
    whole = hidden * cp * key_heads * (key_width + value_width)
    yield Collective("cp", "all_gather", whole)
    yield Collective("cp", "all_gather", whole, backward=True)
    yield Collective("cp", "reduce_scatter", whole, backward=True)


def _attention(model: PreTrainedModel, tp: int) -> tuple[int, int, int, int]:
    """On a process: query heads, key heads, numbers in a key and in a value."""
    config = model.config.get_text_config()
    heads = config.num_attention_heads // tp
    key_heads = max((getattr(config, "num_key_value_heads", None) or config.num_attention_heads) // tp, 1)
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    key_width = getattr(config, "qk_head_dim", None) or width
    return heads, key_heads, key_width, getattr(config, "v_head_dim", None) or width


def _experts(model: PreTrainedModel, hidden: float, copies: TokenCopies | None) -> Iterator[Collective]:
    """Of tokens to their experts and back."""
    config = model.config.get_text_config()
    chosen = 1 if copies else getattr(config, "num_experts_per_tok", None) or 1
    for backward in (False, True):
        for _ in ("to experts", "back"):
            yield Collective("ep", "all_to_all", hidden * chosen * config.hidden_size, backward, copies)
