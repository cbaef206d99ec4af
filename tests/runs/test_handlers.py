"""Several handlers in one app: each has a name, a queue, a price, limits and retries of its own."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import sqlalchemy as sa

from bullpen import Bullpen
from bullpen._kernel.backoff import Backoff
from bullpen._kernel.policy import DeadLetterPolicy, RetryPolicy
from bullpen.errors import (
    BullpenError,
    InsufficientCredits,
    InvalidOption,
    NotConfigured,
    PayloadTooLarge,
    RowStateConflict,
)
from bullpen.http.runs import Tokens, runs_api
from bullpen.ledger import Ledger, RunStatus
from bullpen.runs import CircuitBreaker, HandlerOptions, Run, RunOptions
from bullpen.settings import Settings
from tests.runs.conftest import MakeStage
from tests.runs.kit import ALICE, Stage, payload
from tests.runs.test_http import TOKENS, Client, start

REPORT = "workflow-execution.report"
AT_ONCE = Backoff.fixed(1)


async def report(run: Run) -> str:
    return f"report of {run.tenant_id}"


async def execute(run: Run) -> str:
    return "executed"


async def never(run: Run) -> None:
    raise ConnectionError("the model is busy")


class TestTwoHandlers:
    async def test_each_runs_its_own_runs(self, stage: Stage) -> None:
        stage.runs.handler(execute)
        stage.runs.handler("report")(report)
        plain, named = payload(), payload()
        await stage.service.submit(plain)
        await stage.service.submit(named, handler="report")

        async with stage.working(), stage.working(name="report", dispatch=False):
            done = await stage.service.result(ALICE, named.run_id, timeout=20_000)
            other = await stage.service.result(ALICE, plain.run_id, timeout=20_000)

        assert (done, other) == ("report of alice", "executed")
        rows = [await stage.service.get(ALICE, each.run_id) for each in (plain, named)]
        assert [(row.handler, row.queue) for row in rows] == [(None, None), ("report", REPORT)]

    async def test_a_process_takes_no_runs_of_a_handler_that_it_does_not_have(self, stage: Stage) -> None:
        """Two processes with different handlers share a ledger and a Redis."""
        stage.runs.declare("report")
        named, plain = payload(), payload()
        await stage.service.submit(named, handler="report")
        await stage.service.submit(plain)

        async with stage.working(execute):
            await stage.until(plain.run_id, RunStatus.COMPLETED)

        assert (await stage.service.get(ALICE, named.run_id)).status is RunStatus.QUEUED
        assert await stage.runs.routes.queue(REPORT).state_of(named.run_id) == "prioritized"

    async def test_handlers_of_two_processes_on_one_queue_leave_each_others_runs_alone(
        self, lite: Stage, make_stage: MakeStage
    ) -> None:
        """Where somebody has said otherwise: both work on one queue. The row decides whose a run is."""
        other = make_stage(lite.ledger)
        lite.runs.handler("report", queue="shared")(report)
        other.runs.handler("letter", queue="shared")(execute)
        mine, theirs = payload(), payload()
        await lite.service.submit(mine, handler="report")
        await other.service.submit(theirs, handler="letter")

        async with lite.working(name="report"):
            await lite.until(mine.run_id, RunStatus.COMPLETED)
            async with other.working(name="letter", dispatch=False):
                row = await lite.until(theirs.run_id, RunStatus.COMPLETED)

        assert (row.result, row.attempts, row.retry_history) == ("executed", 0, [])

    async def test_an_app_runs_all_of_its_handlers(self, redis_url: str, sqlite_url: str, tmp_path: Path) -> None:
        app = Bullpen(settings=Settings.load(environ={}, start=tmp_path, redis_url=redis_url, ledger_url=sqlite_url))

        @app.use_runs().handler
        async def plain(run: Run) -> str:
            return "plain"

        @app.use_runs().handler("report", concurrency=3)
        async def reports(run: Run) -> str:
            return "report"

        assert {worker.queue_name: worker.options.concurrency for worker in app.workers} == {
            "workflow-execution": 100,
            REPORT: 3,
        }
        await app.prepare()
        wanted = {None: payload(), "report": payload()}
        for name, each in wanted.items():
            await app.use_runs().service.submit(each, handler=name)
        running = asyncio.create_task(app.run(signals=False))
        results = [await app.use_runs().service.result(ALICE, each.run_id, timeout=30_000) for each in wanted.values()]

        @app.use_runs().handler("late")
        async def late(run: Run) -> str:
            return "late"

        await app.use_runs().service.submit(last := payload(), handler="late")
        results.append(await app.use_runs().service.result(ALICE, last.run_id, timeout=30_000))
        await app.stop()
        await running

        assert results == ["plain", "report", "late"]

    async def test_the_pool_must_be_enough_for_all_handlers_together(
        self, redis_url: str, postgres_url: str, tmp_path: Path
    ) -> None:
        given = {"redis_url": redis_url, "ledger_url": postgres_url, "ledger_pool_size": 10}
        app = Bullpen(settings=Settings.load(environ={}, start=tmp_path, **given))
        app.use_runs().handler(execute)
        app.use_runs().handler("report", concurrency=50)(report)

        with pytest.raises(NotConfigured, match=r"150 runs .* need 15"):
            await app.run(signals=False)


class TestSubmitting:
    async def test_an_unknown_handler_is_refused_before_anything_is_written(self, lite: Stage) -> None:
        lite.runs.declare("report")
        wanted = payload()

        with pytest.raises(InvalidOption, match=r"handler: .*report.*'raport'"):
            await lite.service.submit(wanted, handler="raport")
        with pytest.raises(InvalidOption, match="handler"):
            await lite.ledger.transactions.run(
                ALICE, lambda runs: lite.service.submit_in(runs, wanted, handler="raport")
            )

        assert await lite.service.find(ALICE) == []
        assert await lite.ledger.outbox.due_types() == []

    async def test_a_run_for_one_handler_cannot_be_submitted_for_another(self, lite: Stage) -> None:
        lite.runs.declare("report")
        wanted = payload()
        await lite.service.submit(wanted, handler="report")

        assert not (await lite.service.submit(wanted, handler="report")).created
        with pytest.raises(RowStateConflict, match="handler 'report'"):
            await lite.service.submit(wanted)

    async def test_a_handler_has_a_price_of_its_own(self, stage: Stage) -> None:
        stage.runs.declare("report", price=30)
        stage.runs.declare("letter", price=lambda payload: len(payload.definition["pages"]))
        await stage.service.grant(ALICE, 40, reference="r", actor="bank")

        costs = [
            (await stage.service.submit(payload(), handler="report")).run.cost,
            (await stage.service.submit(payload(definition={"pages": [1, 2]}), handler="letter")).run.cost,
            (await stage.service.submit(payload())).run.cost,
            (await stage.service.submit(payload(), handler="report", cost=1)).run.cost,
        ]
        with pytest.raises(InsufficientCredits):
            await stage.service.submit(payload(), handler="report")

        assert costs == [30, 2, 0, 1]
        assert await stage.service.balance(ALICE) == 7

    async def test_a_handler_has_a_limit_of_its_payloads(self, lite: Stage) -> None:
        lite.runs.declare("report", max_payload_bytes=500)
        large = payload(definition={"text": "x" * 500})

        with pytest.raises(PayloadTooLarge):
            await lite.service.submit(large, handler="report")
        assert await lite.service.find(ALICE) == []
        assert (await lite.service.submit(large)).created

    async def test_runs_are_found_by_handler(self, stage: Stage) -> None:
        stage.runs.declare("report")
        named = payload()
        await stage.service.submit(payload())
        await stage.service.submit(named, handler="report")

        assert [row.id for row in await stage.service.find(ALICE, handler="report")] == [named.run_id]
        assert [row.id for row in await stage.ledger.runs.find(handler="report")] == [named.run_id]

    async def test_the_handler_of_a_run_never_changes(self, stage: Stage, ledger: Ledger) -> None:
        stage.runs.declare("report")
        wanted = payload()
        await stage.service.submit(wanted, handler="report")

        for column in ("handler", "queue"):
            update = sa.text(f"UPDATE {ledger.database.table('bullpen_runs')} SET {column} = 'other'")
            async with ledger.database.engine.connect() as connection:
                with pytest.raises(sa.exc.IntegrityError, match="never change"):
                    await connection.execute(update)


class TestRunning:
    async def test_a_handler_has_retries_of_its_own(self, stage: Stage) -> None:
        stage.runs.handler("report", retry=RetryPolicy(attempts=2, backoff=AT_ONCE))(never)
        wanted = payload()
        await stage.service.submit(wanted, handler="report")

        async with stage.working(name="report"):
            row = await stage.until(wanted.run_id, RunStatus.FAILED)

        assert [entry["attempt"] for entry in row.retry_history] == [1, 2]
        assert row.error_message == "Workflow execution failed after 2 attempts: the model is busy"

    async def test_permanent_errors_of_a_handler_end_its_runs_at_once(self, lite: Stage) -> None:
        lite.runs.handler("report", retry=RetryPolicy(permanent_errors=(ConnectionError,)))(never)
        wanted = payload()
        await lite.service.submit(wanted, handler="report")

        async with lite.working(name="report"):
            row = await lite.until(wanted.run_id, RunStatus.FAILED)

        assert len(row.retry_history) == 1

    async def test_an_attempt_that_takes_too_long_has_failed(self, lite: Stage) -> None:
        was_cancelled = asyncio.Event()

        async def slow(run: Run) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                was_cancelled.set()

        lite.runs.handler("report", timeout=50, retry=RetryPolicy(attempts=1))(slow)
        wanted = payload()
        await lite.service.submit(wanted, handler="report")

        async with lite.working(name="report"):
            row = await lite.until(wanted.run_id, RunStatus.FAILED)

        assert "longer than 0.05 s" in (row.error_message or "")
        assert "longer than 0.05 s" in row.retry_history[0]["error"]
        assert was_cancelled.is_set()

    async def test_a_handler_has_a_limit_of_its_results(self, lite: Stage) -> None:
        lite.runs.handler("report", max_result_bytes=5)(report)
        wanted = payload()
        await lite.service.submit(wanted, handler="report")

        async with lite.working(name="report"):
            row = await lite.until(wanted.run_id, RunStatus.FAILED)

        assert "more than 5" in (row.error_message or "")

    async def test_the_breaker_of_one_handler_does_not_stop_another(self, lite: Stage) -> None:
        lite.runs.configure(breaker=CircuitBreaker(failures=1, pause=60_000))
        lite.runs.handler(never)
        lite.runs.handler("report")(report)
        bad, good = payload(), payload()
        await lite.service.submit(bad)

        async with lite.working(), lite.working(name="report", dispatch=False):
            async with asyncio.timeout(20):
                while not (await lite.service.get(ALICE, bad.run_id)).retry_history:  # noqa: ASYNC110 - tells nobody
                    await asyncio.sleep(0.02)
            await lite.service.submit(good, handler="report")
            await lite.until(good.run_id, RunStatus.COMPLETED)

    async def test_a_job_in_the_queue_of_another_handler_is_refused(self, lite: Stage) -> None:
        """Somebody who may add jobs cannot have a run done by a handler that it was not submitted for."""
        lite.runs.handler("report")(report)
        wanted = payload()
        await lite.service.submit(wanted)
        await lite.runs.routes.queue(REPORT).add("workflow-run", wanted.to_data(), job_id=wanted.run_id)

        async with lite.working(name="report", dispatch=False):
            async with asyncio.timeout(20):
                while not (letters := await lite.runs.routes.queue(REPORT).dead_letters.list()):  # noqa: ASYNC110
                    await asyncio.sleep(0.02)

        assert letters[0].cause == "security"
        assert (await lite.service.get(ALICE, wanted.run_id)).status is RunStatus.QUEUED


class TestAfterwards:
    async def failed(self, stage: Stage) -> str:
        """A run of `report` that has failed finally."""
        stage.runs.handler("report", retry=RetryPolicy(attempts=2, backoff=AT_ONCE))(never)
        wanted = payload()
        await stage.service.submit(wanted, handler="report")
        async with stage.working(name="report"):
            await stage.until(wanted.run_id, RunStatus.FAILED)
        return wanted.run_id

    async def test_dead_letters_are_those_of_a_handler_and_go_back_to_it(self, stage: Stage) -> None:
        run_id = await self.failed(stage)

        letters = await stage.service.dead_letters(ALICE, actor="ada", handler="report")
        assert [(each.job_id, each.queue) for each in letters] == [(run_id, REPORT)]
        assert await stage.service.dead_letters(ALICE, actor="ada") == []
        assert (await stage.service.dead_letter_depth("report"), await stage.service.dead_letter_depth()) == (1, 0)

        stage.runs.handler("report")(report)
        await stage.service.retry(ALICE, run_id, actor="ada")
        async with stage.working(name="report"):
            row = await stage.until(run_id, RunStatus.COMPLETED)
        assert row.handler == "report"
        assert await stage.service.dead_letter_depth("report") == 0

    async def test_a_process_that_does_not_know_the_handler_gives_a_lost_job_back_as_it_was(
        self, stage: Stage, make_stage: MakeStage
    ) -> None:
        """Maintenance may run in a process of its own, and on the command line there is no handler at all."""
        stage.runs.declare("report", queue="reports", retry=RetryPolicy(attempts=7, backoff=Backoff.fixed(1_234)))
        wanted = payload()
        await stage.service.submit(wanted, handler="report")
        await stage.dispatch()
        queue = stage.runs.routes.queue("reports")
        submitted = await queue.get_job(wanted.run_id)
        await queue.remove(wanted.run_id)

        swept = await make_stage(stage.ledger).runs.maintenance().sweep()

        job = await queue.get_job(wanted.run_id)
        assert swept.given_jobs == 1
        assert job is not None and submitted is not None
        assert (job.opts.attempts, job.opts.backoff) == (7, Backoff.fixed(1_234))
        assert job.opts.remove_on_complete == submitted.opts.remove_on_complete

    async def test_cancelling_removes_the_job_from_its_queue(self, lite: Stage, make_stage: MakeStage) -> None:
        lite.runs.declare("report")
        wanted = payload()
        await lite.service.submit(wanted, handler="report")
        await lite.dispatch()

        await make_stage(lite.ledger).service.cancel(ALICE, wanted.run_id, actor="ada")

        assert await lite.runs.routes.queue(REPORT).get_job(wanted.run_id) is None


class TestDeclaring:
    @pytest.mark.parametrize("name", ["", "Report", "a b", "x-dlq", "-a", "a:b", "x" * 61])
    def test_a_wrong_name_is_refused(self, lite: Stage, name: str) -> None:
        with pytest.raises(InvalidOption, match="handler"):
            lite.runs.declare(name)

    def test_two_handlers_of_an_app_have_two_queues(self, lite: Stage) -> None:
        lite.runs.declare("report", queue="reports")

        with pytest.raises(InvalidOption, match="queue"):
            lite.runs.declare("letter", queue="reports")
        with pytest.raises(InvalidOption, match="queue"):
            lite.runs.declare("letter", queue="reports-dlq")
        with pytest.raises(InvalidOption, match="queue"):
            lite.runs.declare("letter", queue="workflow-execution")
        with pytest.raises(InvalidOption, match="queue"):
            lite.runs.handler(queue="mine")
        with pytest.raises(InvalidOption, match="one queue"):
            lite.runs.declare("report")

    @pytest.mark.parametrize(
        "wrong",
        [
            {"price": -1},
            {"timeout": 0},
            {"max_payload_bytes": 11 * 1024 * 1024},
            {"max_result_bytes": 2 * 1024 * 1024},
            {"retry": RetryPolicy(dead_letters=DeadLetterPolicy(store="none"))},
            {"retry": 3},
        ],
    )
    def test_wrong_options_are_refused_where_they_are_said(self, lite: Stage, wrong: dict[str, Any]) -> None:
        with pytest.raises(InvalidOption):
            lite.runs.handler("report", **wrong)

    def test_a_handler_begins_with_the_options_of_the_app(self, lite: Stage) -> None:
        lite.runs.configure(lock=30_000)
        lite.runs.declare("report", concurrency=2)

        options = lite.runs.routes.get("report").options
        assert (options.lock, options.concurrency, lite.runs.options.concurrency) == (30_000, 2, 100)
        lite.runs.declare("letter")
        assert lite.runs.routes.get("letter").options.concurrency == 20

    def test_a_declared_handler_cannot_be_run_here(self, lite: Stage) -> None:
        lite.runs.declare("report")
        with pytest.raises(NotConfigured, match="runs in another process"):
            lite.runs.worker("report")

    def test_every_keyword_is_an_option(self) -> None:
        """What the editor knows and what is checked are the same."""
        of_the_app = {"idle_ms", "sweep_every_ms"}
        options = {field.name for field in dataclasses.fields(RunOptions)} - of_the_app
        assert get_type_hints(HandlerOptions).keys() == options | {"queue"}


class TestOverHttp:
    @pytest.fixture
    def client(self, lite: Stage) -> Client:
        lite.runs.declare("report", price=7)
        lite.runs.declare("secret")
        return Client(runs_api(lite.service, Tokens(TOKENS), price=lambda _: 10, handlers=["report"]))

    async def test_a_run_is_started_for_a_handler_at_its_price(self, lite: Stage, client: Client) -> None:
        await lite.service.grant(ALICE, 30, reference="g", actor="bank")

        status, run = await start(client, handler="report")
        other_status, other = await start(client, "order-2")

        assert (status, run["handler"], run["cost"]) == (201, "report", 7)
        assert (other_status, other["handler"], other["cost"]) == (201, None, 10)
        _, page = await client("GET", "/runs?handler=report")
        assert [each["id"] for each in page["runs"]] == [run["id"]]
        assert (await start(client))[0] == 409  # the same key for another handler

    async def test_handlers_that_are_unknown_or_not_for_clients_are_refused(self, lite: Stage, client: Client) -> None:
        everything = Client(runs_api(lite.service, Tokens(TOKENS)))

        assert (await start(client, handler="secret"))[0] == 403
        assert (await start(everything, handler="raport"))[0] == 422
        assert (await start(everything, handler="secret"))[0] == 201
        assert len(await lite.service.find(ALICE)) == 1

    async def test_dead_letters_name_their_handler(self, lite: Stage) -> None:
        run_id = await TestAfterwards().failed(lite)
        client = Client(runs_api(lite.service, Tokens(TOKENS)))

        _, page = await client("GET", "/dead-letters?handler=report")
        _, unnamed = await client("GET", "/dead-letters")

        assert [(each["runId"], each["handler"]) for each in page["deadLetters"]] == [(run_id, "report")]
        assert (page["depth"], unnamed["depth"]) == (1, 0)
        assert (await client("GET", "/dead-letters?handler=raport"))[0] == 422


async def test_payloads_of_dead_letters_of_every_handler_cannot_be_edited(
    redis_url: str, lite: Stage, sqlite_url: str, tmp_path: Path
) -> None:
    """The payload is in the row: whoever edited the letter would believe that it had an effect."""
    await TestAfterwards().failed(lite)
    app = Bullpen(settings=Settings.load(environ={}, start=tmp_path, redis_url=redis_url, ledger_url=sqlite_url))

    async with app:
        console = await app.dead_letters()
        found = [each async for each in console.find()]
        with pytest.raises(BullpenError, match="which never changes"):
            await console.edit(found[0].store, found[0].letter.id, data={"other": 1})
