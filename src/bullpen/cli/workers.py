"""`bullpen workers`: who is connected to work, of every client, as the server tells it."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from bullpen.cli.arguments import QueuesArgument
from bullpen.cli.context import Done, OnServer, must_exist
from bullpen.cli.show import Column, Record
from bullpen.cli.tree import Group

if TYPE_CHECKING:
    from bullpen.app import Bullpen
    from bullpen.ops.overview import ConnectedWorker

app = Group()

_OURS: Final = re.compile(r"(?P<host>.+)-(?P<pid>\d+)-[0-9a-f]+")
"""How a worker of ours is called unless its program says otherwise."""
_MOST_ACTIVE: Final = 10_000


@app.command("list")
async def list_(at: OnServer, queues: QueuesArgument = None) -> None:
    """List worker processes of all clients: host, library and queues.

    `running` counts the jobs that a process has taken and not ended; a Node worker without a name cannot be counted.
    A worker with a name of its own does not say its process id; its host is the address of its connection.
    """
    from bullpen.ops.overview import workers_by_queue

    async with at.app() as app:
        for name in queues or ():
            await must_exist(app, name)
        found = await workers_by_queue(app.connection, app.prefix)
        if found is None:
            raise Done("the server refuses CLIENT LIST, so workers cannot be listed; allow that command")
        wanted = [each for each in found if not queues or each.queue in queues]
        running = await _running(app, {each.queue for each in wanted})
    at.list(
        WORKERS, _by_process(wanted, running), empty="no workers are connected; `bullpen run MODULE:APP` starts some"
    )


async def _running(app: Bullpen, queues: set[str]) -> Counter[tuple[str, str]]:
    """How many jobs each worker of each queue has taken and not ended."""
    from bullpen.queue import JobState

    found: Counter[tuple[str, str]] = Counter()
    for name in queues:
        heads = await app.queue(name).heads(JobState.ACTIVE, count=_MOST_ACTIVE)
        found.update((name, head.record.worker_id or "") for head in heads)
    return found


def _by_process(workers: list[ConnectedWorker], running: Counter[tuple[str, str]]) -> list[dict[str, Any]]:
    """One record for each process; of clients that do not say which process they are, for each connection."""
    processes: dict[object, dict[str, Any]] = {}
    for each in workers:
        ours = _OURS.fullmatch(each.name)
        # The address of a connection by a unix socket is the path of the socket, on the server's machine.
        address = "(unix socket)" if each.address.startswith("/") else each.address.rpartition(":")[0]
        host, pid = (ours["host"], int(ours["pid"])) if ours else (address, None)
        made = processes.setdefault(
            (host, pid) if pid else each.address,
            {
                "host": host,
                "pid": pid,
                "name": None if ours else each.name or None,
                "library": each.library or ("bullpen" if ours else None),
                "queues": [],
                "running": 0 if each.name else None,
                "idleSeconds": each.idle_s,
                "connectedSeconds": each.age_s,
            },
        )
        made["queues"] = sorted({*made["queues"], each.queue})
        made["running"] = running.pop((each.queue, each.name), 0) + made["running"] if each.name else None
        made["idleSeconds"] = min(made["idleSeconds"], each.idle_s)
        made["connectedSeconds"] = max(made["connectedSeconds"], each.age_s)
    return list(processes.values())


WORKERS = Record(
    lambda each: each,
    (
        Column("host"),
        Column("pid"),
        Column("name", worth=3),
        Column("library", worth=2),
        Column("queues", lambda each: ", ".join(each["queues"]), least=16),
        Column("running"),
        Column("idle", lambda each: f"{each['idleSeconds']} s", worth=1, is_number=True),
    ),
)
