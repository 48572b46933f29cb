"""Models by their Hub names: what is fetched, by whom, at which commit, and the error where nothing comes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from penstock import AutoPipeline
from penstock.errors import HubError, ModelError
from penstock.models import hub as hubs
from support.hub import Hub, files_in, serving, use
from support.mutations import CASES, mutated_bytes, mutated_json, seeded
from support.pool import Pool, alive, start
from support.refusals import refuses

NAME = "Makers/Tiny-0.1B"


def config() -> Qwen3Config:
    return Qwen3Config(
        hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, vocab_size=64,
    )  # fmt: skip


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A model in several shards with a tokenizer, and copies of its weights in other formats."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config()).save_pretrained(folder, max_shard_size="5KB")
    found = files_in(folder)
    assert sum(name.endswith(".safetensors") for name in found) > 1
    more = {
        "tokenizer.json": b"{}",
        "tokenizer_config.json": b"{ }",
        "modeling.py": b"pass",
        "README.md": b"#",
    }
    copies = dict.fromkeys(
        ("pytorch_model.bin", "model.gguf", "consolidated.safetensors", "original/x.pth"), b"x"
    )
    return {**found, **more, **copies}


@pytest.fixture
def hub(files: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serving(Hub()) as served:
        served.add(NAME, files)
        use(monkeypatch, served.url, tmp_path / "cache")
        yield served


def shards(files: dict[str, bytes]) -> set[str]:
    return {name for name in files if name.startswith("model-")}


def test_only_what_a_run_needs_is_fetched_and_only_once(hub: Hub, files: dict[str, bytes]) -> None:
    folder = hubs.fetch(NAME)
    assert folder.name == hub.revisions[NAME]["main"]
    small = {"config.json", "generation_config.json", "model.safetensors.index.json", "tokenizer.json",
             "tokenizer_config.json"}  # fmt: skip
    assert set(hub.fetched) == small | shards(files)
    assert all((folder / name).read_bytes() == files[name] for name in hub.fetched)
    before = len(hub.fetched)
    assert hubs.fetch(NAME) == folder
    assert hubs.fetch(NAME, folder.name) == folder
    assert len(hub.fetched) == before


def test_a_part_is_fetched_alone(hub: Hub) -> None:
    hubs.fetch(NAME, part="config")
    assert hub.fetched == ["config.json"]
    hubs.fetch(NAME, part="tokenizer", trusted=True)
    assert set(hub.fetched) == {
        "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "modeling.py",
    }  # fmt: skip


def test_a_log_gets_no_progress_bar(hub: Hub, capfd: pytest.CaptureFixture[str]) -> None:
    """huggingface_hub draws that of the files into whatever stderr is."""
    hubs.fetch(NAME)
    written = capfd.readouterr()
    assert "fetching" in written.err
    assert "%" not in written.err + written.out


def test_a_single_file_of_weights_needs_no_index(hub: Hub, files: dict[str, bytes], tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(config()).save_pretrained(tmp_path / "single")
    hub.add("makers/single", files_in(tmp_path / "single"))
    assert (hubs.fetch("makers/single") / "model.safetensors").is_file()


def test_a_pipeline_is_built_from_a_name(hub: Hub, files: dict[str, bytes], tmp_path: Path) -> None:
    later = dict(files, **{"README.md": b"# changed"})
    pipe = AutoPipeline(ranks=2, microbatches=2).build(NAME)
    first = hub.revisions[NAME]["main"]
    model = AutoModelForCausalLM.from_pretrained(hubs.fetch(NAME))
    for name, parameter in pipe.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name))
    hub.add(NAME, later)
    auto = AutoPipeline(ranks=2, microbatches=2, revision=first)
    assert auto.build_plan(NAME).source.commit == first
    plan = AutoPipeline(ranks=2, microbatches=2).build_plan(NAME)
    assert plan.source.commit == plan.facts["commit"] == hub.revisions[NAME]["main"] != first


def test_a_local_folder_of_that_name_wins(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config().save_pretrained(tmp_path / NAME)
    monkeypatch.chdir(tmp_path)
    assert AutoPipeline(ranks=2, microbatches=2).build_plan(NAME).source.commit is None
    assert not hub.asked
    with refuses(HubError, rule="it is a local folder, and only the Hub has revisions"):
        AutoPipeline(ranks=2, microbatches=2, revision="main").build_plan(NAME)
    with refuses(HubError, "revision='main' for Qwen3Config"):
        AutoPipeline(ranks=2, microbatches=2, revision="main").build_plan(config())


def test_a_local_file_of_that_name_wins(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """0.5.0: model/config.json was looked up on the Hub, as only a folder was looked for here."""
    config().save_pretrained(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    with refuses(ModelError, "model folder model/config.json", "there is no such folder"):
        AutoPipeline(ranks=2, microbatches=2).build_plan("model/config.json")
    assert not hub.asked


@pytest.mark.parametrize(
    "name", ["gpt2", "./a/b", "/a/b", "~/a", "a/b/c", "a/", "bytes", "a b/c", Path("a/b")]
)
def test_what_is_no_name_is_a_path(name: object) -> None:
    assert not hubs.is_name(name)


REFUSED = {
    "unknown": ("makers/none", None, "no such model", "Fix the name"),
    "no name": ("makers/a--b", None, "no name on the Hub", "Fix the name"),
    "private": ("makers/private", None, "no such model", "log in: hf auth login"),
    "gated": ("makers/gated", None, "granted access", "Ask for access on its page"),
    "forbidden": ("makers/forbidden", None, "granted access", "set HF_TOKEN"),
    "revision": (NAME, "v2", "no such revision", "Give a branch, a tag or a commit of it"),
    "no commit": (NAME, "0" * 40, "no such revision", "Give a branch"),
    "no weights": ("makers/bin", None, "no weights", "model.weights=random"),
    "no config": ("makers/bare", None, "no config.json", "Take another revision"),
    "incomplete": ("makers/torn", None, "no model-00001-of-", "Take another revision"),
    "failing": ("makers/failing", None, "HTTP", "hf download makers/failing"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_had_is_one_error(hub: Hub, files: dict[str, bytes], case: str) -> None:
    name, revision, rule, remedy = REFUSED[case]
    hub.refused |= {"makers/private": (401, ""), "makers/gated": (403, "GatedRepo"),
                    "makers/forbidden": (403, ""), "makers/failing": (500, "")}  # fmt: skip
    hub.add("makers/bin", {"config.json": files["config.json"], "pytorch_model.bin": b"x"})
    hub.add("makers/bare", {"model.safetensors": b"x"})
    hub.add("makers/torn", {each: held for each, held in files.items() if "-00001-" not in each})
    with refuses(HubError, name, rule, remedy) as caught:
        hubs.fetch(name, revision)
    assert "\n" not in str(caught.value)


def test_without_a_network_the_cache_is_enough(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = hubs.fetch(NAME)
    hubs.fetch(NAME, part="config")
    before = len(hub.asked)
    for url, offline, rule in (
        (hub.url, True, "HF_HUB_OFFLINE is set"),
        ("http://127.0.0.1:9", False, "does not answer"),
    ):
        use(monkeypatch, url, tmp_path / "cache", offline=offline)
        assert hubs.fetch(NAME) == hubs.fetch(NAME, folder.name) == folder
        with refuses(HubError, "makers/none", rule, "hf download makers/none") as caught:
            hubs.fetch("makers/none")
        assert str(tmp_path / "cache") in caught.value.rule
    assert len(hub.asked) == before


def test_a_part_in_the_cache_is_not_taken_for_all(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With huggingface_hub before 2, a folder of the cache is all that is known."""
    folder = hubs.fetch(NAME, part="config")
    use(monkeypatch, hub.url, tmp_path / "cache", offline=True)
    with refuses(HubError, NAME, "not all of its files"):
        hubs.fetch(NAME)
    shutil.copytree(tmp_path / "cache", tmp_path / "older", symlinks=True)
    next((tmp_path / "older").rglob(f"trees/{folder.name}.json")).unlink()
    use(monkeypatch, hub.url, tmp_path / "older", offline=True)
    with refuses(HubError, NAME, "not all of its files"):
        hubs.fetch(NAME)


def test_a_connection_that_breaks_is_an_error_and_the_next_fetch_completes(
    hub: Hub, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    pause = time.sleep  # huggingface_hub tries five times, a second apart
    monkeypatch.setattr(time, "sleep", lambda seconds: pause(min(seconds, 0.01)))
    hub.broken = shards(files)
    with refuses(HubError, rule="fetched from http"):
        hubs.fetch(NAME)
    hub.broken = set()
    folder = hubs.fetch(NAME)
    assert all((folder / name).read_bytes() == files[name] for name in shards(files))


# ---- Ranks of one host


def as_rank(url: str, cache: str, name: str, barrier: bool = True) -> tuple[str, str]:
    """What a rank of a launch gets, "folder" or "error", from a fetch that all begin together."""
    import torch.distributed as dist

    with pytest.MonkeyPatch.context() as patch:
        use(patch, url, Path(cache))
        patch.setenv("WORLD_SIZE", "4")
        patch.setenv("MASTER_PORT", "1")
        if not barrier and dist.get_rank():
            dist.barrier()
        try:
            if barrier:
                dist.barrier()
            return "folder", str(hubs.fetch(name))
        except HubError as error:
            return "error", str(error)
        finally:
            if not barrier and not dist.get_rank():
                dist.barrier()


def test_one_rank_of_a_host_fetches_and_the_others_hear_of_it(pool: Pool, hub: Hub, tmp_path: Path) -> None:
    cache = str(tmp_path / "cache")
    found = pool.run(4, as_rank, hub.url, cache, NAME)
    assert {kind for kind, _ in found} == {"folder"}
    assert len(set(found)) == 1
    assert len(hub.fetched) == len(set(hub.fetched))
    assert sum("/revision/main" in path for path in hub.asked) == 1
    hub.add(NAME, {**hub.commits[hub.revisions[NAME]["main"]], "README.md": b"# new"})
    assert pool.run(4, as_rank, hub.url, cache, NAME) == found  # of the same launch: the same commit


def test_the_next_launch_asks_again(
    hub: Hub, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a container it has the process numbers, the address and the port of the one before."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setattr(hubs, "began_of", lambda process: 100)
    first = hubs.fetch(NAME)
    hub.add(NAME, {**files, "README.md": b"# new"})
    assert hubs.fetch(NAME) == first
    monkeypatch.setattr(hubs, "began_of", lambda process: 200)
    assert hubs.fetch(NAME).name == hub.revisions[NAME]["main"] != first.name


def test_a_rank_that_comes_late_takes_the_commit_of_the_others(pool: Pool, hub: Hub, tmp_path: Path) -> None:
    found = pool.run(4, as_rank, hub.url, str(tmp_path / "cache"), NAME, False)
    assert len(set(found)) == 1
    assert sum("/revision/main" in path for path in hub.asked) == 1


def test_the_error_of_the_one_that_fetches_is_that_of_all(pool: Pool, hub: Hub, tmp_path: Path) -> None:
    hub.refused["makers/gated"] = 403, "GatedRepo"
    found = pool.run(4, as_rank, hub.url, str(tmp_path / "cache"), "makers/gated")
    assert {kind for kind, _ in found} == {"error"}
    assert len(set(found)) == 1


def fetch_alone(url: str, cache: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        use(patch, url, Path(cache))
        hubs.fetch(NAME)


def test_a_fetch_that_is_killed_is_taken_over(
    hub: Hub, files: dict[str, bytes], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.stalled = {min(shards(files))}
    process = start(fetch_alone, hub.url, str(tmp_path / "cache"))
    assert hub.reached.wait(30)
    folders: list[Path] = []
    waiting = threading.Thread(target=lambda: folders.append(hubs.fetch(NAME)))
    waiting.start()
    said = ""
    while "waiting for another process" not in said and waiting.is_alive():
        said += capsys.readouterr().err
        time.sleep(0.01)
    assert f"penstock: waiting for another process of this host, which fetches {NAME}\n" in said
    hub.stalled = set()
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert not alive(process.pid)
    waiting.join(30)
    assert all((folders[0] / name).read_bytes() == files[name] for name in shards(files))


def test_a_killed_fetch_is_not_taken_for_whole_offline(
    hub: Hub, files: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.stalled = {min(shards(files))}
    process = start(fetch_alone, hub.url, str(tmp_path / "cache"))
    assert hub.reached.wait(30)
    process.kill()
    process.join()
    use(monkeypatch, hub.url, tmp_path / "cache", offline=True)
    with refuses(HubError, NAME, "not all of its files"):
        hubs.fetch(NAME)


def test_a_fetch_leaves_a_readable_note_beside_the_caches_own_locks(hub: Hub, tmp_path: Path) -> None:
    folder = hubs.fetch(NAME)
    (note,) = (tmp_path / "cache" / ".locks").glob("penstock-*.json")
    assert json.loads(note.read_text()) == {"launch": None, "folder": str(folder)}


# _fetched and _launch stand for the other rank of this launch, and its note
@pytest.mark.parametrize("cases", CASES)
def test_the_note_of_another_rank_names_no_folder_outside_the_cache(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cases: range
) -> None:
    """0.5.0: a note of this launch was believed: it gave any folder, or ended with an AttributeError."""
    elsewhere = tmp_path / "elsewhere" / ("a" * 40)  # named as a commit is
    elsewhere.mkdir(parents=True)
    folder = hubs.fetch(NAME)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(hubs, "_fetched", lambda *_, **__: folder)
    (note,) = (tmp_path / "cache" / ".locks").glob("penstock-*.json")
    good = {"launch": hubs._launch(), "folder": str(folder)}
    odd = [
        {**good, "folder": str(elsewhere)},
        {**good, "folder": str(folder / ".." / ".." / "..")},
    ]
    for number in cases:
        with seeded(number) as choices:
            if number < len(odd):
                note.write_text(json.dumps(odd[number]))
            elif choices.random() < 0.5:
                note.write_text(json.dumps(mutated_json(choices, good)))
            else:
                note.write_bytes(mutated_bytes(choices, json.dumps(good).encode()))
            assert hubs.fetch(NAME) == folder
