"""Typed errors: their text, their exit code, what they carry, and how they cross processes."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest

from penstock import errors
from penstock.errors import (
    DifferenceError,
    FailurePoint,
    InputError,
    PeerLostError,
    PenstockError,
    ScheduleError,
    account_of,
    give_account,
)
from support.refusals import refuses

KINDS = [getattr(errors, name) for name in errors.__all__]


class Report(SimpleNamespace):
    def problems(self) -> list[str]:
        return [f"layer {number} differs" for number in range(7)]


def made(kind: type[PenstockError]) -> PenstockError:
    special: dict[type[PenstockError], tuple[Any, ...]] = {
        ScheduleError: ("mine", ["a", "b"]),
        DifferenceError: (Report(),),
    }
    return kind(*special.get(kind, ("ranks=0", "one at least", "Give 1")))


@pytest.mark.parametrize("kind", KINDS)
def test_every_error_comes_from_another_process_as_it_was(kind: type[PenstockError]) -> None:
    error = made(kind)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert (str(again), again.value, again.rule, again.remedy) == (
        str(error), error.value, error.rule, error.remedy,
    )  # fmt: skip


def test_the_text_is_value_rule_and_remedy() -> None:
    assert str(made(InputError)) == "ranks=0: one at least. Give 1"


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_user_can_mend_ends_with_code_2(kind: type[PenstockError]) -> None:
    mendable = issubclass(kind, InputError) and kind is not DifferenceError
    assert kind.exit_code == (2 if mendable else 1)


def test_of_many_violations_the_first_are_named() -> None:
    text = str(ScheduleError("mine", [f"violation {number}" for number in range(30)]))
    assert "it breaks 30 rule(s)" in text
    assert "violation 19" in text
    assert "violation 20" not in text
    assert "and 10 more" in text
    assert str(made(DifferenceError)).startswith("layer 0 differs; layer 1 differs; ")
    assert "layer 4 differs; and 2 more: " in str(made(DifferenceError))


def test_any_error_may_carry_an_account() -> None:
    error = ValueError("no")
    assert account_of(error) is None
    give_account(error, FailurePoint("in 2F3", "", "timeline so far in x.json"))
    assert str(account_of(error)) == "in 2F3; timeline so far in x.json"


def test_an_error_of_a_peer_adds_what_both_ranks_said_last() -> None:
    error = PeerLostError("rank 1", "it died", "See its log")
    error.rank, error.peer_report = 0, "rank 1 last reported 0.1 s ago"
    give_account(error, FailurePoint("in 0B1"))
    assert str(error).splitlines() == [error.brief, "  rank 1 last reported 0.1 s ago", "  rank 0 in 0B1"]


def raise_it(kind: type[PenstockError], *texts: str) -> None:
    raise kind(*texts)


def test_a_refusal_is_matched_by_its_parts() -> None:
    with refuses(InputError, "ranks", "one", "Give") as caught:
        raise_it(InputError, "ranks=0", "one at least", "Give 1")
    assert caught.value.value == "ranks=0"


@pytest.mark.parametrize(
    ("kind", "texts"),
    [
        (errors.ConfigError, ("ranks=0", "one at least", "Give 1")),  # a derived class
        (InputError, ("steps=0", "one at least", "Give 1")),
        (InputError, ("ranks=0", "two at least", "Give 1")),
        (InputError, ("ranks=0", "one at least", "")),
        (InputError, ("ranks=0", "one at least", "Give 1.")),
        (InputError, ("ranks=0", "one at least", "give 1")),
    ],
)
def test_another_refusal_is_not_matched(kind: type[PenstockError], texts: tuple[str, ...]) -> None:
    with pytest.raises(AssertionError), refuses(InputError, "ranks=0", "one"):
        raise_it(kind, *texts)
