"""Where the primaries are now: what to ask of sentinels and clusters, and how to read their answers.

In: an address and raw replies. Out: shards, that is ranges of slots with the server that may write them. No I/O here:
an event loop and a plain thread ask in their own ways (`_redis`, `_blocking`), and both read with this. Asked only
when a connection is opened, so nothing is kept that could grow stale except whom to ask first.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, NamedTuple

from bullpen.errors import ConnectionLost, ServerRefused
from bullpen.queue._address import ClusterAddress, Command, Endpoint, SentinelAddress
from bullpen.wire.keys import slot

SLOTS: Final = 16384


class Unavailable(ConnectionLost):
    """The server answered that it cannot serve now (loading, failing over, busy). Nothing was executed."""


class Shard(NamedTuple):
    """Slots `first` to `last` are written at `primary`."""

    first: int
    last: int
    primary: Endpoint


class Directory:
    """Whom to ask about one address, and in which order."""

    def __init__(self, address: SentinelAddress | ClusterAddress) -> None:
        self.address = address
        self._known: tuple[Endpoint, ...] = ()

    @property
    def question(self) -> Command:
        if isinstance(self.address, SentinelAddress):
            return ("SENTINEL", "MASTER", self.address.service)
        return ("CLUSTER", "SLOTS")

    def candidates(self) -> list[Endpoint]:
        """Whoever answered last comes first; nodes of a cluster that we learned of outlive its seeds."""
        return list(dict.fromkeys((*self._known, *self.address.seeds)))

    def read(self, asked: Endpoint, reply: Any) -> list[Shard]:
        """What `asked` answered. Raises Unavailable when it knows of no primary that works, ServerRefused when the
        answer makes no sense."""
        try:
            if isinstance(self.address, SentinelAddress):
                shards = [_watched(self.address, reply)]
                self._known = (asked,)
            else:
                shards = _slots(self.address, asked, reply)
                self._known = tuple(dict.fromkeys((asked, *(shard.primary for shard in shards))))
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ServerRefused(f"{asked} gave an answer that cannot be read: {str(reply)[:200]}") from error
        return shards

    def nobody(self, reasons: Iterable[tuple[Endpoint, Exception]]) -> Exception:
        """The error when all candidates were asked in vain. Refused by all: waiting does not help."""
        reasons = list(reasons)
        text = "; ".join(f"{asked}: {reason}" for asked, reason in reasons)
        kind = ServerRefused if all(isinstance(reason, ServerRefused) for _, reason in reasons) else ConnectionLost
        return kind(f"{self.address}: nobody tells where the primary is ({text})")


def pick(shards: list[Shard], key: str | None) -> Endpoint:
    """The server that holds `key`; any, when there is none."""
    if key is None:
        return shards[0].primary
    wanted = slot(key)
    for shard in shards:
        if shard.first <= wanted <= shard.last:
            return shard.primary
    raise Unavailable(f"slot {wanted} of the cluster is served by nobody now")


def _watched(address: SentinelAddress, reply: list[bytes]) -> Shard:
    fields = dict(zip(reply[::2], reply[1::2], strict=False))
    flags = fields.get(b"flags", b"").split(b",")
    host, port = fields[b"ip"].decode(), int(fields[b"port"])
    if b"s_down" in flags or b"o_down" in flags:
        # Connecting to a machine that is off would only cost the time until it fails.
        raise Unavailable(f"the primary {host}:{port} is down and no other was chosen yet")
    return Shard(0, SLOTS - 1, address.node.at(host, port))


def _slots(address: ClusterAddress, asked: Endpoint, reply: list[Any]) -> list[Shard]:
    shards = []
    for first, last, primary, *_ in reply:
        host = (primary[0] or b"").decode()
        # Nodes that do not know their own name let the client use the one it came by.
        shards.append(Shard(first, last, address.node.at(host if host not in ("", "?") else asked.host, primary[1])))
    if not shards:
        raise Unavailable(f"{asked} knows of no slots; the cluster is not set up")
    return shards
