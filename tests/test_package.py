"""The wheel: it builds, it holds what it needs, and it works where nothing else of penstock lies."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from email import message_from_string
from pathlib import Path

import pytest

from oldest import oldest

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_the_oldest_versions_are_those_that_it_promises() -> None:
    """Each has a bound, but for stubs. In `dev` the extras that tests need have the bound of their own."""
    extras = PROJECT["optional-dependencies"].keys() - {"dev", "docs", "liger", "low-bits"}
    needed = oldest("dependencies", "dev")
    assert [line for line in needed if "==" not in line] == ["types-PyYAML"]
    assert {line.replace("==", ">=") for line in needed} >= {*PROJECT["dependencies"]}
    assert {*oldest(*extras)} <= {*needed}


def run(*command: str | Path, cwd: Path) -> str:
    """What `command` prints; fails with it where the command fails."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    ran = subprocess.run(
        list(map(str, command)),
        cwd=cwd, env=environment, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of a copy of the source, so that the build leaves nothing in the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--wheel-dir", folder)
    run(sys.executable, "-m", "pip", "wheel", *options, source, cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def clean(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment with the wheel; dependencies come from this one, after everything of its own."""
    folder = tmp_path_factory.mktemp("clean")
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder)
    python = folder / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python)
    run(*pip, "install", "--no-deps", "--no-index", "--quiet", wheel, cwd=folder)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return folder


def test_the_wheel_holds_every_source_and_data_file(wheel: Path) -> None:
    package = ROOT / "src" / "penstock"
    wanted = {
        file.relative_to(package.parent).as_posix()
        for file in package.rglob("*")
        if file.suffix in {".py", ".html", ".css", ".js", ".typed", ".yaml"}
    }
    wanted_data = {name for name in wanted if not name.endswith(".py")}
    assert {Path(name).suffix or Path(name).name for name in wanted_data} == {
        ".html", ".css", ".js", ".typed", ".yaml"
    }  # fmt: skip
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert held == wanted


def test_the_wheel_says_its_version_pythons_licence_and_types(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (each for each in archive.namelist() if each.endswith(".dist-info/METADATA"))
        metadata = message_from_string(archive.read(name).decode())
        assert any(each.endswith("/LICENSE") for each in archive.namelist())
    assert metadata["Version"] == PROJECT["version"]
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["License-Expression"] == "Apache-2.0"
    classifiers = metadata.get_all("Classifier") or []
    for version in ("3.11", "3.12", "3.13"):
        assert f"Programming Language :: Python :: {version}" in classifiers
    assert "Typing :: Typed" in classifiers


def test_schedules_work_from_the_wheel_without_torch(clean: Path) -> None:
    script = (
        "import sys, penstock, penstock.schedule as schedule\n"
        "schedule.render(schedule.simulate(schedule.build('1f1b', ranks=2, microbatches=4)), 'page.html')\n"
        "print(penstock.__file__, 'torch' in sys.modules)"
    )
    file, torch = run(clean / "bin" / "python", "-c", script, cwd=clean).split()
    assert clean in Path(file).parents
    assert torch == "False"
    assert "<script" in (clean / "page.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("command", [("python", "-m", "penstock"), ("penstock",)], ids=" ".join)
def test_the_command_of_the_wheel_prints_its_version(clean: Path, command: tuple[str, ...]) -> None:
    program, *arguments = command
    printed = run(clean / "bin" / program, *arguments, "--version", cwd=clean)
    assert printed == f"penstock {PROJECT['version']}\n"
