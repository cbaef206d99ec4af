"""A private PostgreSQL starts wherever its programs lie."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bullpen.testing.postgres import PostgresServer, need_postgres


def test_it_starts_from_a_directory_that_its_account_cannot_enter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clone in root's home: PostgreSQL refuses to run as root, and nobody else can enter there.

    The programs need their libraries, which a wheel keeps beside its package. Whoever is not root runs them in place.
    """
    programs = need_postgres()
    closed = tmp_path / "closed"
    closed.mkdir()
    package = programs.parent.parent
    for part in (package, package.with_name(f"{package.name}.libs")):
        if part.is_dir():
            (closed / part.name).symlink_to(part)
    closed.chmod(0o700)
    monkeypatch.setenv("BULLPEN_TEST_POSTGRES", os.fspath(closed / programs.relative_to(package.parent)))

    with PostgresServer.start() as server:
        assert server.execute("SELECT 1") == [(1,)]
