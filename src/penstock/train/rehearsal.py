"""What the process that ranks are forked from does ahead of them: it plans the run, and drops the plan.

What penstock has learned of a model's form, and what torch keeps of a trace, stays in their caches. A rank
that is forked from there plans in hundredths of a second.
"""

from __future__ import annotations

from penstock.models.hub import is_name
from penstock.models.split.multiply_adds import works
from penstock.train.config.sections import TrainConfig
from penstock.train.model import named_model
from penstock.train.settings import make_auto


def rehearse(config: TrainConfig) -> None:
    """Trace the model of a run as each of its ranks will. Reads no weight. Raises what `preflight` raises.

    Not one of a Hub name, before the preflight has fetched its files and pinned its commit.
    """
    if is_name(config.model.path) and config.model.commit is None:
        return
    plan = make_auto(config).build_plan(named_model(config.model))
    works(plan.source.model, plan.chain)
    _ = plan.completer().shape_questions  # which the first step would count
