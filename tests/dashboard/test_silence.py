"""Incidents on the page of health: who was told, and silence for a while."""

from __future__ import annotations

import pytest

from bullpen import Bullpen
from bullpen.dashboard import Role, Visitor
from tests.dashboard._kit import settings, visit
from tests.ops.test_alerts import SIGN, Eyes, watcher

ADMIN = Visitor("ada", Role.ADMIN)


@pytest.mark.requirement("D-91")
async def test_an_incident_is_silenced_for_a_time_with_a_reason(redis_url: str, sqlite_url: str) -> None:
    loaded = settings(redis_url, ledger_url=sqlite_url, alerts_email="ops@example.com", smtp_url="smtp://localhost")
    async with Bullpen(settings=loaded) as app:
        await app.ledger.migrate()
        await watcher(app.ledger, Eyes(SIGN)).watch()
        address = "/health/incidents/dead_letters/mails-dlq"

        before, form, without, done, after = [
            (await visit(app, ADMIN, path, data=data))[0]
            for path, data in (
                ("/health", None),
                (f"{address}/silence", None),
                (f"{address}/silence", {"choice": "30m"}),
                (f"{address}/silence", {"choice": "30m", "reason": "partner knows"}),
                ("/health", None),
            )
        ]

        assert "mail to ops@example.com" in before.text and "Silence…" in before.text
        assert "Nobody is told again" in form.text and "bullpen alerts silence" in form.text
        assert without.status_code == 422 and "Say why" in without.text
        assert done.status_code == 303
        assert "silenced" in after.text and "partner knows" in after.text and "Tell again…" in after.text
        (entry,) = [each for each in await app.ledger.audit.read() if each.action == "incident.silence"]
        assert entry.actor == "ada" and entry.detail["reason"] == "partner knows" and entry.detail["role"] == "admin"

        (told, gone) = [
            (await visit(app, ADMIN, f"{address}/unsilence", data={}))[0],
            (await visit(app, ADMIN, "/health/incidents/dead_letters/nobody/silence"))[0],
        ]
        assert told.status_code == 303
        assert gone.status_code == 404
        (incident,) = await app.ledger.incidents.open()
        assert incident.silenced_until is None


@pytest.mark.requirement("D-91")
async def test_a_viewer_may_not_silence(redis_url: str, sqlite_url: str) -> None:
    async with Bullpen(settings=settings(redis_url, ledger_url=sqlite_url)) as app:
        await app.ledger.migrate()
        await watcher(app.ledger, Eyes(SIGN)).watch()
        (page, refused) = await visit(app, Visitor("v"), "/health", "/health/incidents/dead_letters/mails-dlq/silence")
        assert "Silence…" not in page.text
        assert refused.status_code == 403
