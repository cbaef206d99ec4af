"""One warm process for all commands that are tried on a terminal."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.flows._warm import Warm


@pytest.fixture(scope="session")
def warm() -> Iterator[Warm]:
    process = Warm()
    yield process
    process.close()
