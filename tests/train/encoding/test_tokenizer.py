"""Bytes as tokens, and the same ids from plain transformers."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoConfig, AutoTokenizer

from penstock.errors import DataError
from penstock.train.encoding.tokenizer import ByteTokenizer, HuggingFace, byte_level_tokenizer, open_tokenizer
from support.refusals import refuses

TEXT = "def f(x):\n\treturn 'ä 😀 ' , x . \0\x7f\r\n  don't   stop  "


def test_saved_bytes_tokenizer_gives_the_same_ids_in_transformers(tmp_path: Path) -> None:
    AutoConfig.for_model("qwen3").save_pretrained(tmp_path)  # as in a checkpoint: it must not mislead
    ByteTokenizer().save(tmp_path)
    opened = AutoTokenizer.from_pretrained(tmp_path)
    ids = opened(TEXT)["input_ids"]
    assert ids == list(TEXT.encode()) == ByteTokenizer().encode([""], [TEXT.encode()])[0].tolist()
    assert opened.decode(ids) == TEXT
    assert opened.decode(ids, skip_special_tokens=True) == TEXT
    assert len(opened) == 256


def test_every_byte_has_its_value_as_id() -> None:
    tokenizer = byte_level_tokenizer()
    characters = tokenizer.convert_ids_to_tokens(list(range(256)))
    assert len(set(characters)) == 256
    text = (
        "".join(map(chr, range(0x80))) + "".join(chr(c) for c in range(0x80, 0x3000)) + "\U0001f600\U0010fffd"
    )
    assert tokenizer(text)["input_ids"] == list(text.encode())


def test_a_folder_s_own_tokenizer_reads_text(tmp_path: Path) -> None:
    byte_level_tokenizer().save_pretrained(tmp_path)
    tokenizer = open_tokenizer(str(tmp_path))
    assert isinstance(tokenizer, HuggingFace)
    assert [ids.tolist() for ids in tokenizer.encode(["a", "b"], [b"ab", b""])] == [[97, 98], []]
    with refuses(DataError, "data file b", "byte 1 is 0xff", "tokenizer=bytes"):
        tokenizer.encode(["a", "b"], [b"ab", b"a\xff"])


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with refuses(DataError, rule="reads no tokenizer there"):
        open_tokenizer(str(tmp_path))
