"""Who did what: searched, paged and exported, over a ledger and over streams of the server."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import AsyncIterator

import pytest

from bullpen import Bullpen
from bullpen.dashboard import Role, Visitor
from tests.dashboard._kit import HOSTILE, settings, visit

ADMIN = Visitor("ada", Role.ADMIN)


@pytest.fixture(params=["ledger", "streams"])
async def app(request: pytest.FixtureRequest, redis_url: str, sqlite_url: str) -> AsyncIterator[Bullpen]:
    extra = {"ledger_url": sqlite_url} if request.param == "ledger" else {}
    async with Bullpen(settings=settings(redis_url, **extra)) as made:
        if extra:
            await made.ledger.migrate()
        await made.queue("mails").add("a", {})
        for name, action, subject, tenant in (
            ("ada", "job.retry", "mails/1", None),
            ("bo", "job.remove", "mails/2", "t1"),
            ("bob", "queue.pause", "mails", None),
            ("ada", "job.retry", "mails/100%", "t2"),
        ):
            await (await made.trail()).write("mails", name, action, subject, tenant, {"why": HOSTILE[55]})
        yield made


@pytest.mark.requirement("D-94")
@pytest.mark.parametrize(
    ("query", "subjects"),
    [
        ("", ["mails/100%", "mails", "mails/2", "mails/1"]),
        ("actor=BO", ["mails", "mails/2"]),
        ("action=retry", ["mails/100%", "mails/1"]),
        ("subject=100%25", ["mails/100%"]),
        ("tenant=t1", ["mails/2"]),
        ("since=2026-01-01&action=pause", ["mails"]),
        ("since=2199-01-01", []),
        ("until=2001-01-01", []),
        ("actor=ada&subject=nothing", []),
    ],
)
async def test_entries_are_found(app: Bullpen, query: str, subjects: list[str]) -> None:
    """By parts of who, what and to what, by tenant and time; what matches anything in a pattern is a sign here."""
    (answer, page) = await visit(app, ADMIN, f"/api/v1/audit?{query}", f"/audit?{query}")
    assert [entry["subject"] for entry in answer.json()["entries"]] == subjects
    assert page.status_code == 200


@pytest.mark.requirement("D-94")
async def test_what_is_found_is_exported(app: Bullpen) -> None:
    """As lines of JSON, and for spreadsheets, which must not take a cell for a formula."""
    trail = await app.trail()
    await trail.write("mails", "=cmd()", "job.retry", "@mails/3", None, {})
    lines, table, wrong = await visit(
        app, ADMIN, "/audit/export?actor=bo", "/audit/export?format=csv&action=retry", "/audit/export?format=exe"
    )
    assert [json.loads(line)["actor"] for line in lines.text.splitlines()] == ["bob", "bo"]
    rows = list(csv.reader(io.StringIO(table.text)))
    assert rows[0] == ["at", "actor", "login", "action", "subject", "tenant", "detail"]
    assert [(row[1], row[4]) for row in rows[1:]] == [
        ("'=cmd()", "'@mails/3"),
        ("ada", "mails/100%"),
        ("ada", "mails/1"),
    ]
    assert 'filename="audit.csv"' in table.headers["content-disposition"]
    assert wrong.status_code == 422


@pytest.mark.requirement("D-94")
async def test_whoever_is_no_admin_sees_his_own_actions(app: Bullpen) -> None:
    """Not those of somebody whose name begins alike; in the export neither."""
    operator = Visitor("bo", Role.OPERATOR)
    answer, exported, others = await visit(app, operator, "/api/v1/audit", "/audit/export", "/api/v1/audit?actor=ada")
    assert [entry["actor"] for entry in answer.json()["entries"]] == ["bo"]
    assert [json.loads(line)["actor"] for line in exported.text.splitlines()] == ["bo"]
    assert others.json()["entries"] == []


@pytest.mark.requirement("D-94")
async def test_no_route_changes_the_audit(app: Bullpen) -> None:
    for path in ("/audit", "/audit/export", "/api/v1/audit"):
        (refused,) = await visit(app, ADMIN, path, data={"delete": "1"})
        assert refused.status_code == 405


@pytest.mark.requirement("D-94")
async def test_pages_hold_every_entry_once(redis_url: str, sqlite_url: str) -> None:
    async with Bullpen(settings=settings(redis_url, ledger_url=sqlite_url)) as app:
        await app.ledger.migrate()
        trail = await app.trail()
        for number in range(230):
            await trail.write("q", "ada", "job.retry", f"q/{number}", None, {})
        seen, address = list[str](), "/api/v1/audit"
        while address:
            (answer,) = await visit(app, ADMIN, address)
            seen += [entry["subject"] for entry in answer.json()["entries"]]
            address = f"/api/v1/audit?before={answer.json()['next']}" if answer.json()["next"] else ""
        assert seen == [f"q/{number}" for number in reversed(range(230))]
