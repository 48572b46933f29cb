"""Which optimizer trains what, in which groups, and the learning rate as a function of the step alone."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from transformers import AutoModelForCausalLM

from penstock import Axes
from penstock.cli.dry_run import memory, optimizers
from penstock.errors import ConfigError
from penstock.parallel.muon import Muon, matrices
from penstock.train.config.load import load_config
from penstock.train.optimizers.optimizer import (
    OPTIMIZERS,
    AdafactorSection,
    AdamWKeys,
    AdamWSection,
    GroupSection,
    MuonSection,
    Named,
    OptimizerChoice,
    OptimizerSection,
    RunFacts,
    Share,
    check_installed,
    check_optimizer,
    learning_rates,
    make_optimizers,
    set_learning_rates,
    shares_of,
    trained_by,
)
from penstock.train.optimizers.rates import RateKeys
from penstock.train.preflight import preflight
from support import zoo
from support.families import FAMILIES, tiny_model
from support.refusals import refuses
from support.tiny import config, config_file


def some() -> list[tuple[str, nn.Parameter]]:
    frozen = nn.Parameter(torch.zeros(2, 2), requires_grad=False)
    return [*nn.Linear(2, 3).named_parameters(), ("frozen", frozen)]


def made(
    section: OptimizerSection, named: Iterable[tuple[str, nn.Parameter]], muon: Collection[str] = ()
) -> list[Optimizer]:
    named = list(named)
    return make_optimizers(section, named, {name: "Muon" if name in muon else "AdamW" for name, _ in named})


def test_each_optimizer_of_a_run_and_each_group_has_a_rate() -> None:
    """Adafactor's rate stood there as AdamW's too."""
    group = GroupSection(match="head", learning_rate=0.25)
    sections: list[tuple[OptimizerSection, dict[str, float]]] = [
        (AdafactorSection(name="adafactor", learning_rate=0.5), {"adafactor": 0.5}),
        (AdamWSection(learning_rate=0.5), {"adamw": 0.5}),
        (AdamWSection(learning_rate=0.5, groups=(group,)), {"adamw": 0.5, "head": 0.25}),
        (
            MuonSection(
                name="muon", learning_rate=0.5, adamw=AdamWKeys(learning_rate=0.125, groups=(group,))
            ),
            {"muon": 0.5, "adamw": 0.125, "head": 0.25},
        ),
    ]
    for section, expected in sections:
        full = section.model_copy(update={"schedule": "constant"})
        assert learning_rates(full, 10, 5) == expected


def test_only_matrices_decay() -> None:
    section = AdamWSection(weight_decay=0.3, learning_rate=0.5)
    (weight, bias, _) = named = some()
    (optimizer,) = made(section, named)
    found = [(group["params"], group["weight_decay"]) for group in optimizer.param_groups]
    assert found == [([weight[1]], 0.3), ([bias[1]], 0.0)]
    set_learning_rates(section, [optimizer], 10, 11)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.05, 0.05])


def test_biases_do_not_decay_though_they_have_two_dimensions() -> None:
    """0.5.0: those of gpt_oss's experts, one row for each expert, did."""
    named: dict[str, nn.Parameter] = {}
    for family in FAMILIES:
        named |= {f"{family}.{name}": p for name, p in tiny_model(family, layers=2).named_parameters()}
    names = {id(parameter): name for name, parameter in named.items()}
    (optimizer,) = made(AdamWSection(), named.items())
    decays, rest = ({names[id(p)] for p in group["params"]} for group in optimizer.param_groups)
    assert {name for name in decays if "norm" in name or "bias" in name} == set()
    biases = {"gpt_oss.model.layers.0.mlp.experts.gate_up_proj_bias", "gpt2.transformer.h.0.attn.c_attn.bias"}
    assert biases < rest
    assert {name for name in rest if not re.search("norm|bias|ln_|layer_norm|sinks", name)} == set()


GROUPS = (
    GroupSection(match=r"embed|lm_head", learning_rate=0.1),
    GroupSection(match=r"norm\.weight$", weight_decay=0.5),
    GroupSection(match=r"layers\.[01]\.", learning_rate=0.2, weight_decay=0.0),
)


def test_groups_have_rates_and_decays_of_their_own() -> None:
    """The first that matches counts: a norm of layer 0 is in the second."""
    section = AdamWSection(learning_rate=1.0, weight_decay=0.3, groups=GROUPS)
    model = tiny_model("gpt_neox", layers=3)
    named = {re.sub("^gpt_neox", "model", name): p for name, p in model.named_parameters()}
    names = {id(parameter): name for name, parameter in named.items()}
    optimizers = made(section, named.items())
    set_learning_rates(section, optimizers, 10, 11)  # a tenth of each
    met = set()
    for group in optimizers[0].param_groups:
        for name in (names[id(parameter)] for parameter in group["params"]):
            rate, decay = 0.1, 0.0 if named[name].ndim < 2 or name.endswith("bias") else 0.3
            if "embed" in name or "lm_head" in name:
                rate = 0.01
            elif name.endswith("norm.weight"):
                decay = 0.5
            elif "layers.0." in name or "layers.1." in name:
                rate, decay = 0.02, 0.0
            assert group["lr"] == pytest.approx(rate), name
            assert group["weight_decay"] == decay, name
            met.add(name)
    assert met == named.keys()


def test_parameters_of_a_group_step_as_in_one_of_torch() -> None:
    section = AdamWSection(groups=(GroupSection(match="bias", learning_rate=0.5, weight_decay=0.2),))
    ours, theirs = nn.Linear(2, 3), nn.Linear(2, 3)
    theirs.load_state_dict(ours.state_dict())
    optimizers = made(section, ours.named_parameters())
    options: Any = {"betas": section.betas, "eps": section.eps, "fused": True}
    expected = torch.optim.AdamW(
        [
            {"params": [theirs.weight], "lr": 3e-4, "weight_decay": 0.1},
            {"params": [theirs.bias], "lr": 0.5, "weight_decay": 0.2},
        ],
        **options,
    )
    for _ in range(3):
        for module in (ours, theirs):
            module.zero_grad()
            module(torch.ones(4, 2)).square().sum().backward()
        set_learning_rates(AdamWSection(schedule="constant"), optimizers, 3, 1)
        expected.step()
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(ours.weight, theirs.weight)
    assert torch.equal(ours.bias, theirs.bias)


@pytest.mark.parametrize(
    ("section", "value", "rule"),
    [
        (
            AdamWSection(groups=(GroupSection(match="q_porj", weight_decay=0.0),)),
            "optimizer.groups[0].match=q_porj",
            "no parameter that AdamW trains",
        ),
        (
            AdamWSection(groups=(*GROUPS[:1], GroupSection(match="lm_head", weight_decay=0.0))),
            "optimizer.groups[1].match=lm_head",
            "earlier groups",
        ),
        (
            MuonSection(adamw=AdamWKeys(groups=(GroupSection(match="q_proj", weight_decay=0.0),))),
            "optimizer.adamw.groups[0].match=q_proj",
            "no parameter that AdamW trains",
        ),
    ],
)
def test_a_group_without_parameters_is_refused(section: OptimizerSection, value: str, rule: str) -> None:
    with refuses(ConfigError, value, rule):
        trained_by(section, tiny_model("llama", layers=2), "model.layers")


def test_a_group_of_a_tied_weight_goes_by_its_first_name() -> None:
    """By the second one it was accepted, and held nothing."""
    tied = tiny_model("llama", layers=2, tied=True)
    for match in ("lm_head", "embed_tokens"):
        section = AdamWSection(groups=(GroupSection(match=match, learning_rate=1e-5),))
        with refuses(ConfigError, rule="no parameter") if match == "lm_head" else nullcontext():
            trained_by(section, tied, "model.layers")


@pytest.mark.parametrize(
    ("group", "value", "rule"),
    [
        ({"match": "q_proj"}, "optimizer.groups.0", "match='q_proj' sets nothing"),
        ({"match": "(", "weight_decay": 0.0}, "optimizer.groups.0.match", "'(' is no regular expression"),
        ({"learning_rate": 1.0}, "optimizer.groups.0.match is missing", "needs it"),
    ],
)
def test_a_group_that_says_too_little_is_refused(tmp_path: Path, group: Any, value: str, rule: str) -> None:
    with refuses(ConfigError, value, rule):
        load_config(config_file(tmp_path, optimizer={"groups": [group]}))


def test_muon_and_adamw_have_rates_of_their_own_that_fall_together() -> None:
    section = MuonSection(
        learning_rate=1.0, weight_decay=0.2, momentum=0.8, ns_steps=3, adjust="match_rms_adamw",
        adamw=AdamWKeys(learning_rate=0.01, weight_decay=0.3), final_fraction=0.5,
    )  # fmt: skip
    muon, adamw = made(section, some(), {"weight"})
    assert isinstance(muon, Muon)
    (group,) = muon.param_groups
    assert [tuple(p.shape) for p in group["params"]] == [(3, 2)]
    options = [group[key] for key in ("weight_decay", "momentum", "ns_steps", "adjust_lr_fn")]
    assert options == [0.2, 0.8, 3, "match_rms_adamw"]
    set_learning_rates(section, [muon, adamw], 4, 5)
    assert group["lr"] == pytest.approx(0.5)
    assert [group["lr"] for group in adamw.param_groups] == pytest.approx([0.005])


def test_a_process_may_hold_nothing_of_one_kind() -> None:
    def groups(section: OptimizerSection, count: int, *muon: str) -> list[tuple[str, int]]:
        return [(type(each).__name__, len(each.param_groups)) for each in made(section, some()[:count], muon)]

    assert groups(AdamWSection(), 1) == [("AdamW", 1)]
    assert groups(MuonSection(), 1, "weight") == [("Muon", 1)]
    assert groups(MuonSection(), 3) == [("AdamW", 2)]
    assert groups(MuonSection(), 0) == [("AdamW", 1)]


@pytest.mark.parametrize("choice", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_the_table_says_what_an_optimizer_keeps(choice: OptimizerChoice) -> None:
    """The dry run reads its bytes, resuming the names of its classes and of what has a weight's shape."""
    shaped: set[str] = set()
    for kind, share in shares_of(choice.section()).items():
        for shape in ((2, 3), (4, 2, 3), (5,))[: 3 if share.chosen is None else 2]:
            parameter = nn.Parameter(torch.ones(shape))
            optimizer = share.make(share.keys, [("weight", parameter)])
            assert type(optimizer).__name__ == kind
            parameter.grad = torch.ones(shape)
            optimizer.step()
            state = optimizer.state[parameter]
            kept = sum(value.nbytes for part, value in state.items() if part != "step")
            assert kept == share.kept(parameter, parameter.numel()) > 0
            found = {part: value.shape for part, value in state.items() if part in choice.shaped}
            assert set(found.values()) <= {parameter.shape}
            shaped.update(found)
    assert shaped == set(choice.shaped)


class SGDSection(RateKeys):
    """Keys of an optimizer that the trainer does not have."""

    name: Literal["sgd"] = "sgd"
    learning_rate: float = 0.5


def test_an_optimizer_works_by_its_line_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was neither Adafactor nor Muon was taken for AdamW."""

    def sgd(keys: SGDSection, named: Named) -> Optimizer:
        return torch.optim.SGD([parameter for _, parameter in named], lr=keys.learning_rate)

    def shares(section: SGDSection) -> dict[str, Share]:
        return {"SGD": Share("sgd", section, "optimizer", sgd, lambda parameter, entries: 0)}

    section: Any = SGDSection(warmup_steps=2)
    monkeypatch.setitem(OPTIMIZERS, "sgd", OptimizerChoice("SGD", type(section), shares, ()))
    check_optimizer(section, RunFacts("float32", Axes(dp_shard=2)))
    check_installed(section)
    kinds = trained_by(section, tiny_model("llama", layers=2), "model.layers")
    assert set(kinds.values()) == {"SGD"}
    (optimizer,) = make_optimizers(section, some(), dict.fromkeys(("weight", "bias"), "SGD"))
    set_learning_rates(section, [optimizer], 10, 2)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25]
    assert learning_rates(section, 10, 2) == {"sgd": 0.25}


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
    kinds = trained_by(MuonSection(), model, layers)
    assert kinds.keys() == dict(model.named_parameters(remove_duplicate=False)).keys()
    assert {name for name, kind in kinds.items() if kind == "Muon"} == found
    assert {*trained_by(AdamWSection(), model, layers).values()} == {"AdamW"}


def test_a_model_without_matrices_is_refused() -> None:
    with refuses(ConfigError, "optimizer.name=muon", "LlamaForCausalLM has no matrix inside"):
        trained_by(MuonSection(), tiny_model("llama", layers=2).requires_grad_(False), "model.layers")


def test_a_dry_run_shows_which_parameters_go_where(tmp_path: Path) -> None:
    plain, muon = (
        preflight(config(tmp_path, keys={"optimizer": {"name": name}})) for name in ("adamw", "muon")
    )
    parameters = sum(p.numel() for p in plain.plan.source.model.parameters())
    assert {name: trained.parameters for name, trained in optimizers(plain).items()} == {"AdamW": 25}
    found = optimizers(muon)
    assert {name: trained.parameters for name, trained in found.items()} == {"Muon": 14, "AdamW": 11}
    assert sum(trained.entries for trained in found.values()) == parameters
    assert set(found["Muon"].names) == LLAMA
    assert {"model.embed_tokens.weight", "lm_head.weight", "input_layernorm.weight"} < {*found["AdamW"].names}
    hidden = [name for name, kind in muon.kinds.items() if kind == "Muon"]
    matrices = sum(plain.plan.source.model.get_parameter(name).nbytes for name in hidden)
    saved = sum(m.optimizer for m in memory(plain)) - sum(m.optimizer for m in memory(muon))
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
