"""Draw pictures, and write chats about them, a processor and the config of a small model that sees.

    python examples/draw_pictures.py runs/pictures
    penstock train configs/pictures.yaml

    runs/pictures/model/         config.json, the processor's files; no weights
    runs/pictures/images/        0.png, 1.png, ...: a shape in a colour, on white, in many sizes
    runs/pictures/chats.jsonl    {"messages": [{"role": "user", "content": [{"type": "image", ...

A chat shows one picture, or two, or none. Nothing is downloaded: tokens are bytes, weights will be random.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw
from transformers import Idefics3Config, Idefics3ImageProcessorPil, Idefics3Processor

from penstock.train.encoding.tokenizer import byte_level_tokenizer

COLOURS = {"red": "#d02020", "green": "#20a040", "blue": "#2040d0", "black": "#101010"}
SHAPES = ("circle", "square", "cross")
SIDE, PATCH, SCALE = 32, 8, 2  # pixels of a picture for the tower, and of its patches; patches to a token
TOKENS = (SIDE // PATCH // SCALE) ** 2  # of a picture
TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' }}
    {%- set ns = namespace(text='') %}
    {%- for part in message['content'] %}
        {%- set ns.text = ns.text + ('<image>' if part['type'] == 'image' else part['text']) %}
    {%- endfor %}
    {%- if message['role'] == 'assistant' %}
        {%- generation %}{{- ns.text + '<|im_end|>' }}{%- endgeneration %}
    {%- else %}
        {{- ns.text + '<|im_end|>' }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


def draw(rng: random.Random) -> tuple[Image.Image, str]:
    """A picture, and what it shows."""
    width, height = rng.randint(24, 64), rng.randint(24, 64)
    name, shape = rng.choice(list(COLOURS)), rng.choice(SHAPES)
    picture = Image.new("RGB", (width, height), "white")
    pen, colour = ImageDraw.Draw(picture), COLOURS[name]
    size = rng.randint(12, min(width, height) - 4)
    x, y = rng.randint(0, width - size), rng.randint(0, height - size)
    if shape == "circle":
        pen.ellipse((x, y, x + size, y + size), fill=colour)
    elif shape == "square":
        pen.rectangle((x, y, x + size, y + size), fill=colour)
    else:
        third = size // 3
        pen.rectangle((x + third, y, x + 2 * third, y + size), fill=colour)
        pen.rectangle((x, y + third, x + size, y + 2 * third), fill=colour)
    return picture, f"a {name} {shape}"


def chat(question: str, answer: str, *files: str) -> dict[str, Any]:
    """A record of the file of chats."""
    shown: list[dict[str, str]] = [{"type": "image", "path": file} for file in files]
    asked = {"role": "user", "content": [*shown, {"type": "text", "text": question}]}
    answered = {"role": "assistant", "content": [{"type": "text", "text": answer}]}
    return {"messages": [asked, answered]}


def write(folder: Path, count: int, seed: int = 0, *, hidden: int = 64, layers: int = 4) -> None:
    """Write `count` chats, their pictures, and the model's folder. hidden, layers: of the model's text"""
    rng = random.Random(seed)
    (folder / "images").mkdir(parents=True, exist_ok=True)
    chats, drawn = [], 0
    for _ in range(count):
        files, shown = [], []
        for _ in range(rng.choices((0, 1, 2), (1, 6, 3))[0]):
            picture, words = draw(rng)
            picture.save(folder / "images" / f"{drawn}.png")
            files.append(f"{drawn}.png")
            shown.append(words)
            drawn += 1
        chats.append(chat("What do you see?", " and ".join(shown) or "nothing", *files))
    (folder / "chats.jsonl").write_text("".join(json.dumps(record) + "\n" for record in chats))
    write_model(folder / "model", hidden, layers)


def write_model(folder: Path, hidden: int, layers: int) -> None:
    """A model's folder without weights: its config, and its processor."""
    tokenizer = byte_level_tokenizer(chat=True)
    marks = {"fake_image_token": "<fake>", "image_token": "<image>", "global_image_token": "<global>",
             "end_of_utterance_token": "<end>"}  # fmt: skip
    tokenizer.add_tokens(list(marks.values()), special_tokens=True)
    for name, token in marks.items():
        setattr(tokenizer, name, token)
    tokenizer.pad_token = tokenizer.eos_token
    processor = Idefics3Processor(
        image_processor=Idefics3ImageProcessorPil(
            size={"longest_edge": SIDE}, max_image_size={"longest_edge": SIDE}, do_image_splitting=False
        ),
        tokenizer=tokenizer,
        image_seq_len=TOKENS,
        chat_template=TEMPLATE,
    )
    processor.save_pretrained(folder)
    vocabulary = len(tokenizer)
    text = {
        "model_type": "llama", "vocab_size": vocabulary, "hidden_size": hidden,
        "intermediate_size": 3 * hidden, "num_hidden_layers": layers, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": tokenizer.pad_token_id,
    }  # fmt: skip
    vision = {
        "hidden_size": hidden, "intermediate_size": 2 * hidden, "num_hidden_layers": 2,
        "num_attention_heads": 4, "image_size": SIDE, "patch_size": PATCH,
    }  # fmt: skip
    config = Idefics3Config(
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"), scale_factor=SCALE, text_config=text,
        vision_config=vision, architectures=["Idefics3ForConditionalGeneration"], pad_token_id=None,
    )  # fmt: skip
    config.save_pretrained(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Draw pictures, and write chats about them.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=600, help="chats")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    write(options.folder, options.count, options.seed)
    print(f"{options.count} chats in {options.folder / 'chats.jsonl'}")
