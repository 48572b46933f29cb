"""A typed error by its value and a key word of its rule, so that a better sentence changes no test."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import TracebackType
from typing import Generic, TypeVar

import pytest

E = TypeVar("E", bound=BaseException)


class refuses(Generic[E]):  # noqa: N801  reads as pytest.raises, whose place it takes
    """Expect an error in a block: `with refuses(ConfigError, "chunks=0", "one at least"):`.

    Args:
        kind: the error's very class, and none derived from it; its errors have a value, a rule and a remedy.
        value, rule, remedy: a part of each of these texts, letter by letter and no pattern.

    All three must be there, and read "value: rule. Remedy" together.
    """

    def __init__(self, kind: type[E], value: str = "", rule: str = "", remedy: str = "") -> None:
        assert value or rule, "an error is known by its value or its rule"
        self._kind, self._parts = kind, {"value": value, "rule": rule, "remedy": remedy}
        self._raises: AbstractContextManager[pytest.ExceptionInfo[E]] = pytest.raises(kind)

    def __enter__(self) -> pytest.ExceptionInfo[E]:
        self._caught = self._raises.__enter__()
        return self._caught

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        if not self._raises.__exit__(kind, error, traceback):
            return False
        self._check(self._caught.value)
        return True

    def _check(self, error: E) -> None:
        assert type(error) is self._kind
        texts = {part: getattr(error, part) for part in self._parts}
        for part, expected in self._parts.items():
            text = texts[part]
            assert expected in text, f"{part}: {expected!r} is not in {text!r}"
            assert text.strip(), f"no {part}: {error}"
        last = texts["remedy"].strip().removesuffix("...")
        assert not last.endswith((".", ",", ":")), f"the remedy has no end of its own: {error}"
        assert last[:1].isupper() or last.startswith("pip install"), f"the remedy is no sentence: {error}"
