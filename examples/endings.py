"""Write examples/endings.jsonl: contexts with four endings each, of which one is right, in HellaSwag's form.

    python examples/endings.py > examples/endings.jsonl

They are made for this project, under its licence. configs/sft_hellaswag.yaml fine-tunes on the right endings.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

from chats import FACTS, UNITS

Question = tuple[str, str, list[str]]  # a context, its right ending, and three wrong ones
ENDINGS = 4


def arithmetic(draw: random.Random) -> Question:
    a, b = draw.randint(2, 40), draw.randint(2, 40)
    others = draw.sample([wrong for wrong in range(2, 90) if wrong != a + b], ENDINGS - 1)
    said = draw.choice(
        ("Someone adds {} and {}. The sum", "There are {} stages, and then {} more. All in all it")
    )
    return said.format(a, b), f"is {a + b}.", [f"is {wrong}." for wrong in others]


def units(draw: random.Random) -> Question:
    large, small, factor = draw.choice(UNITS)
    count = draw.randint(2, 9)
    others = draw.sample([other for other in range(2, 12) if other != count], ENDINGS - 1)
    wrong = [f"get {other * factor} {small}." for other in others]
    return f"Someone converts {count} {large}. They", f"get {count * factor} {small}.", wrong


def facts(draw: random.Random) -> Question:
    subject, said = draw.choice(FACTS)
    others = draw.sample([other for name, other in FACTS if name != subject], ENDINGS - 1)
    asked = draw.choice(
        ("Someone asks about {}. The answer:", "A page explains {}. It says:", "Of {} we know:")
    )
    return asked.format(subject), said, others


def questions(count: int, seed: int = 0) -> Iterator[dict[str, Any]]:
    """`count` different records with the fields of HellaSwag that a recipe reads. Labels are text."""
    draw, seen = random.Random(seed), set[str]()
    while len(seen) < count:
        kind = draw.choice((arithmetic, units, facts))
        context, right, wrong = kind(draw)
        label = draw.randrange(ENDINGS)
        record = {"ind": len(seen), "activity_label": kind.__name__, "ctx": context,
                  "endings": [*wrong[:label], right, *wrong[label:]], "label": str(label)}  # fmt: skip
        key = json.dumps([context, record["endings"]])
        if key not in seen:
            seen.add(key)
            yield record


if __name__ == "__main__":
    for record in questions(600):
        print(json.dumps(record))
