"""Masked language modelling: rows in which some tokens are masked, and the loss counts these alone.

    ids       2 15 31 22 3           the tokens of a row, special ones at its ends
    masked    2 15  4 22 3           4 is the mask token; now and then a random token, or the token itself
    labels    .  . 31  . .           -100 where no token is masked

transformers masks (DataCollatorForLanguageModeling). The seed, the step and the number of the row determine
what is masked, so that a resumed run and any mesh mask the same tokens, and each epoch others. A text of
which that masks nothing has one masked token, as in BERT: a step of short texts would have no loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from transformers import DataCollatorForLanguageModeling

from penstock.batch.loss import IGNORED
from penstock.errors import DataError
from penstock.train.data.rows import Piece, Rows
from penstock.train.encoding.encode import check_highest
from penstock.train.encoding.tokenizer import HuggingFace, Tokenizer

HELD_OUT = 0  # in place of a step: rows to evaluate on always have the same masks


@dataclass(frozen=True)
class Masking:
    """Which tokens are masked.

    Attributes:
        own: the tokenizer of transformers
        probability: of each token, but for special ones
    """

    own: Any
    probability: float
    seed: int

    @classmethod
    def of(cls, name: str, tokenizer: Tokenizer, vocabulary: int, probability: float, seed: int) -> Masking:
        """Raises DataError for a tokenizer without a mask token, or with more ids than the model.

        name: of the tokenizer, for errors
        """
        own = tokenizer.own if isinstance(tokenizer, HuggingFace) else None
        if own is None or own.mask_token is None:
            rule = "data.kind=masked puts a mask token in the place of others, and this tokenizer has none"
            remedy = "Take the tokenizer of a masked language model, or set its mask_token"
            raise DataError(f"data.tokenizer={name}", rule, remedy)
        check_highest(f"data.tokenizer={name}", len(own) - 1, vocabulary)  # any id may be a random token
        return cls(own, probability, seed)

    def masked(self, pieces: Sequence[Piece], step: int, row: int) -> list[Piece]:
        """The documents of a row as the step sees them."""
        generator = np.random.default_rng((self.seed, step, row))
        return [self._masked(piece, generator) for piece in pieces]

    def _masked(self, piece: Piece, generator: np.random.Generator) -> Piece:
        # made for each call: two threads may read rows, and it holds the generator
        collator = DataCollatorForLanguageModeling(self.own, mlm_probability=self.probability)
        collator.generator = generator
        (ids,), (labels,) = collator.numpy_mask_tokens(piece.ids[None].copy())
        if (labels == IGNORED).all() and len(plain := self._plain(piece)):
            at = generator.choice(plain)
            labels[at], ids[at] = ids[at], self.own.mask_token_id
        return piece._replace(ids=ids, labels=labels)

    def _plain(self, piece: Piece) -> npt.NDArray[np.int64]:
        """Where the tokens are that may be masked: all but special ones."""
        special = self.own.get_special_tokens_mask(piece.ids.tolist(), already_has_special_tokens=True)
        return np.flatnonzero(np.logical_not(special))


@dataclass(frozen=True)
class MaskedRows:
    """Rows as a step sees them. step: from 1, or HELD_OUT"""

    rows: Rows
    masking: Masking
    step: int

    def __len__(self) -> int:
        return len(self.rows)

    def lengths(self, row: int) -> Sequence[int]:
        return self.rows.lengths(row)

    def read(self, row: int) -> list[Piece]:
        return self.masking.masked(self.rows.read(row), self.step, row)
