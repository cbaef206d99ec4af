"""`bullpen endpoints`: where tenants want their events, for whoever looks after the service."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from bullpen.cli.arguments import LimitOption, TenantOption, YesOption, duration, instant, parse_json
from bullpen.cli.context import Done, OnLedger, WrongCommand, whoami
from bullpen.cli.show import Column, Record, present
from bullpen.cli.tree import Argument, Group, Option

if TYPE_CHECKING:
    from bullpen.outbox import Endpoint, EndpointAttempt, EndpointRate, Endpoints
    from bullpen.outbox.endpoints import NewSecret

app = Group()

EndpointArgument = Annotated[str, Argument("ENDPOINT", "Id of the endpoint.")]
EventsOption = Annotated[
    list[str] | None,
    Option("--event", metavar="TYPE", help="Event type, or a beginning such as 'order.*'; may be repeated."),
]
DescriptionOption = Annotated[str | None, Option(metavar="TEXT", help="For people.")]
HeadersOption = Annotated[
    str | None,
    Option("--headers", metavar="JSON", help="Sent with each request; @FILE reads a file, - stdin. {}: none."),
]
RateOption = Annotated[int | None, Option(min=0, help="Deliveries started within --rate-ms, over all; 0: any.")]
RateMsOption = Annotated[int, Option(min=1, max=86_400_000, help="What --rate counts by.")]
SecretOption = Annotated[
    str | None, Option("--secret", metavar="FILE", help="File that holds the secret, - for stdin; else one is made.")
]
ReasonOption = Annotated[str, Option(metavar="TEXT", help="Reason, shown to others later.")]


@app.command("list")
async def list_(
    at: OnLedger,
    tenant: TenantOption = None,
    state: Annotated[str | None, Option(metavar="STATE", help="enabled, paused or disabled.")] = None,
    after: Annotated[str | None, Option(metavar="ENDPOINT", help="Begin behind this one.")] = None,
    limit: LimitOption = 50,
) -> None:
    """List endpoints, the oldest first."""
    from bullpen.outbox import EndpointState

    if state is not None and state not in tuple(EndpointState):
        raise WrongCommand(f"no such state {state!r}; there is {', '.join(EndpointState)}")
    async with _opened(at) as endpoints:
        wanted = None if state is None else EndpointState(state)
        found = await endpoints.find(tenant, state=wanted, after=after, limit=min(limit, 1_000))
    is_narrow = not (tenant is state is after is None)
    empty = "no such endpoints" if is_narrow else "no endpoints; `bullpen endpoints add TENANT URL` makes one"
    at.list(ENDPOINTS, found, empty=empty)


@app.command("show")
async def show_(at: OnLedger, endpoint: EndpointArgument, tenant: TenantOption = None) -> None:
    """Show one endpoint. Secrets and values of headers are never shown."""
    async with _one(at, endpoint, tenant) as (endpoints, owner):
        found = await endpoints.get(owner, endpoint)
    at.fields(_to_json(found))


@app.command()
async def add(
    at: OnLedger,
    tenant: Annotated[str, Argument("TENANT", "Whose endpoint it is.")],
    url: Annotated[str, Argument("URL", "Where to send.")],
    event: EventsOption = None,
    description: DescriptionOption = None,
    headers: HeadersOption = None,
    rate: RateOption = None,
    rate_ms: RateMsOption = 1_000,
    secret: SecretOption = None,
) -> None:
    """Make an endpoint, and print its secret: it is never shown again."""
    async with _opened(at) as endpoints:
        made = await endpoints.create(
            tenant,
            url,
            by=whoami(),
            events=event or ["*"],
            description=description or "",
            headers=_headers(headers) or {},
            rate=_rate(rate, rate_ms),
            secret=_read_secret(secret),
        )
    _say_secret(at, made)


@app.command()
async def change(
    at: OnLedger,
    endpoint: EndpointArgument,
    url: Annotated[str | None, Option(metavar="URL", help="Where to send.")] = None,
    event: EventsOption = None,
    description: DescriptionOption = None,
    headers: HeadersOption = None,
    rate: RateOption = None,
    rate_ms: RateMsOption = 1_000,
    tenant: TenantOption = None,
) -> None:
    """Change what is named; the rest stays."""
    given: dict[str, Any] = {
        "url": url,
        "events": event,
        "description": description,
        "headers": _headers(headers),
        "rate": _rate(rate, rate_ms),
    }
    changes = {name: value for name, value in given.items() if value is not None}
    if rate == 0:
        changes["rate"] = None
    if not changes:
        raise WrongCommand("name what to change: --url, --event, --description, --headers or --rate")
    async with _one(at, endpoint, tenant) as (endpoints, owner):
        at.fields(_to_json(await endpoints.update(owner, endpoint, by=whoami(), **changes)))


@app.command()
async def rotate(
    at: OnLedger,
    endpoint: EndpointArgument,
    overlap: Annotated[
        str | None, Option(metavar="TIME", help="How long the old secret signs as well: 24h, 0; else as configured.")
    ] = None,
    secret: SecretOption = None,
    tenant: TenantOption = None,
) -> None:
    """Make a new secret, and print it: it is never shown again."""
    overlap_ms = None if overlap is None else int(duration("--overlap", overlap).total_seconds() * 1000)
    async with _one(at, endpoint, tenant) as (endpoints, owner):
        made = await endpoints.rotate_secret(
            owner, endpoint, by=whoami(), secret=_read_secret(secret), overlap_ms=overlap_ms
        )
    _say_secret(at, made)


@app.command()
async def enable(
    at: OnLedger, endpoint: EndpointArgument, reason: ReasonOption = "", tenant: TenantOption = None
) -> None:
    """Send to an endpoint (again); what waits for it goes at once."""
    await _set_state(at, endpoint, tenant, "enable", reason)


@app.command()
async def pause(
    at: OnLedger, endpoint: EndpointArgument, reason: ReasonOption = "", tenant: TenantOption = None
) -> None:
    """Send nothing to an endpoint. Messages are stored for it and wait."""
    await _set_state(at, endpoint, tenant, "pause", reason)


@app.command()
async def disable(
    at: OnLedger, endpoint: EndpointArgument, reason: ReasonOption = "", tenant: TenantOption = None
) -> None:
    """Send nothing to an endpoint and store nothing for it."""
    await _set_state(at, endpoint, tenant, "disable", reason)


async def _set_state(
    at: OnLedger, endpoint: str, tenant: str | None, deed: Literal["enable", "pause", "disable"], reason: str
) -> None:
    async with _one(at, endpoint, tenant) as (endpoints, owner):
        change = {"enable": endpoints.enable, "pause": endpoints.pause, "disable": endpoints.disable}[deed]
        at.one(ENDPOINTS, await change(owner, endpoint, by=whoami(), reason=reason))


@app.command(destroys=True)
async def remove(at: OnLedger, endpoint: EndpointArgument, tenant: TenantOption = None, yes: YesOption = False) -> None:
    """Forget an endpoint. What waits for it dies with the code NO_SUCH_ENDPOINT."""
    at.confirm(f"Remove endpoint {endpoint}?", yes=yes)
    async with _one(at, endpoint, tenant) as (endpoints, owner):
        await endpoints.remove(owner, endpoint, by=whoami())
    at.say({"removed": endpoint}, f"removed: {endpoint}")


@app.command("test")
async def send_test(
    at: OnLedger,
    endpoint: EndpointArgument,
    payload: Annotated[str | None, Option(metavar="JSON", help="What to send; @FILE reads a file, - stdin.")] = None,
    tenant: TenantOption = None,
) -> None:
    """Send one test message now, past the outbox, and show what the endpoint answers."""
    content = None if payload is None else parse_json("--payload", payload)
    async with _one(at, endpoint, tenant) as (endpoints, owner):
        result: Any = await endpoints.send_test(owner, endpoint, content)
    answer = {"result": type(result).__name__, **{name: getattr(result, name) for name in result.__slots__}}
    at.say(answer, " ".join(str(value) for value in answer.values() if value not in ("", None)))
    if answer["result"] != "Accepted":
        raise at.failed("the test message was not delivered")


@app.command()
async def attempts(
    at: OnLedger,
    endpoint: EndpointArgument,
    before: Annotated[int | None, Option(min=0, help="Begin behind the attempt of this number.")] = None,
    limit: LimitOption = 50,
    tenant: TenantOption = None,
) -> None:
    """List what was tried, the last one first."""
    async with _one(at, endpoint, tenant) as (endpoints, owner):
        found = await endpoints.attempts(owner, endpoint, before=before, limit=min(limit, 1_000))
    at.list(ATTEMPTS, found, empty="nothing was sent there yet, or it is not kept any more")


@app.command()
async def replay(
    at: OnLedger,
    endpoint: EndpointArgument,
    label: Annotated[str, Option(metavar="TEXT", help="Name of this replay; the same again copies nothing.")],
    failed: Annotated[bool, Option("--failed", help="What failed finally, instead of what was sent.")] = False,
    since: Annotated[str | None, Option(metavar="TIME", help="Stored then or later (ISO 8601, UTC).")] = None,
    before: Annotated[str | None, Option(metavar="TIME", help="Stored before that (ISO 8601, UTC).")] = None,
    new_key: Annotated[
        bool, Option("--new-key", help="Give copies keys of their own: a target that knows the old takes them.")
    ] = False,
    limit: Annotated[int | None, Option(min=1, help="Look at this many messages at most.")] = None,
    tenant: TenantOption = None,
    yes: YesOption = False,
) -> None:
    """Send again what an endpoint was sent, or what failed. Copies are delivered; what is there stays as it is."""
    first, last = instant("--since", since), instant("--before", before)
    at.confirm(
        f"Send again {'what failed' if failed else 'everything that was sent'} there in that time?",
        yes=yes,
        refusal="this may send very much and needs --yes",
    )
    async with _one(at, endpoint, tenant) as (endpoints, owner):
        count = await endpoints.replay(
            *(owner, endpoint),
            by=whoami(),
            label=label,
            failed=failed,
            since=first,
            before=last,
            new_key=new_key,
            limit=limit,
        )
    at.say({"replayed": count}, f"replayed: {count}")


@app.command()
async def reseal(at: OnLedger) -> None:
    """Encrypt the secrets of all endpoints with the current key of the codec, so that older ones can go."""
    async with _opened(at) as endpoints:
        count = await endpoints.reseal(by=whoami())
    at.say({"resealed": count}, f"resealed: {count}")


# Reaching them ------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def _opened(at: OnLedger) -> AsyncIterator[Endpoints]:
    from bullpen.app import Bullpen

    async with Bullpen(settings=at.settings()) as opened:
        yield opened.endpoints


@asynccontextmanager
async def _one(at: OnLedger, endpoint_id: str, tenant: str | None) -> AsyncIterator[tuple[Endpoints, str]]:
    """The endpoints, and whose this one is. `--tenant` is needed where the login sees one tenant at a time."""
    async with _opened(at) as endpoints:
        owner = tenant or await endpoints.owner_of(endpoint_id)
        if owner is None:
            raise Done(f"there is no endpoint {endpoint_id}; `bullpen endpoints list` shows all")
        yield endpoints, owner


def _headers(text: str | None) -> dict[str, str] | None:
    if text is None:
        return None
    found = parse_json("--headers", text)
    if not isinstance(found, dict):
        raise WrongCommand("--headers takes a JSON object of names and texts")
    return found


def _rate(rate: int | None, per_ms: int) -> EndpointRate | None:
    from bullpen.outbox import EndpointRate

    return EndpointRate(rate, per_ms) if rate else None


def _read_secret(source: str | None) -> str | None:
    """Not on the command line itself, which other users of the machine may read."""
    if source is None:
        return None
    try:
        return (sys.stdin.read() if source == "-" else Path(source).read_text(encoding="utf-8")).strip()
    except (OSError, ValueError) as error:
        raise WrongCommand(f"the secret cannot be read from {source!r}: {error}") from None


# How they are shown -------------------------------------------------------------------------------------------------


def _say_secret(at: OnLedger, made: NewSecret) -> None:
    document = {**_to_json(made.endpoint), "secret": made.secret}
    at.say(document, f"endpoint {made.endpoint.id}", f"secret   {made.secret}")
    at.warn("give the secret to its owner now: it is never shown again")


def _to_json(endpoint: Endpoint) -> dict[str, Any]:
    rate = endpoint.rate
    fields = {
        "id": endpoint.id,
        "tenantId": endpoint.tenant_id,
        "url": endpoint.url,
        "description": endpoint.description or None,
        "events": list(endpoint.events),
        "headerNames": list(endpoint.header_names) or None,
        "rateMax": None if rate is None else rate.max,
        "rateMs": None if rate is None else rate.per_ms,
        "state": endpoint.state.value,
        "reason": endpoint.reason,
        "stateBy": endpoint.state_by,
        "stateAt": endpoint.state_at,
        "failingSince": endpoint.failing_since,
        "failures": endpoint.failures or None,
        "errorCode": endpoint.error_code,
        "oldSecretUntil": endpoint.old_secret_until,
        "createdAt": endpoint.created_at,
        "updatedAt": endpoint.updated_at,
    }
    return present(fields)


def _attempt_json(attempt: EndpointAttempt) -> dict[str, Any]:
    fields = {
        "number": attempt.number,
        "outcome": attempt.outcome,
        "eventType": attempt.event_type,
        "eventId": attempt.source_event_id,
        "row": attempt.outbox_id,
        "finishedAt": attempt.finished_at,
        "errorCode": attempt.error_code,
        "error": attempt.error,
        "receipt": attempt.receipt,
    }
    return present(fields)


ENDPOINTS = Record(
    _to_json,
    (
        *(Column("id"), Column("tenant", "tenantId"), Column("state"), Column("url", least=20)),
        Column("events", lambda each: ", ".join(each["events"]), worth=1, least=10),
        *(Column("failures", worth=2, is_number=True), Column("reason", worth=3, least=10)),
    ),
)
ATTEMPTS = Record(
    _attempt_json,
    (
        *(Column("number"), Column("at", "finishedAt"), Column("outcome"), Column("event", "eventType", least=10)),
        *(
            Column("code", "errorCode"),
            Column("answer", lambda each: each.get("error") or each.get("receipt"), worth=1),
        ),
        Column("row", worth=2),
    ),
)
