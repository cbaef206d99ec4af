"""The channel of all endpoints: one route for every customer's target, each read from its row.

In: a message whose type is `endpoint:<id>`. Out: what the endpoint's own webhook answers; or why it may not be called
now. What the answer says about the endpoint is noted: it is gone, or it fails since so long that it is switched off.
A change of a row is followed within a second. Elsewhere: the rows (`bullpen.ledger.endpoints`), what users do with them
(`endpoints`), the call itself (a plug-in, given as `make_webhook`).
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from bullpen._kernel import telemetry
from bullpen._kernel.logs import get_logger
from bullpen.errors import DatabaseUnavailable, InvalidOption, MissingExtra, PayloadTampered, PayloadUnavailable
from bullpen.ledger import EndpointRow, EndpointState, EndpointStore
from bullpen.ledger.endpoint_records import endpoint_id_of
from bullpen.outbox.vault import Vault
from bullpen.ports.channel import (
    Accepted,
    Channel,
    ChannelHealth,
    Message,
    NotTried,
    Refused,
    SendResult,
    WhenUnknown,
)

__all__ = ["EndpointChannel", "MakeWebhook"]

_log = get_logger("bullpen.outbox")

GONE: Final = "HTTP_410"
NO_SUCH_ENDPOINT: Final = "NO_SUCH_ENDPOINT"
ENDPOINT_UNUSABLE: Final = "ENDPOINT_UNUSABLE"
_FRESH_S: Final = 1.0
_STATE_RETRY_MS: Final = 5_000
_KEY_RETRY_MS: Final = 30_000
_AWAY_RETRY_MS: Final = 1_000
_MOST_KNOWN: Final = 1_000
"""Endpoints that are kept open: each has connections of its own, so that a slow one holds up nobody else's."""


class MakeWebhook(Protocol):
    """Makes what calls one address. Raises InvalidOption for an address, a secret or a header that cannot be used."""

    def __call__(self, url: str, *, secrets: Sequence[str], headers: Mapping[str, str]) -> Channel: ...


@dataclass(slots=True)
class _Opened:
    """What calls one address. Closed when it is not wanted any more and nobody uses it."""

    webhook: Channel
    made_of: tuple[object, ...]
    in_use: int = 0
    is_wanted: bool = True

    async def release(self) -> None:
        self.in_use -= 1
        await self._close()

    async def drop(self) -> None:
        self.is_wanted = False
        await self._close()

    async def _close(self) -> None:
        if not self.is_wanted and not self.in_use:
            await self.webhook.aclose()


@dataclass(slots=True)
class _Known:
    """What this process knows about one endpoint."""

    row: EndpointRow | None
    fresh_until: float
    opened: _Opened | None = None
    is_kept: bool = True
    """False: the next call is the last one."""

    async def drop(self) -> None:
        self.is_kept = False
        opened, self.opened = self.opened, None
        if opened is not None:
            await opened.drop()


class EndpointChannel:
    """Delivers to endpoints. `off_after_ms` and `off_failures` say when one that only fails is switched off."""

    when_unknown = WhenUnknown.RESEND
    """The target gets the same `webhook-id` and `Idempotency-Key` again."""

    def __init__(
        self,
        store: EndpointStore,
        vault: Vault,
        make_webhook: MakeWebhook,
        *,
        off_after_ms: int | None,
        off_failures: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._vault, self._make_webhook = store, vault, make_webhook
        self._off_after_ms, self._off_failures = off_after_ms, off_failures
        self._clock = clock
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self._reading: dict[str, asyncio.Lock] = {}

    async def send(self, message: Message) -> SendResult:
        endpoint_id = endpoint_id_of(message.integration_type) or ""
        try:
            known = await self._read(endpoint_id)
            row = known.row
            # The message says whose it is, and the row too: a message that came past `publish` reaches no other tenant.
            if row is None or row.tenant_id != message.tenant_id:
                return Refused("there is no such endpoint of this tenant any more", NO_SUCH_ENDPOINT)
            if row.state is not EndpointState.ENABLED:
                return NotTried(f"endpoint {row.id} is {row.state}", _STATE_RETRY_MS, for_all=True)
            if row.rate is not None:
                wait_ms = await self._store.take_slot(row.id, tenant_id=row.tenant_id)
                if wait_ms is not None:
                    # Not later than that, however far away it is: a rate may be changed or taken away.
                    wait_ms = min(wait_ms, _STATE_RETRY_MS)
                    return NotTried(f"endpoint {row.id} has its rate", wait_ms, for_all=True)
        except DatabaseUnavailable as error:
            return NotTried(str(error), _AWAY_RETRY_MS)
        result = await self._call(known, row, message)
        await self._note(known, row, result)
        return result

    async def send_test(self, row: EndpointRow, message: Message) -> SendResult:
        """Send one message to an endpoint as it is stored, whatever its state. Nothing is noted."""
        return await self._call(_Known(row, 0.0, is_kept=False), row, message)

    async def check(self) -> ChannelHealth:
        """Nothing can be said about a target without sending it something."""
        return ChannelHealth(True)

    async def aclose(self) -> None:
        known, self._known = self._known, OrderedDict()
        for each in known.values():
            await each.drop()

    # ---- inside -------------------------------------------------------------------------------------------------

    async def _read(self, endpoint_id: str) -> _Known:
        """What is known, read again when that is a second ago. Those who ask at once wait for one query."""
        known = self._known.get(endpoint_id)
        if known is not None and self._clock() < known.fresh_until:
            return known
        lock = self._reading.setdefault(endpoint_id, asyncio.Lock())
        try:
            async with lock:
                known = self._known.get(endpoint_id)
                if known is None or self._clock() >= known.fresh_until:
                    row = await self._store.get(endpoint_id)
                    known = self._known.setdefault(endpoint_id, _Known(row, 0.0))
                    known.row, known.fresh_until = row, self._clock() + _FRESH_S
                    self._known.move_to_end(endpoint_id)
        finally:
            if not lock.locked():
                self._reading.pop(endpoint_id, None)
        await self._forget_oldest()
        return known

    async def _forget_oldest(self) -> None:
        while len(self._known) > _MOST_KNOWN:
            _, oldest = self._known.popitem(last=False)
            await oldest.drop()

    async def _call(self, known: _Known, row: EndpointRow, message: Message) -> SendResult:
        try:
            opened = await self._open(known, row)
        except PayloadUnavailable as error:
            _log.error("endpoint %s cannot be called: %s", row.id, error, extra=_fields(row))
            return NotTried(str(error), _KEY_RETRY_MS, for_all=True)
        except MissingExtra as error:
            return NotTried(str(error), _KEY_RETRY_MS, for_all=True)
        except (PayloadTampered, InvalidOption, ValueError, LookupError, TypeError) as error:
            # Written past us, or by settings that allowed what those of this process do not.
            reason = str(error) if isinstance(error, PayloadTampered | InvalidOption) else type(error).__name__
            return Refused(f"endpoint {row.id} cannot be called: {reason}", ENDPOINT_UNUSABLE)
        opened.in_use += 1
        try:
            return await opened.webhook.send(message)
        finally:
            if not known.is_kept:
                opened.is_wanted = False
            await opened.release()

    async def _open(self, known: _Known, row: EndpointRow) -> _Opened:
        secrets = [secret.key for secret in self._vault.secrets_of(row)]
        made_of = (row.url, row.headers, tuple(secrets))
        if known.opened is None or known.opened.made_of != made_of:
            webhook = self._make_webhook(row.url, secrets=secrets, headers=self._vault.headers_of(row))
            before, known.opened = known.opened, _Opened(webhook, made_of)
            if before is not None:
                await before.drop()
        return known.opened

    async def _note(self, known: _Known, row: EndpointRow, result: SendResult) -> None:
        """Learn from a result. Never raises: what cannot be written now the next delivery writes."""
        if isinstance(result, NotTried):
            return
        try:
            if isinstance(result, Accepted):
                if row.failing_since is not None:
                    await self._store.note_success(row)
                    known.fresh_until = 0.0
                return
            await self._note_failure(known, row, result.code)
        except DatabaseUnavailable:
            pass

    async def _note_failure(self, known: _Known, row: EndpointRow, code: str) -> None:
        off = await self._store.note_failure(
            row, code, gone=code == GONE, after_ms=self._off_after_ms, least=self._off_failures
        )
        if row.failing_since is None or off is not None:
            known.fresh_until = 0.0
        if off is not None:
            _log.error("endpoint %s was switched off: %s", off.id, off.reason, extra=_fields(off))
            telemetry.emit("outbox.endpoint_disabled", endpoint_id=off.id, tenant_id=off.tenant_id, code=code)


def _fields(row: EndpointRow) -> dict[str, str]:
    return {"endpointId": row.id, "tenantId": row.tenant_id}
