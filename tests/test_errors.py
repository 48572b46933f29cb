"""Typed errors: what they carry, and how they cross processes."""

from __future__ import annotations

from penstock.errors import FailurePoint, account_of, give_account


def test_any_error_may_carry_an_account() -> None:
    error = ValueError("no")
    assert account_of(error) is None
    give_account(error, FailurePoint("in 2F3", "", "timeline so far in x.json"))
    assert str(account_of(error)) == "in 2F3; timeline so far in x.json"
