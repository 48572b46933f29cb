"""data.columns: a prompt and its completion in fields of other names, as HellaSwag has them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import endings
from penstock.batch.loss import IGNORED
from penstock.errors import DataError
from penstock.train.config.data import ColumnsSection
from penstock.train.config.load import load_config
from penstock.train.config.sections import TrainConfig
from penstock.train.encoding.chat import ChatEncoder
from penstock.train.encoding.tokenizer import HuggingFace
from penstock.train.preflight import preflight
from penstock.train.run import run
from support.reference import assert_gradients, gradients_of
from support.refusals import refuses
from support.tiny import QWEN3, config, metrics
from support.twin import documents_alone

ROOT = Path(__file__).parents[3]
MODEL = {**QWEN3, "vocab_size": 258, "num_hidden_layers": 4, "max_position_embeddings": 256}
COLUMNS = {"prompt": "ctx", "completion": "endings", "choice": "label"}
ROW = {"ctx": "A rank waits. It", "endings": ["sings.", "computes."], "label": "1"}
END = 257  # the tokenizer's end of text


def encoded(row: dict[str, Any], columns: ColumnsSection, **options: Any) -> tuple[str, str]:
    """What the loss does not count, and what it counts, as text."""
    tokenizer = HuggingFace("bytes")
    tokenizer.own.chat_template = None  # texts need none
    found = ChatEncoder(tokenizer, columns=columns, **options).encode("a.jsonl line 1", row)
    assert found is not None
    assert found.labels is not None
    assert found.ids[-1] == END
    counted = found.labels != IGNORED
    assert (found.labels[counted] == found.ids[counted]).all()
    return tuple(bytes(found.ids[of & (found.ids < 256)].tolist()).decode() for of in (~counted, counted))  # type: ignore[return-value]


def test_the_right_ending_counts_alone() -> None:
    assert encoded(ROW, ColumnsSection(**COLUMNS)) == ("A rank waits. It", " computes.")
    assert encoded({**ROW, "label": 0}, ColumnsSection(**COLUMNS)) == ("A rank waits. It", " sings.")
    assert encoded(ROW, ColumnsSection(**COLUMNS), loss_on="all") == ("", "A rank waits. It computes.")
    plain = ColumnsSection(prompt="question", completion="answer", between="\n")
    assert encoded({"question": "2 + 3?", "answer": "5"}, plain) == ("2 + 3?", "\n5")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"label": ""}, "label is a number from 0 to 1, and here is ''"),
        ({"label": "2"}, "from 0 to 1, and here is '2'"),
        ({"label": -1}, "from 0 to 1, and here is -1"),
        ({"label": True}, "from 0 to 1, and here is True"),
        ({"label": 0.0}, "from 0 to 1, and here is 0.0"),
        ({"endings": "sings."}, "endings is a list of completions, and here is a str"),
        ({"endings": ["sings.", 3]}, "endings is a text, and here is a int"),
        ({"ctx": None}, "ctx is a text, and here is nothing"),
        ({"ctx": 0}, "ctx is a text, and here is a int"),
        ({"endings": []}, "endings is a list of completions, and here is nothing"),
        ({"label": "9" * 5000}, "label is a number from 0 to 1, and here is '9999"),
    ],
)
def test_wrong_records_are_named(change: dict[str, Any], message: str) -> None:
    with refuses(DataError, "data file a.jsonl line 1", message):
        encoded(ROW | change, ColumnsSection(**COLUMNS))


def test_missing_fields_are_named() -> None:
    with refuses(DataError, "", "no field 'context', only 'ctx', 'endings', 'label'", "Name its fields"):
        encoded(ROW, ColumnsSection(prompt="context", completion="endings", choice="label"))
    with refuses(DataError, "data file a.jsonl line 1", "a list", "texts name data.columns.choice"):
        encoded(ROW, ColumnsSection(prompt="ctx", completion="endings"))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"kind": "jsonl"}, "kind=jsonl .*kind=chat"),
        ({"chat_form": "messages"}, "chat_form=messages .*leave chat_form out"),
        ({"columns": {"prompt": "ctx"}}, "completion"),
    ],
)
def test_keys_that_do_not_fit(tmp_path: Path, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        made(tmp_path, **keys)


def write(file: Path, rows: Sequence[dict[str, Any]]) -> str:
    if file.suffix == ".parquet":
        from datasets import Dataset

        Dataset.from_list(list(rows)).to_parquet(str(file))
    else:
        file.write_text("\n".join(map(json.dumps, rows)))
    return str(file)


def made(folder: Path, suffix: str = "jsonl", **keys: Any) -> TrainConfig:
    rows = list(endings.questions(60, seed=1))
    data = {"path": write(folder / f"rows.{suffix}", rows), "kind": "chat", "columns": COLUMNS,
            "sequence_length": 256, "held_out": 0.2, **keys}  # fmt: skip
    pipeline = {"schedule": {"schedule": "interleaved_1f1b", "stages_per_rank": 2}, "head_weight": None}
    given = {f"data.{key}": value for key, value in data.items()}
    given |= {f"pipeline.{key}": value for key, value in pipeline.items()}
    return config(folder, MODEL, given | {"model.dtype": "float64"}, batch_size=8)


@pytest.mark.parametrize("suffix", ["jsonl", pytest.param("parquet", marks=pytest.mark.sweep)])
def test_the_recipe_has_the_gradients_of_one_process(tmp_path: Path, suffix: str) -> None:
    """Its twin: one plain model on each record alone, and the mean over the tokens of all right endings."""
    if suffix == "parquet":
        pytest.importorskip("datasets")
    given = made(tmp_path, suffix)
    prepared = preflight(given)
    pipe = prepared.auto.build(prepared.model)
    tokens, loss, gradients = documents_alone(prepared, given.train.batch_size)
    result = pipe.step(prepared.data.batch(1).content)
    assert result.tokens == tokens
    assert result.loss == pytest.approx(loss, rel=1e-12)
    found = gradients_of(pipe)
    assert found.keys() == gradients.keys()
    assert_gradients(found, gradients, 1e-10)


def test_a_run_of_the_recipe_and_one_of_one_rank_have_equal_losses(tmp_path: Path) -> None:
    given, losses = made(tmp_path).model_dump(), []
    given["train"]["steps"] = 2
    for ranks, schedule in ((2, given["pipeline"]["schedule"]), (1, "1f1b")):
        given["pipeline"] |= {"ranks": ranks, "schedule": schedule}
        given["output"]["folder"] = str(tmp_path / "out")
        run(preflight(TrainConfig.model_validate(given)))
        losses.append([row["loss"] for row in metrics(tmp_path) if "loss" in row])
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)
    assert len(losses[0]) == 2


def test_columns_are_of_chats_alone_in_a_mixture(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abc" * 200)
    mixture = [{"path": str(tmp_path / "rows.jsonl")}, {"path": str(tmp_path / "a.txt"), "kind": "text"}]
    given = made(tmp_path, path=None, mixture=mixture).data
    assert [source.columns is None for source in given.sources] == [False, True]


def test_the_shipped_config_finds_its_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole run takes two minutes: `penstock train configs/sft_hellaswag.yaml`."""
    monkeypatch.chdir(ROOT)
    prepared = preflight(load_config("configs/sft_hellaswag.yaml"))
    facts = prepared.data.rows.sources[0].store.facts
    assert facts.documents == 600
    assert facts.counted / facts.tokens < 0.6
    lines = Path("examples/endings.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == list(endings.questions(600))
