"""Models of the Hugging Face Hub: from a name such as Qwen/Qwen3-8B to its folder in the cache.

    a process of a host   takes the lock | asks the Hub, fetches | writes the outcome | releases
    the others            wait for the lock ......................................... | read the outcome

The lock ends with the process that has it, so that the next one continues a fetch that was killed. Ranks of
one launch take the same commit, even those that start when the fetch is over.

Only the files that a run needs are fetched: config, tokenizer, and the weights in safetensors, as a single
file or those that the index names; no second copy of the weights in another format.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import StringIO
from pathlib import Path
from typing import Any, Literal, TextIO

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils.tqdm import tqdm

from penstock.errors import HubError
from penstock.models.model_folder import OTHERS, TOKENIZER
from penstock.models.weights.files import INDEX, SINGLE, named_files
from penstock.reading import parse_json
from penstock.runtime.health.notes import began as began_of

ModelPart = Literal["config", "tokenizer", "weights"]  # parts of a model; each includes those before it

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_CONFIG = "config.json"
_OFFLINE = "HF_HUB_OFFLINE is set", "Unset it. "
_FILES = {
    "config": (_CONFIG,),
    "tokenizer": (_CONFIG, *TOKENIZER, *OTHERS),
    "weights": (_CONFIG, *TOKENIZER, *OTHERS, SINGLE, INDEX),  # an index's shards are fetched after it
}


def is_name(model: object) -> bool:
    """Whether `model` has the form owner/name. A local path of that name takes precedence."""
    return isinstance(model, str) and bool(_NAME.fullmatch(model)) and not Path(model).exists()


def folder_of(model: str, revision: str | None, *, trusted: bool = False) -> tuple[Path, str | None]:
    """The folder for a path, or for a Hub name, which is fetched, with its commit.

    Raises HubError, also for a revision of a path.
    """
    if is_name(model):
        folder = fetch(model, revision, trusted=trusted)
        return folder, folder.name
    if revision is not None:
        raise not_on_the_hub(f"revision={revision!r}", model)
    return Path(model), None


def not_on_the_hub(value: str, model: object) -> HubError:
    """The error for a revision of something that has none."""
    where = "a local folder" if isinstance(model, str | Path) and Path(model).is_dir() else "no Hub name"
    return HubError(
        f"{value} for {model}", f"it is {where}, and only the Hub has revisions", "Leave the revision out"
    )


def fetch(
    name: str, revision: str | None = None, part: ModelPart = "weights", *, trusted: bool = False
) -> Path:
    """The cache's folder with the files of a model, fetched unless they are cached. Its name is the commit.

    One process of a host fetches; the others wait for it, and raise its error.

    Args:
        revision: a branch, a tag or a commit; None takes the main branch
        trusted: whether to fetch its Python code too

    Raises HubError.
    """
    key = hashlib.sha256(repr((constants.ENDPOINT, name, revision, part, trusted)).encode()).hexdigest()
    began = time.time()
    with _lock(key[:16], name) as file:
        others_folder = _outcome_of_another(file, name, began)
        if others_folder is not None:
            return others_folder
        outcome: dict[str, Any] = {"launch": _launch()}
        try:
            folder = _fetched(name, revision, part, trusted=trusted)
            outcome["folder"] = str(folder)
        except HubError as error:
            outcome |= {"error": [error.value, error.rule, error.remedy], "at": time.time()}
            raise
        finally:
            with suppress(OSError):  # then the others fetch by themselves
                file.seek(0)
                file.truncate()
                file.write(json.dumps(outcome))
                file.flush()
    return folder


# ---- One process of a host


@contextmanager
def _lock(key: str, name: str) -> Iterator[TextIO]:
    """The locked file; a nameless one in a read-only cache, into which nothing can be fetched.

    The first process that waits logs that another one fetches `name`.
    """
    file = Path(constants.HF_HUB_CACHE) / ".locks" / f"penstock-{key}.json"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        opened = file.open("a+")
    except OSError:
        yield StringIO()
        return
    with opened:
        with suppress(OSError):  # without locks in the file system, every process fetches
            try:
                fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if os.environ.get("LOCAL_RANK", "0") == "0":
                    _say(f"waiting for another process of this host, which fetches {name}")
                fcntl.flock(opened, fcntl.LOCK_EX)
        yield opened  # not removed: later processes would lock a different file


def _launch() -> str | None:
    """A key that the ranks of this launch on this host share; None without ranks."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return None
    names = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
    parent = os.getppid()
    # with the launcher's start time: in a container the next launch has the same pid, address and port
    return " ".join([str(parent), str(began_of(parent)), *(os.environ.get(name, "") for name in names)])


def _outcome_of_another(file: TextIO, name: str, began: float) -> Path | None:
    """The outcome of the fetch by another rank of this launch; None without one, or if it was killed.

    began: when this process started. An older error does not count, as the Hub may answer now.
    """
    launch = _launch()
    file.seek(0)
    with suppress(ValueError):
        match parse_json(file.read()):
            case {"launch": str(of), "error": [str(value), str(rule), str(remedy)], "at": float(at)} if (
                of == launch and at >= began
            ):
                raise HubError(value, rule, remedy)
            case {"launch": str(of), "folder": str(text)} if of == launch:
                folder, models = Path(text), f"models--{name.replace('/', '--')}"
                known = folder.parent == Path(constants.HF_HUB_CACHE, models, "snapshots")
                if known and _COMMIT.fullmatch(folder.name) and folder.is_dir():
                    return folder
    return None


# ---- The fetch


def _fetched(name: str, revision: str | None, part: ModelPart, *, trusted: bool) -> Path:
    patterns = [*_FILES[part], *(["*.py"] if trusted else [])]
    folder = _download(name, revision, patterns)
    weights = named_files(folder) if part == "weights" else []
    if missing := [file for file in weights if not (folder / file).is_file()]:
        _say(f"fetching {len(missing)} files of weights of {name}")
        _download(name, folder.name, missing)
    for file in [*([] if part == "tokenizer" else [_CONFIG]), *weights]:
        if not (folder / file).is_file():
            _raise_missing(name, folder, file, weights)
    return folder


def _say(what: str) -> None:
    print(f"penstock: {what}", file=sys.stderr, flush=True)


def _raise_missing(name: str, folder: Path, file: str, weights: list[str]) -> None:
    """Raise the error for a file that the commit lacks, or, offline, that the cache lacks."""
    value = f"{name} at commit {folder.name}"
    if constants.HF_HUB_OFFLINE:
        raise _not_cached(name, value, *_OFFLINE)
    if file in weights and not (folder / INDEX).is_file():
        rule = f"it has no weights in safetensors: neither {file} nor {INDEX}"
        remedy = "Take a revision that has, or config and random weights (model.weights=random)"
    else:
        rule, remedy = f"it has no {file}", "Take another revision, or fetch it where there is a network"
    raise HubError(value, rule, remedy)


def _download(name: str, revision: str | None, patterns: list[str]) -> Path:
    try:
        return Path(
            snapshot_download(name, revision=revision, allow_patterns=patterns, tqdm_class=_BarOnTerminals)
        )
    except Exception as cause:  # of many types: from the Hub, its cache, the network, a disk
        raise _refusal(name, revision, cause) from cause


class _BarOnTerminals(tqdm):
    """huggingface_hub's progress bar, on terminals only."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"disable": None, **options})  # type: ignore[no-untyped-call]


def _refusal(name: str, revision: str | None, cause: Exception) -> HubError:
    """The error for an exception of huggingface_hub."""
    value = name if revision is None else f"{name} at revision {revision}"
    hub = constants.ENDPOINT
    log_in = "log in: hf auth login, or set HF_TOKEN"
    uncached = isinstance(cause, LocalEntryNotFoundError)
    if uncached and isinstance(cause.__cause__, Exception):  # the reason why it tried the cache
        cause = cause.__cause__
    status = getattr(getattr(cause, "response", None), "status_code", None)
    if isinstance(cause, GatedRepoError) or status == 403:
        rule = f"{hub} gives it only to those who were granted access"
        return HubError(value, rule, f"Ask for access on its page, then {log_in}")
    if isinstance(cause, RepositoryNotFoundError) or status == 401:
        rule = f"there is no such local folder, and {hub} has no such model that this user may see"
        return HubError(value, rule, f"Fix the name; for a private model {log_in}")
    if isinstance(cause, HFValidationError):
        return HubError(
            value, "there is no such local folder, and no name on the Hub is like it", "Fix the name"
        )
    if isinstance(cause, RevisionNotFoundError):
        return HubError(value, f"{hub} has no such revision of it", "Give a branch, a tag or a commit of it")
    if constants.HF_HUB_OFFLINE:
        return _not_cached(name, value, *_OFFLINE)
    said = f"{type(cause).__name__}: {next(iter(str(cause).splitlines()), '')}"
    if uncached:
        return _not_cached(name, value, f"there is no such local folder, {hub} does not answer ({said})")
    rule = f"it could not be fetched from {hub} ({said})"
    return HubError(value, rule, "Start again: what has come is kept")


def _not_cached(name: str, value: str, why: str, first: str = "") -> HubError:
    """The error where only the cache can be used. why: the reason; first: the first part of the remedy"""
    rule = f"{why}, and the cache {constants.HF_HUB_CACHE} has not all of its files"
    remedy = f"{first}Fetch it where there is a network (hf download {name}), or give a local folder"
    return HubError(value, rule, remedy)
