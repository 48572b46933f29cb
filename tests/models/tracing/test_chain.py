"""The chain of layers that a model shows, and stages cut from it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, BertConfig, PretrainedConfig, T5Config
from transformers.modeling_outputs import BaseModelOutputWithPast

from penstock import AutoPipeline
from penstock.checkpoint import save_checkpoint
from penstock.errors import BatchError, ModelError, PartitionError
from penstock.models.huggingface.boundary import BoundaryPlaceholder, at_boundary
from penstock.models.huggingface.stages import HFCall, HFEdges, cut
from penstock.models.split.activation_sizes import stage_sizes
from penstock.models.stage import StageInfo
from penstock.models.tracing.chain import find_chain
from penstock.models.tracing.probe import register_chain
from penstock.runtime.around import is_around
from support import zoo
from support.families import ragged_batch, tiny_config, tiny_model


@pytest.mark.parametrize(
    ("config", "layers", "before", "after"),
    [
        (tiny_config("llama"), "model.layers", ["model.embed_tokens"], ["model.norm", "lm_head"]),
        (tiny_config("gpt2"), "transformer.h", ["transformer.wte", "transformer.wpe"],
         ["transformer.ln_f", "lm_head"]),
        (tiny_config("gpt_neox"), "gpt_neox.layers", ["gpt_neox.embed_in"],
         ["gpt_neox.final_layer_norm", "lm_head"]),
        (tiny_config("opt"), "model.decoder.layers",
         ["model.decoder.embed_tokens", "model.decoder.embed_positions"],
         ["model.decoder.final_layer_norm", "lm_head"]),
        (BertConfig(vocab_size=64, hidden_size=32, num_hidden_layers=4, num_attention_heads=4,
                    intermediate_size=48, is_decoder=True), "bert.encoder.layer", ["bert.embeddings"],
         ["cls"]),
    ],
    ids=lambda value: value.model_type if isinstance(value, PretrainedConfig) else "",
)  # fmt: skip
def test_names_around_the_layers(
    config: PretrainedConfig, layers: str, before: list[str], after: list[str]
) -> None:
    with torch.device("meta"):
        chain = find_chain(AutoModelForCausalLM.from_config(config))
    assert (chain.layers, chain.count) == (layers, 4)
    assert (sorted(chain.before), sorted(chain.after)) == (sorted(before), sorted(after))


@pytest.mark.parametrize("family", ["bloom", "falcon", "mpt"])
def test_layers_that_return_tuples(family: str) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes))
    assert find_chain(model).output_form == "tuple"
    pipe = AutoPipeline(ranks=3, microbatches=4).build(model)
    pipe.verify_against(model.train(), ragged_batch())


def test_models_that_are_refused() -> None:
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (T5Config(vocab_size=64, d_model=16, num_layers=2, num_heads=2), {},
         "transformers builds no causal LM from it"),
        (3, {}, "model given as int"),
        ("/nowhere/at/all", {}, "there is no such folder"),
        (tiny_model("llama"), {"dtype": torch.float64}, "taken as it is"),
        (tiny_model("llama"), {"attention": "eager"}, "attention=eager for a model object with sdpa"),
    ]  # fmt: skip
    for model, options, message in cases:
        with pytest.raises(ModelError, match=message):
            AutoPipeline(ranks=2, microbatches=2, **options).build_plan(model)
    with pytest.raises(PartitionError, match="6 stages for 4 layers"):
        AutoPipeline(ranks=6, microbatches=2).build_plan(tiny_config("llama"))


Forward = Callable[..., torch.Tensor]


def residual(layer: Any, hidden: torch.Tensor, bias: torch.Tensor | float = 0.0) -> torch.Tensor:
    return hidden + layer.mlp(hidden + bias)  # type: ignore[no-any-return]


def rewired(forward: Forward, layer: Callable[..., torch.Tensor] = residual) -> Any:
    """A Llama whose last hidden states `forward`(model, embeddings) gives, with `layer` for its layers'."""
    model = tiny_model("llama")
    inner: Any = model.model
    inner.scales = torch.nn.Parameter(torch.tensor([1.0, 0.9, 0.8, 1.1]))
    inner.table = torch.nn.Embedding(64, 32)

    def whole(self: Any, input_ids: torch.Tensor, **_: Any) -> BaseModelOutputWithPast:
        return BaseModelOutputWithPast(last_hidden_state=forward(self, self.embed_tokens(input_ids)))

    for each in inner.layers:
        own = {"forward": lambda self, *args: layer(self, *args)}
        each.__class__ = type("Rewired", (type(each),), own)
    inner.__class__ = type("Rewired", (type(inner),), {"forward": whole})
    return model


def through(layers: Any, hidden: torch.Tensor, *more: Any) -> torch.Tensor:
    for layer in layers:
        hidden = layer(hidden, *more)
    return hidden


@pytest.mark.parametrize(
    ("order", "message"),
    [
        (lambda layers, h: through(layers[2:], through(layers[:2], h) + h),
         "layer 2 does not take what layer 1 returned"),
        (lambda layers, h: through([*layers[2:], *layers[:2]], h),
         r"the layers run in the order \[2, 3, 0, 1\]"),
        (lambda layers, h: through(layers[:2], h), r"the order \[0, 1\]"),
        (lambda layers, h: through([layers[0], *layers], h), r"the order \[0, 0, 1, 2, 3\]"),
    ],
)  # fmt: skip
def test_layers_that_do_not_run_once_each_in_order(order: Callable[[Any, Any], Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        find_chain(rewired(lambda model, hidden: order([*model.layers], hidden)))


def looked_up(model: Any, hidden: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        bias = model.table(torch.arange(hidden.shape[1]))
    return through(model.layers, hidden, bias)


def magnitude(model: Any, hidden: torch.Tensor) -> torch.Tensor:
    return through(model.layers, hidden, hidden.detach().pow(2).mean(-1, keepdim=True))


def compared(model: Any, hidden: torch.Tensor) -> torch.Tensor:
    return through(model.layers, hidden, (hidden.sum(-1, keepdim=True) > 0).to(hidden.dtype))


@pytest.mark.parametrize("forward", [looked_up, magnitude, compared])
def test_early_values_without_a_gradient(forward: Forward) -> None:
    """0.3.0: made of a dummy on later stages (roformer's table of positions is such a one)."""
    model = rewired(forward)
    AutoPipeline(ranks=4, microbatches=2).build(model).verify_against(model, ragged_batch())


def scaled(scale: Callable[[Any, int], Any]) -> Forward:
    def forward(model: Any, hidden: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(model.layers):
            hidden = layer(hidden) * scale(model, index)
        return hidden

    return forward


def skips(model: Any, hidden: torch.Tensor) -> torch.Tensor:
    first = model.layers[0](hidden)
    share: torch.Tensor = first.detach().abs()
    return through(model.layers[1:], first) * share


def left_on(box: Any, made: torch.Tensor) -> None:
    box.x = made


def passed_in(box: Callable[[], Any], put: Callable[[Any, Any], Any], get: Callable[[Any], Any]) -> Any:
    def forward(model: Any, hidden: torch.Tensor) -> torch.Tensor:
        return through(model.layers, hidden, box())

    def layer(layer: Any, hidden: torch.Tensor, box: Any) -> torch.Tensor:
        before, made = get(box), layer.mlp(hidden)
        put(box, made)
        return made if before is None else made + before  # type: ignore[no-any-return]

    return forward, layer


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (lambda model, h: through(model.layers, h) + h, "what comes before the layers reaches the head"),
        (skips, "what layer 0 returned reaches the head past the layers after it"),
        (lambda model, h: through(model.layers, h) @ model.embed_tokens.weight.T @ model.embed_tokens.weight,
         "model.embed_tokens.weight is used both before and after the layers"),
        (scaled(lambda model, index: model.scales.data[index]), "scales is used between layers"),
        (lambda model, h: through(model.layers, h) + (h if model.training else 0),
         "what comes before the layers reaches the head"),
        (lambda model, h: through(model.layers, h) * (model.norm(h * 0) if model.training else 1),
         "runs both before and after|another way in training|reaches the head"),
    ],
)  # fmt: skip
def test_values_that_pass_the_layers_by(forward: Forward, message: str) -> None:
    """0.3.0: made of a dummy on the last stage, in silence."""
    with pytest.raises(ModelError, match=message):
        find_chain(rewired(forward))


@pytest.mark.parametrize(
    ("wires", "message"),
    [
        (passed_in(dict, lambda box, new: box.update(x=new), lambda box: box.get("x")), "left in a dict"),
        (passed_in(list, lambda box, new: box.append(new), lambda box: box[-1] if box else None), "a list"),
        (passed_in(SimpleNamespace, left_on, lambda box: getattr(box, "x", None)),
         "layer 1 uses something of the embeddings that is not among its arguments"),
    ],
)  # fmt: skip
def test_values_that_layers_leave_for_each_other(wires: tuple[Forward, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        find_chain(rewired(*wires))


def test_hidden_states_wider_than_the_weights() -> None:
    """0.4.0: mamba in bfloat16 keeps a stream in float32, and the next rank expected bfloat16."""
    model = zoo.tiny_model("mamba2", torch.bfloat16)
    assert find_chain(model).dtype == torch.float32
    AutoPipeline(ranks=4, microbatches=2).build(model).verify_against(model, zoo.tiny_batch("mamba2"))


def test_a_buffer_that_the_last_stage_writes_is_saved(tmp_path: Path) -> None:
    """0.3.0: the first stage's was, which nothing had written."""

    class Mean(torch.nn.Module):
        mean: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(()))

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            self.mean += hidden.detach().mean()
            return hidden

    model = rewired(lambda model, hidden: model.running(through(model.layers, hidden)))
    model.model.running = Mean()
    pipe = AutoPipeline(ranks=2, microbatches=2).build(model)
    pipe.step(ragged_batch())
    save_checkpoint(tmp_path / "saved", pipe, torch.optim.SGD(pipe.parameters(), lr=0.1))
    held: dict[str, torch.Tensor] = {}
    for file in (tmp_path / "saved").glob("*.safetensors"):
        held |= load_file(file)
    assert float(held["model.running.mean"]) == float(pipe.modules[1].state_dict()["model.running.mean"]) != 0
    with pytest.raises(ModelError, match=r"weights with model\.scales, which only the model"):
        pipe.save_pretrained(tmp_path / "of no class that from_pretrained makes")


def test_entries_that_the_pipeline_sets() -> None:
    """0.4.0: a mixture's auxiliary loss was that of the last stage's routers alone."""
    pipe = AutoPipeline(ranks=2, microbatches=2).build(tiny_model("mixtral", layers=2))
    for name in ("use_cache", "output_router_logits"):
        rule = f"'{name}' in a batch: the pipeline sets it, to the same value on every stage"
        with pytest.raises(BatchError, match=rule):
            pipe.step({**ragged_batch(), name: True})


def test_an_entry_that_the_model_does_not_take() -> None:
    model: Any = tiny_model("llama")
    llama = type(model)

    def forward(self: Any, input_ids: Any = None, attention_mask: Any = None, use_cache: Any = None) -> Any:
        return llama.forward(self, input_ids, attention_mask, use_cache=use_cache)

    model.__class__ = type("Strict", (llama,), {"forward": forward})
    pipe = AutoPipeline(ranks=2, microbatches=2).build(model)
    pipe.step(ragged_batch())
    with pytest.raises(BatchError, match=r"takes such an argument\. Did you mean 'attention_mask'"):
        pipe.step({**ragged_batch(), "atention_mask": ragged_batch()["input_ids"]})


def test_a_model_without_anything_to_train() -> None:
    model = tiny_model("llama").requires_grad_(False)
    with pytest.raises(ModelError, match="no parameter of it requires a gradient"):
        AutoPipeline(ranks=2, microbatches=2).build(model).step(ragged_batch())


def test_positions_of_three_dimensions_are_split_by_rows() -> None:
    model = zoo.tiny_model("qwen3_5_text")
    batch = zoo.tiny_batch("qwen3_5_text", rows=3)
    positions = torch.arange(batch["input_ids"].shape[1]).expand(3, 3, -1)
    pipe = AutoPipeline(ranks=2, microbatches=3).build(model)
    pipe.verify_against(model, {**batch, "position_ids": positions})


def test_a_registered_rule_names_the_list_of_layers() -> None:
    """Where its config does not tell which list is the layers'."""
    model = tiny_model("llama")
    mine: Any = type("Mine", (type(model),), {})
    model.__class__ = mine
    model.model.experts = torch.nn.ModuleList(torch.nn.Linear(256, 256) for _ in range(4))
    with pytest.raises(ModelError, match="the layers run in the order"):
        find_chain(model)
    register_chain(mine, lambda model: "model.layers")
    assert find_chain(model).layers == "model.layers"
    register_chain(mine, lambda model: "model.blocks")
    rule = r"Mine, whose rule returns 'model.blocks': .* names the nn.ModuleList .* Return 'model.layers' or"
    with pytest.raises(ModelError, match=rule):
        find_chain(model)


def test_a_model_that_writes_into_its_embeddings() -> None:
    """0.1.0: ctrl scales them in place, which on later stages scaled what had been received."""
    config = AutoConfig.for_model("ctrl", vocab_size=64, n_embd=32, dff=48, n_layer=3, n_head=4,
                                  resid_pdrop=0.0, embd_pdrop=0.0)  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    AutoPipeline(ranks=3, microbatches=4).build(model).verify_against(model, ragged_batch())


def test_layers_dropped_at_random_are_refused() -> None:
    """0.1.0: a placeholder that was passed by gave a loss without gradients."""
    with pytest.raises(ModelError, match=r"layerdrop=0.3: .* Set layerdrop=0"):
        AutoPipeline(ranks=2, microbatches=2).build(tiny_config("opt", layerdrop=0.3))
    model = tiny_model("opt")
    pipe = AutoPipeline(ranks=2, microbatches=2).build(model)
    for module in pipe.modules.values():
        module.model.decoder.layerdrop = 1.0  # type: ignore[union-attr]
    with pytest.raises(ModelError, match="Set the config's layer dropping to 0"):
        pipe.step(ragged_batch())


def test_a_stage_holds_its_own_parameters_only() -> None:
    model = tiny_model("gpt2")
    chain = find_chain(model)
    names = []
    for stage, layers in enumerate((range(1), range(1, 3), range(3, 4))):
        part = cut(model, chain, layers, StageInfo(stage, 3))
        names.append({name for name, _ in part.named_parameters()})
        layers_kept = [layer for layer in part.transformer.h if type(layer) is not BoundaryPlaceholder]
        own = [is_around(at_boundary, layer) for layer in layers_kept]
        assert own == [[True], [False, True], [False]][stage]  # the last one ends the forward
    assert set.union(*names) == {name for name, _ in model.named_parameters(remove_duplicate=False)}
    assert not names[0] & names[1]
    assert not names[1] & names[2]
    assert all(p.device.type == "cpu" for p in model.parameters())


def test_only_a_forward_that_looks_at_values_has_no_estimate() -> None:
    """0.5.0: any error meant that, a mistake in the estimate too."""
    model = tiny_model("llama", layers=2)
    chain, info = find_chain(model), StageInfo(0, 2)

    def estimate(hook: Any) -> Any:
        stage = cut(model, chain, range(1), info)
        stage.get_submodule("model.layers.0").register_forward_pre_hook(hook)
        return stage_sizes(stage, info, HFEdges(model, chain), (4, 32))

    assert estimate(lambda module, args: bool(args[0].sum())) is None
    with pytest.raises(ZeroDivisionError):
        estimate(lambda module, args: 1 / 0)


def test_estimated_activation_bytes_are_what_autograd_holds() -> None:
    """Counted without values, and counted in a real forward of the same stage; token ids are the batch's."""
    model = tiny_model("llama", layers=2, hidden_size=64)
    chain, info, ids = find_chain(model), StageInfo(0, 2), torch.zeros(4, 32, dtype=torch.long)
    stage = cut(model, chain, range(1), info)
    found = stage_sizes(stage, info, HFEdges(model, chain), (4, 32))
    held: dict[int, int] = {}
    weights = {p.untyped_storage().data_ptr() for p in stage.parameters()}
    keep = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        keep.append(tensor)
        if tensor.untyped_storage().data_ptr() not in weights:
            held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = HFCall(stage, info)((), {"input_ids": ids})
    assert found is not None
    predicted, in_backward = found
    assert output.shape == (4, 32, 64)
    assert predicted.activation == sum(held.values()) - ids.nbytes
    assert predicted.buffer == predicted.sent == output.nbytes
    assert in_backward > predicted.activation


def test_torch_logs_nothing_for_ops_that_fail_without_values() -> None:
    """The grouped product of the default experts takes float32, but not in torch's rules for shapes."""
    records: list[logging.LogRecord] = []
    handler, log = logging.Handler(), logging.getLogger("torch._subclasses.fake_tensor")
    handler.emit = records.append  # type: ignore[assignment, method-assign]
    log.addHandler(handler)
    try:
        config = tiny_config("mixtral", num_local_experts=4, hidden_size=64)
        AutoPipeline(ranks=2, microbatches=2).build(AutoModelForCausalLM.from_config(config))
    finally:
        log.removeHandler(handler)
    assert not records


def test_a_head_alone_makes_masks_of_the_models_dtype() -> None:
    """0.5.0, xlnet: StopIteration: a model reads its dtype and device from its first weight, and had none."""
    model = zoo.tiny_model("xlnet", torch.float64)
    pipe = AutoPipeline(ranks=2, microbatches=2, layers_per_stage=[4, 0]).build(model)
    assert [type(module).__name__ for module in pipe.modules.values()] == ["XLNetLMHeadModel"] * 2
    assert pipe.verify_against(model, zoo.tiny_batch("xlnet")).passed


@pytest.mark.parametrize("is_moe", [False, True])
def test_the_logits_of_routers_cross_where_there_are_routers(is_moe: bool) -> None:
    """0.5.0, a dense doge with output_router_logits: KeyError: its config was asked, and not its layers."""
    model = zoo.tiny_model("doge", torch.float64, output_router_logits=True, is_moe=is_moe)
    assert find_chain(model).recorded == (("router_logits",) if is_moe else ())
    pipe = AutoPipeline(ranks=2, microbatches=2).build(model)
    assert pipe.verify_against(model, zoo.tiny_batch("doge")).passed


def test_positions_that_depend_on_earlier_rows_are_refused() -> None:
    """0.5.0: "use a decoder-only model" for a decoder-only model: its forward looks at values."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    with pytest.raises(
        ModelError, match=r"^rope_type='dynamic': its frequencies follow the longest row seen"
    ):
        AutoPipeline(ranks=2, microbatches=2).build_plan(tiny_config("llama", rope_parameters=rope))
    by_kind = {"sliding_attention": rope, "full_attention": {**rope, "rope_type": "default"}}
    with pytest.raises(ModelError, match=r"^rope_type='dynamic'"):
        AutoPipeline(ranks=2, microbatches=2).build_plan(tiny_config("gemma3_text", rope_parameters=by_kind))


def test_a_module_may_keep_a_tensor_of_its_own() -> None:
    """As RecurrentGemma does after a forward: its truth was asked, which is an error of torch."""
    whole = tiny_model("llama")
    expected = find_chain(whole)
    whole.model.state = torch.ones(2, 3)
    assert find_chain(whole) == expected
