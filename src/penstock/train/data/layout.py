"""How the rows of a config become batches: the layout for its packing, its labels and its loss."""

from __future__ import annotations

from penstock.batch.padding import Padding
from penstock.errors import ConfigError
from penstock.train.config.sections import TrainConfig
from penstock.train.data.labelled import LabelledLayout
from penstock.train.data.pairs import HeadPairs, PairLayout
from penstock.train.data.rows import BatchLayout, DocumentLayout, StreamLayout
from penstock.train.data.unpaired import UnpairedLayout
from penstock.train.encoding.images import Processor
from penstock.train.encoding.labels import LabelSpace
from penstock.train.encoding.tokenizer import Tokenizer


def layout_of(
    config: TrainConfig, tokenizer: Tokenizer, padding: Padding | None, flash: bool, space: LabelSpace | None
) -> BatchLayout:
    """How rows become microbatches. The arguments are those of `load_data`.

    Raises ConfigError for a head over rows that does not know which tokens are padding.
    """
    section = config.data
    if section.packing == "stream":
        return StreamLayout(padding)
    calls = (config.pipeline.microbatches * config.train.accumulate,)
    if section.compared is not None:
        return _compared(config, space, calls, padding)
    if section.labels != "next tokens":
        assert space is not None
        if section.labels == "rows":
            pad = _pad_of(space, f"data.kind={section.kind}")
            return LabelledLayout(calls, False, pad=pad, problem=space.problem)
        return LabelledLayout(calls, False, pad=space.pad or 0)
    packed = section.packing in ("sequential", "best_fit")
    seen = (tokenizer.entries, tokenizer.image_token) if isinstance(tokenizer, Processor) else ()
    return DocumentLayout(calls, packed, padding, flash, section.longest_document, *seen)


def _compared(
    config: TrainConfig, space: LabelSpace | None, calls: tuple[int, ...], padding: Padding | None
) -> BatchLayout:
    loss, longest = config.train.loss, config.data.longest_document
    assert loss is not None
    if loss.head is not None:
        assert space is not None
        return HeadPairs(calls, False, longest=longest, pad=_pad_of(space, f"train.loss={loss.kind}"))
    make = PairLayout if config.data.has_pairs else UnpairedLayout
    return make(calls, False, padding, longest=longest, refers=loss.refers)


def _pad_of(space: LabelSpace, key: str) -> int:
    if space.pad is None:
        rule = f"{key} pads rows, and a head may look for the last token before padding"
        remedy = "Set pad_token_id in the model's config, to an id that no text has"
        raise ConfigError("a model without pad_token_id", rule, remedy)
    return space.pad
