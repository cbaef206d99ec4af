"""The first page that anybody reads: its programs run on the embedded default, its Node worker on the same queue."""

from __future__ import annotations

from pathlib import Path

from tests.docs._forks import Forks
from tests.docs.run_page import blocks_of
from tests.docs.test_pages import run_page

README = Path(__file__).resolve().parents[2] / "README.md"


def test_the_tour_runs(forks: Forks) -> None:
    run_page(README, forks)


def test_the_two_commands_and_the_installation_are_named() -> None:
    shell = "".join(block.source for block in blocks_of(README.read_text()) if block.language == "sh")

    assert "make demo" in shell
    assert "make test" in shell
    assert 'pip install ".[embedded,cli]"' in shell
