"""Tests mirror the source: `src/penstock/a/b.py` is tested in `tests/a/test_b.py`, or says here why not."""

from __future__ import annotations

from pathlib import Path

import penstock

SOURCE, TESTS = Path(penstock.__file__).parent, Path(__file__).parent

# source files without a test file of their own, each with the reason
WITHOUT = {
    "__main__.py": "one call, which every test of a command in a process of its own makes",
    "options.py": "records of options: pipeline/test_options.py, train/config/test_sections.py",
    "pipeline/building/auto_options.py": "what AutoPipeline takes: pipeline/test_options.py",
    "pipeline/building/build_stages.py": "what stages.py describes: pipeline/building/test_stages.py",
    "pipeline/building/check_model.py": "a refusal is tested with what it refuses, as in "
    "parallel/test_mesh_plan.py and models/test_quantized.py",
    "pipeline/building/planning.py": "what build_plan.py describes: pipeline/building/test_build_plan.py",
    "train/parts.py": "a list; runs of the trainer need every part in it",
}
# tests without one source file: what holds only where several files work together
OF_SEVERAL = {
    "checkpoint": "every_model older_versions processes",
    "cli": "hostile hub report seeds",
    "faults": "commands damage kills leftovers machine resumes stalls surroundings",
    "launch": "torchrun",
    "models": "every_model zoo",
    "models/weights": "fuzz_folders load_memory",
    "parallel": "accuracy adapters checkpoints dropout equivalence failures memory outputs precision "
    "sharded_build trained",
    "pipeline": "autocast collective edges equivalence layouts mtp padded_losses ragged",
    "pipeline/steps": "agree",
    "runtime": "profiled verdicts",
    "runtime/device": "host_bound",
    "runtime/transport": "slow_network staging",
    "schedule": "properties",
    "schedule/builders": "builders",
    "schedule/render": "render",
    "train": "chats embedding_models exactly_once files_of_a_run heads kto masked_models mesh precision "
    "protocol ramps reward_models",
    "train/data": "document_length",
    "train/encoding": "columns",
}


def mirrored() -> dict[str, str]:
    """The path of each source file's tests, by the path of the source file."""
    files = (path.relative_to(SOURCE) for path in SOURCE.rglob("*.py") if path.name != "__init__.py")
    return {str(path): str(path.with_name(f"test_{path.name}")) for path in files}


def of_several() -> set[str]:
    return {f"{folder}/test_{name}.py" for folder, names in OF_SEVERAL.items() for name in names.split()}


def test_every_source_file_has_its_tests() -> None:
    lacking = {source for source, test in mirrored().items() if not (TESTS / test).is_file()}
    assert sorted(lacking - WITHOUT.keys()) == []
    assert sorted(WITHOUT.keys() - lacking) == []  # these need no exception


def test_every_test_file_is_of_one_source_file_or_of_several_by_name() -> None:
    """Those at the top are of the package as a whole, of its pages, or of what stands beside it."""
    tests = {str(path.relative_to(TESTS)) for path in TESTS.glob("*/**/test_*.py")}
    others = tests - set(mirrored().values())
    assert sorted(others - of_several()) == []
    assert sorted(of_several() - others) == []
