"""Endpoints as people and programs manage them: make, change, switch off and on, rotate secrets, test, send again.

In: what a customer wants, by API, command line or HTTP. Out: a row, and everything that delivers follows within a
second; no route, no restart. A secret is shown once, to whoever made it. Elsewhere: the rows (`bullpen.ledger`),
delivering (`endpoint_channel`), storing a message for each endpoint (`Outbox.publish`).
"""

from __future__ import annotations

import base64
import secrets as _secrets
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final, TypedDict, Unpack

import msgspec

from bullpen._kernel.duration import check_int
from bullpen.delivery.gates import Breaker
from bullpen.errors import BullpenError, InvalidOption, RowNotFound, RowStateConflict, require
from bullpen.ledger import (
    EndpointAttempt,
    EndpointRate,
    EndpointRow,
    EndpointState,
    EndpointStore,
    Ledger,
    OutboxStatus,
    check_tenant,
)
from bullpen.ledger.endpoint_records import ENDPOINT_TYPES, check_events, check_rate, endpoint_type
from bullpen.ledger.records import check_text
from bullpen.outbox.endpoint_channel import EndpointChannel, MakeWebhook
from bullpen.outbox.enqueue import make_test_message
from bullpen.outbox.replay import replay
from bullpen.outbox.routing import Route
from bullpen.outbox.vault import Secret, Vault
from bullpen.ports.channel import SendResult
from bullpen.queue.codec import Codec

__all__ = ["Endpoint", "EndpointChanges", "EndpointFields", "EndpointOptions", "Endpoints", "NewSecret"]

_KEYS: Final = uuid.UUID("5d2f1f0e-8c6b-4b1e-9a56-0b4c1f8a7e21")
"""Where ids that are made of a caller's key begin; any fixed one."""
ENDPOINTS: Final = ENDPOINT_TYPES
_LONGEST_URL: Final = 2_000
_LONGEST_DESCRIPTION: Final = 200
_MOST_HEADERS: Final = 20
_LONGEST_INSTANT: Final = 18
"""Digits of microseconds: until the year 5138."""
_PAGE: Final = 200
_LONGEST_HEADERS: Final = 8_000
"""Characters of names and values together: what common servers take."""
_LONGEST_KEY: Final = 200
_LONGEST_OVERLAP_MS: Final = 366 * 86_400_000
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_SECRET_BYTES: Final = 32
_MOST_SECRETS: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointOptions:
    """How endpoints are treated. All durations in milliseconds."""

    off_after_ms: int | None = 5 * 86_400_000
    """An endpoint that has taken no delivery for so long, while some were tried, is switched off. None: never."""
    off_failures: int = 10
    """Deliveries that must have failed in that time."""
    overlap_ms: int = 86_400_000
    """How long the old secret signs beside the new one after a rotation."""
    most_per_tenant: int = 100
    """Endpoints that one tenant may have: each event of it becomes so many messages at most."""
    concurrency: int = 5
    """Deliveries to one endpoint at the same time, per process."""

    def __post_init__(self) -> None:
        if self.off_after_ms is not None:
            check_int("off_after_ms", self.off_after_ms, minimum=1)
        for name in ("off_failures", "most_per_tenant", "concurrency"):
            check_int(name, getattr(self, name), minimum=1)
        check_int("overlap_ms", self.overlap_ms, minimum=0, maximum=_LONGEST_OVERLAP_MS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """One endpoint as its owner may see it: without secrets, and without the values of headers."""

    id: str
    tenant_id: str
    url: str = field(repr=False)
    description: str
    events: tuple[str, ...]
    """Patterns of the event types that it wants."""
    header_names: tuple[str, ...]
    rate: EndpointRate | None
    state: EndpointState
    reason: str | None
    """Why it is in this state."""
    state_by: str | None
    state_at: datetime
    failing_since: datetime | None
    failures: int
    error_code: str | None
    old_secret_until: datetime | None
    """How long the secret before the last rotation signs as well."""
    created_at: datetime
    updated_at: datetime

    @property
    def cursor(self) -> str:
        """Where it stands among all: the page after it begins there, also when it was removed meanwhile."""
        return f"{(self.created_at - _EPOCH) // timedelta(microseconds=1)}.{self.id}"

    @property
    def integration_type(self) -> str:
        """What its messages are called in the outbox."""
        return endpoint_type(self.id)


@dataclass(frozen=True, slots=True)
class NewSecret:
    """An endpoint with a secret that is shown now and never again."""

    endpoint: Endpoint
    secret: str = field(repr=False)
    """Empty: the endpoint was made by an earlier call with the same key, which was shown it."""


class EndpointFields(TypedDict, total=False):
    """What `Endpoints.create` takes besides tenant, address and actor."""

    events: Sequence[str]
    description: str
    headers: Mapping[str, str]
    rate: EndpointRate | None
    secret: str | None
    idempotency_key: str | None


class EndpointChanges(TypedDict, total=False):
    """What `Endpoints.update` can change."""

    url: str
    events: Sequence[str]
    description: str
    headers: Mapping[str, str]
    rate: EndpointRate | None


class Endpoints:
    """The endpoints of one ledger.

    `make_webhook` makes the channel that calls one address; it also says which addresses may be stored. `codec` seals
    secrets and headers. Each method takes the tenant whose endpoint it is; another tenant's does not exist.
    """

    def __init__(
        self,
        ledger: Ledger,
        make_webhook: MakeWebhook,
        *,
        codec: Codec | None = None,
        options: EndpointOptions | None = None,
    ) -> None:
        self.options = options or EndpointOptions()
        self._ledger, self._make_webhook, self._vault = ledger, make_webhook, Vault(codec)
        self._channel = EndpointChannel(
            self._store,
            self._vault,
            make_webhook,
            off_after_ms=self.options.off_after_ms,
            off_failures=self.options.off_failures,
        )

    @property
    def route(self) -> Route:
        """How the messages of all endpoints leave: `Outbox(ledger, {"endpoint:*": endpoints.route})`. Directly: a queue
        for each endpoint would be a thousand queues."""
        return Route(
            channel=self._channel,
            strategy="direct",
            concurrency=self.options.concurrency,
            breaker=Breaker(),
            one_tenant=True,
        )

    @property
    def _store(self) -> EndpointStore:
        return self._ledger.endpoints

    # ---- one endpoint -------------------------------------------------------------------------------------------

    async def create(self, tenant_id: str, url: str, *, by: str, **fields: Unpack[EndpointFields]) -> NewSecret:
        """Store a new endpoint, enabled. Without `secret` one is made. This is the only time that it is shown.

        With `idempotency_key` a repeated call makes no second one: it gives the first, whose secret is not shown."""
        given = {"headers": {}, "description": "", **fields}
        key = given.pop("idempotency_key", None)
        check_text("idempotency_key", key, _LONGEST_KEY, required=False)
        require("idempotency_key", key != "", "non-empty text or None", key)
        endpoint_id = str(uuid.uuid4() if key is None else uuid.uuid5(_KEYS, f"{tenant_id}\0{key}"))
        secret = fields.get("secret") or _new_secret()
        given.pop("secret", None)
        given.setdefault("events", ("*",))
        given.setdefault("rate", None)
        values = self._values(check_tenant(tenant_id), endpoint_id, {"url": url, **given}, secret=secret)
        sealed = self._vault.seal_secrets([Secret(secret)], endpoint_id, tenant_id)
        row, is_new = await self._store.add(
            {**values, "id": endpoint_id, "tenant_id": tenant_id, "secrets": sealed},
            by=by,
            most=self.options.most_per_tenant,
        )
        return NewSecret(self._show(row), secret if is_new else "")

    async def get(self, tenant_id: str, endpoint_id: str) -> Endpoint:
        """Raises RowNotFound."""
        return self._show(await self._row(tenant_id, endpoint_id))

    async def owner_of(self, endpoint_id: str) -> str | None:
        """The tenant of an endpoint; None: there is no such one. For the service role."""
        row = await self._store.get(_need_id(endpoint_id))
        return None if row is None else row.tenant_id

    async def find(
        self,
        tenant_id: str | None = None,
        *,
        state: EndpointState | None = None,
        after: str | None = None,
        limit: int = 100,
    ) -> list[Endpoint]:
        """Endpoints in the order in which they were made, of one tenant or (service role) of all. The next page begins
        after the `cursor` of the last one, or after its id while it exists. Raises RowNotFound for an id that does
        not."""
        check_int("limit", limit, minimum=1, maximum=1_000)
        tenant = None if tenant_id is None else check_tenant(tenant_id)
        place = None if after is None else await self._place(after, tenant)
        rows = await self._store.find(tenant_id=tenant, state=state, after=place, limit=limit)
        return [self._show(row) for row in rows]

    async def update(
        self, tenant_id: str, endpoint_id: str, *, by: str, **changes: Unpack[EndpointChanges]
    ) -> Endpoint:
        """Change what is named; the rest stays. Raises RowNotFound."""
        require("changes", bool(changes), "at least one field to change", changes)
        values = self._values(check_tenant(tenant_id), endpoint_id, changes)
        detail: dict[str, Any] = {"changed": sorted(changes)}
        row = await self._store.change(
            tenant_id, _need_id(endpoint_id), values, action="endpoint.update", by=by, detail=detail
        )
        return self._show(row)

    async def rotate_secret(
        self, tenant_id: str, endpoint_id: str, *, by: str, secret: str | None = None, overlap_ms: int | None = None
    ) -> NewSecret:
        """Give it a new secret. The one before signs as well for `overlap_ms` (as the options say), so that a receiver
        may change it in between without losing a message. Raises RowNotFound, and RowStateConflict when somebody else
        has changed it at the same time, or when five secrets sign already; `overlap_ms=0` ends all others."""
        wanted = check_int("overlap_ms", self._overlap(overlap_ms), minimum=0, maximum=_LONGEST_OVERLAP_MS)
        overlap = timedelta(milliseconds=wanted)
        row, new = await self._row(tenant_id, endpoint_id), secret or _new_secret()
        self._make_webhook(row.url, secrets=[new], headers={})
        until = row.read_at + overlap
        old = [Secret(each.key, min(until, each.until or until)) for each in self._vault.secrets_of(row)]
        kept = [Secret(new), *(each for each in old if each.until != row.read_at)]
        if len(kept) > _MOST_SECRETS:
            # A secret that is left out earlier than was promised is a receiver that refuses everything.
            state = f"signed with {len(old)} secrets already"
            raise RowStateConflict("bullpen_endpoints", row.id, state, f"with fewer than {_MOST_SECRETS}")
        changed = await self._store.change(
            row.tenant_id,
            row.id,
            {"secrets": self._vault.seal_secrets(kept, row.id, row.tenant_id)},
            action="endpoint.rotate",
            by=by,
            detail={"overlapMs": wanted},
            version=row.version,
        )
        return NewSecret(self._show(changed), new)

    async def enable(self, tenant_id: str, endpoint_id: str, *, by: str, reason: str = "") -> Endpoint:
        """Send to it (again): what waits for it goes at once. Raises RowNotFound."""
        return await self._set_state(tenant_id, endpoint_id, EndpointState.ENABLED, by, reason)

    async def pause(self, tenant_id: str, endpoint_id: str, *, by: str, reason: str = "") -> Endpoint:
        """Send nothing to it; messages are stored for it and wait. Raises RowNotFound."""
        return await self._set_state(tenant_id, endpoint_id, EndpointState.PAUSED, by, reason)

    async def disable(self, tenant_id: str, endpoint_id: str, *, by: str, reason: str = "") -> Endpoint:
        """Send nothing to it, and store nothing for it. What is stored already waits. Raises RowNotFound."""
        return await self._set_state(tenant_id, endpoint_id, EndpointState.DISABLED, by, reason)

    async def remove(self, tenant_id: str, endpoint_id: str, *, by: str) -> None:
        """Forget it. What still waits for it dies with the code NO_SUCH_ENDPOINT. Raises RowNotFound."""
        await self._store.remove(check_tenant(tenant_id), _need_id(endpoint_id), by=by)

    # ---- its deliveries -----------------------------------------------------------------------------------------

    async def attempts(
        self, tenant_id: str, endpoint_id: str, *, before: int | None = None, limit: int = 50
    ) -> list[EndpointAttempt]:
        """What was tried, the last one first; those of messages that were sent as long as the outbox keeps them.
        `before` is the number of the last one of the page before. Raises RowNotFound."""
        check_int("limit", limit, minimum=1, maximum=1_000)
        if before is not None:
            check_int("before", before, minimum=0)
        row = await self._row(tenant_id, endpoint_id)
        return await self._store.attempts(row.id, tenant_id=row.tenant_id, before=before, limit=limit)

    async def send_test(self, tenant_id: str, endpoint_id: str, payload: Any = None) -> SendResult:
        """Send one message now, past the outbox and whatever its state, and say what it answered. Nothing is stored,
        counted or tried again; its event type is `bullpen.test.v1`. Raises RowNotFound."""
        row = await self._row(tenant_id, endpoint_id)
        message = make_test_message(endpoint_type(row.id), payload, row.tenant_id)
        return await self._channel.send_test(row, message)

    async def replay(
        self,
        tenant_id: str,
        endpoint_id: str,
        *,
        by: str,
        label: str,
        failed: bool = False,
        since: datetime | None = None,
        before: datetime | None = None,
        new_key: bool = False,
        limit: int | None = None,
    ) -> int:
        """Send again what it was sent in a period, or with `failed` what failed finally; returns how many. As copies
        with the key of their originals; the same label again copies nothing twice. Raises RowNotFound."""
        row = await self._row(tenant_id, endpoint_id)
        return await replay(
            self._ledger.outbox,
            by=by,
            label=label,
            integration_type=endpoint_type(row.id),
            tenant_id=row.tenant_id,
            since=since,
            before=before,
            new_key=new_key,
            limit=limit,
            status=OutboxStatus.DEAD if failed else OutboxStatus.SENT,
        )

    async def reseal(self, *, by: str) -> int:
        """Seal the secrets of all endpoints with the current key of the codec; returns how many were not. After that
        older keys are not needed for them any more. For the service role."""
        count, after = 0, None
        while rows := await self._store.find(after=after, limit=_PAGE):
            after = rows[-1].created_at, rows[-1].id
            for row in rows:
                count += await self._reseal(row, by)
        return count

    async def aclose(self) -> None:
        """Close connections to endpoints. The outbox does so for the route that it was given."""
        await self._channel.aclose()

    # ---- inside -------------------------------------------------------------------------------------------------

    def _overlap(self, given: int | None) -> int:
        return self.options.overlap_ms if given is None else given

    async def _row(self, tenant_id: str, endpoint_id: str) -> EndpointRow:
        row = await self._store.get(_need_id(endpoint_id), tenant_id=check_tenant(tenant_id))
        if row is None:
            raise RowNotFound("bullpen_endpoints", endpoint_id)
        return row

    async def _place(self, after: str, tenant_id: str | None) -> tuple[datetime, str]:
        """When an endpoint was made, and its id: from its cursor, or as it is stored."""
        made, dot, endpoint_id = after.rpartition(".") if isinstance(after, str) else ("", "", after)
        if not dot:
            row = await self._store.get(_need_id(endpoint_id), tenant_id=tenant_id)
            if row is None:
                raise RowNotFound("bullpen_endpoints", endpoint_id)
            return row.created_at, row.id
        try:
            fits = made.isascii() and made.isdigit() and len(made) < _LONGEST_INSTANT
            return _EPOCH + timedelta(microseconds=int(made if fits else "")), str(uuid.UUID(endpoint_id))
        except ValueError as error:
            raise InvalidOption("after", "the `cursor` or the id of an endpoint", after) from error

    async def _reseal(self, row: EndpointRow, by: str) -> bool:
        """Whether it had to be. Somebody who changes it at the same time has the first word; one that was removed
        needs nothing."""
        found: EndpointRow | None = row
        while found is not None and not self._vault.is_current(found):
            secrets, headers = self._vault.secrets_of(found), self._vault.headers_of(found)
            values = {
                "secrets": self._vault.seal_secrets(secrets, found.id, found.tenant_id),
                "headers": self._vault.seal_headers(headers, found.id, found.tenant_id),
            }
            try:
                await self._store.change(
                    *(found.tenant_id, found.id, values),
                    action="endpoint.reseal",
                    by=by,
                    detail={},
                    version=found.version,
                )
            except RowStateConflict:
                found = await self._store.get(row.id, tenant_id=row.tenant_id)
            except RowNotFound:
                return False
            else:
                return True
        return False

    async def _set_state(
        self, tenant_id: str, endpoint_id: str, state: EndpointState, by: str, reason: str
    ) -> Endpoint:
        row = await self._store.set_state(check_tenant(tenant_id), _need_id(endpoint_id), state, by=by, reason=reason)
        return self._show(row)

    def _values(
        self, tenant_id: str, endpoint_id: str, given: Mapping[str, Any], *, secret: str | None = None
    ) -> dict[str, Any]:
        """The columns of what was given, checked."""
        values: dict[str, Any] = {}
        url, headers = given.get("url"), given.get("headers")
        if "url" in given:
            check_text("url", url, _LONGEST_URL)
            values["url"] = url
        if "headers" in given:
            fits = isinstance(headers, Mapping) and len(headers) <= _MOST_HEADERS
            require("headers", fits, f"a mapping of at most {_MOST_HEADERS} names to texts", type(headers).__name__)
            length = sum(len(each) for pair in (headers or {}).items() for each in pair if isinstance(each, str))
            fits = length <= _LONGEST_HEADERS
            require("headers", fits, f"names and values of at most {_LONGEST_HEADERS} characters together", length)
            values["headers"] = self._vault.seal_headers(headers or {}, endpoint_id, tenant_id)
        # Made once to be checked: what the channel refuses is not stored.
        self._make_webhook(
            url or "https://example.com/", secrets=[] if secret is None else [secret], headers=headers or {}
        )
        if "events" in given:
            values["events"] = _as_json(check_events(given["events"]))
        if "description" in given:
            check_text("description", given["description"] or None, _LONGEST_DESCRIPTION, required=False)
            values["description"] = given["description"] or ""
        if "rate" in given:
            rate = check_rate(given["rate"])
            values |= {"rate_max": None if rate is None else rate.max, "rate_ms": None if rate is None else rate.per_ms}
        return values

    def _show(self, row: EndpointRow) -> Endpoint:
        """Without what is secret. A row that cannot be opened here is shown all the same."""
        try:
            secrets, headers = self._vault.secrets_of(row), self._vault.headers_of(row)
        except (BullpenError, ValueError, LookupError, TypeError):
            secrets, headers = [], {}
        return Endpoint(
            id=row.id,
            tenant_id=row.tenant_id,
            url=row.url,
            description=row.description,
            events=row.events,
            header_names=tuple(headers),
            rate=row.rate,
            state=row.state,
            reason=row.reason,
            state_by=row.state_by,
            state_at=row.state_at,
            failing_since=row.failing_since,
            failures=row.failures,
            error_code=row.error_code,
            old_secret_until=max((each.until for each in secrets if each.until is not None), default=None),
            created_at=row.created_at,
            updated_at=row.updated_at,
        )


def _new_secret() -> str:
    return f"whsec_{base64.b64encode(_secrets.token_bytes(_SECRET_BYTES)).decode()}"


def _as_json(values: Sequence[str]) -> str:
    return msgspec.json.encode(list(values)).decode()


def _need_id(given: str) -> str:
    """The id as it is stored. Raises InvalidOption for what can be none."""
    try:
        return str(uuid.UUID(given))
    except (ValueError, AttributeError, TypeError) as error:
        raise InvalidOption("endpoint_id", "the id of an endpoint, a UUID", given) from error
