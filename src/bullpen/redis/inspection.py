"""Ask the servers of a connection what an operator should know, now.

In: a connection. Out: findings (`checks`). Nothing is written.
"""

from __future__ import annotations

import time

from bullpen.errors import ConnectionLost, ServerRefused
from bullpen.redis.address import SentinelAddress
from bullpen.redis.checks import Facts, ServerFinding, ServerVerdict, judge_facts, judge_replicas
from bullpen.redis.client import Connection

__all__ = ["inspect_server"]


async def inspect_server(connection: Connection) -> list[ServerFinding]:
    """Ask every primary of a connection now. A server that cannot be reached is a finding too; never raises for one."""
    findings: list[ServerFinding] = []
    try:
        async with connection.every_primary() as doors:
            for door in doors:
                asked_at = time.time()
                questions = (
                    ("INFO",),
                    ("CONFIG", "GET", "save"),
                    ("TIME",),
                    ("CONFIG", "GET", "min-replicas-to-write"),
                )
                info, save, server_time, least = await door.call_many(questions)
                facts = Facts.read(str(door.endpoint), info, save, server_time, asked_at, time.time())
                findings += judge_facts(facts)
                answer = judge_replicas(
                    facts.info or {}, least, expects_some=isinstance(connection.address, SentinelAddress)
                )
                if answer is not None:
                    findings.append(ServerFinding(facts.server, "replicas", *answer))
    except (ConnectionLost, ServerRefused) as error:
        findings.append(ServerFinding(str(connection.address), "version", ServerVerdict.CANNOT_TELL, str(error)))
    return findings
