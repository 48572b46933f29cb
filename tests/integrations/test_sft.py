"""PipelineSFTTrainer against TRL's SFTTrainer in one process: the same data, and the same training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from penstock.errors import ConfigError
from penstock.integrations import PipelineSFTTrainer
from support import trainers
from support.pool import Pool
from support.refusals import refuses
from support.trainers import Seen
from support.trl import skip_kernels

WORDS = ["<pad>", "<eos>", *"abcdefghijklmnopqrstuvwxyz"]
# entropy and accuracy of tokens are measured on the logits of TRL's own loss
OF_LOGITS = ("entropy", "mean_token_accuracy", "num_tokens")


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, "<pad>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")


def pairs(count: int, seed: int) -> Dataset:
    """Prompts, which the loss leaves out, and completions of several lengths."""
    letters = torch.randint(0, 26, (count, 12), generator=torch.Generator().manual_seed(seed))
    texts = [[chr(97 + letter) for letter in row[: 6 + index % 6]] for index, row in enumerate(letters)]
    split = [{"prompt": " ".join(t[:3]) + " ", "completion": " ".join(t[3:])} for t in texts]
    return Dataset.from_list(split)


def arguments(folder: Path, **more: Any) -> SFTConfig:
    given = trainers.arguments(folder)
    names = (
        "per_device_train_batch_size", "per_device_eval_batch_size", "num_train_epochs", "learning_rate",
        "weight_decay", "warmup_steps", "max_grad_norm", "logging_steps", "eval_strategy", "eval_steps",
        "save_steps", "report_to", "use_cpu", "disable_tqdm",
    )  # fmt: skip
    default = {"bf16": False, "activation_checkpointing": False, "dataset_num_proc": None}
    return SFTConfig(str(folder), **{**{name: getattr(given, name) for name in names}, **default, **more})


def options() -> dict[str, Any]:
    data = {"train_dataset": pairs(11, 1), "eval_dataset": pairs(11, 2)}
    return {**data, "processing_class": tokenizer(), "callbacks": [trainers.Recorded()]}


def without_logits(seen: Seen) -> list[dict[str, float]]:
    return [{k: v for k, v in entry.items() if not k.endswith(OF_LOGITS)} for entry in seen.logs]


def test_trains_as_trls_trainer(pool: Pool, tmp_path: Path) -> None:
    skip_kernels()
    trainer = SFTTrainer(model=trainers.model(), args=arguments(tmp_path / "plain"), **options())
    trainer.train()
    weights = {name: value.detach().clone() for name, value in trainer.model.named_parameters()}
    expected = trainers.seen(trainer, weights)
    ranks = pool.run(2, _train, tmp_path / "pipeline")
    trained: dict[str, torch.Tensor] = {}
    for rank in ranks:
        assert rank.events == expected.events
        for ours, theirs in zip(without_logits(rank), without_logits(expected), strict=True):
            assert ours == pytest.approx(theirs, rel=1e-6)
        trained |= rank.weights
    assert trained.keys() == weights.keys()
    for name, value in weights.items():
        torch.testing.assert_close(trained[name], value, rtol=0, atol=1e-6)


def _train(folder: Path) -> Seen:
    with trainers.as_launched():
        args = arguments(folder)
        pipe = trainers.pipeline()
        trainer = PipelineSFTTrainer(pipe, args, **options())
        trainer.train()
        weights = {name: value.detach().clone() for name, value in pipe.owned_parameters()}
        pipe.close()
        return trainers.seen(trainer, weights)


@pytest.mark.parametrize(
    ("value", "rule", "more"),
    [
        ("loss_type='dft'", "computes the loss", {"loss_type": "dft"}),
        ("bf16=True", "precision", {"bf16": True}),
        ("activation_checkpointing=True", "without values", {"activation_checkpointing": True}),
        ("activation_offloading=True", "without values", {"activation_offloading": True}),
    ],
)
def test_what_only_trls_loss_has_is_refused(
    tmp_path: Path, value: str, rule: str, more: dict[str, Any]
) -> None:
    with trainers.as_launched(), refuses(ConfigError, value, rule):
        PipelineSFTTrainer(trainers.pipeline(), arguments(tmp_path, **more), **options())
