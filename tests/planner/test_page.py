"""The page of a search stands alone, and shows what the table shows."""

from __future__ import annotations

import re

from penstock.planner.page import page
from penstock.planner.search import plan
from support.planning import LENGTH, cluster, workload


def test_a_page_has_the_runs_the_step_its_memory_and_the_field() -> None:
    host = cluster(1, 4)
    plans = plan(workload(), host, 16, LENGTH, keep=4)
    text = page(plans, host, "<Llama>")
    assert "Plan of &lt;Llama&gt;" in text
    assert "<Llama>" not in text
    assert text.count("<tr") == 1 + 4
    for run in plans.best:
        assert run.candidate.mesh in text
        assert f"{run.seconds:.4g}" in text
    assert text.count("<circle") == len([r for r in plans.fitting if r.seconds <= 3 * plans.best[0].seconds])
    assert text.count('class="limit"') == 3
    linked = set(re.findall(r"(?:href|src)\s*=", text))
    assert not linked
    assert "<script" not in text
