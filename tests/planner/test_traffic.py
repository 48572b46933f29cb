"""What a part's collectives carry, by hand for a small Llama: 64 wide, 4 heads of 16, 2 key heads."""

from __future__ import annotations

from collections import Counter

import pytest
from transformers import MixtralConfig

from penstock.parallel.axes import Axes
from penstock.planner import workload as measuring
from penstock.planner.candidate import Candidate
from penstock.planner.communication import all_reduce, exchange, groups
from penstock.planner.practice import Practice, TokenCopies
from penstock.planner.traffic import Collective, collective_seconds
from penstock.planner.workload import Workload
from support.planning import LENGTH, cluster, workload

HIDDEN = 3 * LENGTH * 64 * 2  # bytes of three rows in bfloat16


def layer(candidate: Candidate) -> Counter[tuple[str, str, float, bool]]:
    return Counter(tuple(one[:4]) for one in workload().traffic(candidate).kinds[0])  # type: ignore[misc]


def test_tp_sums_behind_each_row_wise_projection_and_in_front_of_column_wise_ones() -> None:
    run = Candidate(axes=Axes(tp=2), rows=3, length=LENGTH)
    reduce = "tp", "all_reduce", HIDDEN
    assert layer(run) == {(*reduce, False): 2, (*reduce, True): 2}
    sent = workload().traffic(run)
    assert sent.embedding == (Collective("tp", "all_reduce", HIDDEN),)
    assert set(sent.head) == {
        Collective("tp", "all_gather", 3 * LENGTH * 2 * 4 * 2),  # of the loss: two sums of each rank
        Collective("tp", "all_reduce", HIDDEN, backward=True),
    }  # fmt: skip


def test_a_split_sequence_is_gathered_and_scattered() -> None:
    run = Candidate(axes=Axes(tp=2), rows=3, length=LENGTH, sequence_parallel=True)
    assert layer(run) == {
        ("tp", "all_gather", HIDDEN, False): 2, ("tp", "all_reduce", HIDDEN, False): 2,
        ("tp", "all_gather", HIDDEN, True): 2, ("tp", "reduce_scatter", HIDDEN, True): 2,
    }  # fmt: skip


def test_cp_sends_queries_keys_and_values_and_the_result() -> None:
    run = Candidate(axes=Axes(cp=2), rows=3, length=LENGTH)
    tokens = 3 * LENGTH // 2
    sent, back = tokens * 16 * 2 * (4 + 2 + 2), tokens * 16 * 2 * 4
    assert layer(run) == {
        ("cp", "all_to_all", float(nbytes), backward): 1
        for nbytes in (sent, back) for backward in (False, True)
    }  # fmt: skip


def test_ep_sends_each_token_to_its_experts_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "measured_work", None)  # for what is sent nothing is run
    config = MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=64,
    )  # fmt: skip
    sent = Workload(config, "bfloat16").traffic(Candidate(axes=Axes(dp_shard=2, ep=2), rows=1, length=32))
    assert [one for one in sent.kinds[0] if one.axis == "ep"] == [
        Collective("ep", "all_to_all", 32.0 * 32 * 2 * 2, backward) for backward in (False, False, True, True)
    ]


def test_a_scattered_sum_replaces_that_of_row_wise_projections() -> None:
    run = Candidate(
        axes=Axes(tp=2), rows=3, length=LENGTH, sequence_parallel=True, practice=Practice(scattered=True)
    )
    assert layer(run) == {
        ("tp", "all_gather", HIDDEN, False): 2, ("tp", "reduce_scatter", HIDDEN, False): 2,
        ("tp", "all_gather", HIDDEN, True): 2, ("tp", "reduce_scatter", HIDDEN, True): 2,
    }  # fmt: skip


def test_keys_and_values_are_gathered_in_place_of_heads() -> None:
    """Two key heads of 16, of the whole sequence."""
    run = Candidate(axes=Axes(cp=2), rows=3, length=LENGTH, practice=Practice(gathered_keys=True))
    whole = 3.0 * LENGTH * 2 * 2 * (16 + 16)
    assert layer(run) == {
        ("cp", "all_gather", whole, False): 1, ("cp", "all_gather", whole, True): 1,
        ("cp", "reduce_scatter", whole, True): 1,
    }  # fmt: skip


def test_a_token_is_sent_once_to_each_rank_that_has_experts_of_it() -> None:
    copies = TokenCopies(2, 1)
    config = MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=64,
    )  # fmt: skip
    run = Candidate(axes=Axes(dp_shard=2, ep=2), rows=1, length=32, practice=Practice(copies=copies))
    host, across = cluster(), groups(1, Axes(dp_shard=2, ep=2), cluster())
    sent = [one for one in Workload(config, "bfloat16").traffic(run).kinds[0] if one.axis == "ep"]
    assert [one.nbytes for one in sent] == [32.0 * 32 * 2] * 4
    assert sent[0].seconds(across["ep"], host) == exchange(32.0 * 32 * 2, copies, across["ep"], host)


def test_seconds_are_those_of_the_collectives_by_axis() -> None:
    host = cluster()
    across = groups(2, Axes(tp=2), host)
    ones = [Collective("tp", "all_reduce", 1e6), Collective("tp", "all_reduce", 1e6, backward=True)]
    spent = collective_seconds(ones, across, host, backward=True)
    assert spent == {"tp": pytest.approx(all_reduce(1e6, across["tp"], host))}
