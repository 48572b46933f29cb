"""What the processes of a test run share of what the product remembers: models of libraries, by name."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import FunctionType

from transformers.integrations.sdpa_attention import sdpa_attention_forward as attention
from transformers.models.llama.modeling_llama import LlamaModel

from support.remembered import PATIENCE, Remembered


def test_a_function_of_a_library_has_another_address_in_another_process(tmp_path: Path) -> None:
    """Keys with addresses were shared with forks alone: each worker of xdist found every chain anew."""
    elsewhere = FunctionType(attention.__code__, attention.__globals__, attention.__name__)
    Remembered(tmp_path)["llama", LlamaModel, ("sdpa", attention)] = 3
    other = Remembered(tmp_path)
    assert repr(elsewhere) != repr(attention)
    assert ("llama", LlamaModel, ("sdpa", elsewhere)) in other
    assert other["llama", LlamaModel, ("sdpa", elsewhere)] == 3
    assert ("gpt2", LlamaModel, ("sdpa", elsewhere)) not in other


def test_what_another_process_has_begun_is_waited_for(tmp_path: Path) -> None:
    """But not for ever, and not by the process that has begun it: what it makes may end in an error."""
    first, second = Remembered(tmp_path), Remembered(tmp_path)
    assert "key" not in first
    assert "key" not in first
    threading.Timer(0.2, first.__setitem__, ("key", 3)).start()
    assert "key" in second
    assert "other" not in first
    began = time.monotonic()
    assert "other" not in second
    assert PATIENCE / 2 < time.monotonic() - began < 5 * PATIENCE


def test_what_a_test_defines_is_not_shared(tmp_path: Path) -> None:
    """Nor what has an address in its text, of which nobody else knows what it does."""

    class Own: ...

    def own() -> None: ...

    for key in (("m", Own), ("m", (own,)), ("m", object())):
        Remembered(tmp_path)[key] = 1
        assert key not in Remembered(tmp_path)
