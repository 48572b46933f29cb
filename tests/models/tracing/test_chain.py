from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, BertConfig, T5Config
from transformers.modeling_outputs import BaseModelOutputWithPast

from penstock import AutoPipeline
from penstock.errors import BatchError, ModelError, PartitionError
from penstock.models.costs import stage_sizes
from penstock.models.huggingface.boundary import BoundaryLayer, BoundaryPlaceholder
from penstock.models.huggingface.stages import HFCall, HFEdges, cut
from penstock.models.stage import StageInfo
from penstock.models.tracing.chain import find_chain
from penstock.models.tracing.probe import register_chain
from support import zoo
from support.families import FAMILIES, ragged_batch, tiny_config, tiny_model


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_a_chain(family: str) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config(family, layers=3))
    chain = find_chain(model)
    assert chain.count == 3
    named = {name.rpartition(".")[2] for name in (*chain.before, *chain.after)}
    assert named & {"embed_tokens", "wte", "embed_in"}
    assert "lm_head" in named
    assert "embed_positions" not in chain.after


@pytest.mark.parametrize("family", ["bloom", "falcon", "mpt"])
def test_layers_that_return_tuples(family: str) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes))
    assert find_chain(model).output_form == "tuple"
    pipe = AutoPipeline(ranks=3, microbatches=4).build(model)
    pipe.verify_against(model.train(), ragged_batch())


@pytest.mark.parametrize(
    ("wire", "told"),
    [
        (
            lambda layers, h: layers[2](layers[1](layers[0](h)) + h),
            "layer 2 does not take what layer 1 returned",
        ),
        (lambda layers, h: layers[1](layers[0](layers[2](h))), r"the layers run in the order \[2, 0, 1\]"),
        (lambda layers, h: layers[1](layers[0](h)), r"the order \[0, 1\]"),
        (lambda layers, h: layers[2](layers[1](layers[0](layers[0](h)))), r"the order \[0, 0, 1, 2\]"),
    ],
)
def test_what_is_no_chain(wire: Callable[[Any, Any], Any], told: str) -> None:
    model = tiny_model("llama", layers=3)

    def forward(self: Any, input_ids: torch.Tensor, **kwargs: Any) -> BaseModelOutputWithPast:
        return BaseModelOutputWithPast(last_hidden_state=wire(self.layers, self.embed_tokens(input_ids)))

    inner = type(model.model)
    model.model.__class__ = type("Rewired", (inner,), {"forward": forward})
    with pytest.raises(ModelError, match=told):
        find_chain(model)


def test_refusals_by_name() -> None:
    auto = AutoPipeline(ranks=2, microbatches=2)
    with pytest.raises(ModelError, match="transformers builds no causal LM from it"):
        auto.build_plan(T5Config(vocab_size=64, d_model=16, num_layers=2, num_heads=2))
    with pytest.raises(PartitionError, match="6 stages for 4 layers"):
        AutoPipeline(ranks=6, microbatches=2).build_plan(tiny_config("llama"))
    with pytest.raises(ModelError, match="model given as int"):
        auto.build_plan(3)
    with pytest.raises(ModelError, match="there is no such folder"):
        auto.build_plan("/nowhere/at/all")
    with pytest.raises(ModelError, match="taken as it is"):
        AutoPipeline(ranks=2, microbatches=2, dtype=torch.float64).build_plan(tiny_model("llama"))
    with pytest.raises(ModelError, match="attention=eager for a model object with sdpa"):
        AutoPipeline(ranks=2, microbatches=2, attention="eager").build_plan(tiny_model("llama"))


def test_a_weight_that_is_used_without_a_gradient() -> None:
    """0.3.0: roformer's table of positions was that of a dummy on later stages, and so were its gradients."""
    model = tiny_model("llama")

    class Table(torch.nn.Embedding):
        @torch.no_grad()
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input)

    class Biased(type(model.model.layers[0])):  # type: ignore[misc]
        def forward(self, hidden_states: torch.Tensor, bias: torch.Tensor, **kwargs: Any) -> Any:
            return super().forward(hidden_states + bias, **kwargs)

    def forward(self: Any, input_ids: torch.Tensor, **kwargs: Any) -> BaseModelOutputWithPast:
        places = torch.arange(input_ids.shape[1])
        hidden, bias = self.embed_tokens(input_ids), self.table(places)
        turned = self.rotary_emb(hidden, position_ids=places[None])
        for layer in self.layers:
            hidden = layer(hidden, bias, position_embeddings=turned, attention_mask=None)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden))

    model.model.table = Table(64, 32)
    for layer in model.model.layers:
        layer.__class__ = Biased
    model.model.__class__ = type("Rewired", (type(model.model),), {"forward": forward})
    pipe = AutoPipeline(ranks=4, microbatches=2).build(model)
    pipe.verify_against(model, ragged_batch())


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


def looked_up(model: Any, hidden: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        bias = model.table(torch.arange(hidden.shape[1]))
    return through(model.layers, hidden, bias)


def size_of(model: Any, hidden: torch.Tensor) -> torch.Tensor:
    return through(model.layers, hidden, hidden.detach().pow(2).mean(-1, keepdim=True))


def compared(model: Any, hidden: torch.Tensor) -> torch.Tensor:
    return through(model.layers, hidden, (hidden.sum(-1, keepdim=True) > 0).to(hidden.dtype))


@pytest.mark.parametrize("forward", [looked_up, size_of, compared])
def test_what_layers_take_without_a_gradient(forward: Forward) -> None:
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


def stored(box: Callable[[], Any], put: Callable[[Any, Any], Any], get: Callable[[Any], Any]) -> Any:
    def forward(model: Any, hidden: torch.Tensor) -> torch.Tensor:
        return through(model.layers, hidden, box())

    def layer(layer: Any, hidden: torch.Tensor, box: Any) -> torch.Tensor:
        before, made = get(box), layer.mlp(hidden)
        put(box, made)
        return made if before is None else made + before  # type: ignore[no-any-return]

    return forward, layer


@pytest.mark.parametrize(
    ("forward", "told"),
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
def test_values_that_go_other_ways(forward: Forward, told: str) -> None:
    """0.3.0: made of a dummy on the last stage, in silence."""
    with pytest.raises(ModelError, match=told):
        find_chain(rewired(forward))


@pytest.mark.parametrize(
    ("wires", "told"),
    [
        (stored(dict, lambda box, made: box.update(x=made), lambda box: box.get("x")), "left in a dict"),
        (stored(list, lambda box, made: box.append(made), lambda box: box[-1] if box else None), "in a list"),
        (stored(SimpleNamespace, left_on, lambda box: getattr(box, "x", None)),
         "layer 1 takes something of the embeddings that it is not given"),
    ],
)  # fmt: skip
def test_values_that_layers_leave_for_each_other(wires: tuple[Forward, Any], told: str) -> None:
    with pytest.raises(ModelError, match=told):
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
    pipe.save_pretrained(tmp_path / "saved")
    held = {
        key: value
        for file in (tmp_path / "saved").glob("*.safetensors")
        for key, value in load_file(file).items()
    }
    assert float(held["model.running.mean"]) == float(pipe.modules[1].state_dict()["model.running.mean"]) != 0


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        ({"use_cache": True}, "'use_cache' in a batch: the pipeline sets it itself"),
        ({"output_router_logits": True}, "the pipeline sets it itself, alike on every stage"),
    ],
)
def test_entries_that_are_the_pipelines_own(entry: dict[str, Any], told: str) -> None:
    """0.4.0: a mixture's auxiliary loss was that of the last stage's routers alone."""
    pipe = AutoPipeline(ranks=2, microbatches=2).build(tiny_model("mixtral"))
    with pytest.raises(BatchError, match=told):
        pipe.step({**ragged_batch(), **entry})


def test_an_entry_that_the_model_does_not_take() -> None:
    model: Any = tiny_model("llama")
    llama = type(model)

    def forward(self: Any, input_ids: Any = None, attention_mask: Any = None, use_cache: Any = None) -> Any:
        return llama.forward(self, input_ids, attention_mask, use_cache=use_cache)

    model.__class__ = type("Strict", (llama,), {"forward": forward})
    pipe = AutoPipeline(ranks=2, microbatches=2).build(model)
    pipe.step(ragged_batch())
    with pytest.raises(BatchError, match=r"takes no such argument\. Did you mean 'attention_mask'"):
        pipe.step({**ragged_batch(), "atention_mask": ragged_batch()["input_ids"]})


def test_a_model_without_anything_to_train() -> None:
    model = tiny_model("llama").requires_grad_(False)
    with pytest.raises(ModelError, match="no parameter of it requires a gradient"):
        AutoPipeline(ranks=2, microbatches=2).build(model).step(ragged_batch())


def test_positions_of_three_dimensions_are_cut_by_rows() -> None:
    model = zoo.tiny_model("qwen3_5_text")
    batch = zoo.tiny_batch("qwen3_5_text", rows=3)
    positions = torch.arange(batch["input_ids"].shape[1]).expand(3, 3, -1)
    pipe = AutoPipeline(ranks=2, microbatches=3).build(model)
    pipe.verify_against(model, {**batch, "position_ids": positions})


def test_a_rule_for_a_model_of_ones_own() -> None:
    """Where its config does not tell which list is the layers'."""
    model = tiny_model("llama")
    blocks = model.model.layers
    mine: Any = type("Mine", (type(model),), {})
    model.__class__ = mine
    model.model.experts = torch.nn.ModuleList(torch.nn.Linear(256, 256) for _ in range(4))
    with pytest.raises(ModelError, match="the layers run in the order"):
        find_chain(model)
    register_chain(mine, lambda model: "model.layers")
    assert find_chain(model).layers == "model.layers"
    register_chain(mine, lambda model: "model.blocks")
    with pytest.raises(ModelError, match=r"its rule names 'model.blocks' .* and that is none"):
        find_chain(model)
    assert len(blocks) == 4


def test_a_model_that_writes_into_its_embeddings() -> None:
    """0.1.0: ctrl scales them in place, which on later stages scaled what had been received."""
    config = AutoConfig.for_model("ctrl", vocab_size=64, n_embd=32, dff=48, n_layer=3, n_head=4,
                                  resid_pdrop=0.0, embd_pdrop=0.0)  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    AutoPipeline(ranks=3, microbatches=4).build(model).verify_against(model, ragged_batch())


def test_layers_dropped_at_random_are_refused() -> None:
    """0.1.0: a door that was passed by gave a loss without gradients."""
    with pytest.raises(ModelError, match=r"layerdrop=0.3: .* Set layerdrop=0"):
        AutoPipeline(ranks=2, microbatches=2).build(tiny_config("opt", layerdrop=0.3))
    model = tiny_model("opt")
    pipe = AutoPipeline(ranks=2, microbatches=2).build(model)
    for module in pipe.modules.values():
        module.model.decoder.layerdrop = 1.0  # type: ignore[union-attr]
    with pytest.raises(ModelError, match="Set the config's layer dropping to 0"):
        pipe.step(ragged_batch())


def test_bert_needs_no_table_of_names() -> None:
    """A model with other names around its layers."""
    config = BertConfig(vocab_size=64, hidden_size=32, num_hidden_layers=3, num_attention_heads=4,
                        intermediate_size=48, is_decoder=True)  # fmt: skip
    with torch.device("meta"):
        chain = find_chain(AutoModelForCausalLM.from_config(config))
    assert chain.layers == "bert.encoder.layer"
    assert (chain.before, chain.after) == (("bert.embeddings",), ("cls",))


def test_a_stage_holds_its_own_parameters_only() -> None:
    model = tiny_model("gpt2")
    chain = find_chain(model)
    names = []
    for stage, layers in enumerate((range(1), range(1, 3), range(3, 4))):
        part = cut(model, chain, layers, StageInfo(stage, 3))
        names.append({name for name, _ in part.named_parameters()})
        doors = [type(module) for module in part.transformer.h]
        own = [
            isinstance(module, BoundaryLayer)
            for module in part.transformer.h
            if not isinstance(module, BoundaryPlaceholder)
        ]
        assert doors.count(BoundaryPlaceholder) == 4 - len(layers)
        assert own == [[True], [False, True], [False]][stage]  # the last one ends the forward
    assert set.union(*names) == {name for name, _ in model.named_parameters(remove_duplicate=False)}
    assert not names[0] & names[1]
    assert not names[1] & names[2]
    assert all(p.device.type == "cpu" for p in model.parameters())


def test_activation_bytes_are_what_autograd_holds() -> None:
    """Counted without values, and counted in a real forward of the same stage."""
    model = tiny_model("llama", layers=2, hidden_size=64)
    chain, info = find_chain(model), StageInfo(0, 2)
    stage = cut(model, chain, range(1), info)
    predicted = stage_sizes(stage, info, HFEdges(model, chain), (4, 32))
    held: dict[int, int] = {}
    weights = {p.untyped_storage().data_ptr() for p in stage.parameters()}
    keep = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        keep.append(tensor)
        if tensor.untyped_storage().data_ptr() not in weights:
            held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = HFCall(stage, info)((), {"input_ids": torch.zeros(4, 32, dtype=torch.long)})
    assert predicted is not None
    assert output.shape == (4, 32, 64)
    assert sum(held.values()) <= predicted.activation <= 1.25 * sum(held.values())
    assert predicted.buffer == predicted.sent == output.nbytes


def test_what_torch_has_to_say_of_ops_without_values_is_not_told() -> None:
    """The grouped product of the default experts takes float32, but not in torch's rules for shapes."""
    told: list[logging.LogRecord] = []
    handler, log = logging.Handler(), logging.getLogger("torch._subclasses.fake_tensor")
    handler.emit = told.append  # type: ignore[assignment, method-assign]
    log.addHandler(handler)
    try:
        config = tiny_config("mixtral", num_local_experts=4, hidden_size=64)
        AutoPipeline(ranks=2, microbatches=2).build(AutoModelForCausalLM.from_config(config))
    finally:
        log.removeHandler(handler)
    assert not told
