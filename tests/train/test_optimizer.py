"""Groups by dimension, and the learning rate as a function of the step alone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from penstock.cli.plan import memory, optimizers
from penstock.errors import ConfigError
from penstock.parallel.muon import Muon, matrices
from penstock.train.config.sections import AdamWKeys, AdamWSection, MuonSection, TrainConfig
from penstock.train.optimizer import learning_rate, make_optimizers, muon_parameters, set_learning_rates
from penstock.train.run import preflight
from support import zoo
from support.families import FAMILIES, tiny_model
from support.tiny import tree


def some() -> list[tuple[str, nn.Parameter]]:
    frozen = nn.Parameter(torch.zeros(2, 2), requires_grad=False)
    return [*nn.Linear(2, 3).named_parameters(), ("frozen", frozen)]


def test_only_matrices_decay() -> None:
    (weight, bias), section = [p for _, p in some()[:2]], AdamWSection(weight_decay=0.3, learning_rate=0.5)
    (optimizer,) = make_optimizers(section, [("weight", weight), ("bias", bias), some()[2]], ())
    many, vectors = optimizer.param_groups
    assert many["params"] == [weight]
    assert many["weight_decay"] == 0.3
    assert vectors["params"] == [bias]
    assert vectors["weight_decay"] == 0.0
    set_learning_rates(section, [optimizer], 10, 10)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.05, 0.05])


def test_biases_do_not_decay_though_they_have_two_dimensions() -> None:
    """0.5.0: those of gpt_oss's experts, one row for each expert, did."""
    made: dict[str, nn.Parameter] = {}
    for family in FAMILIES:
        made |= {f"{family}.{name}": p for name, p in tiny_model(family, layers=2).named_parameters()}
    names = {id(parameter): name for name, parameter in made.items()}
    (optimizer,) = make_optimizers(AdamWSection(), made.items(), ())
    decays, rest = ({names[id(p)] for p in group["params"]} for group in optimizer.param_groups)
    assert {name for name in decays if "norm" in name or "bias" in name} == set()
    biases = {"gpt_oss.model.layers.0.mlp.experts.gate_up_proj_bias", "gpt2.transformer.h.0.attn.c_attn.bias"}
    assert biases < rest
    assert {name for name in rest if not re.search("norm|bias|ln_|layer_norm|sinks", name)} == set()


def test_a_process_with_matrices_only_has_one_group() -> None:
    (optimizer,) = make_optimizers(AdamWSection(), some()[:1], ())
    assert len(optimizer.param_groups) == 1


def test_muon_and_adamw_have_rates_of_their_own_that_fall_together() -> None:
    section = MuonSection(
        learning_rate=1.0, weight_decay=0.2, momentum=0.8, ns_steps=3, adjust="match_rms_adamw",
        adamw=AdamWKeys(learning_rate=0.01, weight_decay=0.3), final_fraction=0.5,
    )  # fmt: skip
    muon, adamw = make_optimizers(section, some(), {"weight"})
    assert isinstance(muon, Muon)
    assert [tuple(p.shape) for p in muon.param_groups[0]["params"]] == [(3, 2)]
    options = {key: muon.param_groups[0][key] for key in ("weight_decay", "momentum", "ns_steps")}
    assert options == {"weight_decay": 0.2, "momentum": 0.8, "ns_steps": 3}
    assert muon.param_groups[0]["adjust_lr_fn"] == "match_rms_adamw"
    set_learning_rates(section, [muon, adamw], 4, 4)
    assert muon.param_groups[0]["lr"] == pytest.approx(0.5)
    assert [group["lr"] for group in adamw.param_groups] == pytest.approx([0.005])


def test_a_process_may_hold_nothing_of_one_kind() -> None:
    assert [type(o).__name__ for o in make_optimizers(MuonSection(), some()[:1], {"weight"})] == ["Muon"]
    assert [type(o).__name__ for o in make_optimizers(MuonSection(), some(), ())] == ["AdamW"]
    assert [type(o).__name__ for o in make_optimizers(MuonSection(), [], ())] == ["AdamW"]


LLAMA = {f"self_attn.{x}_proj.weight" for x in "qkvo"} | {
    f"mlp.{x}_proj.weight" for x in ("gate", "up", "down")
}
MATRICES = {
    "llama": LLAMA,
    "mixtral": {name for name in LLAMA if "attn" in name}
    | {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"},
    "gpt_oss": {name for name in LLAMA if "attn" in name}
    | {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"},
    "gpt2": {"attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight"},
}  # neither embeddings nor the head, no norm, bias or router, nor experts' biases


@pytest.mark.parametrize("family", MATRICES)
def test_muon_is_for_the_matrices_inside_of_layers(family: str) -> None:
    model = tiny_model(family, layers=2)
    layers = "transformer.h" if family == "gpt2" else "model.layers"
    found = matrices(model, layers)
    assert found == {f"{layers}.{at}.{name}" for at in range(2) for name in MATRICES[family]}
    model.get_parameter(sorted(found)[0]).requires_grad_(False)
    assert muon_parameters(MuonSection(), model, layers) == found - {sorted(found)[0]}
    assert muon_parameters(AdamWSection(), model, layers) == frozenset()


def test_a_model_without_matrices_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^optimizer\.name=muon: LlamaForCausalLM has no matrix inside"):
        muon_parameters(MuonSection(), tiny_model("llama", layers=2).requires_grad_(False), "model.layers")


def test_the_rate_rises_in_a_line_and_falls_along_a_cosine_to_its_floor() -> None:
    section = AdamWSection(warmup_steps=4, final_fraction=0.1)
    rates = [learning_rate(section, 2.0, 12, step) for step in range(1, 13)]
    assert rates[:4] == [0.5, 1.0, 1.5, 2.0]
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert rates[7] == pytest.approx(2.0 * 0.55)  # half-way down
    assert rates[-1] == pytest.approx(0.2)


@pytest.mark.parametrize(("warmup", "steps"), [(0, 1), (1, 1), (0, 3), (3, 3)])
def test_short_runs_have_a_rate_at_every_step(warmup: int, steps: int) -> None:
    section = AdamWSection(warmup_steps=warmup)
    assert all(0 < learning_rate(section, 1.0, steps, step) <= 1 for step in range(1, steps + 1))


def test_a_dry_run_tells_which_parameters_go_where(tmp_path: Path) -> None:
    made = tree(tmp_path)
    plain = preflight(TrainConfig.model_validate(made))
    muon = preflight(TrainConfig.model_validate({**made, "optimizer": {"name": "muon"}}))
    parameters = sum(p.numel() for p in plain.plan.source.model.parameters())
    assert {name: trained.parameters for name, trained in optimizers(plain).items()} == {"AdamW": 25}
    found = optimizers(muon)
    assert {name: trained.parameters for name, trained in found.items()} == {"Muon": 14, "AdamW": 11}
    assert sum(trained.entries for trained in found.values()) == parameters
    assert set(found["Muon"].names) == LLAMA
    assert {"model.embed_tokens.weight", "lm_head.weight", "input_layernorm.weight"} < {*found["AdamW"].names}
    matrices = sum(plain.plan.source.model.get_parameter(name).nbytes for name in muon.muon_names)
    saved = sum(m.moments for m in memory(plain)) - sum(m.moments for m in memory(muon))
    assert saved == matrices  # one of AdamW's two


@pytest.mark.parametrize(
    ("kind", "router"),
    [("afmoe", "router.gate"), ("hunyuan_v1_moe", "gate.wg"), ("qwen2_moe", "shared_expert_gate")],
)
def test_a_router_is_none_of_them_though_its_module_is_linear(kind: str, router: str) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(zoo.tiny_config(kind))
    found = matrices(model, "model.layers")
    linear = {f"{name}.weight" for name, part in model.named_modules() if isinstance(part, nn.Linear)}
    left = {name for name in linear - found if name.startswith("model.layers.")}
    assert left
    assert all(name.endswith(f"mlp.{router}.weight") for name in left)
