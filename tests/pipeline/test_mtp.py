"""Pipelines with prediction layers (MTP): exact wherever a layout puts them; weights in and out; refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock import AutoPipeline, Axes
from penstock.batch import head_logits
from penstock.cli.merge import merge_folder
from penstock.errors import ConfigError, InputError, ModelError, PartitionError
from penstock.models.split.multiply_adds import multiply_adds
from penstock.pipeline.building.build_plan import balance
from support import zoo
from support.covering import every
from support.mesh import build_whole, own_part
from support.pool import Pool
from support.predicting import packed_batch, tiny_config, tiny_predicting
from support.refusals import refuses

BATCH = zoo.tiny_batch("deepseek_v3", rows=8)
TWO_EACH = {"schedule": "1f1b", "stages_per_rank": 2}
OF_BAILING = {"mtp_layer_types": ["full_attention"], "mtp_mlp_layer_types": ["sparse"]}
CASES: list[tuple[str, str | None, Any, dict[str, Any]]] = [
    ("deepseek_v3", "Et*3|tmL", "1f1b", {}),  # on the last stage
    ("deepseek_v3", "Et|ttt|m|mL", "zb_v", {"count": 2}),
    ("deepseek_v3", "Ett|tt|m|L", TWO_EACH, {}),  # on one of its own
    ("deepseek_v3", "ttttmL", "gpipe", {"tie_word_embeddings": True}),
    ("deepseek_v3", "Ettt|tmmL", "zb_h1", {"count": 2, "tie_word_embeddings": True}),
    ("glm4_moe", "Ett|ttm|L", "1f1b", {}),  # behind layers, before the head
    ("deepseek_v3", None, "dualpipe", {}),
]


def pipe_of(model: Any, layout: str | None, schedule: Any, **options: Any) -> Any:
    stages = 2 if layout is None else layout.count("|") + 1
    ranks = stages // 2 if stages == 4 else stages
    return AutoPipeline(ranks=ranks, schedule=schedule, microbatches=4, layout=layout, **options).build(model)


@pytest.mark.parametrize(
    ("model_type", "layout", "schedule", "changes"),
    [
        *every(2, CASES),
        pytest.param("bailing_hybrid", "Ett|ttmL", "1f1b", OF_BAILING, marks=pytest.mark.sweep),
    ],
)
def test_every_gradient(model_type: str, layout: str | None, schedule: Any, changes: dict[str, Any]) -> None:
    model = tiny_predicting(model_type, **changes)
    pipe = pipe_of(model, layout, schedule)
    report = pipe.compare(model, BATCH)
    report.raise_if_wrong()
    assert "model.layers.4.eh_proj.weight" in {tensor.name for tensor in report.tensors}
    assert report.losses is not None
    assert report.losses[0] == pytest.approx(float(model(**BATCH).loss.detach()), rel=1e-6)


@pytest.mark.parametrize("batch", [packed_batch(8), [BATCH, zoo.tiny_batch("deepseek_v3", 4, 9)]])
def test_documents_and_lengths_that_differ(batch: Any) -> None:
    model = tiny_predicting()
    if isinstance(batch, list):  # a list has an entry for each microbatch
        batch = [{name: value[:2] for name, value in each.items()} for each in batch * 2]
    pipe_of(model, "Ett|tt|m|L", TWO_EACH).verify_against(model, batch)


def test_rows_shorter_than_the_layers_look_ahead() -> None:
    """Rows of one token, and with position ids of two: "The size of tensor a (2) must match" (b (3))."""
    whole = {**BATCH, "position_ids": torch.arange(BATCH["input_ids"].shape[1]).expand(8, -1)}
    batch = [{name: value[:2, :length] for name, value in whole.items()} for length in (1, 2, 3, 9)]
    pipe_of(tiny_predicting(count=2), "Et|ttt|m|mL", "zb_v").verify_against(tiny_predicting(count=2), batch)


def test_in_blocks_of_the_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_logits, "HELD_BYTES", 1 << 10)
    model = tiny_predicting()
    pipe_of(model, "Ett|tt|m|L", TWO_EACH).verify_against(model, BATCH)


def test_layers_run_again_in_the_backward() -> None:
    model = tiny_predicting()
    pipe_of(model, "Ett|tt|m|L", "zb_v", activation_checkpointing=True).verify_against(model, BATCH)


def test_a_loss_function_gets_the_logits_of_all() -> None:
    def mean(output: Any, microbatch: Any) -> Tensor:
        assert output["mtp_loss_scaling_factor"] == 0.1
        return output["logits"].mean() + output["mtp_logits"][0].mean()  # type: ignore[no-any-return]

    pipe = pipe_of(tiny_predicting(), "Ettt|tmL", "1f1b", loss_fn=mean)
    assert pipe.step({"input_ids": BATCH["input_ids"]}).loss != 0


def held_in(folder: Path) -> dict[str, Tensor]:
    return {n: v for file in folder.glob("*.safetensors") for n, v in load_file(file).items()}


def test_weights_in_and_out(tmp_path: Path) -> None:
    """A folder with prediction layers is read, trained and written; without them they get initial values."""
    model: Any = tiny_predicting(dtype=torch.float32)
    model.save_pretrained(tmp_path / "theirs")
    auto = AutoPipeline(ranks=2, microbatches=4, layout="Ettt|tmL", mtp_loss_scaling_factor=0.3)
    held, copies = (
        held_in(tmp_path / "theirs"),
        {"embed_tokens": "model.embed_tokens", "shared_head.head": "lm_head"},
    )
    for name, source in copies.items():  # as in DeepSeek-V3's files
        held[f"model.layers.4.{name}.weight"] = held[f"{source}.weight"].clone()
    save_file(held, tmp_path / "theirs" / "model.safetensors", metadata={"format": "pt"})
    pipe = auto.build(tmp_path / "theirs")
    model.config.mtp_loss_scaling_factor = 0.3
    pipe.verify_against(model, BATCH)
    pipe.save_pretrained(tmp_path / "ours")
    theirs, ours = (held_in(tmp_path / each) for each in ("theirs", "ours"))
    assert theirs.keys() - ours.keys() == {f"model.layers.4.{name}.weight" for name in copies}
    assert all(torch.equal(theirs[name], value) for name, value in ours.items())
    auto.build(tmp_path / "ours").verify_against(model, BATCH)
    fresh = auto.build(tiny_config())
    assert fresh.modules[1].get_parameter("model.layers.4.eh_proj.weight").std() > 0
    without = AutoPipeline(ranks=2, microbatches=4).build(
        tmp_path / "ours"
    )  # the plain model of the same folder
    assert not any("layers.4" in name for module in without.modules.values() for name in module.state_dict())


def test_an_adapter_of_prediction_layers_is_merged(tmp_path: Path) -> None:
    """The merged folder had none, though the base has them and the adapter was trained on them."""
    tiny_predicting(dtype=torch.float32).save_pretrained(tmp_path / "base")
    adapter = LoraConfig(r=2, target_modules=["o_proj", "eh_proj"])
    options: dict[str, Any] = {
        "ranks": 2,
        "microbatches": 4,
        "layout": "Ettt|tmL",
        "mtp_loss_scaling_factor": 0.1,
    }
    pipe = AutoPipeline(**options, adapter=adapter).build(tmp_path / "base")
    for parameter in pipe.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter.data, std=0.1)
    pipe.save_pretrained(tmp_path / "adapter")
    merge_folder(tmp_path / "adapter", tmp_path / "merged", tmp_path / "base", "5GB")
    base, merged = held_in(tmp_path / "base"), held_in(tmp_path / "merged")
    assert merged.keys() == base.keys()
    changed = {name for name, value in base.items() if not torch.equal(value, merged[name])}
    assert changed == {name for name in base if "o_proj" in name or "eh_proj" in name}
    again = AutoPipeline(**options).build(tmp_path / "merged")
    assert again.evaluate(BATCH).loss == pytest.approx(pipe.evaluate(BATCH).loss, rel=1e-5)


@pytest.mark.parametrize("name", ["norm", "model.norm"])
def test_an_adapter_with_a_copy_of_the_final_norm_is_refused(name: str) -> None:
    """Its gradients were exact, and a merged folder had the norm of the base."""
    adapter = LoraConfig(r=2, target_modules=["o_proj"], modules_to_save=[name])
    with refuses(ModelError, "norm and prediction layers (mtp)", "the first prediction layer"):
        pipe_of(get_peft_model(tiny_predicting(), adapter), None, "1f1b")


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["o_proj", "embed_tokens"]},
        {"target_modules": ["o_proj"], "modules_to_save": ["embed_tokens"]},
    ],
    ids=["lora", "modules_to_save"],
)
def test_an_adapter_of_the_embedding_is_exact(options: dict[str, Any]) -> None:
    """PEFT gives the prediction layer's embedding an adapter of its own, on another stage."""
    made: Any = get_peft_model(tiny_predicting(), LoraConfig(r=2, **options))
    for parameter in made.double().parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter.data, std=0.1)
    report = pipe_of(made, "Ettt|t|mL", "1f1b").compare(made.get_base_model(), BATCH)
    report.raise_if_wrong()
    trained = {tensor.name for tensor in report.tensors}
    embeddings = {name.rpartition("embed_tokens")[0] for name in trained if "embed_tokens" in name}
    assert embeddings == {"model.", "model.layers.4."}


def test_initial_values_do_not_depend_on_the_layout() -> None:
    def values(layout: str) -> dict[str, Tensor]:
        ranks = layout.count("|") + 1
        auto = AutoPipeline(ranks=ranks, microbatches=4, layout=layout, mtp_loss_scaling_factor=0.1)
        modules = auto.build(tiny_config()).modules.values()
        return {
            name: p.detach()
            for module in modules
            for name, p in module.named_parameters(remove_duplicate=False)
        }

    one, other = values("ttttmL"), values("Ett|tt|m|L")
    assert one.keys() == other.keys()
    assert all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.parametrize(
    ("options", "error", "value", "rule", "remedy"),
    [
        ({"layout": "Ettt|tmL"}, PartitionError,
         "layout 'Ettt|tmL'", "1 multi-token-prediction layer (m), and the model is built with none",
         "remove m"),
        ({"layout": "Ettt|tL", "mtp_loss_scaling_factor": 0.1}, PartitionError,
         "layout 'Ettt|tL'", "built with 1", "Write 1 m"),
        ({"layout": "Ettt|tmmL", "mtp_loss_scaling_factor": 0.1}, PartitionError,
         "layout 'Ettt|tmmL'", "built with 1", "Write 1 m"),
        ({"layout": "Ettm|ttL", "mtp_loss_scaling_factor": 0.1}, PartitionError,
         "layout, character 6", "a layer after m", "Move m"),
        ({"layout": "Ettt|tLm", "mtp_loss_scaling_factor": 0.1}, PartitionError,
         "layout, character 8", "after L", "Move L"),
        ({"layout": "Ett|tmL", "mtp_loss_scaling_factor": 0.1}, PartitionError,
         "layout 'Ett|tmL'", "has 3 layers", "Write 4 t"),
        ({"mtp_loss_scaling_factor": -1.0}, ConfigError,
         "mtp_loss_scaling_factor=-1.0", "multiplied by it", ""),
        ({"mtp_loss_scaling_factor": float("nan")}, ConfigError,
         "mtp_loss_scaling_factor=nan", "multiplied by it", ""),
        ({"mtp_loss_scaling_factor": 0.1, "axes": Axes(tp=2)}, ConfigError,
         "mtp_loss_scaling_factor with tp=2", "tp and cp", ""),
    ],
)  # fmt: skip
def test_refused(
    options: dict[str, Any], error: type[InputError], value: str, rule: str, remedy: str
) -> None:
    with refuses(error, value, rule, remedy):
        AutoPipeline(ranks=2, microbatches=4, **options).build_plan(tiny_config())


def test_a_model_object_is_taken_as_it_is() -> None:
    with refuses(
        ModelError,
        "mtp_loss_scaling_factor for a model object",
        remedy="Build it with penstock.with_mtp(DeepseekV3ForCausalLM)",
    ):
        AutoPipeline(ranks=2, microbatches=4, mtp_loss_scaling_factor=0.1).build_plan(tiny_predicting())


def test_layers_cost_what_they_compute() -> None:
    """The prediction layer more than a decoder layer, by its projection; the head as much for each part."""
    one, two = (
        AutoPipeline(ranks=2, microbatches=4, mtp_loss_scaling_factor=factor).build_plan(tiny_config())
        for factor in (None, 0.1)
    )
    before, after = (multiply_adds(plan.source.model, plan.chain, 16) for plan in (one, two))
    width, tokens = 32, 16
    assert after.layers[:-1] == before.layers
    assert after.layers[-1] == before.layers[-1] + 2 * width * width * tokens
    assert after.head == 2 * before.head
    assert balance(two).count("m") == 1


def verified(layout: str, axes: Axes) -> tuple[bool, float]:
    model = tiny_predicting()
    pipe = build_whole(model, layout.count("|") + 1, axes, layout=layout)
    report = pipe.compare(model, own_part(BATCH, *pipe.batch_part))
    pipe.close()
    return report.passed, report.largest


@pytest.mark.parallel
@pytest.mark.parametrize("layout", ["Ettt|tmL", "Etttt|mL", "Ettttm|L"])
@pytest.mark.parametrize("axes", [Axes(dp_shard=2), Axes(dp_shard=2, ep=2)])
def test_sharded(pool: Pool, layout: str, axes: Axes) -> None:
    assert all(passed for passed, _ in pool.run(4, verified, layout, axes))
