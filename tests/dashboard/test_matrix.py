"""Every route with every role, with a second tenant's ids, and for nobody, over a ledger that has them all."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator

import httpx
import pytest

from bullpen import Bullpen
from bullpen.dashboard import Role, Visitor, make_dashboard
from bullpen.dashboard.access import Permission
from bullpen.dashboard.routes import PageRoute
from bullpen.ledger import OutboxItem
from bullpen.ledger.messages import SqlMessages
from bullpen.messages import Messages, Recipient
from bullpen.plugins.transports.memory import MemoryBroker, MemoryClient
from bullpen.runs import RunPayload, Runs
from tests.dashboard._kit import HOST, SAME, As, settings, transport
from tests.messages.kit import make

RUN = "7c6f4b0e-0000-4000-8000-00000000000a"
ROLES = {
    "nobody": None,
    "viewer": Visitor("v"),
    "operator": Visitor("o", Role.OPERATOR),
    "admin": Visitor("a", Role.ADMIN),
    "other tenant": Visitor("t", Role.ADMIN, ("t2",)),
}
SECRET = "only-of-t1"
_STREAMS = ("/stream", "/pulse")


@pytest.fixture
async def app(redis_url: str, sqlite_url: str) -> AsyncIterator[Bullpen]:
    """Something of the tenant t1 of every kind, and nothing of t2."""
    async with Bullpen(settings=settings(redis_url, ledger_url=sqlite_url)) as made:
        await made.ledger.migrate()
        item = OutboxItem(
            integration_type="webhook:x",
            event_type=SECRET,
            source_stream_id="s",
            source_event_id="e",
            payload={"text": SECRET},
            tenant_id="t1",
            correlation_id="c-1",
        )
        await made.ledger.outbox.enqueue_many([item])
        runs = Runs(made.ledger, made.connection, prefix=made.prefix)
        payload = RunPayload(run_id=RUN, tenant_id="t1", version_id=SECRET, definition={}, context_inputs={})
        await runs.service.submit(payload, actor="test", cost=0)
        messages: Messages = make(made.ledger, MemoryClient(MemoryBroker()))
        person = Recipient(
            id=SECRET, tenant_id="t1", zone="UTC", channel="email", address="p@example.com",
            occasions={"birthday": "1990-01-01"},
        )  # fmt: skip
        await messages.recipients.save(person)
        await made.queue("mails").add("job", {"text": SECRET}, job_id="one")
        yield made
        await messages.aclose()


async def address(app: Bullpen, route: PageRoute) -> str:
    """The route with ids of things that are there."""
    (row,) = await app.ledger.outbox.find(integration_type="webhook:x")
    found = await SqlMessages(app.ledger.database).find(limit=1)
    first = route.pattern.split("/")[1]
    ids = {"outbox": row.id, "runs": RUN, "messages": found[0].id if found else row.id, "chains": "c-1"}
    given = {"queue": "mails", "job": "one", "type": "webhook:x", "verb": "cancel", "id": ids.get(first, "1")}
    return re.sub(r"\{(\w+)\}", lambda part: given.get(part[1], "x"), route.pattern)


@pytest.mark.requirement("W-78")
@pytest.mark.parametrize("role", list(ROLES))
@pytest.mark.requirement("D-110")
@pytest.mark.requirement("D-112")
async def test_every_route_obeys_role_and_tenant(app: Bullpen, role: str) -> None:
    """Pages of another tenant's objects are as if they did not exist, and nothing of theirs is in any answer."""
    visitor = ROLES[role]
    dashboard = make_dashboard(app, access=As(visitor))
    async with httpx.AsyncClient(transport=transport(dashboard), base_url=HOST) as http:
        for route in dashboard.routes:
            if route.pattern.startswith(_STREAMS):
                continue
            path = await address(app, route)
            for base in ("", "/api/v1"):
                answer = await http.request(route.method, f"{base}{path}", headers=SAME)
                told = (role, route.method, f"{base}{path}", answer.status_code)
                assert answer.status_code != 500, told
                if visitor is None:
                    assert answer.status_code in ((200, 404) if route.open else (401, 303)), told
                elif not visitor.may(route.permission) and not route.open:
                    assert answer.status_code == 403, told
                elif visitor.tenants:
                    allowed = {200, 303, 404, 409, 422} if route.for_tenants or route.open else {403}
                    assert answer.status_code in allowed or route.pattern == "/", told
                if (
                    visitor is None
                    or visitor.tenants
                    or (not visitor.may(Permission.PAYLOADS) and path.startswith("/queues"))
                ):
                    assert SECRET not in answer.text, told
    await dashboard.aclose()


@pytest.mark.requirement("D-111")
async def test_every_change_is_refused_where_the_dashboard_only_reads(app: Bullpen) -> None:
    from dataclasses import replace

    wanted = replace(app.settings.dashboard, read_only=True)
    dashboard = make_dashboard(app, access=As(ROLES["admin"]), settings=wanted)
    async with httpx.AsyncClient(transport=transport(dashboard), base_url=HOST) as http:
        for route in dashboard.routes:
            if route.method == "POST" and route.permission is not Permission.SEE:
                answer = await http.post(await address(app, route), headers=SAME)
                assert answer.status_code == 403, route.pattern
    await dashboard.aclose()
    entries = await app.ledger.audit.read()
    assert [entry.action for entry in entries if entry.actor == "a"] == []
