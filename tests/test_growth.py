"""docs/growth.md: its points are the planner's best runs, and its table and picture show them."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from benchmarks import growth
from transformers import LlamaConfig

from penstock.planner.hardware import Cluster, read_cluster
from penstock.planner.search import Plans, plan
from penstock.planner.workload import Workload


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> LlamaConfig:
    monkeypatch.setattr(growth, "BATCH", 8)
    monkeypatch.setattr(growth, "LENGTH", 64)
    monkeypatch.setattr(growth, "processors", lambda: 1)  # others would import torch first
    return LlamaConfig(
        num_hidden_layers=2, hidden_size=64, intermediate_size=96, num_attention_heads=1,
        num_key_value_heads=1, vocab_size=256, max_position_embeddings=64, architectures=["LlamaForCausalLM"],
    )  # fmt: skip


def test_a_point_is_the_planners_best_run(config: LlamaConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Workload, Cluster, int, int]] = []
    made: list[Plans] = []

    def planned(workload: Workload, cluster: Cluster, batch: int, length: int, **options: int) -> Plans:
        asked.append((workload, cluster, batch, length))
        made.append(plan(workload, cluster, batch, length, **options))
        return made[-1]

    monkeypatch.setattr(growth, "plan", planned)
    of = growth.point(config, 1)
    ((workload, *rest),), best = asked, made[0].best[0]
    assert workload.config is config
    assert rest == [read_cluster("1 x DGX H100"), 8, 64]
    assert (of.gpus, of.seconds, of.mfu, of.gib) == (8, best.seconds, best.mfu, best.nbytes / 2**30)
    assert sum(of.spent.values()) == pytest.approx(1)
    assert of.spent["bubble"] == pytest.approx(best.spent.get("bubble", 0.0) / best.seconds)


def test_the_page_gets_a_row_and_a_bar_for_each_point(
    config: LlamaConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page, drawn = tmp_path / "growth.md", tmp_path / "growth.svg"
    page.write_text(f"# Page\n\n{growth.BEGIN}old\n{growth.END}\n\ntext\n")
    monkeypatch.setattr(growth, "PAGE", page)
    monkeypatch.setattr(growth, "PICTURE", drawn)
    monkeypatch.setattr(growth, "llama_8b", lambda: config)
    monkeypatch.setattr("sys.argv", ["growth", "--write", "--hosts", "1", "2"])
    growth.main()
    text = page.read_text()
    assert text.startswith("# Page\n")
    assert text.endswith("\n\ntext\n")
    assert "old" not in text
    assert len({line.count("|") for line in text.splitlines() if line.startswith("|")}) == 1
    assert [line.split(" | ")[0] for line in text.splitlines() if "`," in line] == ["| 8", "| 16"]
    bars = [title.text or "" for title in ElementTree.parse(drawn).iter() if title.tag.endswith("title")]
    assert sum(text.startswith("16 GPUs: compute") for text in bars) == 1
