"""Two applications with a ledger each, on one Redis with one prefix: neither harms the runs of the other."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bullpen.ledger import RunStatus
from bullpen.queue import JobState
from bullpen.runs import Run
from tests.databases import MakeLedger
from tests.runs.conftest import MakeStage
from tests.runs.kit import ALICE, PATIENCE_S, Records, Stage, payload

MakeApplication = Callable[[str], Stage]


@pytest.fixture
def application(
    sqlite_template: Path, tmp_path: Path, make_ledger: MakeLedger, make_stage: MakeStage
) -> MakeApplication:
    """Each is an application of its own. A copy of a ledger is the same ledger, so each of them is migrated anew."""

    def make(name: str) -> Stage:
        import sqlite3

        file = tmp_path / f"{name}.sqlite3"
        shutil.copy(sqlite_template, file)
        with sqlite3.connect(file) as connection:
            connection.execute("UPDATE bullpen_ledger SET id = ?", [f"ledger-of-{name}"])
        connection.close()
        return make_stage(make_ledger(f"sqlite:///{file}"))

    return make


async def until_logged(records: Records, text: str) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not any(text in line for line in records.texts()):  # noqa: ASYNC110 - logging tells nobody
            await asyncio.sleep(0.01)


async def audited(stage: Stage) -> list[str]:
    return [entry.action for entry in await stage.ledger.audit.read()]


async def never(run: Run) -> None:
    raise AssertionError("a run of another application")


async def at_once(run: Run) -> str:
    return "done"


async def run_one(stage: Stage) -> None:
    wanted = payload()
    await stage.service.submit(wanted)
    async with stage.working(at_once):
        await stage.until(wanted.run_id, RunStatus.COMPLETED)


@pytest.mark.requirement("X-115")
async def test_a_run_of_another_application_is_left_to_it(application: MakeApplication, records: Records) -> None:
    shop, bank = application("shop"), application("bank")
    wanted = payload()
    await shop.service.submit(wanted, actor="ada")
    async with bank.working(never, dispatch=False):
        await shop.dispatch()
        await until_logged(records, "is of ledger ledger-of-shop")  # the bank had it first
        async with shop.working(at_once, dispatch=False):
            row = await shop.until(wanted.run_id, RunStatus.COMPLETED)

    assert (row.result, row.attempts) == ("done", 0)
    assert await shop.service.dead_letter_depth() == 0
    assert (await audited(bank), await audited(shop)) == ([], ["run.submit"])


async def test_a_run_that_got_its_job_again_names_its_ledger_too(application: MakeApplication) -> None:
    shop = application("shop")
    wanted = payload()
    await shop.service.submit(wanted)
    await shop.dispatch()
    first = await shop.runs.queue.get_job(wanted.run_id)
    await shop.runs.queue.remove(wanted.run_id)
    await shop.runs.maintenance().sweep()
    second = await shop.runs.queue.get_job(wanted.run_id)

    assert first is not None and second is not None
    assert first.meta.headers["ledger"] == second.meta.headers["ledger"] == "ledger-of-shop"
    assert "ledger" not in first.data


async def test_a_failure_of_another_application_is_not_looked_up(
    application: MakeApplication, records: Records
) -> None:
    """Its last worker died with it, and ours was told."""
    shop, bank = application("shop"), application("bank")
    wanted = payload()
    await shop.service.submit(wanted)
    await shop.dispatch()
    job = await shop.runs.queue.get_job(wanted.run_id)
    assert job is not None

    await bank.runs.processor.on_failed(job, "it killed its workers")

    assert not [line for line in records.texts(logging.ERROR) if "does not exist" in line]
    assert (await shop.service.get(ALICE, wanted.run_id)).status is RunStatus.QUEUED


@pytest.mark.requirement("X-115")
@pytest.mark.parametrize("named", [None, "own", 5, ["own"]])
async def test_a_job_that_names_no_other_ledger_is_still_a_security_event(
    application: MakeApplication, named: Any
) -> None:
    from bullpen.wire.options import JobMeta

    shop, forged = application("own"), payload()
    named = "ledger-of-own" if named == "own" else named
    meta = JobMeta(headers={} if named is None else {"ledger": named})
    await shop.runs.queue.add("workflow-run", forged.to_data(), job_id=forged.run_id, meta=meta)
    async with shop.working(never, dispatch=False):
        await shop.until_job(forged.run_id, JobState.FAILED)

    assert await shop.service.dead_letter_depth() == 1
    assert await audited(shop) == ["run.security"]


async def test_the_start_warns_of_another_ledger(application: MakeApplication, records: Records) -> None:
    shop, bank = application("shop"), application("bank")
    await run_one(shop)
    await run_one(shop)
    alone = records.texts(logging.WARNING)
    async with bank.working(never, dispatch=False):
        pass

    (warning,) = records.texts(logging.WARNING)
    assert alone == []
    assert "ledger-of-shop" in warning and "ledger-of-bank" in warning and "BULLPEN_PREFIX" in warning


async def test_maintenance_notices_another_ledger_once(application: MakeApplication, records: Records) -> None:
    shop, bank = application("shop"), application("bank")
    maintenance = shop.runs.maintenance()
    await run_one(shop)
    await maintenance.sweep()
    async with bank.working(never, dispatch=False):
        pass
    before = len(records.texts(logging.WARNING))
    for _ in range(3):
        await maintenance.sweep()

    assert (before, len(records.texts(logging.WARNING))) == (1, 2)  # the bank's start, and our own sweep


async def test_a_ledger_has_one_identity_and_keeps_it(ledger_url: str, make_ledger: MakeLedger) -> None:
    first, second = make_ledger(ledger_url), make_ledger(ledger_url)
    identity = await first.transactions.ledger_id()

    await second.migrate()

    assert len(identity) == 36
    assert await second.transactions.ledger_id() == identity
    assert await second.transactions.run(ALICE, lambda runs: runs.ledger_id()) == identity
