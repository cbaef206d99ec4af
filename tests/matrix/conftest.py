"""Fixtures of the matrix: a place for all scenarios, and a kit that inspects what each one leaves behind."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from tests.matrix._places import Place, PlaceKit, kinds


@pytest.fixture(scope="module", params=kinds())
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    """Each kind of server in turn."""
    started = Place(request.param)
    yield started
    started.close()


@pytest.fixture
async def kit(place: Place, queue_name: str) -> AsyncIterator[PlaceKit]:
    """Queues and workers of one queue on this place, closed and inspected in the end."""
    place.flush()
    made = PlaceKit(place, queue_name)

    yield made

    await made.close()
    faults = made.faults()
    if faults:
        pytest.fail("\n".join(["the scenario left something wrong behind:", *faults]), pytrace=False)
