"""Rollouts: completions of prompts with their rewards, as a batch for GRPO.

    prompts    ->  pipe.generate, or an inference engine's file  ->  reward of each row  ->  batch

    {"prompt_ids": [5, 6], "completion_ids": [7, 2], "logprobs": [-0.3, -1.2], "reward": 1.0}      a line

Lines of a group stand next to each other. `logprobs` become old_logps. `routed_experts`, a list of (tokens,
mixtures, top_k), are the experts that the engine chose: a step of a pipeline with replay_routing=True
replays them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, FiniteFloat, NonNegativeInt, ValidationError
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from penstock.batch.grpo import ADVANTAGES, OLD, group_advantages
from penstock.batch.loss import IGNORED
from penstock.batch.padding import ROUTED
from penstock.errors import BatchError, ConfigError, DataError
from penstock.pipeline.pipeline import Pipeline
from penstock.reading import parse_json, read_text

Tokens = Sequence[Sequence[int]]
# (prompts, completions), both the token ids of each row -> the reward of each row
RewardFunction = Callable[[Tokens, Tokens], Sequence[float]]
_LARGEST = 1 << 30  # bytes of a file
# samples of the policy itself, as TRL's, whatever the model's generation_config prefers
_OF_THE_POLICY = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0}


class Rollouts(NamedTuple):
    """Rows for a step with GRPO.

    batch: input_ids, labels (-100 on prompts), attention_mask, advantages; from a file perhaps old_logps and
        routed_experts; padded on the right
    rewards: (rows,)
    completions: the token ids of each row
    """

    batch: dict[str, Tensor]
    rewards: Tensor
    completions: Tokens


class _Line(BaseModel):
    """A line of an engine's file."""

    model_config = ConfigDict(extra="forbid", strict=True)

    prompt_ids: list[NonNegativeInt]
    completion_ids: list[NonNegativeInt]
    logprobs: list[FiniteFloat] | None = None
    reward: FiniteFloat | None = None
    routed_experts: list[list[list[int]]] | None = None


def rollouts(
    pipe: Pipeline,
    prompts: Tokens,
    reward: RewardFunction,
    *,
    group: int,
    max_new_tokens: int,
    scaled: bool = True,
    seed: int = 0,
    **options: Any,
) -> Rollouts:
    """Sample `group` completions of each prompt by the pipeline's weights. Collective.

    Args:
        prompts: the token ids of each prompt; on a mesh, those of this pipeline's part
        reward: called once with all rows, on every rank, where it must give the same
        scaled: whether advantages are divided by the standard deviation of their group
        seed: another one for each step
        options: as for `Pipeline.generate`, such as temperature, eos_token_id and pad_token_id; without
            them, samples are of the whole distribution at temperature 1

    Raises the errors of `Pipeline.generate`, ConfigError for stop_strings, BatchError for rewards that do not
    fit the rows.
    """
    if options.get("stop_strings"):
        rule = "a completion ends with an end token, which belongs to it"
        raise ConfigError("rollouts with stop_strings", rule, "Give eos_token_id, also of several tokens")
    of_rows = [torch.tensor(prompt) for prompt in prompts for _ in range(group)]
    ids = pad_sequence(of_rows, True, padding_side="left")
    mask = pad_sequence([torch.ones_like(row) for row in of_rows], True, padding_side="left")
    sampling: dict[str, Any] = {**_OF_THE_POLICY, "attention_mask": mask, **options}
    written = pipe.generate(ids, max_new_tokens=max_new_tokens, seed=seed, **sampling)
    ends = options.get("eos_token_id", _ends_of(pipe))
    completions = [_until(row, ends) for row in written[:, ids.shape[1] :].tolist()]
    return _made([row.tolist() for row in of_rows], completions, reward, group, scaled)


def read_rollouts(
    path: str | Path, *, group: int, reward: RewardFunction | None = None, scaled: bool = True
) -> Rollouts:
    """Read the rollouts that an inference engine wrote, JSON lines.

    Args:
        group: the number of lines of each prompt, next to each other
        reward: as for `rollouts`; None takes the rewards of the file
        scaled: as for `rollouts`

    Raises DataError that names the file and the line; BatchError for a part of a group.
    """
    try:
        texts = read_text(path, _LARGEST).splitlines()
    except (OSError, ValueError) as error:
        raise DataError(f"rollouts {path}", str(error), "Give a file of JSON lines") from None
    lines = [_read(f"rollouts {path} line {at}", text) for at, text in enumerate(texts, 1)]
    for name in ("logprobs", "reward", "routed_experts"):
        _check_all(f"rollouts {path}", name, lines, needed=name == "reward" and reward is None)
    _check_groups(f"rollouts {path}", lines, group)
    prompts, completions = [line.prompt_ids for line in lines], [line.completion_ids for line in lines]
    rewards = [line.reward or 0.0 for line in lines]
    made = _made(prompts, completions, reward or (lambda *_: rewards), group, scaled)
    return made._replace(batch=made.batch | _of_engine(lines, made.batch["input_ids"].shape[1]))


def _made(prompts: Tokens, completions: Tokens, reward: RewardFunction, group: int, scaled: bool) -> Rollouts:
    rewards = torch.tensor([*map(float, reward(prompts, completions))])
    if len(rewards) != len(prompts):
        rule = f"the reward function got {len(prompts)} rows, and gives a number for each"
        raise BatchError(f"{len(rewards)} rewards", rule, "Return a list with one number a row")
    rows = [torch.tensor([*both[0], *both[1]]) for both in zip(prompts, completions, strict=True)]
    starts = torch.tensor([len(prompt) for prompt in prompts])[:, None]
    ids = pad_sequence(rows, True)
    mask = pad_sequence([torch.ones_like(row) for row in rows], True)
    before = torch.arange(ids.shape[1]) < starts
    batch = {
        "input_ids": ids,
        "labels": ids.masked_fill(before | (mask == 0), IGNORED),
        "attention_mask": mask,
        ADVANTAGES: group_advantages(rewards, group, scaled=scaled),
    }
    return Rollouts(batch, rewards, completions)


def _ends_of(pipe: Pipeline) -> Any:
    module: Any = next(iter(pipe.modules.values()))
    return module.generation_config.eos_token_id


def _until(tokens: list[int], ends: Any) -> list[int]:
    """The tokens up to the first end token, with it. ends: an id, several, or None"""
    last = {ends} if isinstance(ends, int) else {*(ends or ())}
    at = next((at for at, token in enumerate(tokens, 1) if token in last), len(tokens))
    return tokens[:at]


# ---- An engine's file


def _read(name: str, text: str) -> _Line:
    """Raises DataError."""
    try:
        line = _Line.model_validate(parse_json(text))
    except ValidationError as error:
        first = error.errors()[0]
        rule = f"{'.'.join(map(str, first['loc'])) or 'it'}: {first['msg'].lower()}"
        raise DataError(name, rule, "Write prompt_ids, completion_ids, logprobs and reward alone") from None
    except ValueError as error:
        raise DataError(name, f"it is not JSON: {error}", "Mend it") from None
    count = len(line.completion_ids)
    if line.logprobs is not None and len(line.logprobs) != count:
        rule = f"it has {len(line.logprobs)} logprobs for {count} tokens of the completion"
        raise DataError(name, rule, "Give one for each")
    if not line.prompt_ids or not count:
        rule = "its prompt or its completion has no token"
        raise DataError(name, rule, "Leave out the whole group of this prompt")
    tokens = len(line.prompt_ids) + count
    if line.routed_experts is not None:
        shapes = {tuple(map(len, of_token)) for of_token in line.routed_experts}
        if len(line.routed_experts) not in (tokens - 1, tokens) or len(shapes) != 1:
            rule = f"it has routed_experts of {len(line.routed_experts)} tokens, and the row has {tokens}"
            remedy = "Give (tokens, mixtures, top_k), of all tokens; the last one may be missing"
            raise DataError(name, rule, remedy)
    return line


def _check_all(name: str, key: str, lines: Sequence[_Line], *, needed: bool) -> None:
    """Raise DataError for a key that only some lines have, or none where it is needed."""
    absent = [at for at, line in enumerate(lines, 1) if getattr(line, key) is None]
    if absent and (needed or len(absent) < len(lines)):
        rule = f"it has no {key}" + ("" if needed else ", and other lines do")
        remedy = "Give a reward function, or a reward in each line" if needed else "Give it in all lines"
        raise DataError(f"{name} line {absent[0]}", rule, remedy)


def _check_groups(name: str, lines: Sequence[_Line], group: int) -> None:
    """Raise DataError where lines of one group have different prompts."""
    for at, line in enumerate(lines):
        if line.prompt_ids != lines[at - at % group].prompt_ids:
            rule = f"the group of {group} lines from line {at - at % group + 1} on has another prompt"
            raise DataError(f"{name} line {at + 1}", rule, f"Give {group} lines of each prompt, or set group")


def _of_engine(lines: Sequence[_Line], length: int) -> dict[str, Tensor]:
    """The entries that only an engine knows: old_logps (rows, length), routed_experts."""
    entries = dict[str, Tensor]()
    if lines and lines[0].logprobs is not None:
        of_rows = [[0.0] * len(line.prompt_ids) + (line.logprobs or []) for line in lines]
        entries[OLD] = pad_sequence([torch.tensor(row) for row in of_rows], True)
    if lines and lines[0].routed_experts is not None:
        chosen = [torch.tensor(line.routed_experts, dtype=torch.int32) for line in lines]
        padded = pad_sequence(chosen, True, -1)
        entries[ROUTED] = torch.nn.functional.pad(padded, (0, 0, 0, 0, 0, length - padded.shape[1]), value=-1)
    return entries
