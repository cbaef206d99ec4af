"""Where the primaries are now: what to ask of sentinels and clusters, and how to read their answers.

In: an address and raw replies. Out: shards, that is ranges of slots with the server that may write them. No I/O here:
an event loop and a plain thread ask in their own ways (`client`, `blocking`), and both read with this. Asked only
when a connection is opened. The last answer of a cluster serves for the first opening of others (`client`): the node
must prove then that it holds the slot, so an answer that grew stale does no harm.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, NamedTuple

from bullpen.errors import ConnectionLost, ServerRefused
from bullpen.redis.address import ClusterAddress, Command, NodeAddress, SentinelAddress
from bullpen.wire.keys import slot

SLOTS: Final = 16384


class ServerUnavailable(ConnectionLost):
    """The server answered that it cannot serve now (loading, failing over, busy). Nothing was executed."""


class FailoverUnderWay(ServerUnavailable):
    """Sentinels are about to replace the primary: what it still takes it will throw away."""


class Shard(NamedTuple):
    """Slots `first` to `last` are written at `primary`."""

    first: int
    last: int
    primary: NodeAddress


class DiscoveryAnswer(NamedTuple):
    """What one of those who were asked knows."""

    shards: list[Shard]
    epoch: int = 0
    """Of a sentinel's configuration: it grows with each failover."""
    is_down: bool = False
    is_failing_over: bool = False
    """This sentinel leads a failover just now."""
    is_chosen: bool = False
    """The failover has come so far that the new primary takes writes; other sentinels do not know it yet."""


class Directory:
    """Whom to ask about one address, and in which order."""

    def __init__(self, address: SentinelAddress | ClusterAddress) -> None:
        self.address = address
        self.silent_until: dict[NodeAddress, float] = {}
        """Who did not answer in time, for plain threads, which ask one after the other: they are asked last, and not
        before then when others answered."""
        self._known: tuple[NodeAddress, ...] = ()

    @property
    def questions(self) -> tuple[Command, ...]:
        if isinstance(self.address, SentinelAddress):
            # The first names the new primary as soon as there is one; the second tells whether a failover is under way.
            service = self.address.service
            return (("SENTINEL", "GET-MASTER-ADDR-BY-NAME", service), ("SENTINEL", "MASTER", service))
        return (("CLUSTER", "SLOTS"),)

    @property
    def asks_all(self) -> bool:
        """One sentinel leads a failover, and only that one knows of it."""
        return isinstance(self.address, SentinelAddress)

    def candidates(self) -> list[NodeAddress]:
        """Whoever answered last comes first; nodes of a cluster that we learned of outlive its seeds."""
        return list(dict.fromkeys((*self._known, *self.address.seeds)))

    def is_enough(self, answers: int) -> bool:
        """Whether those who have not answered yet need not be waited for."""
        return answers > len(self.address.seeds) // 2 if self.asks_all else answers > 0

    def read(self, asked: NodeAddress, replies: list[Any]) -> DiscoveryAnswer:
        """What `asked` answered to the questions; errors stand in their places. Raises the error,
        ServerUnavailable when it knows of no primary that works, ServerRefused when the answer makes no sense."""
        if isinstance(replies[-1], Exception) and not isinstance(replies[0], list):
            raise replies[-1]
        try:
            if isinstance(self.address, SentinelAddress):
                return _watched(self.address, *replies)
            answer = DiscoveryAnswer(_slots(self.address, asked, replies[0]))
            self._known = tuple(dict.fromkeys((asked, *(shard.primary for shard in answer.shards))))
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise ServerRefused(f"{asked} sent an answer that cannot be read: {str(replies)[:200]}") from error
        return answer

    def decide(self, answers: list[DiscoveryAnswer]) -> list[Shard]:
        """Where the primaries are, from all that was answered. Raises ServerUnavailable when there is none now."""
        leading = [answer for answer in answers if answer.is_failing_over]
        for answer in leading:
            if answer.is_chosen:
                return answer.shards
        if leading:
            raise FailoverUnderWay(f"{self.address}: a failover is under way")
        newest = max(answer.epoch for answer in answers)
        for answer in answers:
            if answer.epoch == newest and not answer.is_down:
                return answer.shards
        # Connecting to a machine that is off would only cost the time until it fails.
        primary = answers[0].shards[0].primary
        raise ServerUnavailable(f"the primary {primary} is down and no other was chosen yet")

    def nobody(self, reasons: Iterable[tuple[NodeAddress, Exception]]) -> Exception:
        """The error when all candidates were asked in vain. Refused by all: waiting does not help."""
        reasons = list(reasons)
        text = "; ".join(f"{asked}: {reason}" for asked, reason in reasons)
        kind = ServerRefused if all(isinstance(reason, ServerRefused) for _, reason in reasons) else ConnectionLost
        return kind(f"{self.address}: no sentinel knows the primary ({text})")


def pick(shards: list[Shard], key: str | None) -> NodeAddress:
    """The server that holds `key`; any, when there is none."""
    if key is None:
        return shards[0].primary
    wanted = slot(key)
    for shard in shards:
        if shard.first <= wanted <= shard.last:
            return shard.primary
    raise ServerUnavailable(f"slot {wanted} of the cluster is served by no node now")


def _watched(address: SentinelAddress, named: Any, told: Any) -> DiscoveryAnswer:
    """One of the two may be refused to this user."""
    fields: dict[bytes, bytes] = {}
    if not isinstance(told, Exception):
        fields = dict(zip(told[::2], told[1::2], strict=False))
    configured = (fields[b"ip"].decode(), int(fields[b"port"])) if fields else None
    host, port = configured or ("", 0)
    if isinstance(named, list):
        host, port = named[0].decode(), int(named[1])
    flags = fields.get(b"flags", b"").split(b",")
    is_chosen = configured is not None and configured != (host, port)
    return DiscoveryAnswer(
        [Shard(0, SLOTS - 1, address.node.at(host, port))],
        epoch=int(fields.get(b"config-epoch", b"0")),
        is_down=not is_chosen and (b"s_down" in flags or b"o_down" in flags),
        is_failing_over=b"failover_in_progress" in flags,
        is_chosen=is_chosen,
    )


def _slots(address: ClusterAddress, asked: NodeAddress, reply: list[Any]) -> list[Shard]:
    shards = []
    for first, last, primary, *_ in reply:
        host = (primary[0] or b"").decode()
        # Nodes that do not know their own name let the client use the one it came by.
        shards.append(Shard(first, last, address.node.at(host if host not in ("", "?") else asked.host, primary[1])))
    if not shards:
        raise ServerUnavailable(f"{asked} knows no slots; the cluster is not set up")
    return shards
