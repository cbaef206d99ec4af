"""What must not stand in any file of the project: traces of one machine, promises for later."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

FORBIDDEN = {
    "a path of one machine": r"(?<![\w.~-])/(?:work/(?:main|shared|\.)|root/|home/\w|Users/\w)",
    "the address of a package index": (
        r"https?://[\w.-]*(?:registry|artifactory|nexus|pythonhosted|\bmirror|pkg\.dev)|pypi\.org/simple|--(?:extra-)?index-url"
    ),
    "a promise for later": r"\b(?:TODO|FIXME|XXX)\b|(?i:coming soon)",
    "a page that is not part of the project": (
        r"\b(?:ARCHITECTURE|REQUIREMENTS|COMPONENTS|STYLE|CORE|bullmq-protocol)\.md\b"
        r"|(?i:\bthe seeds?\b|\bseed (?:documents?|files?|\d)|\bprotocol page\b|\bdecision \d)"
    ),
    "a ticket that the reader cannot open": r"(?i:\bissue #?\d)",
    "a merge that was not finished": r"^(?:<{7}|>{7}) ",
}


@cache
def ignored() -> list[str]:
    lines = (ROOT / ".gitignore").read_text().splitlines()
    return [".git", *(line.strip("/") for line in lines if line and not line.startswith("#"))]


def project_files(directory: Path = ROOT) -> Iterator[Path]:
    """All files that are or could be committed. Without git, which the machine may not have."""
    for path in sorted(directory.iterdir()):
        if any(fnmatch.fnmatch(path.name, pattern) for pattern in ignored()) or path == Path(__file__):
            continue
        if path.is_dir():
            yield from project_files(path)
        else:
            yield path


@cache
def texts() -> dict[Path, str]:
    """Of files that are text: the bytes of a picture may spell anything."""
    read = {path: path.read_bytes() for path in project_files()}
    return {path: raw.decode("utf-8", "replace") for path, raw in read.items() if b"\0" not in raw[:8_000]}


@pytest.mark.parametrize("what", FORBIDDEN)
def test_no_file_has(what: str) -> None:
    pattern = re.compile(FORBIDDEN[what], re.MULTILINE)

    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:120]}"
        for path, text in texts().items()
        if pattern.search(text)
        for number, line in enumerate(text.splitlines(), start=1)
        if pattern.search(line)
    ]

    assert found == []


def test_constraints_are_bare_versions() -> None:
    """An address in that file would send every reader to the author's index."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()

    assert [line for line in lines if not re.fullmatch(r"[a-z0-9-]+==[0-9a-z.]+", line)] == []


@pytest.mark.requirement("O-64")
def test_no_file_holds_a_private_key() -> None:
    """A key for a test server is made by the test; a committed one is copied into production sooner or later."""
    begin = re.compile(rb"-----BEGIN (?:[A-Z]+ )?PRIVATE KEY-----")

    assert [path for path in project_files() if begin.search(path.read_bytes())] == []
