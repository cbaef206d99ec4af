"""Roles that hold for some queues only, and payloads that nobody sees without the permission."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import pytest

from bullpen import Bullpen, Worker
from bullpen.dashboard import Role, Visitor, make_dashboard
from bullpen.dashboard.access import Permission
from bullpen.ledger import OutboxItem
from bullpen.ledger.records import Died, Settlement
from bullpen.ops.marks import add_mark
from tests.dashboard._kit import HOST, SAME, As, settings, transport, visit
from tests.dashboard.test_pages import fail_one
from tests.ops.test_history import until

CANARY = "canary-5512"
MAIL = Visitor("ada", Role.ADMIN, queues=("mail-*",))


@pytest.mark.requirement("D-110")
async def test_a_role_holds_for_the_queues_of_its_pattern(redis_url: str) -> None:
    """Elsewhere its bearer is a viewer, on every route; so is he where many queues are meant."""
    async with Bullpen(settings=settings(redis_url)) as app:
        for name in ("mail-out", "invoices"):
            await app.queue(name).add("send", {"text": CANARY}, job_id="one")
        dashboard = make_dashboard(app, access=As(MAIL))
        async with httpx.AsyncClient(transport=transport(dashboard), base_url=HOST) as http:
            for route in dashboard.routes:
                if route.open or route.pattern.startswith(("/stream", "/pulse")):
                    continue
                path = re.sub(
                    r"\{(\w+)\}",
                    lambda part: {"queue": "invoices", "store": "invoices-dlq", "job": "one"}.get(part[1], "x"),
                    route.pattern,
                )
                answer = await http.request(route.method, path, headers=SAME)
                told = (route.method, path, answer.status_code)
                assert CANARY not in answer.text, told
                if route.permission in (Permission.ACT, Permission.ADMIN, Permission.PAYLOADS):
                    assert answer.status_code == 403, told
                else:
                    assert answer.status_code != 403, told
        await dashboard.aclose()

        mine = [
            (await visit(app, MAIL, path, data=data))[0]
            for path, data in (
                ("/queues/mail-out/jobs/one", None),
                ("/queues/mail-out/act/pause", {"reason": "x"}),
                ("/queues/invoices/act/pause", {"reason": "x"}),
                ("/queues-act/pause", {"reason": "x"}),
            )
        ]
        assert CANARY in mine[0].text
        assert [answer.status_code for answer in mine[1:]] == [303, 403, 403]
        assert await app.queue("mail-out").is_paused()
        assert not await app.queue("invoices").is_paused()


@pytest.mark.requirement("D-110")
async def test_dead_letters_of_other_queues_cannot_be_sent_by_naming_ones_own(redis_url: str) -> None:
    """The address names one store, the form another."""
    async with Bullpen(settings=settings(redis_url)) as app:
        job = await fail_one(redis_url, app.queue("invoices"))
        await fail_one(redis_url, app.queue("mail-out"))
        entry = f"dl-{job.id}-1"
        refused, other, mine = [
            (await visit(app, MAIL, path, data=data))[0]
            for path, data in (
                ("/dead-letters/act/redrive?store=mail-out-dlq", {"store": "invoices-dlq", "entry": entry}),
                ("/dead-letters/act/redrive?store=mail-out-dlq", {"store": "", "count": "2"}),
                ("/dead-letters/act/redrive", {"store": "mail-out-dlq", "entry": entry}),
            )
        ]
        assert [refused.status_code, other.status_code, mine.status_code] == [403, 403, 303]
        assert await app.queue("invoices").dead_letters.depth() == 1


@pytest.mark.requirement("D-110")
def test_patterns_are_exact_in_their_letters() -> None:
    visitor = Visitor("a", Role.OPERATOR, queues=("mail-*", "Exact"))
    assert visitor.on("mail-x").role is Role.OPERATOR
    assert visitor.on("Exact").role is Role.OPERATOR
    for name in ("", "Mail-x", "xmail-", "exact", "mail"):
        assert visitor.on(name).role is Role.VIEWER
    assert Visitor("a", Role.ADMIN).on("").role is Role.ADMIN


@pytest.mark.requirement("D-113")
async def test_payloads_are_nowhere_without_the_permission(redis_url: str, sqlite_url: str) -> None:
    """Data, results, logs, progress and errors of every store: in pages, the API, exports and search only sizes."""
    async with Bullpen(settings=settings(redis_url, ledger_url=sqlite_url)) as app:
        await app.ledger.migrate()
        queue = app.queue("mails")
        failed = await fail_one(redis_url, queue, {"text": CANARY}, error=f"HTTP 503 {CANARY}")
        await queue.add("send", {"text": CANARY}, job_id="waits")
        await queue.upsert_scheduler("nightly", "send", {"text": CANARY}, cron="0 3 * * *")

        async def work(job: Any) -> str:
            await job.log(CANARY)
            await job.progress({"at": CANARY})
            return CANARY

        async with Worker("mails", work, connection=redis_url):

            async def done() -> bool:
                return (await queue.counts()).completed == 1

            await until(done)
        item = OutboxItem(
            integration_type="webhook:x", event_type="e", source_stream_id="s", source_event_id="1",
            payload={"text": CANARY}, correlation_id="c-1",
        )  # fmt: skip
        await app.ledger.outbox.enqueue_many([item])
        rows = await app.ledger.outbox.claim_due_batch("d", 10, lease_ms=60_000)
        await app.ledger.outbox.settle([Settlement(row, Died(f"no {CANARY}", "REJECTED"), worker="d") for row in rows])
        await add_mark(app.connection, app.queue("bullpen-operations").keys, "v1", "ci")
        (row,) = await app.ledger.outbox.find(integration_type="webhook:x")

        dashboard = make_dashboard(app, access=As(Visitor("v")))
        ids = {"queue": "mails", "job": "waits", "store": "mails-dlq", "entry": f"dl-{failed.id}-1", "id": "nightly"}
        seen = 0
        async with httpx.AsyncClient(transport=transport(dashboard), base_url=HOST) as http:
            addresses = [
                *(
                    re.sub(r"\{(\w+)\}", lambda part: ids.get(part[1], "x"), route.pattern)
                    for route in dashboard.routes
                    if route.method == "GET" and not route.pattern.startswith(("/stream", "/pulse"))
                ),
                *(f"/queues/mails?state={state}" for state in ("failed", "completed", "delayed")),
                *(f"/queues/mails/jobs/{each}" for each in (failed.id, "waits", "repeat:nightly:1")),
                *(
                    f"/outbox/{row.id}",
                    f"/dead-letters/integration_outbox/{row.id}",
                    "/chains/c-1",
                    "/live?queue=mails",
                ),
                *("/dead-letters/export", "/audit/export", f"/search?q={failed.id}", "/charts?queue=mails"),
            ]
            for path in addresses:
                for base in ("", "/api/v1"):
                    answer = await http.get(f"{base}{path}")
                    assert CANARY not in answer.text, (base, path)
                    seen += answer.status_code == 200
            assert seen > 60, "most of them are there"
            (asked,) = [await http.get(f"/queues/mails?state=failed&text={CANARY}")]
            assert asked.status_code == 403, "a search would tell letter by letter"
        await dashboard.aclose()
        (page,) = await visit(app, Visitor("v", payloads=True), f"/queues/mails/jobs/{failed.id}")
        assert CANARY in page.text, "with the permission they are"


@pytest.mark.requirement("D-110")
async def test_the_command_writes_the_queues_of_a_user(tmp_path: Any) -> None:
    from bullpen.dashboard.access import PasswordAccess, hash_password

    path = tmp_path / "users.json"
    users = {"ada": {"password": hash_password("long enough"), "role": "admin", "queues": ["mail-*"]}}
    path.write_text(json.dumps({"key": "k" * 64, "users": users}))
    path.chmod(0o600)
    visitor, _ = PasswordAccess(path).check({"user": "ada", "password": "long enough"})
    assert visitor == MAIL
