"""The work of a model's parts for a candidate, and the bytes that all layers of a stage share.

Parts are run one by one (work.py), so each layer counts what a stage has once, such as the angles of rotary
positions. Two layers run together say how much that is.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import starmap
from typing import NamedTuple

from penstock.models.activation_checkpointing import Checkpointing
from penstock.models.activation_offloading import Offloading
from penstock.pipeline.building.build_plan import BuildPlan
from penstock.pipeline.building.memory import Account
from penstock.planner.candidate import GROUPS, Candidate
from penstock.planner.work import ModelWork, PartBytes, PartWork, head_work, model_work


class Measurement(NamedTuple):
    """The work of a model's parts, without the bytes that all layers of a stage share."""

    work: ModelWork
    shared: int


def measured_work(plan: BuildPlan, candidate: Candidate) -> Measurement:
    """The work of each part for a microbatch of `candidate` on one process, with full recomputation.

    plan: any of the model. Raises ModelError where the forward cannot run without values.
    """
    axes, options = candidate.axes, candidate.parallel_options()
    work = model_work(plan, candidate.shape, axes, options, chunked_loss=candidate.chunked_loss)
    shared = _shared(plan, candidate, work)

    def part(kind: int, one: PartWork) -> PartWork:
        nbytes = _with_offloading(plan, candidate, work.layers.index(kind), one.nbytes)
        return one._replace(nbytes=_without(nbytes, shared))

    return Measurement(replace(work, kinds=tuple(starmap(part, enumerate(work.kinds)))), shared)


def with_own_head(plan: BuildPlan, candidate: Candidate, alike: Measurement) -> Measurement:
    """`measured_work` of a candidate that differs from that of `alike` in its loss alone: the head is run."""
    return Measurement(replace(alike.work, head=own_head(plan, candidate)), alike.shared)


def own_head(plan: BuildPlan, candidate: Candidate) -> PartWork:
    """The work of the head with its loss, for a microbatch of `candidate`."""
    options, chunked = candidate.parallel_options(), candidate.chunked_loss
    return head_work(Account(plan, candidate.axes, options, chunked_loss=chunked), candidate.shape)


def selective_work(plan: BuildPlan, candidate: Candidate, whole: Measurement) -> Measurement:
    """The same with selective recomputation: results of products and attention are kept. whole: with full"""

    def part(kind: int, work: PartWork) -> PartWork:
        layer = whole.work.layers.index(kind)
        account = Account(plan, candidate.axes, candidate.parallel_options())
        checkpointing = Checkpointing(save=GROUPS)
        sizes = account.of_part(candidate.shape, range(layer, layer + 1), 1, checkpointing)
        nbytes = work.nbytes._replace(
            recomputed_activation=sizes.kept.activation - whole.shared,
            recomputed_backward_peak=sizes.in_backward - whole.shared,
        )
        again = tuple(op for op in work.forward if op.kind == "other")
        return work._replace(recomputed=again, nbytes=nbytes)

    kinds = tuple(part(kind, work) for kind, work in enumerate(whole.work.kinds))
    return Measurement(replace(whole.work, kinds=kinds), whole.shared)


def _shared(plan: BuildPlan, candidate: Candidate, work: ModelWork) -> int:
    """What one layer holds beyond its half of two alike; 0 where no two layers in a row are alike."""
    for layer, pair in enumerate(zip(work.layers, work.layers[1:], strict=False)):
        if pair[0] == pair[1]:
            account = Account(plan, candidate.axes, candidate.parallel_options())
            sizes = account.of_part(candidate.shape, range(layer, layer + 2), 1)
            return max(0, 2 * work.kinds[pair[0]].nbytes.activation - sizes.kept.activation)
    return 0


def _with_offloading(plan: BuildPlan, candidate: Candidate, layer: int, nbytes: PartBytes) -> PartBytes:
    """With what a layer offloads that does not run again, and the most that its whole backward then holds."""
    account = Account(plan, candidate.axes, candidate.parallel_options(), offloading=Offloading())
    sizes = account.of_part(candidate.shape, range(layer, layer + 1), 1, split=False)
    return nbytes._replace(
        offloaded=sizes.kept.offloaded + sizes.input_stays,
        offloaded_input=sizes.input_stays,
        offloaded_backward_peak=sizes.in_backward,
    )


def _without(nbytes: PartBytes, shared: int) -> PartBytes:
    return nbytes._replace(
        activation=nbytes.activation - shared,
        forward_peak=nbytes.forward_peak - shared,
        backward_peak=nbytes.backward_peak - shared,
        recomputed_activation=nbytes.recomputed_activation - shared,
        recomputed_backward_peak=nbytes.recomputed_backward_peak - shared,
        offloaded=max(nbytes.offloaded - shared, nbytes.offloaded_input),  # which counts as if it stayed
        offloaded_backward_peak=nbytes.offloaded_backward_peak - shared,
    )
