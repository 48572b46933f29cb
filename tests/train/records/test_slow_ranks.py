"""A rank that is slower than predicted is named once, with its numbers; even ranks never are."""

from __future__ import annotations

import math
import re
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from penstock.models.split.multiply_adds import MultiplyAdds
from penstock.runtime.step_report import OpSeconds
from penstock.schedule import Op, Schedule, build
from penstock.train.data.rows import Fill
from penstock.train.preflight import preflight

# medians of others, of a table by hand
from penstock.train.records.slow_ranks import IN_A_ROW, KINDS, Host, SlowRanks, _medians_of_others
from penstock.train.run import run
from support import jobs_train
from support.pool import Pool
from support.tiny import QWEN3, config, metrics, tree

# of four stages
WORKS = tuple(MultiplyAdds(*each) for each in ((3.0, 0.01), (1.0, 0.02), (1.0, 0.02), (2.0, 0.02)))
RATE = 1e-6  # seconds of a multiply-add
FORWARDS = {"F": 1, "B": 2, "I": 1, "W": 1}


def hosts(pipelines: int = 1, ranks: int = 4) -> list[Host]:
    """Two ranks on a host."""
    return [Host(p, r, f"host-{'abcdefgh'[2 * p + r // 2]}") for p in range(pipelines) for r in range(ranks)]


class Cluster:
    """Ranks that compute as fast as is said, in the steps of a schedule."""

    def __init__(
        self, schedule: Schedule, pipelines: int = 1, kinds: str = KINDS, works: Any = WORKS, seed: int = 0
    ) -> None:
        self.schedule, self.pipelines = schedule, pipelines
        self.works = works * (schedule.placement.depth // len(works))
        self.watch = SlowRanks(self.works, hosts(pipelines), pipelines > 1, kinds)
        self._draw = np.random.default_rng(seed)

    def seconds(self, tokens: int, squares: int, slow: dict[tuple[int, int], float]) -> Any:
        found = np.zeros((self.pipelines, self.schedule.ranks, len(KINDS)))
        depth = self.schedule.placement.depth
        for rank, program in enumerate(self.schedule.programs):
            for op in program:
                cost = self.works[op.stage % depth].of(tokens, squares) / self.schedule.microbatches
                found[:, rank, KINDS.index(op.kind)] += RATE * FORWARDS[op.kind] * cost
        for (pipeline, rank), times in slow.items():
            found[pipeline, rank] *= times
        return found * self._draw.uniform(0.95, 1.1, found.shape)

    def run(
        self, steps: int, slow: dict[tuple[int, int], float] | None = None, images: int = 0
    ) -> list[dict[str, Any]]:
        """What is told in so many steps, of ragged lengths."""
        told = []
        for _ in range(steps):
            lengths = self._draw.integers(10, 500, 32)
            tokens, squares = int(lengths.sum()), int((lengths**2).sum())
            seconds = self.seconds(tokens, squares, slow or {})
            told += self.watch.after(self.schedule, seconds, Fill(tokens, tokens, squares, images))
        return told


SCHEDULES = [
    build("1f1b", ranks=4, microbatches=8),
    build("zb_v", ranks=4, microbatches=8),
    build("dualpipe", ranks=4, microbatches=8),
    build("interleaved_1f1b", ranks=4, microbatches=8, stages_per_rank=2),
]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.name)
@pytest.mark.parametrize("pipelines", [1, 3])
def test_even_ranks_are_never_told_and_a_slow_one_is_told_once(schedule: Schedule, pipelines: int) -> None:
    """Also where stages differ in cost, and a stage has no whole backward."""
    cluster = Cluster(schedule, pipelines)
    assert cluster.run(200) == []
    slow = {(pipelines - 1, 2): 1.5}
    assert cluster.run(IN_A_ROW - 1, slow) == []
    (entry,) = cluster.run(60, slow)
    assert (entry["rank"], entry["host"]) == (2, hosts(pipelines)[-2].name)
    assert entry.get("pipeline") == (pipelines - 1 if pipelines > 1 else None)
    assert entry["times"] == pytest.approx(1.5, rel=0.1)
    assert set(entry["ms"]) == set(entry["predicted_ms"]) == {op.kind for op in schedule.programs[2]}
    for kind, milliseconds in entry["ms"].items():
        assert milliseconds == pytest.approx(1.5 * entry["predicted_ms"][kind], rel=0.15)


@pytest.mark.parametrize("frozen", [False, True])
def test_ops_with_towers_that_work_on_images_have_no_prediction(frozen: bool) -> None:
    """0.5.0: the towers counted for nothing, so that a rank with them was named."""
    towers = MultiplyAdds(3.0, 0.01, image=50.0, trained=0.0 if frozen else 50.0)
    cluster = Cluster(SCHEDULES[0], works=(towers, *WORKS[1:]))
    expected = [(0, {"B"})] if frozen else []
    assert [(each["rank"], set(each["ms"])) for each in cluster.run(60, {(0, 0): 2.0}, images=9)] == expected
    assert [each["rank"] for each in cluster.run(60, {(0, 2): 2.0}, images=9)] == [2]
    peers = Cluster(SCHEDULES[0], 3, works=(towers, *WORKS[1:]))
    assert [set(each["ms"]) for each in peers.run(60, {(1, 0): 2.0}, images=9)] == [{"F", "B"}]
    text = Cluster(SCHEDULES[0], works=(towers, *WORKS[1:]))
    assert [set(each["ms"]) for each in text.run(60, {(0, 0): 2.0})] == [{"F", "B"}]


def test_a_rank_is_told_again_after_it_recovered_and_fell_back() -> None:
    cluster, slow = Cluster(SCHEDULES[0]), {(0, 1): 1.6}
    assert len(cluster.run(60, slow)) == 1
    assert cluster.run(IN_A_ROW - 1) == []  # a pause is no recovery
    assert cluster.run(60, slow) == []
    assert cluster.run(IN_A_ROW) == []
    assert len(cluster.run(60, slow)) == 1
    for _ in range(9):  # never so many steps in a row
        assert cluster.run(1) + cluster.run(IN_A_ROW - 1, {(0, 0): 2.0}) == []


def test_a_cost_that_says_nothing_is_no_prediction() -> None:
    """A stage of the embedding alone has no multiply-adds, and one rank has no peer."""
    cluster = Cluster(SCHEDULES[0], works=(MultiplyAdds(0.0), *WORKS[1:]))
    cluster.watch.after(SCHEDULES[0], np.ones((1, 4, 4)), Fill(10, 10, 10))
    assert cluster.run(60, {(0, 0): 9.0}) == []
    assert not any("rank 0" in line for line in cluster.watch.by_host())
    peers = Cluster(SCHEDULES[0], 3, works=(MultiplyAdds(0.0), *WORKS[1:]))
    peers.works = WORKS  # it takes some time
    assert [each["rank"] for each in peers.run(60, {(1, 0): 2.0})] == [0]
    one = SlowRanks(WORKS[:1], [Host(0, 0, "here")], False)
    schedule = build("gpipe", ranks=1, microbatches=2)
    assert [one.after(schedule, np.ones((1, 1, 4)), Fill(10, 10, 10)) for _ in range(60)] == [[]] * 60
    assert one.by_host() == []


def test_forwards_alone_are_compared_where_backwards_are_uneven() -> None:
    cluster = Cluster(SCHEDULES[0], kinds="F")
    seconds = cluster.seconds(100, 1000, {})
    seconds[0, 3, KINDS.index("B")] *= 9
    assert [cluster.watch.after(SCHEDULES[0], seconds, Fill(100, 100, 1000)) for _ in range(40)] == [[]] * 40
    (entry,) = cluster.run(40, {(0, 3): 1.5})
    assert set(entry["ms"]) == {"F"}


def test_the_line_and_the_listing_by_host() -> None:
    cluster = Cluster(SCHEDULES[0])
    (entry,) = cluster.run(40, {(0, 3): 1.5})
    number = r"\d+(\.\d+)? ms \(predicted \d+(\.\d+)?\)"
    assert re.fullmatch(
        rf"penstock: warning: rank 3 on host-b is 1\.\d\d times slower than its share of the work, "
        rf"for 20 steps: F {number}, B {number}",
        cluster.watch.words(entry),
    )
    slow, other = cluster.watch.by_host()
    assert re.fullmatch(rf"1\.\d\d  rank 3 on host-b: F {number}, B {number}", slow)
    assert re.match(r"(0\.9|1\.0)\d  rank [01] on host-a: ", other)
    cluster = Cluster(SCHEDULES[0], 2)
    (entry,) = cluster.run(40, {(1, 0): 1.5})
    assert "rank 0 of pipeline 1 on host-c is 1." in cluster.watch.words(entry)
    assert "times slower than its peers in the other pipelines, for" in cluster.watch.words(entry)


def test_a_rank_is_no_peer_of_its_own() -> None:
    nan = math.nan
    values = np.array([[1.0, 4.0, 5.0], [2.0, nan, nan], [10.0, 4.0, nan]])
    expected = [[6.0, 4.0, nan], [5.5, nan, nan], [1.5, 4.0, nan]]
    np.testing.assert_array_equal(_medians_of_others(values), expected)


# ---- Whole runs


def timed(patch: pytest.MonkeyPatch, forwards: dict[int, float]) -> None:
    """Let the forwards of these stages take so many seconds, and nothing else any, by the ranks' clocks."""

    def of(cls: type[OpSeconds], program: Sequence[Op], times: Sequence[float]) -> OpSeconds:
        return cls(forward=sum(forwards[op.stage] for op in program if op.kind == "F"))

    patch.setattr(OpSeconds, "of", classmethod(of))


def test_a_slow_rank_of_a_run_is_named_in_log_metrics_and_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = {**QWEN3, "num_hidden_layers": 3}
    layers = {"pipeline.ranks": 3, "pipeline.layers_per_stage": [1, 1, 1], "pipeline.head_weight": None}
    timed(monkeypatch, {0: 0.01, 1: 0.04, 2: 0.025})  # the last one has the head
    keys = {**layers, "pipeline.microbatches": 1}
    run(preflight(config(tmp_path, model, keys, steps=24, evaluate_every=24)))
    (row,) = [row for row in metrics(tmp_path) if "slow_ranks" in row]
    assert row["step"] == IN_A_ROW + 2
    (entry,) = row["slow_ranks"]
    assert (entry["rank"], entry["host"]) == (1, socket.gethostname())
    assert entry["times"] > 3
    assert entry["ms"] == {"F": 40}
    said = capsys.readouterr().out
    assert said.count(f"penstock: warning: rank 1 on {socket.gethostname()} is ") == 1
    assert "hosts, by the time of the slowest rank over its prediction:\n" in said
    assert f"  {entry['times']:.2f}  rank 1 on {socket.gethostname()}: F 40 ms (predicted " in said


def test_seconds_of_ops_are_summed_by_their_kind() -> None:
    program = [Op(0, "F", 0), Op(0, "F", 1), Op(0, "I", 0), Op(0, "W", 0), Op(0, "B", 1)]
    times = [
        0.0,
        1.0,
        9.0,
        9.0,
        2.0,
        4.5,
        9.0,
        9.0,
        5.0,
        6.0,
        9.0,
        9.0,
        6.0,
        6.5,
        9.0,
        9.0,
        7.0,
        9.0,
        9.0,
        9.0,
    ]
    assert OpSeconds.of(program, times) == OpSeconds(3.5, 2.0, 1.0, 0.5)


@pytest.mark.sweep
@pytest.mark.parametrize("parallel", [{"dp_replicate": 2}, {"cp": 2}])
def test_a_slow_rank_of_another_pipeline_is_named(
    pool: Pool, tmp_path: Path, parallel: dict[str, int]
) -> None:
    """Beside its peer with dp_replicate, beside the other stage with cp."""
    made = tree(tmp_path)
    made["model"]["config"] |= {"num_key_value_heads": 2}
    made["train"] |= {"steps": 26, "evaluate_every": 26}
    said = pool.run(4, with_a_slow_rank, {**made, "parallel": parallel})
    assert [each["error"] for each in said] == [""] * 4
    (row,) = [row for row in metrics(tmp_path) if "slow_ranks" in row]
    assert [(each["pipeline"], each["rank"]) for each in row["slow_ranks"]] == [(1, 1)]
    assert "rank 1 of pipeline 1 on " in said[0]["said"]


def with_a_slow_rank(made: dict[str, Any]) -> dict[str, Any]:
    """The last process is slow. The head costs as much as one and a half layers."""
    with pytest.MonkeyPatch.context() as patch:
        timed(patch, {0: 0.01, 1: 0.05 if dist.get_rank() == 3 else 0.025})
        return jobs_train.trained(made)
