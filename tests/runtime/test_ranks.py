"""An error of one rank reaches the others in two ways."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event

import pytest
from torch import Tensor

from penstock.errors import (
    AlteredError,
    ConfigError,
    HandshakeError,
    PeerLostError,
    RunError,
    ScheduleError,
)
from penstock.runtime.ranks import Ranks
from support.ranks import on_threads
from support.refusals import refuses

Outcome = BaseException | None


def attempted(*errors: Outcome) -> list[Outcome]:
    """What each rank raises that attempts together what fails on some of them."""
    results: list[int] = []

    def work(ranks: Ranks) -> None:
        def fail() -> int:
            if (error := errors[ranks.index]) is not None:
                raise error
            return ranks.index

        results.append(ranks.attempt("try it", fail))

    raised = on_threads(len(errors), work)
    assert sorted(results) == [rank for rank, error in enumerate(raised) if error is None]
    return raised


def test_what_succeeds_everywhere_returns_on_each_rank() -> None:
    assert attempted(None, None, None) == [None] * 3
    assert Ranks().attempt("try it", lambda: 5) == 5


def test_a_typed_error_of_one_rank_is_raised_on_all_and_names_it() -> None:
    raised = attempted(None, AlteredError("a file", "it is another", "Take another one"), None)
    assert {type(error) for error in raised} == {AlteredError}
    assert {str(error) for error in raised} == {"a file, on process 1: it is another. Take another one"}


def test_an_error_that_all_ranks_have_names_none() -> None:
    raised = attempted(*(ConfigError("ranks=0", "it is 1 at least", "Give 1") for _ in range(3)))
    assert {str(error) for error in raised} == {"ranks=0: it is 1 at least. Give 1"}


def test_of_several_errors_that_of_the_first_rank_is_raised() -> None:
    first, second = ConfigError("a", "b", "c"), AlteredError("d", "e", "f")
    assert {str(error) for error in attempted(None, first, second)} == {"a, on process 1: b. c"}
    raised = attempted(OSError("disk full"), first)
    assert isinstance(raised[1], RunError)


def test_any_other_error_stays_on_its_rank_and_the_others_name_it() -> None:
    error = OSError("disk full")
    first, own, last = attempted(None, error, None)
    assert own is error
    for other in (first, last):
        assert isinstance(other, RunError)
        assert str(other) == "process 1: it could not try it: OSError: disk full. Fix that first"


def test_an_error_that_is_not_to_be_shared_is_raised_at_once() -> None:
    """In a build the others may wait for this rank within the work: its process has to end."""

    def fail() -> None:
        raise MemoryError("of the GPU")

    class Never(Ranks):
        def all_gather(self, mine: Tensor, waits_for: str = "") -> list[Tensor]:
            raise AssertionError("it waits for the others")

    with pytest.raises(MemoryError):
        Never().attempt("try it", fail, ConfigError)


def test_a_rank_that_is_lost_while_it_tells_its_error_names_both() -> None:
    """What failed here is why the others did not come."""

    class Alone(Ranks):
        def all_gather(self, mine: Tensor, waits_for: str = "") -> list[Tensor]:
            raise PeerLostError("rank 1", "it ended", "Look at it") from RuntimeError("closed")

    def fail() -> None:
        raise OSError("disk full")

    with pytest.raises(PeerLostError) as caught:
        Alone().attempt("try it", fail)
    assert isinstance(caught.value.__cause__, OSError)
    with pytest.raises(PeerLostError) as caught:
        Alone().attempt("try it", lambda: None)
    assert isinstance(caught.value.__cause__, RuntimeError)  # its own cause stays


def test_an_error_that_takes_more_than_words_becomes_its_base_on_all() -> None:
    raised = attempted(None, ScheduleError("own", ["0F0 comes after 0B0"]))
    assert "0F0 comes after 0B0" in str(raised[0])
    assert str(raised[0]) == str(raised[1])


def test_an_attempt_within_another_is_told_once() -> None:
    error = OSError("disk full")

    def work(ranks: Ranks) -> None:
        def fail() -> None:
            if ranks.index == 2:
                raise error

        ranks.attempt("write", lambda: ranks.attempt("flush", fail))

    *others, own = on_threads(3, work)
    assert own is error
    said = "process 2: it could not flush: OSError: disk full. Fix that first"
    assert [str(other) for other in others] == [said] * 2


def test_who_has_lost_a_rank_waits_for_nobody() -> None:
    lost = PeerLostError("rank 0 waiting", "rank 1 is gone", "Look there")

    def work(ranks: Ranks) -> None:
        def fail() -> None:
            raise lost

        if ranks.index == 0:
            ranks.attempt("try it", fail)

    assert on_threads(2, work) == [lost, None]


def test_one_process_raises_its_own_error() -> None:
    error = ConfigError("a", "b", "c")

    def fail() -> None:
        raise error

    with pytest.raises(ConfigError) as caught:
        Ranks().attempt("try it", fail)
    assert caught.value is error


def compared(*calls: tuple[str, dict[str, str]]) -> list[Outcome]:
    return on_threads(len(calls), lambda ranks: ranks.same(*calls[ranks.index]))


def test_ranks_in_one_call_on_the_same_facts_go_on() -> None:
    assert compared(*[("build()", {"a": "1", "b": "2"}), ("build()", {"b": "2", "a": "1"})]) == [None] * 2


def test_other_facts_are_named_on_all_ranks() -> None:
    raised = compared(("build()", {"a": "1"}), ("build()", {"a": "2"}), ("build()", {}))
    assert {type(error) for error in raised} == {HandshakeError}
    (said,) = {str(error) for error in raised}
    assert "a: 1 on rank 0; 2 on rank 1; nothing on rank 2" in said


def test_other_calls_are_named_on_all_ranks() -> None:
    raised = compared(("step()", {}), ("costs()", {}))
    assert {type(error) for error in raised} == {ConfigError}
    assert {str(error).partition(":")[0] for error in raised} == {"step() on rank 0, costs() on rank 1"}


@pytest.mark.parametrize(
    "exchange",
    [
        lambda ranks: ranks.gather(1),
        lambda ranks: ranks.attempt("try it", lambda: 1),
        lambda ranks: ranks.same("step()"),
    ],
)
def test_checked_ranks_call_before_each_exchange(exchange: Callable[[Ranks], object]) -> None:
    dropped = Event()

    def check() -> None:
        if dropped.is_set():
            raise RunError("a write", "it was given up", "Go on")

    ranks = Ranks().checked(check)
    exchange(ranks)
    dropped.set()
    with refuses(RunError, "a write", "given up"):
        exchange(ranks)
    exchange(Ranks())
