"""Layout strings: what they stand for, how they are printed, and errors that point at the character."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import PartitionError
from penstock.schedule.layout import LIMIT, Layout, parse_layout, read_layout
from support.refusals import refuses


@pytest.mark.parametrize(
    ("text", "stages", "printed"),
    [
        ("Et*3|(tt|)*29,m|L", ("Ettt", *["tt"] * 29, "m", "L"), "Et*3|(tt|)*29m|L"),  # DeepSeek-V3
        ("Ettt|tttL", ("Ettt", "tttL"), "Et*3|t*3L"),
        ("E|tt|tt|L", ("E", "tt", "tt", "L"), "E|tt|tt|L"),
        ("Et||ttt|L", ("Et", "", "ttt", "L"), "Et||t*3|L"),
        (" E t *\t2 |\n( t , t ) * 2 L ", ("Ett", "ttttL"), "Ett|t*4L"),
        ("E(t|(tt|)*2)*3L", ("Et", "tt", "tt", "t", "tt", "tt", "t", "tt", "tt", "L"),
         "E(t|tt|tt|)*3L"),
        ("E(tt|(t|)*12)*7L", ("Ett", *["t"] * 12, *["tt", *["t"] * 12] * 6, "L"), "E(tt|(t|)*12)*7L"),
        ("(((t)))*3", ("EtttL",), "Et*3L"),
        ("t|*4t", ("Et", "", "", "", "tL"), "Et||||tL"),
        ("t||t", ("Et", "", "tL"), "Et||tL"),  # E and L go where alone they can
        ("Et|t", ("Et", "tL"), "Et|tL"),
        ("|t|", ("E", "t", "L"), "E|t|L"),
        ("t*007L", ("EtttttttL",), "Et*7L"),
        ("EtmmL", ("EtmmL",), "EtmmL"),
    ],
)  # fmt: skip
def test_known_layouts(text: str, stages: tuple[str, ...], printed: str) -> None:
    layout = parse_layout(text)
    assert layout.stages == stages
    assert str(layout) == printed
    assert parse_layout(printed) == layout


def test_layers_are_counted_along_the_stages() -> None:
    layout = parse_layout("Et*3||ttm|mL")
    assert layout.layers == (range(3), range(3, 3), range(3, 5), range(5, 5))
    assert layout.prediction_layers == 2
    assert layout.counts == [3, 0, 3, 1]
    assert Layout.of([3, 0, 3, 1], 2) == layout
    assert Layout.of([3, 0, 2, 0]) == parse_layout("Et*3||tt|L")


# --- lists, a stage each

# of Megatron-LM's tests/unit_tests/pipeline_parallel/test_pipeline_layout.py: 8 layers on 2 or 4 ranks
MEGATRON = [
    ([["embedding"], ["decoder"], ["decoder"] * 2, ["decoder"], [], ["decoder"], ["decoder"],
      ["decoder"] * 2 + ["mtp"] + ["loss"]], ("E", "t", "tt", "t", "", "t", "t", "ttmL")),
    ([["embedding"] + ["decoder"] * 4, ["decoder"] * 4 + ["loss"]], ("Etttt", "ttttL")),
    ([["embedding"], ["decoder"], ["decoder"] * 2, ["decoder"], [], ["decoder"], ["decoder"],
      ["decoder"] * 2 + ["loss"]], ("E", "t", "tt", "t", "", "t", "t", "ttL")),
    ("E|t*3|(t|)*5mL", ("E", "ttt", "t", "t", "t", "t", "t", "mL")),
    ("E|t*3|(t|)*4tm|L", ("E", "ttt", "t", "t", "t", "t", "tm", "L")),
    ("E|t*3|(t|)*3tt|m|L", ("E", "ttt", "t", "t", "t", "tt", "m", "L")),
    # of the comments of its parser
    ("Ettt|(tt|)*29,m|L", ("Ettt", *["tt"] * 29, "m", "L")),
    ([["embedding", "decoder"], ["decoder", "decoder", "decoder", "loss"]], ("Et", "tttL")),
    ([[" Embedding", "DECODER "], ("loss",)], ("Et", "L")),  # it strips names and takes any case
    ([["E", "t"], ["t", "L"]], ("Et", "tL")),  # and its config page has the letters as well
]  # fmt: skip


@pytest.mark.parametrize(("given", "stages"), MEGATRON)
def test_layouts_of_megatron(given: str | list[list[str]], stages: tuple[str, ...]) -> None:
    assert read_layout(given).stages == stages


@pytest.mark.parametrize(
    ("given", "value", "rule", "remedy"),
    [
        ([], "layout=[]", "for each stage", ""),
        (["embedding", "decoder"], "stage 0: 'embedding'", "a list of names", "[embedding]"),
        ([["embedding"], ["decodr", "loss"]],
         "stage 1, entry 0: 'decodr'", "holds embedding, decoder, mtp, loss", "you mean decoder"),
        ([["embedding", "encoder"]],
         "stage 0, entry 1: 'encoder'", "holds embedding, decoder, mtp, loss", ""),
        ([["|"]], "stage 0, entry 0: '|'", "holds embedding, decoder, mtp, loss", ""),
        ([["embedding", 3]], "stage 0, entry 1: 3", "holds embedding, decoder, mtp, loss", ""),
        ([[["embedding", "decoder"], ["decoder"]], [["decoder"], ["loss"]]],
         "stage 0, entry 0: ['embedding', 'decoder']", "list within a stage",
         "stage 0 of every rank, then stage 1"),
        ([["decoder", "embedding"], ["loss"]], "stage 0, entry 1: 'embedding'", "expected E", ""),
        ([["embedding", "mtp"], ["decoder", "loss"]], "stage 1, entry 0: 'decoder'", "a layer after m", ""),
        ([["embedding", "loss", "loss"]], "stage 0, entry 2: 'loss'", "a second L", ""),
        ([["embedding", "loss"], ["decoder"]], "stage 0: ['embedding', 'loss']", "after L", ""),
    ],
)  # fmt: skip
def test_lists_are_refused_where_they_are_wrong(
    given: list[list[str]], value: str, rule: str, remedy: str
) -> None:
    with refuses(PartitionError, value, rule, remedy):
        read_layout(given)


# --- a layout as a tree, expanded in the plainest way ---

Tree = tuple[str, str | list["Tree"], int]  # text between items, what is repeated, how often

symbols = st.sampled_from("tt|")
cosmetic = st.sampled_from(["", "", " ", ",", " ,\n"])
leaves = st.tuples(cosmetic, symbols, st.integers(1, 5))
trees = st.recursive(
    leaves, lambda inner: st.tuples(cosmetic, st.lists(inner, min_size=1, max_size=4), st.integers(1, 3)),
    max_leaves=12,
)  # fmt: skip


def written(tree: Tree) -> str:
    space, body, times = tree
    text = body if isinstance(body, str) else f"({space}{''.join(map(written, body))})"
    return f"{space}{text}" + (f"{space}*{space}{times}" if times > 1 else "")


def expanded(tree: Tree) -> str:
    _, body, times = tree
    return (body if isinstance(body, str) else "".join(map(expanded, body))) * times


@settings(max_examples=50, deadline=None)
@given(st.lists(trees, min_size=1, max_size=3), st.integers(0, 3))
def test_nested_groups_stand_for_what_they_say(items: list[Tree], predictions: int) -> None:
    text = "E" + "".join(map(written, items)) + "m" * predictions + "L"
    layout = parse_layout(text)
    assert "|".join(layout.stages) == "E" + "".join(map(expanded, items)) + "m" * predictions + "L"
    assert parse_layout(str(layout)) == layout
    assert len(str(layout)) <= len("|".join(layout.stages))


@given(st.lists(st.integers(0, 4), min_size=1, max_size=40))
def test_what_is_printed_reads_back(counts: list[int]) -> None:
    layout = Layout.of(counts)
    assert [len(layers) for layers in layout.layers] == counts
    assert parse_layout(str(layout)) == layout


@pytest.mark.parametrize("count", [1000, 20_000])
def test_long_layouts_are_printed_soon(count: int) -> None:
    assert str(Layout.of([2] * count)) == f"E(tt|)*{count - 1}ttL"


@pytest.mark.parametrize(
    ("text", "at", "rule", "remedy"),
    [
        ("", 0, "and here the layout ends", ""),
        (" , ", 3, "and here the layout ends", ""),
        ("Ettx|L", 3, "unknown symbol 'x'", "Take one of these"),
        ("ET*3|L", 1, "unknown symbol 'T'", "you mean t?"),
        ("t²", 1, "unknown symbol '²'", ""),
        ("E(tt|L", 1, "never closed", ""),
        ("E(t(t|L)", 1, "never closed", ""),
        ("Ett)|L", 3, "no group is open", ""),
        ("E()*2L", 2, "expected E, t, m, L", ""),
        ("Et*|L", 3, "how many times", ""),
        ("Et*", 3, "how many times, a number, and here the layout ends", ""),
        ("E(tt|)* L", 8, "how many times", ""),
        ("*3tL", 0, "nothing stands before", ""),
        ("E(*3)L", 2, "nothing stands before", ""),
        ("t*2*3", 3, "repeated already", "Put t*2 in parentheses"),
        ("Et*0L", 3, "repeated 0 times", ""),
        ("(tt|)29", 5, "without a * before it", ""),
        ("t*2 3", 4, "without a * before it", ""),
        (f"Et*{LIMIT + 1}L", 3, "beyond 100,000 symbols", ""),
        (f"((t*{LIMIT // 2})*2)*2", 14, "beyond 100,000 symbols", ""),
        (f"t*{LIMIT}tt", 8, "beyond 100,000 symbols", ""),
        (f"t*{'9' * 5000}", 2, "beyond 100,000 symbols", ""),
        ("(" * 101 + "t" + ")" * 101, 100, "more than 100 groups", ""),
        ("tE|L", 1, "expected E, the embedding", ""),
        ("|EtL", 1, "expected E, the embedding", ""),
        ("EtEL", 2, "a second E", ""),
        ("(Et|)*2L", 1, "a second E", ""),
        ("EtLtL", 3, "a layer after L, the head", ""),
        ("EtL|", 3, "the end of a stage after L, the head", ""),
        ("EtLL", 3, "a second L", ""),
        ("EtmtL", 3, "a layer after m", ""),
    ],
)
def test_errors_point_at_the_character(text: str, at: int, rule: str, remedy: str) -> None:
    with refuses(PartitionError, f"layout, character {at + 1}", rule, remedy) as caught:
        parse_layout(text)
    _, shown, caret = str(caught.value).split("\n")
    assert len(shown) < 110
    assert caret.strip() == "^"
    assert shown[len(caret) - 1 :][:1] == text[at : at + 1]


@given(st.text(alphabet="EtmL|()*03 ,x", max_size=14))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        layout = parse_layout(text)
    except PartitionError as error:
        assert "^" in str(error)  # noqa: PT017  (either is fine)
    else:
        assert parse_layout(str(layout)) == layout


def test_stages_that_no_string_stands_for() -> None:
    for stages in ((), ("tt", "tL"), ("Et", "Et", "L"), ("Em", "tL"), ("Et", "x", "L")):
        with refuses(PartitionError, rule="the first begins with E"):
            Layout(stages)
