"""Short temporary directories: the path of a unix socket has room for about a hundred characters."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    # A server that ends may write its last lines while its directory is being removed.
    with tempfile.TemporaryDirectory(prefix="bp-", dir="/tmp", ignore_cleanup_errors=True) as directory:
        yield Path(directory)
