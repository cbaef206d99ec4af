"""KurrentDB keeps the promises of a source, on its real protocol.

`BULLPEN_TEST_KURRENT=esdb://…` runs the same suite against a real server, which must be empty and is filled.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterable, Iterator

import pytest

from bullpen.plugins.sources.kurrent import KurrentSource
from bullpen.ports.source import EventSource, NewEvent
from bullpen.testing.contracts.source import SourceContract
from bullpen.testing.kurrent import KurrentServer


class KurrentHarness:
    def __init__(self, server: KurrentServer, url: str) -> None:
        self.server, self.url = server, url

    def make(self, *, prefixes: Iterable[str] = (), regex: str | None = None) -> EventSource:
        return KurrentSource(self.url, prefixes=prefixes, regex=regex, batch_size=7, timeout_ms=5_000)

    async def append(self, stream: str, events: list[NewEvent], *, expected_version: int | None = None) -> None:
        writer = KurrentSource(self.url)
        await writer.append(stream, events, expected_version=expected_version)
        await writer.aclose()

    @contextlib.asynccontextmanager
    async def outage(self) -> AsyncIterator[None]:
        self.server.kill()
        yield
        self.server.restart()


class TestKurrentSource(SourceContract):
    @pytest.fixture
    def server(self) -> Iterator[KurrentServer]:
        with KurrentServer() as server:
            yield server

    @pytest.fixture(params=["direct", "discover"])
    def harness(self, server: KurrentServer, request: pytest.FixtureRequest) -> KurrentHarness:
        return KurrentHarness(server, server.url if request.param == "direct" else server.discover_url)
