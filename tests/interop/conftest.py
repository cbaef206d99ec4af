"""The foreign implementations, each one process for the whole session, and a server that nobody else uses."""

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import pytest_asyncio
import redis

from bullpen.testing import RedisServer, check_server, need

from ._node import OLDER_PACKAGES, NodeMissing, NodePeer, NodeTools, find_node, install_packages
from ._peer import Peer
from ._pypi import OLDER_VERSION, PyBullmqMissing, PyBullmqPeer, ensure_environment
from ._sides import OurSide, PeerSide


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # The peers live as long as the session, so their pipes belong to one loop: all tests here must run on it.
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here) and pytest_asyncio.is_async_test(item):
            item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)


def _missing(reason: str) -> None:
    if os.environ.get("CI") == "true":
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def interop_server() -> Iterator[RedisServer]:
    kind = os.environ.get("BULLPEN_TEST_SERVER", "valkey")
    need(kind)
    with RedisServer.start(kind) as server:
        yield server


@pytest.fixture
def interop_url(interop_server: RedisServer) -> str:
    return interop_server.url


@pytest.fixture(scope="session")
def node_tools() -> NodeTools:
    try:
        tools = find_node()
    except NodeMissing as missing:
        _missing(str(missing))
        raise AssertionError("unreachable") from missing
    install_packages(tools)
    return tools


@pytest.fixture(scope="session")
def pypi_python() -> Path:
    try:
        return ensure_environment()
    except PyBullmqMissing as missing:
        _missing(str(missing))
        raise AssertionError("unreachable") from missing


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def node_peer(interop_server: RedisServer, node_tools: NodeTools) -> AsyncIterator[NodePeer]:
    async with NodePeer(interop_server.url, node_tools) as peer:
        yield peer


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def pypi_peer(interop_server: RedisServer, pypi_python: Path) -> AsyncIterator[PyBullmqPeer]:
    async with PyBullmqPeer(interop_server.url, pypi_python) as peer:
        yield peer


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def older_peers(
    interop_server: RedisServer, node_tools: NodeTools
) -> AsyncIterator[Callable[[str], Awaitable[Peer]]]:
    """Start an older client by its version, once per session."""
    started: dict[str, Peer] = {}
    async with AsyncExitStack() as stack:

        async def peer_of(version: str) -> Peer:
            if version not in started:
                url = interop_server.url
                try:
                    peer = (
                        NodePeer(url, node_tools, package=OLDER_PACKAGES[version])
                        if version in OLDER_PACKAGES
                        else PyBullmqPeer(url, ensure_environment(version))
                    )
                except PyBullmqMissing as missing:
                    _missing(str(missing))
                started[version] = await stack.enter_async_context(peer)
            return started[version]

        yield peer_of


@pytest_asyncio.fixture(loop_scope="session", params=[*OLDER_PACKAGES, OLDER_VERSION])
async def older(
    request: pytest.FixtureRequest, older_peers: Callable[[str], Awaitable[Peer]], client: redis.Redis
) -> AsyncIterator[PeerSide]:
    """Each of the older clients in turn (or those that a test names), with nothing running."""
    side = PeerSide(request.param, await older_peers(request.param))
    yield side
    await side.reset()


@pytest.fixture
def client(interop_server: RedisServer, request: pytest.FixtureRequest) -> Iterator[redis.Redis]:
    """A blocking, undecoded client; the server is empty when the test begins and its queues are sound when it ends."""
    with redis.Redis.from_url(interop_server.url) as connected:
        connected.flushall()
        yield connected
        # Torn down after the sides: nobody works any more, but jobs that a closed worker held may still be active.
        violations = check_server(connected, in_flight=True)
    if violations and request.node.get_closest_marker("leaves_queue_broken") is None:
        pytest.fail("\n".join(["the test left broken queues behind:", *map(str, violations)]), pytrace=False)


@pytest_asyncio.fixture(loop_scope="session")
async def node(node_peer: NodePeer, client: redis.Redis) -> AsyncIterator[PeerSide]:
    """npm bullmq, with nothing running when the test begins and after it."""
    side = PeerSide("node", node_peer)
    yield side
    await side.reset()


@pytest_asyncio.fixture(loop_scope="session")
async def pypi(pypi_peer: PyBullmqPeer, client: redis.Redis) -> AsyncIterator[PeerSide]:
    """PyPI bullmq, with nothing running when the test begins and after it."""
    side = PeerSide("pypi", pypi_peer)
    yield side
    await side.reset()


@pytest.fixture(params=["node", "pypi"])
def other(request: pytest.FixtureRequest, node: PeerSide, pypi: PeerSide) -> PeerSide:
    """Each of the other implementations in turn."""
    return {"node": node, "pypi": pypi}[request.param]


@pytest_asyncio.fixture(loop_scope="session")
async def ours(interop_server: RedisServer, client: redis.Redis) -> AsyncIterator[OurSide]:
    """bullpen, with nothing running when the test begins and after it."""
    side = OurSide(interop_server.url, client)
    yield side
    await side.reset()
