"""Pages about other libraries: each feature of ours names a test that exists, each page its version and its sources."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

COMPARE = Path(__file__).resolve().parents[2] / "docs" / "compare"
PAGES = sorted(page for page in COMPARE.glob("*.md") if page.name != "index.md")


def test_each_feature_names_a_test_that_exists() -> None:
    """A row without a proof is a claim."""
    table = (COMPARE / "index.md").read_text().partition("## What bullpen has")[2]
    rows = re.findall(r"^\| ([^|]+) \| (.+) \|$", table, re.MULTILINE)[2:]

    proofs = {feature: re.findall(r"\[`(\w+)`\]\(([^)]+)\)", cell) for feature, cell in rows}

    assert len(proofs) > 15
    assert [feature for feature, links in proofs.items() if not links] == []
    named = [(name, COMPARE / path) for links in proofs.values() for name, path in links]
    assert [name for name, path in named if f"def {name}(" not in path.read_text()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_each_page_names_its_version_and_its_sources(page: Path) -> None:
    """What is said about others grows old: a reader must see of what it was said."""
    text = page.read_text()

    versions = re.findall(r"\d+\.\d+\.\d+", text.partition("\n## ")[0])
    sources = text.partition("## Where the statements come from\n")[2]
    assert versions
    assert len(re.findall(r"^- ", sources, re.MULTILINE)) >= 1
    assert "is the better choice\n\n- " in text  # and not only of ours
    index = (COMPARE / "index.md").read_text()
    assert f"]({page.name})" in index
    assert all(version in index for version in versions)
