"""Links in README.md, CHANGELOG.md and docs lead somewhere, and the README is short.

The site's test holds what mkdocs knows: the anchors of the pages in docs, and the nav.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted(DOCS.rglob("*.md"))]
README_WORDS = 1200

_FENCE = re.compile(r"^( *)(```+|~~~+).*?^\1\2 *$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)", re.DOTALL)
_LINK = re.compile(
    r"\]\(\s*<?([^)<>\s]+)>?(?:\s+\"[^\"]*\")?\s*\)"  # [text](target) and ![text](target)
    r"|^\[[^\]]+\]:\s+(\S+)"  # [name]: target
    r"|<(?:a|img)\b[^>]*?\b(?:href|src)=\"([^\"]+)\"",
    re.MULTILINE,
)
_HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.MULTILINE)


def prose(page: Path) -> str:
    """The page without its code blocks."""
    return _FENCE.sub("", page.read_text(encoding="utf-8"))


def links(text: str) -> Iterator[str]:
    for found in _LINK.finditer(_CODE.sub("`code`", text)):
        yield html.unescape(next(filter(None, found.groups())))


def anchors(page: Path) -> set[str]:
    """Those of its headings on GitHub."""
    plain = [
        re.sub(r"!?\[([^\]]*)\]\([^)]*\)|[`*]", r"\1", heading) for heading in _HEADING.findall(prose(page))
    ]
    return {re.sub(r"[^\w\s-]", "", heading.strip().lower()).replace(" ", "-") for heading in plain}


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
        elif anchor and DOCS not in page.parents and anchor not in anchors(target):
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
        ("[a](CHANGELOG.md#changelog)", 0),
        ("![a](docs/pictures/no-such.svg)", 1),
        ("[a]: no-such-page.md", 1),
        ('<img src="no-such.png">', 1),
        ("`[a](no-such-page.md)` and [b](https://example.com/x)", 0),
        ("[a](README.md) ![b](docs/pictures/train.svg)", 0),
    ],
)
def test_a_broken_link_is_found_and_code_is_left_alone(text: str, wrong: int) -> None:
    assert len(broken(ROOT / "README.md", text)) == wrong


def test_the_readme_is_short() -> None:
    words = len((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert words <= README_WORDS


def test_no_change_is_listed_twice() -> None:
    """The entry on adapters once stood under each of six versions."""
    lines = [line for line in (ROOT / "CHANGELOG.md").read_text().splitlines() if line.startswith("- ")]
    assert len(lines) == len(set(lines))
