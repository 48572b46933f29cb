"""Data sets by name: what `datasets.load_dataset` finds, on the Hub, in its cache or in a local folder.

    data.path: owner/name    split: train    config: en        the Hub, or what was fetched from there before
    data.path: a/folder      split: train                      the folder's files, whose names say their split

`datasets` writes a split into files of Arrow in its own cache, and these are what is read. HF_HUB_OFFLINE,
HF_DATASETS_OFFLINE, HF_DATASETS_CACHE and HF_TOKEN apply.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penstock.errors import DataError
from penstock.train.config.data import NamedSection, SourceSection


def arrow_files(section: SourceSection, datasets: Any) -> tuple[Path, ...]:
    """The files of the split, in the order of their rows; it is fetched unless it is in the cache.

    datasets: the module. Raises DataError.
    """
    local = Path(section.path).expanduser()
    path = str(local) if local.exists() else section.path
    try:
        loaded = datasets.load_dataset(
            path, section.config, split=section.split, revision=section.revision, keep_in_memory=False
        )
    except Exception as error:  # of the Hub, the network, the cache or the files: any
        raise _refused(section, local, error) from error
    return tuple(Path(file["filename"]) for file in loaded.cache_files)


def _refused(section: SourceSection, local: Path, error: Exception) -> DataError:
    keys = {key: getattr(section, key) for key in NamedSection.model_fields}
    named = ", ".join(f"{key}={value}" for key, value in keys.items() if value is not None)
    value = f"{section.named} with {named}"
    rule = f"datasets cannot load it ({type(error).__name__}: {' '.join(str(error).split())})"
    if local.exists():
        return DataError(value, rule, "Name a split of this folder, or leave split out to read its files")
    remedy = (
        "Check its name, split and config. Without a network, or with HF_HUB_OFFLINE or HF_DATASETS_OFFLINE "
        "set, it must be in the cache of datasets: load it once with a network, or give a local path"
    )
    return DataError(value, rule, remedy)
