"""Prediction layers (MTP): what they compute, their loss, and their weights in files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_layers import MtpModel

from penstock import with_mtp
from penstock.batch.loss import prediction_labels
from penstock.errors import BatchError, ModelError
from support import zoo
from support.predicting import packed_batch, tiny_config, tiny_predicting
from support.refusals import refuses

LAYERS = 4


def plain_of(model: PreTrainedModel) -> PreTrainedModel:
    """transformers' own model with the same weights, without prediction layers."""
    plain = zoo.class_of(model.config.model_type)._from_config(model.config, experts_implementation="eager")
    plain.to(model.dtype).load_state_dict(
        {n: v for n, v in model.state_dict().items() if n in plain.state_dict()}
    )
    return plain.eval()


def draft_of(plain: PreTrainedModel, model: Any) -> MtpModel:
    """transformers' own prediction layers with the weights of `model`."""
    draft = MtpModel(plain, model.prediction_layers).to(model.dtype).eval()
    for depth, layer in enumerate(draft.layers):
        ours = model.model.layers[LAYERS + depth].state_dict()
        names = {"post_norm.": "shared_head.norm.", "mtp_block.": ""}
        for name, value in layer.state_dict().items():
            for theirs, own in names.items():
                name = name.replace(theirs, own)
            value.copy_(ours[name])
    return draft


@pytest.mark.parametrize(("model_type", "count"), [("deepseek_v3", 2), ("glm4_moe", 1)])
@torch.no_grad()
def test_the_layers_compute_what_those_of_transformers_do(model_type: str, count: int) -> None:
    model = tiny_predicting(model_type, count=count).eval()
    ids = zoo.tiny_batch(model_type)["input_ids"]
    plain = plain_of(model)
    draft, hidden = draft_of(plain, model), plain.get_decoder()(ids).last_hidden_state
    found = model(ids, use_cache=False)
    assert torch.equal(found.logits, plain(ids).logits)
    assert len(found.mtp_logits) == count
    for depth, logits in enumerate(found.mtp_logits):
        tokens = ids[:, depth + 1 :]  # to each token the one after it, which transformers' layers are given
        positions = torch.arange(depth + 1, ids.shape[1])[None]
        hidden = draft.forward_layer(depth, hidden[:, : tokens.shape[1]], positions, None, input_ids=tokens)
        expected = draft._project_to_logits(hidden)
        assert (logits[:, : tokens.shape[1]] - expected).abs().max() < 1e-6  # rotary tables are of float32


@pytest.mark.parametrize("batch", [zoo.tiny_batch("deepseek_v3"), packed_batch()])
@torch.no_grad()
def test_the_loss_is_the_papers(batch: dict[str, Tensor]) -> None:
    """Written out token by token: none is predicted across the end of a row or of a document."""
    model: Any = tiny_predicting(count=2)
    model.config.mtp_loss_scaling_factor = 0.3
    labels, places = batch["labels"], batch.get("position_ids")
    output = model(**batch)
    chances = [torch.log_softmax(each, -1) for each in (output.logits, *output.mtp_logits)]
    rows, length = labels.shape
    sums = torch.zeros(3, dtype=torch.float64)
    for row in range(rows):
        for at in range(length):
            for ahead, chance in enumerate(chances, 1):
                there = at + ahead
                if there >= length or labels[row, there] == -100:
                    continue
                if places is None or places[row, there] == places[row, at] + ahead:
                    sums[ahead - 1] -= chance[row, at, labels[row, there]]
    expected = (sums[0] + 0.3 * sums[1:].mean()) / (labels[:, 1:] != -100).sum()
    assert float(output.loss) == pytest.approx(float(expected), rel=1e-6)
    count = 7
    assert float(model(**batch, num_items_in_batch=count).loss) == pytest.approx(
        float(expected * (labels[:, 1:] != -100).sum() / count), rel=1e-6
    )
    shifted = F.pad(labels[:, 1:], (0, 1), value=-100)
    same = model(**{**batch, "labels": torch.zeros_like(labels)}, shift_labels=shifted)
    assert float(same.loss) == pytest.approx(float(expected), rel=1e-6)


def test_no_token_of_another_document_is_predicted() -> None:
    following = torch.tensor([[1, 2, 3, -100, 5, 6, -100]])
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2]])
    assert prediction_labels(following, 1).tolist() == [[2, 3, -100, 5, 6, -100, -100]]
    assert prediction_labels(following, 1, positions).tolist() == [[2, 3, -100, -100, 6, -100, -100]]
    assert prediction_labels(following, 2, positions).tolist() == [[3, -100, -100, -100, -100, -100, -100]]
    short, one = torch.tensor([[4]]), torch.tensor([[0]])
    assert prediction_labels(short, 2).tolist() == prediction_labels(short, 2, one).tolist() == [[-100]]
    # positions that run on add nothing, wherever they begin
    assert torch.equal(
        prediction_labels(following, 1, torch.arange(3, 10)[None]), prediction_labels(following, 1)
    )


@torch.no_grad()
def test_the_loss_is_a_tenth_where_the_config_says_nothing() -> None:
    model: Any = tiny_predicting()
    assert model.mtp_loss_scaling_factor == 0.1
    batch = zoo.tiny_batch("deepseek_v3")
    losses = []
    for factor in (0.0, 0.1, None):
        model.config.mtp_loss_scaling_factor = factor
        losses.append(float(model(**batch).loss))
    assert losses[0] < losses[1] == losses[2]


@torch.no_grad()
def test_a_call_takes_what_one_of_the_plain_class_takes() -> None:
    """Position ids by their place did not reach the loss, and a tuple had no logits."""
    model: Any = tiny_predicting()
    batch = packed_batch()
    ids, labels, mask = batch["input_ids"], batch["labels"], torch.ones_like(batch["input_ids"])
    expected = model(**batch, attention_mask=mask)
    assert torch.equal(model(ids, mask, batch["position_ids"], None, None, labels).loss, expected.loss)
    loss, logits, (drafted,) = model(**batch, attention_mask=mask, return_dict=False)
    assert torch.equal(loss, expected.loss)
    assert torch.equal(logits, expected.logits)
    assert torch.equal(drafted, expected.mtp_logits[0])


@pytest.mark.parametrize("mode", [True, False], ids=["train", "eval"])
def test_with_a_cache_it_is_the_plain_model(mode: bool) -> None:
    model = tiny_predicting().train(mode)
    prompt = zoo.tiny_batch("deepseek_v3", rows=2)["input_ids"]
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    found = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
    plain = plain_of(model)
    assert torch.equal(found, plain.generate(prompt, attention_mask=torch.ones_like(prompt), **options))
    assert "mtp_logits" not in model(prompt, use_cache=True)
    assert ("mtp_logits" in model(prompt)) == mode


def test_files_have_the_names_of_the_models_checkpoints(tmp_path: Path) -> None:
    """As in DeepSeek-V3's on the Hub, whose files also hold copies of embedding and head."""
    model: Any = tiny_predicting(dtype=torch.float32).eval()
    model.save_pretrained(tmp_path)
    held = load_file(tmp_path / "model.safetensors")
    names = {name.removeprefix("model.layers.4.") for name in held if name.startswith("model.layers.4.")}
    assert {"enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight"} < names
    assert {"self_attn.o_proj.weight", "mlp.experts.0.down_proj.weight", "mlp.gate.weight"} < names
    assert not {"embed_tokens.weight", "final_norm.weight"} & names
    of_hub = {"embed_tokens": held["model.embed_tokens.weight"], "shared_head.head": held["lm_head.weight"]}
    held |= {f"model.layers.4.{name}.weight": value.clone() for name, value in of_hub.items()}
    save_file(held, tmp_path / "model.safetensors", metadata={"format": "pt"})
    kind = with_mtp(zoo.class_of("deepseek_v3"))
    again, info = kind.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    state = again.state_dict()
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    layer = again.model.layers[4]
    assert layer.embed_tokens.weight is again.model.embed_tokens.weight
    assert layer.final_norm.weight is again.model.norm.weight
    assert again.config.num_hidden_layers == 4
    assert again.config.architectures == ["DeepseekV3ForCausalLM"]


def test_transformers_drafts_with_what_was_saved(tmp_path: Path) -> None:
    model: Any = tiny_predicting(dtype=torch.float32, count=2)
    model.save_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    plain._keys_to_ignore_on_load_unexpected = [r"model\.layers\.[45]\..*"]  # it lists layer 61
    read, expected = (
        MtpModel.from_pretrained(plain).state_dict(),
        draft_of(plain_of(model), model).state_dict(),
    )
    assert read.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in read.items())


@pytest.mark.parametrize(
    ("model_type", "count", "value", "rule"),
    [
        ("qwen3", 1, "Qwen3ForCausalLM", "transformers has none"),
        ("deepseek_v3", 0, "DeepseekV3ForCausalLM", "num_nextn_predict_layers=0"),
        ("mellum", 1, "MellumForCausalLM", "other names and structures"),
        ("bailing_hybrid", 1, "BailingHybridForCausalLM", "without `mtp_layer_types`"),
    ],
)
def test_models_without_such_layers_are_refused(model_type: str, count: int, value: str, rule: str) -> None:
    with torch.device("meta"), refuses(ModelError, value, rule):
        with_mtp(zoo.class_of(model_type))(tiny_config(model_type, count=count))


def test_tokens_are_needed() -> None:
    model = tiny_predicting()
    embedded = model.get_input_embeddings()(zoo.tiny_batch("deepseek_v3")["input_ids"])
    with refuses(BatchError, rule="layers embed the following tokens", remedy="Give input_ids"):
        model(inputs_embeds=embedded)


def test_a_class_is_made_once() -> None:
    made = with_mtp(zoo.class_of("deepseek_v3"))
    assert with_mtp(zoo.class_of("deepseek_v3")) is made is with_mtp(made)
