"""Write examples/chats.jsonl: short chats that a small model learns something from in a minute.

    python examples/chats.py > examples/chats.jsonl

They are made for this project, under its licence: sums, units, questions on words, and facts on pipeline
parallelism, each asked in several ways. configs/sft_full.yaml trains on them.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

Turn = tuple[str, str]  # a question and its answer

SYSTEM = "Answer in one short sentence."
WORDS = ("stage", "rank", "batch", "layer", "bubble", "tensor", "gradient", "weight", "schedule", "token",
         "forward", "backward", "head", "loss")  # fmt: skip
UNITS = (("kilometres", "metres", 1000), ("hours", "minutes", 60), ("minutes", "seconds", 60),
         ("kilograms", "grams", 1000), ("days", "hours", 24), ("kibibytes", "bytes", 1024))  # fmt: skip
FACTS = (
    ("a stage", "A stage is one contiguous slice of the model's layers."),
    ("a rank", "A rank is one process, which holds one stage or more."),
    ("a microbatch", "A microbatch is a slice of a step's batch."),
    ("the bubble", "The bubble is the share of the time in which ranks wait."),
    ("a schedule", "A schedule says in which order a rank runs its forwards and backwards."),
    ("1F1B", "1F1B runs one forward and one backward in turn, so that few activations are held."),
    ("GPipe", "GPipe runs all forwards first, and then all backwards."),
    ("zero bubble", "Zero-bubble schedules put weight gradients off, and fill the bubble with them."),
    ("activation checkpointing", "Activation checkpointing drops activations and computes them again."),
    ("gradient accumulation", "Gradient accumulation sums the gradients of several microbatches."),
    ("tensor parallelism", "Tensor parallelism splits single matrices over processes."),
    ("data parallelism", "Data parallelism gives each copy of the model its own part of the batch."),
)
ASKED = ("What is {}?", "Explain {}.", "Tell me about {}.", "Can you say what {} is?", "Define {}, please.")


def arithmetic(draw: random.Random) -> Turn:
    a, b = draw.randint(0, 12), draw.randint(0, 12)
    if draw.random() < 0.3:
        a, b = max(a, b), min(a, b)
        asked = draw.choice(("What is {} - {}?", "Take {1} from {0}."))
        return asked.format(a, b), f"{a} - {b} = {a - b}."
    return draw.choice(("What is {} + {}?", "Add {} and {}.", "{} + {}?")).format(
        a, b
    ), f"{a} + {b} = {a + b}."


def units(draw: random.Random) -> Turn:
    large, small, factor = draw.choice(UNITS)
    count = draw.randint(2, 9)
    asked = draw.choice(("How many {1} are {2} {0}?", "Convert {2} {0} to {1}.")).format(large, small, count)
    return asked, f"{count} {large} are {count * factor} {small}."


def words(draw: random.Random) -> Turn:
    word = draw.choice(WORDS)
    return draw.choice((
        (f"What is the first letter of {word}?", f"The first letter of {word} is {word[0]}."),
        (f"What is the last letter of {word}?", f"The last letter of {word} is {word[-1]}."),
        (f"How many letters has {word}?", f"{word} has {len(word)} letters."),
        (f"Write {word} in capitals.", word.upper()),
        (f"Spell {word} backwards.", word[::-1]),
    ))  # fmt: skip


def facts(draw: random.Random) -> Turn:
    subject, said = draw.choice(FACTS)
    return draw.choice(ASKED).format(subject), said


def chats(count: int, seed: int = 0) -> Iterator[dict[str, list[dict[str, str]]]]:
    """`count` different chats of one turn or two, a third of them with a system message."""
    draw, seen = random.Random(seed), set[str]()
    while len(seen) < count:
        turns = [draw.choice((arithmetic, units, words, facts))(draw) for _ in range(draw.choice((1, 1, 2)))]
        messages = [{"role": "system", "content": SYSTEM}] if draw.random() < 0.3 else []
        for question, answer in turns:
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        line = json.dumps(messages)
        if line not in seen:
            seen.add(line)
            yield {"messages": messages}


if __name__ == "__main__":
    for chat in chats(600):
        print(json.dumps(chat))
