"""Schedules as files: what is written comes back, PyTorch reads and writes the same, no rubbish gets in."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as theirs

from penstock.errors import ConfigError
from penstock.schedule import Op, Pair, Schedule, both_ways, build, loop, verify, wave
from penstock.schedule.builders import BUILDERS
from penstock.schedule.files import check_path, dump, load
from support.programs import paired, valid, written
from support.refusals import refuses

SIZES = [(1, 1), (2, 4), (3, 7), (4, 8), (4, 16)]


PAIRED = replace(
    written(wave(2), 2, "0F0 3F0 0F1 3B0 0I0 3F1 3B1 0W0 0B1", "1F0 2F0 1F1 2B0 2F1 1B0 2B1 1B1"),
    name="s",
    overlaps=frozenset({Pair(Op(0, "F", 1), Op(3, "B", 0)), Pair(Op(2, "F", 1), Op(1, "B", 0))}),
)


def test_the_json_is_readable(tmp_path: Path) -> None:
    dump(PAIRED, tmp_path / "s.json")
    assert (tmp_path / "s.json").read_text() == (
        "{\n"
        '  "format": "penstock schedule",\n'
        '  "version": 1,\n'
        '  "name": "s",\n'
        '  "microbatches": 2,\n'
        '  "rank_of": [0, 1, 1, 0],\n'
        '  "replicas": 1,\n'
        '  "programs": [\n'
        '    ["0F0", "3F0", "(0F1;3B0)OVERLAP_F_B", "0I0", "3F1", "3B1", "0W0", "0B1"],\n'
        '    ["1F0", "2F0", "1F1", "2B0", "(2F1;1B0)OVERLAP_F_B", "2B1", "1B1"]\n'
        "  ]\n"
        "}\n"
    )


def test_the_csv_is_a_row_for_each_rank(tmp_path: Path) -> None:
    dump(PAIRED, tmp_path / "s.csv")
    assert (tmp_path / "s.csv").read_bytes() == (
        b"0F0,3F0,(0F1;3B0)OVERLAP_F_B,0I0,3F1,3B1,0W0,0B1\n1F0,2F0,1F1,2B0,(2F1;1B0)OVERLAP_F_B,2B1,1B1\n"
    )


@pytest.mark.parametrize("ending", [".json", ".csv", ".CSV"])
def test_what_is_written_comes_back(tmp_path: Path, ending: str) -> None:
    dump(PAIRED, str(tmp_path / f"s{ending}"))
    assert load(str(tmp_path / f"s{ending}")) == PAIRED


@pytest.mark.parametrize("name", BUILDERS)
def test_every_schedule_comes_back(tmp_path: Path, name: str) -> None:
    for ranks, microbatches in SIZES:
        try:
            schedule = build(name, ranks=ranks, microbatches=microbatches)
        except ConfigError:  # not for these numbers
            continue
        dump(schedule, tmp_path / "s.json")
        assert load(tmp_path / "s.json") == schedule
        if schedule.placement.replicas > 1:
            with refuses(
                ConfigError, "schedule 'dualpipe' as 's.csv'", "several copies", "Write it as .json"
            ):
                dump(schedule, tmp_path / "s.csv")
        else:
            dump(schedule, tmp_path / "s.csv")
            assert load(tmp_path / "s.csv") == replace(schedule, name="s")


@settings(max_examples=100, deadline=None)
@given(st.one_of(valid(), paired()), st.text(max_size=8))
def test_any_schedule_comes_back(
    tmp_path_factory: pytest.TempPathFactory, schedule: Schedule, name: str
) -> None:
    path = tmp_path_factory.getbasetemp() / "s.json"
    dump(replace(schedule, name=name), path)
    assert load(path) == replace(schedule, name=name)
    if all(schedule.programs) and schedule.placement.replicas == 1:
        dump(schedule, path.with_suffix(".csv"))
        assert load(path.with_suffix(".csv")) == replace(schedule, name="s")


# -- PyTorch ----------------------------------------------------------------------------------------------

CLASSES = {
    "LoopedBFS": "loop",
    "Interleaved1F1B": "loop",
    "InterleavedZeroBubble": "loop",
    "ZBVZeroBubble": "v",
    "DualPipeV": "v",
}


def stages(ranks: int, stages_per_rank: int = 2) -> list[Any]:
    """As much of rank 0's stages as PyTorch's schedules look at before they run."""
    return [
        SimpleNamespace(
            group_size=ranks, group_rank=0, num_stages=ranks * stages_per_rank, stage_index=index,
            is_last=False, submod=None, stage_index_to_group_rank=None,
        )
        for index in range(stages_per_rank)
    ]  # fmt: skip


def their_schedule(name: str, ranks: int, microbatches: int) -> Any:
    return getattr(theirs, f"Schedule{name}")(stages(ranks), microbatches)


def their_runtime(own: list[Any], microbatches: int) -> Any:
    runtime: Any = theirs._PipelineScheduleRuntime
    return runtime(own, microbatches)


def their_texts(order: dict[int, list[Any]]) -> list[list[str]]:
    """The compute ops, without bubbles."""
    return [[str(op) for op in order[rank] if op is not None and op.is_compute_op] for rank in sorted(order)]


@pytest.mark.parametrize("form", ["compute_only", "compute_comms"])
@pytest.mark.parametrize("name", CLASSES)
def test_their_files_are_read(tmp_path: Path, name: str, form: str) -> None:
    """With communication in them, or empty cells for bubbles: the order of the compute ops is what counts."""
    for ranks, microbatches in ((2, 4), (3, 6), (4, 8)):
        schedule = their_schedule(name, ranks, microbatches)
        schedule._dump_csv(tmp_path / "s.csv", format=form)
        ours = load(tmp_path / "s.csv")
        texts = [[str(entry) for entry in ours.entries(rank)] for rank in range(ranks)]
        assert texts == their_texts(schedule.pipeline_order)
        lap = tuple(range(ranks))
        assert ours.placement.rank_of == lap + (lap if CLASSES[name] == "loop" else lap[::-1])
        assert ours.microbatches == microbatches
        verify(ours)


@pytest.mark.parametrize("name", CLASSES)
def test_they_read_our_files(tmp_path: Path, name: str) -> None:
    """And lower them to the very same communication."""
    schedule = their_schedule(name, 4, 8)
    schedule._dump_csv(tmp_path / "theirs.csv", format="compute_only")
    dump(load(tmp_path / "theirs.csv"), tmp_path / "ours.csv")
    again: Any = their_runtime(stages(4), 8)
    again._load_csv(str(tmp_path / "ours.csv"))
    assert their_texts(again.pipeline_order) == their_texts(schedule.pipeline_order)
    assert again.pipeline_order_with_comms == schedule.pipeline_order_with_comms


@pytest.mark.parametrize("name", BUILDERS)
def test_they_read_what_we_build(tmp_path: Path, name: str) -> None:
    schedule = build(name, ranks=4, microbatches=8)
    if schedule.placement.replicas > 1 or not schedule.trains:
        return  # their classes know neither
    dump(schedule, tmp_path / "s.csv")
    runtime = their_runtime(stages(4, schedule.stages // 4), 8)
    runtime._load_csv(str(tmp_path / "s.csv"))
    ours = [[str(entry) for entry in schedule.entries(rank)] for rank in range(4)]
    assert their_texts(runtime.pipeline_order) == ours
    assert [runtime.stage_index_to_group_rank[s] for s in range(schedule.stages)] == [
        *schedule.placement.rank_of
    ]


# -- what people and spreadsheets write -------------------------------------------------------------------

TWO = "0F0,0B0\n1F0,1B0\n"


@pytest.mark.parametrize(
    "content",
    [
        TWO.encode(),
        b"\xef\xbb\xbf" + TWO.encode(),
        TWO.replace("\n", "\r\n").encode(),
        TWO.replace("\n", "\r").encode(),
        TWO.rstrip().encode(),
        b'"0F0","0B0"\n"1F0","1B0"\n',
        b"0F0,,,0B0,\n,1F0,1B0,,,,,\n",
        b" 0F0 ,\t0B0\n1F0, 1B0 \n",
        b"0F0,0B0\n1F0,1B0\n\n\n",
        b"0F0,0B0\n1F0,1B0\n,,\n",
        b"0UNSHARD,0F0,0SEND_F0,0RECV_B0,0B0,0REDUCE_GRAD,0RESHARD\n1RECV_F0,1F0,1B0,1SEND_B0\n",
    ],
)
def test_every_spelling_of_the_same_csv(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "s.csv").write_bytes(content)
    assert load(tmp_path / "s.csv") == replace(written(loop(2), 1, "0F0 0B0", "1F0 1B0"), name="s")


HOSTILE_CSV = [
    (b"", "it is empty"),
    (b" \n\n", "it is empty"),
    (b",,\n,,\n", "it holds no op that computes"),
    (b"0F0,0B0\n\n1F0,1B0\n", "row 2, column 1: the row holds no op that computes"),
    (b"0UNSHARD\n0F0\n", "row 1, column 1: the row holds no op"),
    (b"\x89PNG\r\n\x1a\n", "no UTF-8 text: byte 0 is 0x89"),
    ("0F0,0B0\n".encode("utf-16"), "no UTF-8 text: byte 0 is 0xff"),
    (b"0F0,\0\n", "no text: there is a zero byte at 4"),
    (b'"0F0,0B0\n', "line 1 is no CSV"),
    (b'"0F0"x,0B0\n', "line 1 is no CSV"),
    (b'"' + b"x" * 200_000 + b'"\n', "line 1 is no CSV: field larger"),
    (b"0F0,0B0\n1F0,1X0\n", "row 2, column 2: '1X0' is no op"),
    (b"0F0,,0B\n", "row 1, column 3: '0B' is no op; the microbatch is missing"),
    (b"0f0\n", "row 1, column 1: '0f0' is no op; 0F0 is"),
    (b"0F0;0B0\n", "'0F0;0B0' is no op; cells are separated by commas"),
    (b"0F0\t0B0\n", "'0F0\\t0B0' is no op; cells are separated by commas"),
    (b"0F0,-1F0\n", "row 1, column 2: '-1F0' is no op"),
    (b"0F0,0F0.5\n", "'0F0.5' is no op"),
    ("٣F0\n".encode(), "'٣F0' is no op"),
    (b"1" * 6000 + b"F0\n", "row 1, column 1: '" + "1" * 37 + "... is no op"),
    (b"0F99999999999\n", "is no op"),
    (b"0F0,0SEND_X0\n", "'0SEND_X0' is no op"),
    (b"0F0,0SEND_F\n", "'0SEND_F' is no op"),
    (b"0F0,(0F1;0B0)\n", "'(0F1;0B0)' is no op"),
    (b"0F0,(0F1;0B0;0W0)OVERLAP_F_B\n", "is no op"),
    (b"(0F1;0F0)OVERLAP_F_B\n", "overlaps other kinds"),
    (b"(0B1;0B0)OVERLAP_F_B\n", "overlaps other kinds"),
    (b"0F0,0B0,,0F0\n", "row 1, column 4: 0F0 is already at row 1, column 1"),
    (b"0F0,(0F1;0B0)OVERLAP_F_B,0B0\n", "row 1, column 3: 0B0 is already at row 1, column 2"),
    (
        b"0F0,1F0\n,2F0,,1B0\n",
        "row 2, column 4: 1B0 is of stage 1, which is at row 1, column 2 on rank 0",
    ),
    (b"0F0\n2F0\n", "row 2, column 1: 2F0 is of stage 2, and no op is of stage 1"),
    (b"0F0\n999999999F0\n", "no op is of stage 999999998"),
    (b"\n" * 200_000 + b"0F0\n", "more than 4,096 rows"),
    (b"no,csv\nat,all\n", "4 cells are wrong:\n  row 1, column 1: 'no' is no op\n  row 1, column 2"),
    (b"x\n" * 50, "and 40 more"),
    (b"0F0," * 1_000_001, "more than 1,000,000 ops"),
]


@pytest.mark.parametrize(("content", "said"), HOSTILE_CSV, ids=[said for _, said in HOSTILE_CSV])
def test_what_is_no_schedule_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "s.csv").write_bytes(content)
    with refuses(ConfigError, "s.csv", said) as caught:
        load(tmp_path / "s.csv")
    assert len(str(caught.value)) < 2000


GOOD: dict[str, Any] = {
    "format": "penstock schedule", "version": 1, "name": "s", "microbatches": 1, "rank_of": [0, 1],
    "replicas": 1, "programs": [["0F0"], ["1F0"]],
}  # fmt: skip

HOSTILE_JSON: list[tuple[bytes | dict[str, Any], str]] = [
    ({"format": "else"}, 'does not say "format"'),
    ({"version": 2}, "its version is 2, and this penstock reads 1"),
    ({"version": None}, "its version is None"),
    ({"program": []}, "the key 'program' is unknown; 'programs'?"),
    ({"name": 3}, "name is 3; it is to be of type str"),
    ({"microbatches": True}, "microbatches is True; it is to be of type int"),
    ({"microbatches": 1.0}, "microbatches is 1.0"),
    ({"rank_of": "0,1"}, "rank_of is '0,1'; it is to be of type list"),
    ({"rank_of": [0, True]}, "rank_of[1] is True"),
    ({"rank_of": [0, 10**12]}, "rank_of[1] is 1000000000000; it is to be a rank"),
    ({"rank_of": [1, 1]}, "hosts at least one stage"),
    ({"rank_of": []}, "hosts at least one stage"),
    ({"replicas": 3}, "the same number of stages"),
    ({"programs": ["0F0", "1F0"]}, "programs[0] is no list of ops"),
    ({"programs": [["0F0", 1]]}, "programs[0] is no list of ops"),
    ({"programs": [["0F0"], ["1F0", "1Q0"]]}, "programs[1][1]: '1Q0' is no op"),
    (
        {"programs": [["0F0"], ["1F0", "0F0"]]},
        "programs[1][1]: 0F0 is already at programs[0][0]",
    ),
    ({"programs": [["0SEND_F0"], []]}, "'0SEND_F0' is no op"),
    (b"", "it is empty"),
    (b"[1, 2", "line 1, column 6: Expecting"),
    (b"[]", 'does not say "format"'),
    (b"[" * 100_000, "cannot be read as JSON"),
    (b'{"microbatches": ' + b"1" * 5000 + b"}", "cannot be read as JSON"),
    (b'{"format": "penstock schedule", "version": 1}', "the key 'name' is missing"),
    (b"[" + b"1," * 1_000_001, "more than 1,000,000 ops"),
    ({"rank_of": list(range(5000))}, "more than 4,096 rows"),
    ({"programs": [[]] * 5000}, "more than 4,096 rows"),
]


@pytest.mark.parametrize(("content", "said"), HOSTILE_JSON, ids=[said for _, said in HOSTILE_JSON])
def test_json_that_is_no_schedule_is_refused(
    tmp_path: Path, content: bytes | dict[str, Any], said: str
) -> None:
    """content: the file, or what is changed in a good one."""
    (tmp_path / "s.json").write_bytes(
        content if isinstance(content, bytes) else json.dumps({**GOOD, **content}).encode()
    )
    with refuses(ConfigError, rule=said):
        load(tmp_path / "s.json")


def test_any_bytes_are_read_or_refused(tmp_path_factory: pytest.TempPathFactory) -> None:
    cells = st.sampled_from(
        ["0F0", "1B0", "", "x", "(0F0;1B0)OVERLAP_F_B", '"', ";", "0SEND_F0", "\ufeff", "\r"]
    )
    lines = st.lists(st.lists(cells, max_size=4).map(",".join), max_size=4).map("\n".join)

    @settings(max_examples=100, deadline=None)
    @given(st.one_of(st.binary(max_size=60), lines.map(str.encode)), st.sampled_from([".csv", ".json"]))
    def check(content: bytes, ending: str) -> None:
        path = tmp_path_factory.getbasetemp() / f"any{ending}"
        path.write_bytes(content)
        with suppress(ConfigError):  # and nothing else
            assert isinstance(load(path), Schedule)

    check()


def test_a_file_that_is_too_large_is_refused_unread(tmp_path: Path) -> None:
    with (tmp_path / "s.csv").open("wb") as file:
        file.truncate(10**9)
    with refuses(ConfigError, rule="larger than 32 MiB"):
        load(tmp_path / "s.csv")


def test_paths_that_cannot_be_used(tmp_path: Path) -> None:
    unreadable: list[tuple[str | Path, str]] = [
        (tmp_path / "none.csv", "cannot be read: No such file or directory"),
        (tmp_path / "a.csv", "cannot be read: it is a folder"),
        (tmp_path / "pipe.json", "cannot be read: it is a pipe"),
        ("zero\0byte.csv", "cannot be read"),
        (tmp_path / "s.txt", ".txt chooses none"),
        (tmp_path / "s", "no ending chooses none"),
    ]
    (tmp_path / "a.csv").mkdir()
    os.mkfifo(tmp_path / "pipe.json")
    for path, said in unreadable:
        with refuses(ConfigError, repr(str(path)), said):
            load(path)
    unwritable: list[tuple[str | Path, str]] = [
        (tmp_path / "no" / "s.csv", "cannot be written: No such file or directory"),
        (tmp_path / "a.csv", "cannot be written: Is a directory"),
        ("zero\0byte.csv", "cannot be written"),
        (tmp_path / "s.txt", "chooses none"),
    ]
    for path, said in unwritable:
        with refuses(ConfigError, repr(str(path)), said):
            dump(PAIRED, path)
    with refuses(ConfigError, rule="there is no folder"):
        check_path(tmp_path / "no" / "s.csv")


def test_a_placement_that_is_given_holds(tmp_path: Path) -> None:
    """Two copies of a model, which the CSV alone cannot tell."""
    (tmp_path / "s.csv").write_text("0F0,3F1,3B1,0B0\n1F0,1B0,2F1,2B1\n")
    assert load(tmp_path / "s.csv").placement.replicas == 1
    schedule = load(tmp_path / "s.csv", placement=both_ways(2))
    assert schedule.placement == both_ways(2)
    dump(schedule, tmp_path / "s.json")
    assert load(tmp_path / "s.json", placement=both_ways(2)) == schedule
    with refuses(ConfigError, rule="is another one than"):
        load(tmp_path / "s.json", placement=wave(2))


def test_a_schedule_that_would_not_come_back_is_not_written(tmp_path: Path) -> None:
    strays = replace(PAIRED, overlaps=frozenset({Pair(Op(0, "F", 0), Op(0, "B", 1))}))
    for ending in (".json", ".csv"):
        with refuses(ConfigError, rule="do not come back"):
            dump(strays, tmp_path / f"s{ending}")
    unwritable = [
        (written(loop(2), 1, "0F0 1F0", "0B0 1B0"), "a stage is on one rank"),
        (written(loop(2), 1, "", "1F0 1B0"), "hosts at least one stage"),
        (written(loop(1), 2, "0F0 0B0"), "do not come back as they are"),  # microbatch 1 has no op
    ]
    for schedule, said in unwritable:
        with refuses(ConfigError, "schedule 'mine' as 's.csv'", said):
            dump(schedule, tmp_path / "s.csv")
    assert not list(tmp_path.iterdir())
