from penstock.schedule import Placement, simulate, verify
from penstock.schedule.builders.hanayo import hanayo, list_schedule

SIZES = [
    (ranks, m, waves)
    for ranks in range(1, 7)
    for waves in (1, 2, 3)
    for m in range(1, 4 * ranks + 2, 1 if waves == 1 else 3)
]


def test_with_few_microbatches_it_takes_little_longer() -> None:
    for ranks, microbatches, waves in SIZES:
        if ranks <= microbatches < 3 * ranks:
            busy_and_ends = 6 * waves * microbatches + 3 * (ranks - 1)
            extra = simulate(hanayo(ranks, microbatches, waves)).makespan - busy_and_ends
            assert extra <= (3 * ranks / 2 if microbatches < 2 * ranks else ranks / 6 if waves == 1 else 0)


def test_one_unit_of_p_microbatches_in_one_wave() -> None:
    for ranks in range(2, 13):
        assert simulate(hanayo(ranks, ranks)).makespan == 6 * ranks + 4 * (ranks - 1)


def test_live_activations() -> None:
    for ranks, microbatches, waves in SIZES:
        live = max(verify(hanayo(ranks, microbatches, waves)).peak_live)
        group = -(-microbatches // max(1, microbatches // ranks))
        most = 2 * ranks - 1 + (2 * waves - 1) * group + (0 if waves == 1 else ranks / 3)
        assert live <= min(most, 2 * waves * microbatches)
        if waves == 1 and microbatches % ranks == 0 and microbatches > ranks:
            assert live == 3 * ranks - 1


def test_live_activations_do_not_grow_with_the_microbatches() -> None:
    for ranks, waves in [(4, 1), (4, 3), (8, 2)]:
        few, many = (max(verify(hanayo(ranks, m * ranks, waves)).peak_live) for m in (4, 20))
        assert few == many


def test_list_scheduling_takes_the_lowest_number_that_is_ready() -> None:
    """The second microbatch, numbered first, goes first; a step that is ready later waits for none."""
    programs = list_schedule(Placement((0, 1)), [9, 0])
    assert [" ".join(map(str, program)) for program in programs] == ["0F1 0F0 0B1 0B0", "1F1 1B1 1F0 1B0"]
