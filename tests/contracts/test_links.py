"""Links between the pages of the documentation lead somewhere: to a file, and to a heading in it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PATTERNS = ("*.md", "docs/**/*.md", "examples/*/*.md")
PAGES = sorted(str(path.relative_to(ROOT)) for pattern in PATTERNS for path in ROOT.glob(pattern))
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\((?!https?://|mailto:)(?P<target>[^)\s]+)\)")
_CODE = re.compile(r"^```.*?^```$", re.M | re.S)


def anchors(page: Path) -> set[str]:
    """The names that headings of the page have in links: lower case, no punctuation, dashes for spaces."""
    headings = re.findall(r"^#+ (.+)$", _CODE.sub("", page.read_text(encoding="utf-8")), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    source = ROOT / page
    broken = []
    for link in _LINK.finditer(_CODE.sub("", source.read_text(encoding="utf-8"))):
        name, _, anchor = link["target"].partition("#")
        target = (source.parent / name) if name else source
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link["target"])
    assert broken == []


def test_the_index_has_every_page() -> None:
    index = (ROOT / "README.md").read_text(encoding="utf-8")
    pages = {str(path.relative_to(ROOT)) for path in ROOT.glob("docs/**/*.md")} - {"docs/developer/simulation.md"}
    assert {page for page in pages if f"({page}" not in index} == set()
