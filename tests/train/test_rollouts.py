"""Rollouts: sampled over stages or read from an engine's file, with rewards, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock import AutoPipeline
from penstock.batch.grpo import GRPO
from penstock.errors import BatchError, ConfigError, DataError
from penstock.train.rollouts import read_rollouts, rollouts
from support.families import tiny_config, tiny_model
from support.pairs import plain_gradients
from support.reference import assert_gradients, gradients_of
from support.refusals import refuses

LINES: list[dict[str, Any]] = [
    {"prompt_ids": [5, 6, 7], "completion_ids": [8, 9], "logprobs": [-0.5, -1.0], "reward": 1.0},
    {"prompt_ids": [5, 6, 7], "completion_ids": [3], "logprobs": [-2.0], "reward": 0.0},
    {"prompt_ids": [4], "completion_ids": [8, 9, 10, 11], "logprobs": [-0.5] * 4, "reward": 2.0},
    {"prompt_ids": [4], "completion_ids": [3, 2], "logprobs": [-0.1, -0.2], "reward": 2.0},
]


def written(folder: Path, lines: list[dict[str, Any]]) -> Path:
    path = folder / "rollouts.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def test_completions_are_those_of_generate_up_to_their_end() -> None:
    pipe = AutoPipeline(ranks=2, microbatches=2, loss_fn=GRPO()).build(tiny_model("llama"))
    seen = list[Any]()

    def reward(prompts: Any, completions: Any) -> list[float]:
        seen.append((prompts, completions))
        return [float(len(completion)) for completion in completions]

    options: dict[str, Any] = {"eos_token_id": [*range(0, 64, 4)], "pad_token_id": 1}
    made = rollouts(pipe, [[5, 6], [7, 8, 9]], reward, group=3, max_new_tokens=6, seed=2, **options)
    (prompts, completions), batch = seen[0], made.batch
    assert prompts == [[5, 6]] * 3 + [[7, 8, 9]] * 3
    assert made.completions == completions
    assert len({len(completion) for completion in completions}) > 1  # some have ended earlier
    for row, completion in enumerate(completions):
        ids, labels = ([*batch[name][row].tolist()] for name in ("input_ids", "labels"))
        tokens = len(prompts[row]) + len(completion)
        assert ids[:tokens] == [*prompts[row], *completion]
        assert [label for label in labels if label != -100] == completion
        assert batch["attention_mask"][row].sum() == tokens
        assert all(token % 4 for token in completion[:-1])
    padded = torch.tensor([[0, 5, 6]] * 3 + [[7, 8, 9]] * 3)
    with refuses(BatchError, "1 rewards", "6 rows"):
        rollouts(pipe, [[5], [6]], lambda *_: [1.0], group=3, max_new_tokens=1, **options)
    options |= {"do_sample": True, "top_k": 0, "attention_mask": (padded > 0).long()}
    again = pipe.generate(padded, max_new_tokens=6, seed=2, **options)
    assert [of[: len(c)] for of, c in zip(again[:, 3:].tolist(), completions, strict=True)] == completions
    assert made.rewards.tolist() == [len(completion) for completion in completions]
    assert torch.allclose(batch["advantages"].view(2, 3).sum(1), torch.zeros(2), atol=1e-5)


def test_a_short_prompt_is_continued_as_if_it_were_alone() -> None:
    model = tiny_model("llama")
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(8 if weight.dim() > 1 else 1)  # so that each token matters
    pipe = AutoPipeline(ranks=2, microbatches=2, loss_fn=GRPO()).build(model)
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 6, "eos_token_id": None}
    prompts = [[5], [7, 8, 9, 10, 11, 12]]
    made = rollouts(pipe, prompts, lambda *_: [0.0, 1.0], group=1, **options)
    alone = [pipe.generate(torch.tensor([row]), microbatches=1, **options) for row in prompts]
    expected = [of[0, len(row) :].tolist() for of, row in zip(alone, prompts, strict=True)]
    assert made.completions == expected


def test_samples_are_of_the_policy_and_end_as_the_model_says() -> None:
    """Many instruction models' generation_config has a top_k or a temperature, and several end tokens."""
    model, ends = tiny_model("llama"), [*range(0, 64, 4)]
    assert model.generation_config is not None
    model.generation_config.update(top_k=1, temperature=0.1, eos_token_id=ends, pad_token_id=1)
    pipe = AutoPipeline(ranks=2, microbatches=2, loss_fn=GRPO()).build(model)

    def sampled(**options: Any) -> list[list[int]]:
        made = rollouts(
            pipe, [[5, 6]], lambda _, rows: [*map(len, rows)], group=8, max_new_tokens=6, **options
        )
        return [list(row) for row in made.completions]

    own = sampled()
    assert len({tuple(row) for row in own}) > 2
    assert any(len(row) < 6 for row in own)
    assert all(row[-1] in ends for row in own if len(row) < 6)
    assert sampled(eos_token_id=ends, temperature=1.0, top_k=64) == own
    assert len({tuple(row) for row in sampled(top_k=1)}) == 1
    with refuses(ConfigError, "stop_strings", "an end token"):
        sampled(stop_strings=["a"])


def test_an_engines_rollouts_train_as_in_one_process(tmp_path: Path) -> None:
    made, model = read_rollouts(written(tmp_path, LINES), group=2), tiny_model("llama", torch.float64)
    batch = made.batch
    assert batch["input_ids"].tolist()[0] == [5, 6, 7, 8, 9]
    assert batch["labels"].tolist()[1] == [-100, -100, -100, 3, -100]
    assert batch["old_logps"].tolist()[0] == [0, 0, 0, -0.5, -1.0]
    assert batch["advantages"].tolist() == pytest.approx([0.70700679, -0.70700679, 0, 0], rel=1e-4)

    def formula() -> torch.Tensor:
        logits = model(input_ids=batch["input_ids"], use_cache=False).logits[:, :-1]
        counted = batch["labels"][:, 1:] != -100
        logps = logits.log_softmax(-1).gather(2, batch["input_ids"][:, 1:, None])[..., 0]
        ratio = torch.exp(logps - batch["old_logps"][:, 1:])
        advantages = batch["advantages"][:, None]
        of_tokens = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        return of_tokens[counted].mean()

    expected, gradients = plain_gradients(model, formula)
    pipe = AutoPipeline(ranks=2, microbatches=2, loss_fn=GRPO()).build(model)
    assert pipe.step(batch).loss == pytest.approx(expected, rel=1e-6)
    assert_gradients(gradients_of(pipe), gradients, 1e-6)
    other = read_rollouts(written(tmp_path, LINES), group=2, reward=lambda prompts, rows: [*map(len, rows)])
    assert other.rewards.tolist() == [2, 1, 4, 2]


def test_the_experts_that_an_engine_chose_are_replayed(tmp_path: Path) -> None:
    """A token has the experts of the file, which its router did not choose; the last one its router's."""
    pipe = AutoPipeline(ranks=2, microbatches=2, loss_fn=GRPO(), replay_routing=True).build(
        tiny_config("mixtral")
    )
    pipe.step(read_rollouts(written(tmp_path, LINES), group=2).batch)
    own = pipe.routed_experts()
    assert isinstance(own, torch.Tensor)
    other = (own + 1) % (int(own.max()) + 1)
    told = [len(line["prompt_ids"]) + len(line["completion_ids"]) - 1 for line in LINES]
    lines = [{**line, "routed_experts": other[row, : told[row]].tolist()} for row, line in enumerate(LINES)]
    pipe.step(read_rollouts(written(tmp_path, lines), group=2).batch)
    chosen = pipe.routed_experts()
    assert isinstance(chosen, torch.Tensor)
    for row, tokens in enumerate(told):
        assert torch.equal(chosen[row, :tokens].sort(-1).values, other[row, :tokens].sort(-1).values)
    assert not torch.equal(chosen, own)


REFUSED: dict[str, tuple[list[dict[str, Any]], str, str]] = {
    "a part of a group": (LINES[:3], "rewards of 3 rows", "group of 2"),
    "groups of other sizes": ([*LINES[:1], *LINES[2:], LINES[3]], "line 2", "has another prompt"),
    "a line without": ([{**LINES[0], "reward": None}, *LINES[1:]], "line 1", "it has no reward"),
    "logprobs of some": ([*LINES[:3], {**LINES[3], "logprobs": None}], "line 4", "other lines do"),
    "too few logprobs": ([{**LINES[0], "logprobs": [0.0]}, LINES[1]], "line 1", "1 logprobs for 2 tokens"),
    "no completion": ([{**LINES[0], "completion_ids": [], "logprobs": []}, LINES[1]], "line 1", "no token"),
    "another name": ([{**LINES[0], "logprob": 1}, LINES[1]], "line 1", "logprob: extra inputs"),
    "a text": ([{**LINES[0], "prompt_ids": "abc"}, LINES[1]], "line 1", "prompt_ids: input should be"),
    "few experts": (
        [{**LINES[0], "routed_experts": [[[0]]]}, LINES[1]], "line 1", "the row has 5"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_lines_that_are_no_rollouts_are_refused(name: str, tmp_path: Path) -> None:
    lines, *said = REFUSED[name]
    with refuses(DataError if "line" in said[0] else BatchError, *said):
        read_rollouts(written(tmp_path, lines), group=2)


def test_what_is_no_file_of_lines_is_refused(tmp_path: Path) -> None:
    with refuses(DataError, "nowhere.jsonl"):
        read_rollouts(tmp_path / "nowhere.jsonl", group=2)
    (tmp_path / "text.jsonl").write_text("{")
    with refuses(DataError, "line 1", "not JSON"):
        read_rollouts(tmp_path / "text.jsonl", group=2)
