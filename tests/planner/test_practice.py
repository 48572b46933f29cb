"""What a search never sets: runs of penstock communicate as its runtime does."""

from penstock.planner.candidate import Candidate
from penstock.planner.practice import Practice


def test_penstock_overlaps_nothing_and_sends_a_token_to_each_expert() -> None:
    assert Candidate().practice == Practice((), None, False, False, False)
