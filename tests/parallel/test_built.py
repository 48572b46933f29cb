"""A stage that is spread over a mesh is never whole on one rank: its values, and what a rank holds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaMLP, LlamaPreTrainedModel

from penstock import AutoPipeline, Axes
from penstock.errors import ModelError
from penstock.models.tracing.meta import outlined
from penstock.models.weights import files as weights
from penstock.models.weights.initial import initialise
from penstock.pipeline.auto_pipeline import fill
from penstock.runtime.sharded_weights import materialize
from support import jobs_spread as jobs
from support.families import FAMILIES, tiny_config, tiny_model
from support.pool import Pool

MIB = 2**20
# Python's own: names, headers, meshes, and what conversions leave behind
CONSTANT = 12 * MIB

# family, ranks of the pipeline, axes, processes
CASES: list[tuple[str, int, Axes, int]] = [
    ("llama", 2, Axes(dp_shard=2), 4),
    ("mixtral", 1, Axes(dp_shard=2, ep=2, tp=2), 4),
    ("gpt2", 1, Axes(dp_shard=3), 3),  # of which some weights have no even shares
    ("qwen3", 2, Axes(tp=2), 4),
    ("gpt_oss", 1, Axes(dp_shard=2, cp=2, ep=4), 4),
    ("mixtral", 1, Axes(dp_shard=4, ep=2), 4),
    ("llama", 1, Axes(dp_replicate=2, dp_shard=2), 4),
]


@pytest.mark.parametrize(
    ("family", "ranks", "axes", "world", "tied"), [(*CASES[0], False), (*CASES[1], True)]
)
def test_the_values_are_those_of_one_process(
    pool: Pool, tmp_path: Path, family: str, ranks: int, axes: Axes, world: int, tied: bool
) -> None:
    """Bit for bit, of a folder, a model and a config, tied weights and buffers among them."""
    tiny_model(family, tied=tied, seed=5).save_pretrained(tmp_path, max_shard_size="20KB")
    expected = {}
    for kind in jobs.KINDS:
        given = jobs.source(kind, family, str(tmp_path), tied)
        expected[kind] = jobs.values(AutoPipeline(ranks=1, microbatches=2, seed=3).build(given))
    found = pool.run(world, jobs.built, ranks, axes, family, str(tmp_path), tied, {})
    for kind, whole in expected.items():
        assert {name for told in found for name in told[kind]} == whole.keys()
        for name, value in ((name, value) for told in found for name, value in told[kind].items()):
            assert value.dtype == whole[name].dtype, (kind, name)
            assert torch.equal(value, whole[name]), (kind, name)


@pytest.mark.parallel
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(("family", "ranks", "axes", "world"), CASES[2:])
def test_more_meshes(
    pool: Pool, tmp_path: Path, family: str, ranks: int, axes: Axes, world: int, tied: bool
) -> None:
    test_the_values_are_those_of_one_process(pool, tmp_path, family, ranks, axes, world, tied)


@pytest.mark.parametrize(
    ("family", "axes", "layers"),
    [
        ("mixtral", Axes(dp_shard=4, ep=4), 44),
        pytest.param("llama", Axes(dp_shard=2, tp=2), 44, marks=pytest.mark.parallel),
        pytest.param("llama", Axes(dp_shard=2, cp=2), 44, marks=pytest.mark.parallel),
        pytest.param("mixtral", Axes(dp_shard=2, cp=2, ep=2), 44, marks=pytest.mark.parallel),
    ],
)
def test_a_ranks_peak_is_its_part_and_one_tensor(
    pool: Pool, tmp_path: Path, family: str, axes: Axes, layers: int
) -> None:
    """All of the process's memory counts, read from /proc, whatever the model comes from."""
    folders = [str(tmp_path / name) for name in ("small", "large")]
    for folder, depth in zip(folders, (2, layers), strict=True):
        model = AutoModelForCausalLM.from_config(jobs.config_of(family, depth))
        model.save_pretrained(folder, max_shard_size="20MB")
    for told in pool.run(4, jobs.peaks, axes, family, layers, tuple(folders)):
        for kind, peak in told.items():
            shown = kind, *(round(size / MIB, 1) for size in peak)
            assert peak.stage > 40 * MIB
            assert peak.part < 0.3 * peak.stage, shown
            assert peak.part <= peak.held + CONSTANT, "the weights are not in memory: nothing was measured"
            assert peak.held <= peak.part + peak.largest + CONSTANT, shown


def test_the_model_that_it_was_built_of_is_let_go(pool: Pool) -> None:
    assert all(pool.run(4, jobs.let_go, Axes(dp_shard=4, ep=2)))
    assert jobs.let_go(None)


def test_a_buffer_without_dimensions_is_saved(pool: Pool, tmp_path: Path) -> None:
    """0.5.0: IndexError on all pipelines of a mesh but the first, which waited for them."""
    pool.run(2, jobs.saved, Axes(dp_shard=2), str(tmp_path / "saved"))
    held = load_file(tmp_path / "saved" / "model.safetensors")
    assert float(held.pop("model.norm.seen")) == 0.5
    expected = tiny_model("llama").state_dict()
    assert held.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in held.items())


def test_what_wraps_a_stage_gets_values(pool: Pool) -> None:
    for given, loss, expected in pool.run(4, jobs.wrapped, Axes(dp_shard=2, tp=2)):
        assert given
        assert loss == pytest.approx(expected, rel=1e-10)


def test_a_dtype_that_some_weights_keep_is_kept(tmp_path: Path) -> None:
    """transformers reads the norms of this one in float32 where the rest is float16."""
    tiny_model("gpt_oss").save_pretrained(tmp_path)
    auto = AutoPipeline(ranks=2, microbatches=2, dtype=torch.float16)
    plan = auto.build_plan(tmp_path)
    whole, part = plan.model_of(0), plan.model_of(0, values=False)
    fill(whole, plan.source, (), auto.seed)
    weights.check(part, plan.source.files, ())  # which finds their dtypes
    given = outlined(part)
    materialize(part, torch.device("cpu"))
    fill(given, plan.source, (), auto.seed)
    expected, found = dict(whole.named_parameters()), dict(part.named_parameters())
    assert {p.dtype for p in expected.values()} == {torch.float16, torch.float32}
    assert all(found[name].dtype == value.dtype for name, value in expected.items())
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def check_pieces(family: str) -> None:
    """Initial values are the same bit for bit, whether they come all at once or piece by piece."""
    outline = AutoPipeline(ranks=2, microbatches=2).build_plan(tiny_config(family))
    model = outline.source.model
    ties = weights.tied_names(model)
    for stage in range(2):
        whole, part = outline.model_of(stage), outline.model_of(stage)
        initialise(whole, model, ties, 3)
        given = outlined(part)
        materialize(part, torch.device("cpu"))
        initialise(given, model, ties, 3)
        for kind in ("parameters", "buffers"):
            expected, found = (dict(getattr(m, f"named_{kind}")()) for m in (whole, part))
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_initial_values_come_piece_by_piece(family: str) -> None:
    check_pieces(family)


def test_an_initialisation_that_looks_at_values(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = LlamaPreTrainedModel._init_weights

    def looks(self: LlamaPreTrainedModel, module: nn.Module) -> None:
        plain(self, module)
        if isinstance(module, LlamaMLP) and float(module.up_proj.weight.detach().max()) > 0:
            module.down_proj.weight.mul_(2)

    monkeypatch.setattr(LlamaPreTrainedModel, "_init_weights", looks)
    check_pieces("llama")


def test_an_initialisation_that_hides_what_it_fills(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = LlamaPreTrainedModel._init_weights

    def hides(self: LlamaPreTrainedModel, module: nn.Module) -> None:
        plain(self, module)
        if isinstance(module, LlamaDecoderLayer) and not module.input_layernorm.weight.is_meta:
            module.mlp.down_proj.weight.mul_(2)

    monkeypatch.setattr(LlamaPreTrainedModel, "_init_weights", hides)
    with pytest.raises(ModelError, match="reads more where there are values"):
        check_pieces("llama")
