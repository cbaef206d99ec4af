"""What PyPI `bullmq` 3.4.4 cannot do, or does otherwise, so that it has no interop test where Node has one.

A version that can do it fails here.
"""

import re

import pytest
import redis

from ._peer import PeerError
from ._sides import OurSide, PeerSide
from ._wait import until, until_event


@pytest.mark.parametrize(
    ("kind", "missing", "offered"),
    [
        ("Queue", {"getMetrics", "removeOrphanedJobs", "getVersion", "removeDeduplicationKey"}, {"clean", "add"}),
        (
            "Job",
            {"changeDelay", "waitUntilFinished", "moveToWait", "getDependencies", "getIgnoredChildrenFailures"}
            | {"removeUnprocessedChildren"},
            {"promote"},
        ),
        ("Worker", {"rateLimit", "RateLimitError"}, {"close"}),
    ],
)
async def test_what_it_does_not_offer(kind: str, missing: set[str], offered: set[str], pypi: PeerSide) -> None:
    found = await pypi.peer.call("offers", kind=kind, names=sorted(missing | offered))

    assert set(found) == offered


async def test_its_workers_are_in_nobodys_list_but_its_own(
    node: PeerSide, pypi: PeerSide, ours: OurSide, client: redis.Redis
) -> None:
    """It names its connections with the plain queue name where BullMQ has it in base64, and names two per worker."""
    # A queue that no other test uses: a worker that it closes by force leaves its connections open.
    await ours.start_worker("python-one", "list", {})
    await pypi.start_worker("pypi-one", "list", {})
    await until(lambda: _pypi_names(client) == {b"pypi-one"}, "it is connected")
    await until(lambda: b"name=bull:bGlzdA==:w:python-one" in _clients(client), "ours is connected")

    by_node = [worker["rawname"] for worker in await node.peer.call("getWorkers", queue="list")]
    by_us = [worker.name for worker in await ours.queue("list").workers() or ()]
    by_itself = {worker["rawname"] for worker in await pypi.peer.call("getWorkers", queue="list")}

    assert (by_node, by_us) == (["bull:bGlzdA==:w:python-one"], ["python-one"])
    assert by_itself == {"bull:list:w:pypi-one"}


def _pypi_names(client: redis.Redis) -> set[bytes]:
    return set(re.findall(rb"name=bull:list:w:(\S+)", _clients(client)))


def _clients(client: redis.Redis) -> bytes:
    found: bytes = client.execute_command("CLIENT", "LIST")  # type: ignore[no-untyped-call]
    return found


@pytest.mark.requirement("X-45")
@pytest.mark.parametrize("job_id", ["7", "a:b", "0"])
async def test_it_accepts_ids_that_node_and_we_refuse_and_we_run_them(
    job_id: str, node: PeerSide, pypi: PeerSide, ours: OurSide, client: redis.Redis
) -> None:
    with pytest.raises(PeerError):
        await node.add("q", "job", {}, jobId=job_id)
    await pypi.add("q", "job", {"n": 1}, jobId=job_id)

    await ours.start_worker("w", "q", {})
    await until_event(client, "q", "completed", job_id)

    assert await ours.queue("q").state_of(job_id) == "completed"
