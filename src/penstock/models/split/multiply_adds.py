"""What the parts of a model cost: multiply-adds of F, I and W for one row of tokens, counted without a run.

Matrix products and attention are counted, in forwards without values. A product costs as much again in I for
each factor that is an activation, and in W for each that is a trained weight: I = F and W = F for a linear
layer, no W for a frozen one, and I = 2 F without W for two activations. Fused attention computes five
products in I, where its forward has two. Through frozen towers there is no backward.

Of layers that are alike one runs, on rows of two short lengths: what grows with the length of a row, and what
with its square, follows for any length. Towers look at values, and count their parameters once for each patch
of an image.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from penstock.errors import ConfigError
from penstock.models.activation_checkpointing import SavePolicy
from penstock.models.split.balanced_split import LayerCosts
from penstock.models.split.counting import Counting, ProductCounts
from penstock.models.split.kernels import kernels_of_runs
from penstock.models.tracing.chain import Chain, config_key, prefixes
from penstock.models.tracing.meta import shadow
from penstock.models.tracing.probe import after_first, layer_kind
from penstock.models.tracing.towers import encodes

SEQUENCE = 4096  # tokens of a row, by default
_SHORT = 16  # tokens
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


class MultiplyAdds(NamedTuple):
    """Multiply-adds of a forward, which grow with its tokens, and with the squared lengths of its documents.

    counted: False if counting failed: then parameters count once a token, and attention does not count
    image: of the towers, for one image token: their parameters, once for each of its patches
    trained: the part of `image` with a backward, which frozen towers do not have
    """

    token: float
    square: float = 0.0
    counted: bool = True
    image: float = 0.0
    trained: float = 0.0

    def of(self, tokens: int, squares: int, images: int = 0) -> float:
        """A third of a step's multiply-adds: a backward takes twice as many as its forward.

        Args:
            tokens: of all documents
            squares: sum of the squared lengths of documents
            images: number of image tokens among `tokens`
        """
        towers = (self.image + 2 * self.trained) / 3
        return self.token * tokens + self.square * squares + towers * images


def multiply_adds(
    model: PreTrainedModel, chain: Chain, sequence: int | None = None, image_tokens: int | None = None
) -> LayerCosts:
    """Multiply-adds of each layer, of the embedding and of the head, in the forward of one row.

    Args:
        sequence: tokens of the row; None takes SEQUENCE, or the model's maximum number of positions if that
            is less
        image_tokens: number of image tokens in the row, for which the towers' multiply-adds count to the
            embedding; None takes a quarter

    Raises ConfigError for a row without tokens, or with more image tokens than tokens.
    """
    tokens, seen = row_of(model, sequence, image_tokens)
    *layers, embedding, head = (int(work.of(tokens, tokens**2, seen)) for work in works(model, chain))
    return LayerCosts(layers, embedding, head)


def row_of(
    model: PreTrainedModel, sequence: int | None = None, image_tokens: int | None = None
) -> tuple[int, int]:
    """The tokens of a row, and how many of them stand for images, as `multiply_adds` takes both."""
    if sequence is not None and sequence < 1:
        rule = "layers are divided by their multiply-adds for a row of this length"
        raise ConfigError(f"sequence_length={sequence}", rule, "Give 1 or more, or leave it out")
    config = model.config.get_text_config(decoder=True)
    most = getattr(config, "max_position_embeddings", None) or SEQUENCE
    tokens = sequence or (min(SEQUENCE, most) if most > 0 else SEQUENCE)  # -1 in families without a limit
    seen = tokens // 4 if image_tokens is None else image_tokens
    if type(seen) is not int or not 0 <= seen <= tokens:
        rule = f"it is the number of image tokens in a row, which has {tokens} tokens"
        raise ConfigError(f"image_tokens={image_tokens!r}", rule, f"Give 0 to {tokens}")
    return tokens, seen


def _towers(model: PreTrainedModel, chain: Chain) -> list[str]:
    """The modules before the layers that a forward of text does not call: towers and projectors."""
    if not encodes(model):
        return []
    run = {outer for name in chain.called_before for outer in prefixes(name)}
    return [name for name in chain.before if name not in run]


def _with_towers(embedding: MultiplyAdds, model: PreTrainedModel, chain: Chain) -> MultiplyAdds:
    """`embedding` with the towers' multiply-adds. A backward ends at their first trained parameter."""
    parts = (part for name in _towers(model, chain) for part in model.get_submodule(name).modules())
    owned = [(part, parameter) for part in parts for parameter in part.parameters(recurse=False)]
    counts = [0 if isinstance(part, nn.Embedding) else parameter.numel() for part, parameter in owned]
    first = next((at for at, (_, parameter) in enumerate(owned) if parameter.requires_grad), len(owned))
    image, trained = (float(sum(sizes)) * _patches(model.config) for sizes in (counts, counts[first:]))
    return embedding._replace(image=image, trained=trained)


def _patches(config: PretrainedConfig) -> float:
    """The number of image patches that the towers merge into one token, by the names in configs."""
    vision = getattr(config, "vision_config", None)
    for owner in (vision, config):
        for name in ("spatial_merge_size", "scale_factor", "downsample_ratio", "downsample_factor"):
            if isinstance(side := getattr(owner, name, None), int | float) and side > 0:
                return max(side, 1 / side) ** 2
    size, patch = (getattr(vision, name, None) for name in ("image_size", "patch_size"))
    tokens = getattr(config, "mm_tokens_per_image", None)
    return (
        (size // patch) ** 2 / tokens if tokens and isinstance(size, int) and isinstance(patch, int) else 1.0
    )


def works(model: PreTrainedModel, chain: Chain) -> list[MultiplyAdds]:
    """The work of the forward of each layer, of the embedding (with the towers) and of the head.

    A mixture counts the experts that process a token. A part that cannot run without values, or that always
    processes more tokens than so short a row has, counts its parameters once a token.
    """
    return [ops.forward for ops in works_of_ops(model, chain)]


class OpWorks(NamedTuple):
    """The work of F, I and W of one part, and of what runs again first where its layer is checkpointed."""

    forward: MultiplyAdds
    input_grad: MultiplyAdds
    weight_grad: MultiplyAdds
    again: MultiplyAdds


def works_of_ops(model: PreTrainedModel, chain: Chain, save: tuple[str, ...] = ()) -> list[OpWorks]:
    """The work of F, I and W of each layer, of the embedding (with the towers) and of the head.

    save: the ops whose results checkpointing keeps, as `Checkpointing.save` names them
    """
    kinds = [layer_kind(layer) for layer in model.get_submodule(chain.layers).children()]
    parameters = zip(*(_parameters(model, chain, kinds, trained) for trained in (False, True)), strict=True)
    works = [
        OpWorks(*(MultiplyAdds(count, counted=False) for count in (whole, whole, trained, whole)))
        for whole, trained in parameters
    ]
    for part, (once, twice) in enumerate(_short_rows(model, chain, kinds, save)):
        if twice.forward >= 2 * once.forward:
            works[part] = OpWorks(*(_grown(*pair) for pair in zip(once, twice, strict=True)))
    *layers, embedding, head = works
    if not any(p.requires_grad for name in chain.before for p in model.get_submodule(name).parameters()):
        embedding = embedding._replace(input_grad=MultiplyAdds(0, counted=embedding.forward.counted))
    forward = _with_towers(embedding.forward, model, chain)
    return [*layers, embedding._replace(forward=forward), head]


def _grown(once: float, twice: float) -> MultiplyAdds:
    """once, twice: in rows of _SHORT tokens, and of twice as many"""
    if twice < 2 * once:  # a short row is padded
        return MultiplyAdds(twice / (2 * _SHORT))
    square = (twice - 2 * once) / (2 * _SHORT**2)
    return MultiplyAdds(once / _SHORT - _SHORT * square, square)


# torch's, of a forward that looks at values, mixes in tensors with values, or does not run at all as it is
_FAILS_WITHOUT_VALUES = (RuntimeError, AssertionError)
_REMEMBERED = 64  # models
_known: dict[object, list[tuple[ProductCounts, ProductCounts]]] = {}


def _short_rows(
    model: PreTrainedModel, chain: Chain, kinds: Sequence[Hashable], save: tuple[str, ...]
) -> list[tuple[ProductCounts, ProductCounts]]:
    """Counts of `_counted` for rows of _SHORT and of twice as many tokens; none if a forward reads values.

    Cached for models that are built the same way. Hooks do not run, as they may change the cost of a forward.
    """
    shapes = tuple((name, p.shape, p.requires_grad) for name, p in model.named_parameters())
    config, attention = config_key(model.config), model.config._attn_implementation
    kind = (chain.layers, config, attention, shapes, save, *kinds)
    if kind not in _known:
        if len(_known) >= _REMEMBERED:
            _known.pop(next(iter(_known)))
        try:
            counted = _counted(model, chain, kinds, (_SHORT, 2 * _SHORT), save)
            _known[kind] = [*zip(*counted, strict=True)]
        except _FAILS_WITHOUT_VALUES:
            _known[kind] = []
    return _known[kind]


def _parameters(model: PreTrainedModel, chain: Chain, kinds: Sequence[Hashable], trained: bool) -> list[int]:
    """Parameters that work on a token, of each layer, before the layers and after them.

    trained: whether those alone count that train
    """
    config = model.config.get_text_config(decoder=True)
    experts = next((expert_count for name in _EXPERTS if (expert_count := getattr(config, name, None))), 1)
    chosen = getattr(config, "num_experts_per_tok", None) or experts

    def count(modules: Sequence[nn.Module]) -> int:
        total = 0
        for module in modules:
            for name, part in module.named_modules():
                size = sum(
                    parameter.numel()
                    for parameter in part.parameters(recurse=False)
                    if parameter.requires_grad or not trained
                )
                if not isinstance(part, nn.Embedding):  # whose rows are looked up
                    total += size * chosen // experts if ".experts" in f".{name}" else size
        return total

    layers = model.get_submodule(chain.layers).children()
    of_kind = {kind: count([layer]) for kind, layer in dict(zip(kinds, layers, strict=True)).items()}
    towers = _towers(model, chain)  # which process no token
    before = [name for name in chain.before if name not in towers]
    ends = ([model.get_submodule(name) for name in names] for names in (before, chain.after))
    return [*(of_kind[kind] for kind in kinds), *map(count, ends)]


def _counted(
    model: PreTrainedModel,
    chain: Chain,
    kinds: Sequence[Hashable],
    rows: Sequence[int],
    save: tuple[str, ...],
) -> list[list[ProductCounts]]:
    """Multiply-adds of each layer, before the layers and after them, for each of `rows`, in tokens.

    kinds: of the layers
    """
    first = {kind: kinds.index(kind) for kind in kinds}
    alike = after_first(model.get_submodule(chain.layers), kinds, chain.output_form)
    marks: dict[int, list[ProductCounts]] = {}  # of a layer that runs: the counts at its start and its end

    def count(whole: PreTrainedModel, tokens: int) -> list[ProductCounts]:
        marks.clear()
        counting.total = ProductCounts()
        with counting:
            whole(input_ids=torch.zeros(1, tokens, dtype=torch.long), use_cache=False)
        of_kind = {kind: marks[layer][1].less(marks[layer][0]) for kind, layer in first.items()}
        last = max(end for _, end in marks.values())
        return [*(of_kind[kind] for kind in kinds), marks[0][0], counting.total.less(last)]

    with shadow(model, alike) as whole, torch.no_grad(), kernels_of_runs():
        counting = Counting(whole, SavePolicy(save) if save else None)
        if "flash" in str(whole.config._attn_implementation):  # of the same work, and needs a GPU
            whole.set_attn_implementation("sdpa")
        if whole._can_set_experts_implementation():
            whole.set_experts_implementation("batched_mm")  # its work depends on no value
        for index in first.values():
            layer = whole.get_submodule(f"{chain.layers}.{index}")
            for register in (layer.register_forward_pre_hook, layer.register_forward_hook):
                register(lambda *_, at=index: marks.setdefault(at, []).append(counting.total))
        whole.eval()
        return [count(whole, tokens) for tokens in rows]
