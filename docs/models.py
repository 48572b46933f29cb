"""Write docs/models.md by cutting every causal language model of the installed transformers: ``make docs``.

tests/test_docs.py, in `make sweep`, checks that the page is what this writes.
"""

from __future__ import annotations

from pathlib import Path

import torch
import transformers

from penstock import AutoPipeline
from penstock.models.tracing.chain import Chain, find_chain
from support import census, pictures, zoo

PAGE = Path(__file__).with_name("models.md")
_HEAD = """# Which models

Every model type that `AutoModelForCausalLM` of transformers {version} knows, as tiny random models with both
kinds of layers where a family has two, windows shorter than the sequences, and weights tied as their configs
say. Each was cut into two and into four stages, run in training mode with `1f1b`, and loss and every
parameter's gradient compared with plain PyTorch in one process: within 1e-5 of the largest entry of each
gradient in float32 (and, but for xglm, whose masks overflow there, within 1e-10 in float64).

**{exact} of {all} are exact. {refused} are refused** by a `ModelError` with the reason given here, and
{untried} were not tried, being no language models by themselves. None is wrong in silence.

What crosses an edge: *hidden* states; what was made *before* the layers of trained weights and is taken by
later ones (per-layer inputs, the embeddings); what a layer *hands* to the next beside hidden states; what
layers *share* (keys and values). A mixture of experts whose config sets `output_router_logits` has its
auxiliary loss counted too: the routers' logits then cross the edges, with their gradients.

Without a `loss_fn` the loss is the model's own, `model(**batch).loss`. The last column says where this
compares each token with its own label and not with the next token's.

The prediction layers (MTP) of deepseek_v3 and glm4_moe [train too](guides/prediction.md).

| model type | class | result | crosses an edge | its own loss |
|---|---|---|---|---|
"""


_SEEING = """
## Vision-language models

Types of `AutoModelForImageTextToText`, tiny and random, on microbatches with one image, with several of other
sizes, and with none. Each was cut into two and into four stages, its towers on the first, and loss and every
gradient compared with plain PyTorch in one process: within 1e-10 in float64. Other types are cut by the same
rules, and `pipe.verify_against(model, batch)` compares them. Where layers take images in another way than
through the embeddings (mllama, idefics, BLIP-2), or an encoder reads the text (Florence-2), a `ModelError`
says so. [Vision-language models](guides/pictures.md) is the guide.

| model type | class | result | crosses an edge |
|---|---|---|---|
"""


def page() -> str:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    verdicts = {model_type: census.judge(model_type) for model_type in zoo.TYPES}
    exact = sum(verdict.chain is not None for verdict in verdicts.values())
    refused = len(verdicts) - exact - len(zoo.SKIPPED)
    head = _HEAD.format(
        version=transformers.__version__,
        exact=exact,
        all=len(verdicts),
        refused=refused,
        untried=len(zoo.SKIPPED),
    )
    return head + "".join(map(_row, verdicts, verdicts.values())) + seeing()


def seeing() -> str:
    """The section on vision-language models."""
    rows = []
    for model_type in sorted(pictures.TYPES):
        model = pictures.tiny_model(model_type, torch.float64)
        for ranks in (2, 4):
            pictures.assert_exact(model, AutoPipeline(ranks=ranks, microbatches=4))
        crosses = "hidden, features of images" if find_chain(model).features else "hidden"
        rows.append(f"| {model_type} | {type(model).__name__} | exact | {crosses} |\n")
    return _SEEING + "".join(rows)


def _row(model_type: str, verdict: census.Verdict) -> str:
    if model_type in zoo.SKIPPED:
        return f"| {model_type} | | not tried: {verdict.refusal} | | |\n"
    if verdict.chain is None:
        return f"| {model_type} | {verdict.kind} | refused: {_short(verdict.refusal)} | | |\n"
    other = model_type in zoo.UNSHIFTED
    crosses = _crosses(verdict.chain)
    return f"| {model_type} | {verdict.kind} | exact | {crosses} | {'of each token' if other else ''} |\n"


def _crosses(chain: Chain) -> str:
    more = {
        "early values": chain.has_early_inputs,
        "more layer outputs": chain.layer_outputs_passed_on,
        "a shared mapping": chain.mappings_shared,
    }
    return ", ".join(["hidden", *(name for name, there in more.items() if there)])


def _short(refusal: str) -> str:
    return refusal.removeprefix("a pipeline cuts a chain of layers, and in this model ")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
