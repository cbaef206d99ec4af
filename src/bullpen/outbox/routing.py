"""Which channel and which queue serve an integration type. No input or output.

`webhook:partnerX` leaves through the channel registered for exactly that, else for `webhook:*`. Its jobs are in the
queue `outbox-webhook-partnerX`; split by tenant, in `outbox-webhook-partnerX-acme`. BullMQ allows no colon in a queue's
name; a plain replacement would give `kafka:a-b` and `kafka-a:b` one queue, so what could be mistaken is
percent-encoded, and every name can be read back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypedDict
from urllib.parse import quote, unquote

from bullpen._kernel.duration import check_int
from bullpen.delivery.gates import Breaker
from bullpen.errors import InvalidOption, require
from bullpen.ports.channel import Channel
from bullpen.queue import RateLimit

Strategy = Literal["direct", "queued"]

QUEUE_PREFIX: Final = "outbox"
_USUAL_LIMIT_MS: Final = 30_000
_SAFE: Final = "._~@+=,!()*'"  # beside letters and digits; all else is encoded, the dash above all


class RouteArguments(TypedDict, total=False):
    """What `Outbox.route` takes besides pattern and channel: the other fields of `Route`, which says what each does."""

    strategy: Strategy | None
    concurrency: int
    timeout_ms: int | None
    split_tenants: bool
    rate_limit: RateLimit | None
    max_queued: int
    breaker: Breaker | None
    one_tenant: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """How messages of an integration type leave."""

    channel: Channel | None = None
    """What delivers them. None: other processes do; this one only puts jobs into the queue."""
    strategy: Strategy | None = None
    """direct: the dispatcher delivers. queued: it adds a job per message, and workers deliver. None: queued."""
    concurrency: int = 20
    """Deliveries at the same time, per dispatcher (direct) or per worker (queued)."""
    timeout_ms: int | None = None
    """How long one delivery may take, instead of the channel's own limit. None: as that limit says, at most 30 s, or
    half of a lease below a minute."""
    split_tenants: bool = False
    """A queue for each tenant, so that one tenant's jobs never stand before another's."""
    rate_limit: RateLimit | None = None
    """Deliveries started per time and queue; with `split_tenants` that is per tenant. Only queued."""
    max_queued: int = 200
    """Jobs that may wait in the queue before no more are added. The database holds the rest, and claims it fairly; what
    is in the queue leaves in its order, so a tenant that comes new waits for that much. More than workers can do in a
    fifth of a second gains nothing."""
    breaker: Breaker | None = Breaker()  # noqa: RUF009 - frozen
    """When to stop calling a destination that does not answer. None: never."""
    one_tenant: bool = False
    """All messages of one integration type are of one tenant, as those of an endpoint: nothing has to be shared among
    tenants, which saves a query per type and claim."""

    def __post_init__(self) -> None:
        require("strategy", self.strategy in (None, "direct", "queued"), "'direct', 'queued' or None", self.strategy)
        check_int("concurrency", self.concurrency, minimum=1)
        if self.timeout_ms is not None:
            check_int("timeout_ms", self.timeout_ms, minimum=1)
        check_int("max_queued", self.max_queued, minimum=1)
        require(
            "channel", self.channel is not None or not self.is_direct, "a channel, to deliver directly", self.channel
        )
        for name in ("split_tenants", "rate_limit"):
            require(
                name, not (self.is_direct and getattr(self, name)), "none: only queues have it", getattr(self, name)
            )

    @property
    def is_direct(self) -> bool:
        return self.strategy == "direct"

    def limit_ms(self, lease_ms: int) -> int:
        """How long one delivery under a lease may take. The other half of the lease is for writing what became of
        it."""
        return self.timeout_ms or max(1, min(_USUAL_LIMIT_MS, lease_ms // 2))


class Router:
    """Resolves integration types. Keys are whole types or `<channel>:*`."""

    def __init__(self, routes: Mapping[str, Route]) -> None:
        self._routes: dict[str, Route] = {}
        for pattern, route in routes.items():
            self.add(pattern, route)

    def add(self, pattern: str, route: Route) -> None:
        """Register one more; the last one for a pattern counts."""
        channel, colon, name = pattern.partition(":")
        fits = bool(channel) and "*" not in channel and ("*" not in name or name == "*") and (bool(name) == bool(colon))
        require("routes", fits, "an integration type such as 'webhook:partnerX', or 'webhook:*'", pattern)
        self._routes[pattern] = route

    def resolve(self, integration_type: str) -> Route | None:
        """The route of a type; None when nobody registered one, or when the type names no target: such a row has come
        past our own door."""
        channel, colon, name = integration_type.partition(":")
        if not channel or (colon and not name):
            return None
        return self._routes.get(integration_type) or self._routes.get(f"{channel}:*")

    def items(self) -> list[tuple[str, Route]]:
        """All patterns with their routes."""
        return list(self._routes.items())

    def exact_types(self) -> list[str]:
        """Types that were registered by their whole name."""
        return [name for name in self._routes if not name.endswith(":*")]


def queue_name(integration_type: str, tenant_id: str | None = None) -> str:
    """The queue of a type, or of one tenant's share of it."""
    channel, colon, name = integration_type.partition(":")
    parts = [channel, name] if colon else [channel]
    if tenant_id is not None:
        parts = [channel, name, tenant_id]
    if not channel or (colon and not name):
        raise InvalidOption("integration_type", "text such as 'webhook:partnerX'", integration_type)
    return "-".join([QUEUE_PREFIX, *map(_encode, parts)])


def read_queue_name(queue: str) -> tuple[str, str | None] | None:
    """Integration type and tenant of a queue; None when it is none of ours."""
    prefix, *parts = queue.split("-")
    if prefix != QUEUE_PREFIX or not 1 <= len(parts) <= 3 or not parts[0]:
        return None
    channel, *rest = (unquote(part, errors="surrogatepass") for part in parts)
    name = rest[0] if rest else ""
    integration_type = f"{channel}:{name}" if name else channel
    tenant = rest[1] if len(rest) == 2 else None
    # A name that we would write otherwise is not ours: somebody else's queue happens to look like it.
    return (integration_type, tenant) if _can_be(integration_type, tenant, queue) else None


def _can_be(integration_type: str, tenant: str | None, queue: str) -> bool:
    return queue_name(integration_type, tenant) == queue


def _encode(part: str) -> str:
    # `quote` never encodes the dash, which separates the parts here.
    return quote(part, safe=_SAFE, errors="surrogatepass").replace("-", "%2D")
