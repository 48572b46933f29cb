"""Adapters of PEFT through pipeline ranks: every gradient is PEFT's, or the adapter is refused by name."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, PromptTuningConfig, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from penstock import AutoPipeline
from penstock.errors import ConfigError, ModelError
from penstock.models.adapters import PREFIX, add_adapter, is_wrapper, without_adapters
from support import zoo
from support.adapted import adapted, assert_exact, lora, rarely, whole
from support.reference import TOLERANCE
from support.refusals import refuses

FAMILIES = (
    "llama", "gpt2", "qwen3_moe", "gemma3_text", "falcon", "opt",  # Conv1D, experts, scales, biases
    "qwen3", "gpt_neox", "phi3", "mistral", "mixtral", "olmo2", "bloom", "starcoder2", "cohere2", "granite",
)  # fmt: skip
DEFAULT = FAMILIES[1:3]
EXPERTS = {
    "target_modules": ["q_proj"],
    "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
}
TIED = {"tie_word_embeddings": True}

# what LoraConfig has, each on the model of which it asks most
FORMS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "dora": ("llama", {"use_dora": True}, {}),
    "dora on Conv1D": ("gpt2", {"use_dora": True, "target_modules": ["c_attn", "c_fc"]}, {}),
    "rslora": ("llama", {"use_rslora": True}, {}),
    "biases of targets": ("opt", {"bias": "lora_only"}, {}),
    "all biases": ("opt", {"bias": "all"}, {}),
    "bias of B": ("opt", {"lora_bias": True}, {}),
    "experts": ("qwen3_moe", EXPERTS, {}),
    "experts of mixtral": ("mixtral", EXPERTS, {}),
    "whole modules": ("llama", {"modules_to_save": ["lm_head", "embed_tokens", "norm"]}, {}),
    "whole ends of tied weights": (
        "llama", {"modules_to_save": ["lm_head", "embed_tokens"], "ensure_weight_tying": True}, TIED,
    ),
    "whole head, which was tied": ("llama", {"modules_to_save": ["lm_head"]}, TIED),
    "rows of the embedding": ("llama", {"trainable_token_indices": [5, 9, 11]}, {}),
    "rows of tied weights": ("llama", {"trainable_token_indices": [5, 9, 11]}, TIED),
    "embedding and head": ("llama", {"target_modules": ["embed_tokens", "lm_head", "q_proj"]}, {}),
    "tied embedding": ("llama", {"target_modules": ["embed_tokens", "v_proj"]}, TIED),
    "tied head": ("llama", {"target_modules": ["lm_head", "v_proj"]}, TIED),
    "dora on the embedding": ("llama", {"target_modules": ["embed_tokens", "q_proj"], "use_dora": True}, {}),
    "scaled embedding": ("gemma3_text", {"target_modules": ["embed_tokens", "q_proj"]}, {}),
    "rows of a scaled embedding": ("gemma3_text", {"trainable_token_indices": [5, 9]}, {}),
    "some layers": ("llama", {"layers_to_transform": [1, 2], "target_modules": ["q_proj"]}, {}),
    "last layer": ("llama", {"layers_to_transform": [3], "target_modules": ["down_proj"]}, {}),
    "ranks by pattern": (
        "llama",
        {"rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\.up_proj": 8}, "alpha_pattern": {"down_proj": 9}}, {},
    ),
    "excluded": ("llama", {"exclude_modules": ["up_proj", "down_proj"]}, {}),
    "a pattern": ("llama", {"target_modules": r".*\.(q|k)_proj"}, {}),
    "fan in, fan out": ("gpt2", {"target_modules": ["c_attn"], "fan_in_fan_out": True}, {}),
    "tied head over its rows": (
        "llama", {"target_modules": ["lm_head"], "trainable_token_indices": [5, 9]}, TIED,
    ),
    "replicated layers": ("llama", {"layer_replication": [(0, 3), (1, 4)], "target_modules": ["q_proj"]}, {}),
}  # fmt: skip
SCHEDULES: dict[str, dict[str, Any]] = {
    "zb_v": {"ranks": 2, "schedule": "zb_v"},
    "interleaved": {"ranks": 2, "schedule": {"schedule": "interleaved_zero_bubble", "stages_per_rank": 2}},
    "dualpipe_v": {"ranks": 2, "schedule": "dualpipe_v", "microbatches": 4},
    "recomputed": {"ranks": 2, "schedule": "zb_h1", "activation_checkpointing": True},
    "frozen first stage": {"ranks": 2, "schedule": "zb_h1", "layout": "E|ttttL"},
}


def pipeline(peft: Any, **options: Any) -> Any:
    return AutoPipeline(**{"ranks": 2, "microbatches": 2, **options}).build(peft)


@pytest.mark.parametrize("family", rarely(FAMILIES, DEFAULT))
def test_every_gradient_is_pefts(family: str) -> None:
    peft = adapted(zoo.tiny_model(family))
    assert_exact(pipeline(peft), peft, zoo.tiny_batch(family))


@pytest.mark.sweep
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_gradient_is_pefts_where_backwards_are_split(family: str, ranks: int) -> None:
    peft = adapted(
        zoo.tiny_model(family), lora(use_dora=family not in ("mixtral", "qwen3_moe"), bias="lora_only")
    )
    assert_exact(pipeline(peft, ranks=ranks, schedule="zb_h1"), peft, zoo.tiny_batch(family))


# and DoRA in float64, below
ALWAYS = ("all biases", "experts", "whole ends of tied weights", "replicated layers")


@pytest.mark.parametrize("form", rarely(FORMS, ALWAYS))
def test_forms_of_adapters(form: str) -> None:
    family, options, model = FORMS[form]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft = adapted(zoo.tiny_model(family, **model), lora(**options))
    assert_exact(pipeline(peft, schedule="zb_h1"), peft, zoo.tiny_batch(family))


@pytest.mark.parametrize("case", rarely(SCHEDULES, ("interleaved", "recomputed", "frozen first stage")))
def test_schedules(case: str) -> None:
    peft = adapted(zoo.tiny_model("llama"), lora(use_dora=case == "recomputed"))
    options = SCHEDULES[case]
    batch = zoo.tiny_batch("llama", rows=options.get("microbatches", 2) * 2)
    pipe = pipeline(peft, **options)
    pipe.verify_against(peft, batch)


def test_float64() -> None:
    peft = adapted(zoo.tiny_model("llama", torch.float64), lora(use_dora=True))
    assert_exact(pipeline(peft, schedule="zb_h1"), peft, zoo.tiny_batch("llama"), TOLERANCE[torch.float64])


@pytest.mark.parametrize(
    ("family", "options"),
    [("llama", {"use_dora": True, "modules_to_save": ["lm_head"]}), ("qwen3_moe", EXPERTS)],
)
def test_an_adapter_made_here_is_in_the_dtype_that_peft_gives_it(
    family: str, options: dict[str, Any]
) -> None:
    """The updates of a float64 model were computed in float32."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        peft = adapted(zoo.tiny_model(family, dtype), lora(**options))
        model = zoo.tiny_model(family, dtype).to("meta")
        add_adapter(model, lora(**options))
        found = {name: parameter.dtype for name, parameter in model.named_parameters()}
        assert found == {n.removeprefix(PREFIX): p.dtype for n, p in peft.named_parameters()}


def test_half_precision_base_and_wide_adapters() -> None:
    """PEFT keeps adapters in float32 on a model in bfloat16: the same casts give the same numbers."""
    peft = adapted(zoo.tiny_model("llama", torch.bfloat16))
    assert {p.dtype for p in peft.parameters() if p.requires_grad} == {torch.float32}
    assert_exact(pipeline(peft), peft, zoo.tiny_batch("llama"), tolerance=2e-2)


def test_autocast() -> None:
    peft, batch = adapted(zoo.tiny_model("llama")), zoo.tiny_batch("llama")
    pipe = pipeline(peft, schedule="zb_h1")
    with torch.autocast("cpu", torch.bfloat16):
        assert_exact(pipe, peft, batch, tolerance=3e-2)


def test_one_of_several_adapters_is_trained() -> None:
    model = zoo.tiny_model("llama")
    peft = get_peft_model(model, lora(), "first")
    peft.add_adapter("second", lora(r=2, target_modules=["q_proj"]))
    peft.set_adapter("second")
    zoo.unsettle(peft, 1)
    peft.train()
    pipe = pipeline(peft)
    assert_exact(pipe, peft, zoo.tiny_batch("llama"))
    assert all(".second." in name for name, p in pipe.named_parameters() if p.requires_grad)
    peft.base_model.set_adapter(["first", "second"])
    with refuses(ModelError, "a model with active adapters first, second", "trained and saved"):
        pipeline(peft)


def test_an_adapter_that_transformers_added() -> None:
    model = zoo.tiny_model("llama")
    model.add_adapter(LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    zoo.unsettle(model, 1)
    batch = zoo.tiny_batch("llama")
    pipe = pipeline(model.train())
    pipe.verify_against(model, batch)
    assert any("lora_A" in name for name, p in pipe.named_parameters() if p.grad is None and p.requires_grad)


def test_dropout_does_not_depend_on_the_split() -> None:
    """Dropout in an adapter draws what the layer and the microbatch say, as any other dropout does."""
    losses = []
    batch = zoo.tiny_batch("llama")
    for ranks in (1, 4):
        peft = adapted(zoo.tiny_model("llama"), lora(lora_dropout=0.4))
        pipe = pipeline(peft, ranks=ranks, schedule="zb_h1" if ranks > 1 else "1f1b")
        assert pipe.draws
        torch.manual_seed(3)
        losses.append(pipe.step(batch).loss)
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert losses[0] != pytest.approx(whole(peft.eval(), batch)[0], rel=1e-4)


# ---- Frozen stages


class Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the products of matrices inside of the block."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.__name__.partition(".")[0].rstrip("_") in ("mm", "addmm", "bmm", "baddbmm")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("layers", [[3], [1, 2]])
def test_frozen_stages_have_no_w_and_cost_no_gradients(layers: list[int]) -> None:
    """A stage without an adapter runs B; all stages compute as many products as PEFT in one process."""
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    config = lora(target_modules=names, layers_to_transform=layers)
    peft, batch = adapted(zoo.tiny_model("llama"), config), zoo.tiny_batch("llama")
    pipe = pipeline(peft, ranks=4, schedule="zb_h1", layers_per_stage=[1, 1, 1, 1])
    for stage in range(4):
        kinds = {op.kind for program in pipe.schedule.programs for op in program if op.stage == stage}
        assert kinds == ({"F", "I", "W"} if stage in layers else {"F", "B"})
    assert_exact(pipe, peft, batch)  # and shapes have been measured
    with Products() as ours:
        pipe.step(batch)
    assert {span.op.stage for span in pipe.timeline.spans if span.op.kind == "W"} == {*layers}
    with Products() as plain:
        whole(peft, batch)
    assert ours.count == plain.count


# ---- What is refused


@pytest.mark.parametrize(
    ("config", "value", "rule"),
    [
        (
            PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
            "PROMPT_TUNING",
            "before the tokens",
        ),
        (
            IA3Config(task_type="CAUSAL_LM", target_modules=["q_proj"], feedforward_modules=[]),
            "a IA3 adapter",
            "not known to be exact",
        ),
        (lora(alora_invocation_tokens=[4]), "ALoraLinearVariant of PEFT", "only plain LoRA"),
    ],
)
def test_other_kinds_are_refused(config: Any, value: str, rule: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft = get_peft_model(zoo.tiny_model("llama"), config)
    with refuses(ModelError, value, rule):
        pipeline(peft)


def test_lora_on_both_ends_of_a_tied_weight_is_refused() -> None:
    model = zoo.tiny_model("llama", tie_word_embeddings=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft = get_peft_model(model, lora(target_modules=["embed_tokens"], ensure_weight_tying=True))
    with refuses(ModelError, "a model with ensure_weight_tying of LoRA on tied embeddings", "both ends"):
        pipeline(peft)


def test_several_adapters_without_values_are_refused() -> None:
    """0.5.0: a KeyError: of two adapters with modules_to_save on the meta device one got its values."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(zoo.tiny_config("llama"))
        peft = get_peft_model(model, lora(modules_to_save=["lm_head"]), "first")
        peft.add_adapter("second", lora(modules_to_save=["norm"]))
    with refuses(ModelError, "a model with adapters first, second on the meta device", "only one gets"):
        AutoPipeline(ranks=2, microbatches=2).build(peft)


def two_adapters(**second: Any) -> Any:
    peft = get_peft_model(zoo.tiny_model("llama"), lora(modules_to_save=["lm_head"]), "first")
    peft.add_adapter("second", lora(**second))
    return peft


@pytest.mark.parametrize("active", ["first", "second"])
def test_an_adapter_within_another_s_whole_modules_is_refused(active: str) -> None:
    """0.5.0: a KeyError: PEFT put the second adapter's update of the head into the first one's copy of it."""
    peft = two_adapters(modules_to_save=["norm"])
    peft.set_adapter(active)
    with refuses(
        ModelError, "a model with updates inside adapter first's modules_to_save", remedy="delete_adapter"
    ):
        AutoPipeline(ranks=2, microbatches=2).build(peft)


@pytest.mark.parametrize("modules", [["lm_head"], pytest.param(["norm"], marks=pytest.mark.sweep), None])
def test_one_of_two_adapters_with_whole_modules_is_trained(modules: list[str] | None) -> None:
    peft = two_adapters(modules_to_save=modules, target_modules=["q_proj"])
    peft.set_adapter("second")
    assert_exact(AutoPipeline(ranks=2, microbatches=2).build(peft), peft, zoo.tiny_batch("llama"))


def test_a_merged_adapter_is_refused() -> None:
    peft = adapted(zoo.tiny_model("llama"))
    peft.merge_adapter()
    with refuses(ModelError, "a model with a merged adapter", remedy="Call model.unmerge_adapter()"):
        pipeline(peft)


# ---- A new adapter of a config


@pytest.mark.parametrize(
    ("options", "value", "rule"),
    [
        ({"target_modules": ["q_proj", "qproj"]},
         "'qproj' in the adapter's target_modules", "nothing in LlamaForCausalLM"),
        ({"target_modules": r".*\.nothing"}, "the adapter's settings", "nothing not found"),
        ({"target_modules": "all_linear"}, "the adapter's settings", "all_linear not found"),
        ({"target_modules": "("}, "the adapter's settings", "PEFT refuses them"),
        ({"modules_to_save": ["score"]},
         "'score' in the adapter's modules_to_save", "nothing in LlamaForCausalLM"),
        ({"target_parameters": ["experts.up"]},
         "'experts.up' in the adapter's target_parameters", "nothing in LlamaForCausalLM"),
        ({"trainable_token_indices": [3, 64]}, "64 in the adapter's trainable_token_indices", "rows 0 to 63"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'", "values of the whole model"),
        ({"target_modules": ["input_layernorm"]}, "the adapter's settings", "is not supported"),
    ],
)  # fmt: skip
def test_targets_that_match_nothing_are_named_before_any_weight_is_loaded(
    options: Any, value: str, rule: str
) -> None:
    auto = AutoPipeline(ranks=2, microbatches=2, adapter=lora(**options))
    with refuses(ConfigError, value, rule):
        auto.build_plan(zoo.tiny_config("llama"))


def test_an_object_brings_its_own_adapter() -> None:
    with refuses(ModelError, "adapter= for a model object", remedy="Give get_peft_model(model, config)"):
        pipeline(zoo.tiny_model("llama"), adapter=lora())


NEW: dict[str, dict[str, Any]] = {
    "lora": {},
    "dora": {"use_dora": True, "target_modules": ["q_proj", "embed_tokens"]},
    "modules and rows": {"modules_to_save": ["lm_head"], "trainable_token_indices": [5, 9]},
    "experts": EXPERTS,
    "gaussian": {"init_lora_weights": "gaussian", "bias": "lora_only", "target_modules": ["dense_h_to_4h"]},
}


@pytest.mark.parametrize("form", rarely(NEW, ("dora", "modules and rows")))
def test_initial_values_do_not_depend_on_the_split(form: str) -> None:
    """The base model's stay as without an adapter, and the new adapter changes no output."""
    family = {"experts": "qwen3_moe", "gaussian": "gpt_neox"}.get(form, "llama")
    config = zoo.tiny_config(family)
    built = [
        AutoPipeline(ranks=ranks, microbatches=2, seed=3, adapter=lora(**NEW[form])).build(config)
        for ranks in (1, 4)
    ]
    values = [dict(pipe.named_parameters(remove_duplicate=False)) for pipe in built]
    assert values[1].keys() == values[0].keys()
    assert all(torch.equal(value, values[0][name]) for name, value in values[1].items())
    plain = AutoPipeline(ranks=1, microbatches=2, seed=3).build(config)
    (module,) = built[0].modules.values()
    with without_adapters(module):
        base = dict(module.named_parameters())
        expected = dict(plain.modules[0].named_parameters())
        assert base.keys() == expected.keys()
        assert all(torch.equal(value, expected[name]) for name, value in base.items())
    random = [v.flatten()[:4].tolist() for n, v in values[0].items() if "lora_A" in n or "embedding_B" in n]
    assert len({tuple(each) for each in random}) == len(random)
    ids = zoo.tiny_batch(family)["input_ids"]
    outputs = [pipe.infer({"input_ids": ids}) for pipe in (built[0], plain)]
    for number, found in outputs[0].items():
        torch.testing.assert_close(found, outputs[1][number], rtol=1e-5, atol=1e-6)


def test_wrappers_are_put_back() -> None:
    peft = adapted(zoo.tiny_model("llama"), lora(modules_to_save=["lm_head"], trainable_token_indices=[4]))
    model = peft.get_base_model()
    names, plain = [n for n, _ in model.named_parameters()], dict(zoo.tiny_model("llama").named_parameters())
    with without_adapters(model):
        assert dict(model.named_parameters()).keys() == plain.keys()
        assert not any(is_wrapper(module) for module in model.modules())
    assert [n for n, _ in model.named_parameters()] == names
