"""Scripts are put together from files: each file once, after what it needs, and in a block only for that block."""

from __future__ import annotations

from collections import Counter

import pytest

from bullpen.wire import scripts
from bullpen.wire.scripts import SCRIPTS, assemble


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Files of the test's own in the place of the package's."""
    written: dict[str, str] = {}
    monkeypatch.setattr(scripts, "_read", lambda name: tuple(written[name].splitlines()))
    return written


def lines(name: str) -> list[str]:
    return [line for _, _, line in assemble(name)]


def test_an_include_brings_what_it_needs_before_itself(files: dict[str, str]) -> None:
    files["script"] = "--#include lib/a\nreturn a()"
    files["lib/a"] = "--#include lib/b\nlocal a = b"
    files["lib/b"] = "local b = 1"

    assert lines("script") == ["local b = 1", "local a = b", "return a()"]


def test_a_file_comes_once(files: dict[str, str]) -> None:
    files["script"] = "--#include lib/a\n--#include lib/c\n--#include lib/a"
    files["lib/a"] = "local a = 1"
    files["lib/c"] = "--#include lib/a\nlocal c = a"

    assert lines("script") == ["local a = 1", "local c = a"]


def test_what_a_block_includes_is_there_for_that_block_only(files: dict[str, str]) -> None:
    """Two blocks that need the same function each make their own; what stands outside is made once for both."""
    block = "do\n--#scope\n--#include lib/c\n--#end\nend"
    files["script"] = f"--#include lib/b\n{block}\n{block}"
    files["lib/b"] = "local b = 1"
    files["lib/c"] = "--#include lib/b\nlocal c = b"

    assert lines("script") == ["local b = 1", "do", "local c = b", "end", "do", "local c = b", "end"]


def test_every_line_knows_its_file(files: dict[str, str]) -> None:
    files["script"] = "-- head\n--#include lib/a\nreturn 1"
    files["lib/a"] = "\nlocal a = 1"

    assert list(assemble("script")) == [
        ("script", 1, "-- head"),
        ("lib/a", 1, ""),
        ("lib/a", 2, "local a = 1"),
        ("script", 3, "return 1"),
    ]


def test_every_scope_of_our_scripts_ends() -> None:
    for name in SCRIPTS:
        counted: Counter[str] = Counter()
        for file in {file for file, _, _ in assemble(name)}:
            counted.update(line for line in scripts._read(file) if line in ("--#scope", "--#end"))
        assert counted["--#scope"] == counted["--#end"], name
