"""Fixtures of the fault tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bullpen.testing import FaultProxy, RedisServer
from tests.chaos.arena import LONG, Arena, open_arena
from tests.conftest import StartServer


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The long form takes its time."""
    for item in items if LONG else ():
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(1_800))


@pytest.fixture
def server(start_server: StartServer) -> RedisServer:
    """A server for one test, which may be killed, frozen or filled."""
    return start_server()


@pytest.fixture
def durable_server(start_server: StartServer) -> RedisServer:
    """A server that forgets nothing it has acknowledged, even when killed."""
    return start_server(persistent=True, args=("--appendfsync", "always"))


@pytest.fixture
def arena(server: RedisServer, tmp_path: Path) -> Iterator[Arena]:
    with open_arena(server, tmp_path) as opened:
        yield opened


@pytest.fixture
def durable_arena(durable_server: RedisServer, tmp_path: Path) -> Iterator[Arena]:
    with open_arena(durable_server, tmp_path) as opened:
        yield opened


@pytest.fixture
def proxy(server: RedisServer) -> Iterator[FaultProxy]:
    """Faults on the way to `server`."""
    with FaultProxy(server) as opened:
        yield opened
