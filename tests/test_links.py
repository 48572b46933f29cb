"""Links in README.md, CHANGELOG.md and docs lead somewhere, the README is short, and the nav names pages."""

from __future__ import annotations

import html
import re
import unicodedata
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted(DOCS.rglob("*.md"))]
README_WORDS = 1500

_FENCE = re.compile(r"^( *)(```+|~~~+).*?^\1\2 *$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)", re.DOTALL)
_LINK = re.compile(
    r"\]\(\s*<?([^)<>\s]+)>?(?:\s+\"[^\"]*\")?\s*\)"  # [text](target) and ![text](target)
    r"|^\[[^\]]+\]:\s+(\S+)"  # [name]: target
    r"|<(?:a|img)\b[^>]*?\b(?:href|src)=\"([^\"]+)\"",
    re.MULTILINE,
)
_HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.MULTILINE)
_ID = re.compile(r"\b(?:id|name)=\"([^\"]+)\"|\{ *#([\w.-]+)")


@cache
def prose(page: Path) -> str:
    """The page without its code blocks."""
    return _FENCE.sub("", page.read_text(encoding="utf-8"))


def links(text: str) -> Iterator[str]:
    for found in _LINK.finditer(_CODE.sub("`code`", text)):
        yield html.unescape(next(filter(None, found.groups())))


def slug(heading: str, *, site: bool) -> str:
    """The anchor of a heading: as mkdocs makes it for the site, or as GitHub does for files at the top."""
    plain = re.sub(r"!?\[([^\]]*)\]\([^)]*\)|\{[^}]*\}|[`*]", r"\1", heading).strip()
    if site:
        plain = unicodedata.normalize("NFKD", plain).encode("ascii", "ignore").decode()
        return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower())
    return re.sub(r"[^\w\s-]", "", plain.lower()).replace(" ", "-")


@cache
def anchors(page: Path) -> frozenset[str]:
    text = prose(page)
    found: set[str] = {a or b for a, b in _ID.findall(text)}
    site = DOCS in page.parents
    times: dict[str, int] = {}
    for heading in _HEADING.findall(text):
        base = slug(heading, site=site)
        seen = times.get(base, 0)
        times[base] = seen + 1
        found.add(f"{base}{'_' if site else '-'}{seen}" if seen else base)
    return frozenset(found)


@cache
def api_names() -> frozenset[str]:
    return frozenset(re.findall(r"\w+", (DOCS / "api.txt").read_text(encoding="utf-8")))


def has_anchor(page: Path, anchor: str) -> bool:
    if anchor in anchors(page):
        return True
    # mkdocstrings makes one anchor for each public name, from the code
    return "\n::: " in page.read_text(encoding="utf-8") and set(anchor.split(".")) <= api_names()


def broken(page: Path, text: str) -> list[str]:
    """The relative links of the text that lead nowhere; `page` is where the text stands."""
    wrong = []
    for link in links(text):
        if re.match(r"[a-z][a-z0-9+.-]*:", link):
            continue
        path, _, anchor = unquote(link).partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists():
            wrong.append(f"{link}: no such file")
        elif anchor and not (target.suffix == ".md" and has_anchor(target, anchor)):
            wrong.append(f"{link}: no such heading")
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_relative_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    assert broken(page, prose(page)) == []


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("[a](docs/no-such-page.md)", 1),
        ("[a](README.md#no-such-heading)", 1),
        ("![a](docs/pictures/no-such.svg)", 1),
        ("[a]: no-such-page.md", 1),
        ('<img src="no-such.png">', 1),
        ("`[a](no-such-page.md)` and [b](https://example.com/x)", 0),
        ("[a](README.md) ![b](docs/pictures/train.svg)", 0),
    ],
)
def test_a_broken_link_is_found_and_code_is_left_alone(text: str, wrong: int) -> None:
    assert len(broken(ROOT / "README.md", text)) == wrong


@pytest.mark.parametrize(
    ("heading", "on_the_site", "on_github"),
    [
        ("A step, in `code`", "a-step-in-code", "a-step-in-code"),
        ("Time & memory", "time-memory", "time--memory"),
        ("[Added](x.md) in 0.5.0", "added-in-050", "added-in-050"),
    ],
)
def test_anchors_are_those_of_the_site_and_of_github(heading: str, on_the_site: str, on_github: str) -> None:
    assert slug(heading, site=True) == on_the_site
    assert slug(heading, site=False) == on_github


def test_the_readme_is_short() -> None:
    words = len((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert words <= README_WORDS


class _Tolerant(yaml.SafeLoader):
    """Reads mkdocs.yml whatever tags its plugins bring."""


_Tolerant.add_multi_constructor("", lambda loader, suffix, node: None)


def named_in(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    elif isinstance(nav, dict):
        for value in nav.values():
            yield from named_in(value)
    else:
        for entry in nav:
            yield from named_in(entry)


def test_the_nav_names_files_that_exist() -> None:
    settings = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader=_Tolerant)
    named = [name for name in named_in(settings["nav"]) if "://" not in name]
    assert "index.md" in named
    assert [name for name in named if not (DOCS / name).is_file()] == []
