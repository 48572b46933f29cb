"""A chart of a run: long curves and wide ranges."""

from __future__ import annotations

import re

from penstock.train.report.charts import Chart, Line, draw


def test_a_long_curve_is_thinned_and_keeps_its_least_and_most() -> None:
    points = [(step, 1.0) for step in range(1, 10_001)]
    points[5000], points[7000] = (5001, 9.0), (7001, -3.0)
    drawn = draw(Chart("Loss", "", [Line("training", points)]))
    assert len(drawn) < 12_000
    ys = [float(y) for y in re.findall(r"[ML][\d.]+ ([\d.]+)", drawn.split('data-label="training"')[1])]
    assert min(ys) < 100  # of 1000, downwards
    assert max(ys) > 850


def test_a_wide_range_is_logarithmic_where_the_chart_may_be() -> None:
    points = [(1, 1e-3), (2, 1.0), (3, 1e3)]
    assert 'data-log="1"' in draw(Chart("Norm", "", [Line("norm", points)], log=True))
    assert 'data-log="0"' in draw(Chart("Norm", "", [Line("norm", points)]))
    assert 'data-log="0"' in draw(Chart("Norm", "", [Line("norm", [*points, (4, -1.0)])], log=True))
