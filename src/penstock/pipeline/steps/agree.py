"""The ranks agree on a step before anything is sent: all accept their batches, which are equal.

rank 0   accepts its batch        fingerprint of it     ----.
rank 1   refuses it (BatchError)  the error's           ----+--> the same error on both
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Sequence

from penstock.batch.microbatches import fingerprint
from penstock.errors import BatchError, InputError
from penstock.parallel.reductions import BatchFacts
from penstock.parallel.world import World
from penstock.pipeline.steps.schedules import LoweredSchedule
from penstock.pipeline.steps.split_batch import BatchLike, as_list
from penstock.pipeline.steps.step import StepPart
from penstock.runtime.executor import Executor
from penstock.runtime.recorder import Progress

_REFUSED = 1 << 32  # above all fingerprints of batches


def agree(world: World, executor: Executor, facts: BatchFacts, refusal: InputError | None) -> int:
    """Return the valid tokens of all parts of the batch. Collective.

    executor: one of this process's; a failed wait reports its progress
    refusal: this rank's error, if it refuses its batch

    Before anything is sent, raises the refusal of the first rank on all ranks of a mesh, and BatchError where
    ranks with the same part have different data, or no part has a valid token.
    """
    tokens = world.reductions.agree(facts, refusal)
    if world.mesh is not None:
        world.transport.follow(_progress_of(executor))
    if world.reductions.everyone.count == 1:  # else the mesh has compared all parts
        world.processes.begin(facts.fingerprint, facts.description)
    if refusal is None and not (facts.total_tokens or tokens):
        refusal = BatchError("a batch without a valid token", "a mean needs at least one", "Leave it out")
    if refusal is not None:
        world.processes.settle()  # raises where another rank accepts another batch, and would wait
        raise refusal
    return tokens


def with_fingerprint(
    facts: BatchFacts, batch: BatchLike, lowered: LoweredSchedule, parts: Sequence[StepPart]
) -> BatchFacts:
    """The facts with a fingerprint, and its description, of data that must be equal on all ranks."""
    number, words = fingerprint(as_list(batch), facts.microbatches, lowered.number)
    more = "".join(part.facts for part in parts)
    more += f", total_tokens={facts.total_tokens}" if facts.total_tokens else ""
    if more:
        number, words = zlib.crc32(f"{number}{more}".encode()), words + more
    return facts._replace(fingerprint=number, description=words)


def refused(facts: BatchFacts, error: InputError) -> BatchFacts:
    """The facts of a rank that refuses its batch."""
    words = f"it refuses its batch ({error})"
    return facts._replace(fingerprint=_REFUSED + zlib.crc32(words.encode()), description=words)


def _progress_of(executor: Executor) -> Callable[[], Progress | None]:
    """The executor's progress, for a watch thread that must not keep a dropped pipeline's weights alive."""
    reference = weakref.ref(executor)
    return lambda: None if (alive := reference()) is None else alive.progress
