"""One process that has imported everything, for all pages."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.docs._forks import Forks
from tests.docs.test_pages import environment


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    made = Forks.launch(environment())
    yield made
    made.close()
