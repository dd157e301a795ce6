"""The documents: every relative link leads to a file, and to a heading if it names one; every page is listed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/**/*.md")])

LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE_BLOCK = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`\n]*`")
HEADING = re.compile(r"^#+ +(.+)$", re.MULTILINE)


def prose(document: Path) -> str:
    return CODE_BLOCK.sub("", document.read_text(encoding="utf-8"))


def anchors(document: Path) -> set[str]:
    """The headings as GitHub writes them in a link."""
    words = (re.sub(r"[^\w\- ]", "", title.lower()) for title in HEADING.findall(prose(document)))
    return {title.strip().replace(" ", "-") for title in words}


def broken_links(document: Path) -> list[str]:
    broken = []
    for link in LINK.findall(CODE.sub("", prose(document))):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = document.parent / path if path else document
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    return broken


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(document: Path) -> None:
    assert not broken_links(document)


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One two\n[a](#one-two) [b](#three) [c](other.md) [d](page.md#one-two) `[e](code.md)`\n")
    assert broken_links(page) == ["#three", "other.md"]


def test_every_page_is_in_the_table_of_contents() -> None:
    contents = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    assert [page.name for page in ROOT.glob("docs/*.md") if f"({page.name})" not in contents] == ["README.md"]


PATH = re.compile(r"`((?:fusion_pass|patterns|kernels|tests|benchmarks|examples)/[\w/.]+)`")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_files_that_are_named_exist(document: Path) -> None:
    named = PATH.findall(prose(document))
    assert [path for path in named if not (ROOT / path).exists()] == []
