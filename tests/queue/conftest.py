"""Fixtures of the queue suites: a kit for one queue, closed before the server's structures are inspected."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping

import pytest

from bullpen.redis.acl import acl_rule
from bullpen.testing import RedisServer
from tests.loops import LoopFactory, loop_factories
from tests.queue._kit import Kit


@pytest.fixture
async def kit(redis_url: str, redis_server: RedisServer, queue_name: str) -> AsyncIterator[Kit]:
    """Queues and workers of one queue; all closed in the end, whatever the test did.

    They log in as the user of the documented minimal ACL: a command that it lacks fails here first.
    """
    rule = acl_rule(inspection=True).split()
    redis_server.command("ACL", "SETUSER", "least", "reset", "on", ">secret", *rule, "~shop:*")  # the other prefix here
    url = redis_url.replace("redis://", "redis://least:secret@")
    made = Kit(url, queue_name, redis_server.client())

    yield made

    await made.close()


def pytest_asyncio_loop_factories(item: pytest.Item) -> Mapping[str, LoopFactory]:
    return loop_factories(item)
