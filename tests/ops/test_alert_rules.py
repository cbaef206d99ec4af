"""The rules, the names and the whole chain, judged by Prometheus itself."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.parse
import urllib.request
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bullpen import Bullpen, Job
from bullpen.ops.exporter import Exporter, LedgerSource, ServerSource
from bullpen.ops.exposition import render
from bullpen.outbox import EventRoutes
from bullpen.ports.metrics import Metric, Sample
from bullpen.ports.source import SourceEvent
from bullpen.settings import Settings
from bullpen.testing import free_port, need
from bullpen.testing.receivers import HttpReceiver
from tests.environments import clean_environ
from tests.workflow.kit import define

HERE = Path(__file__).parent
DEPLOY = HERE.parents[1] / "deploy"

FIXED = {
    # By the specification of the outbox.
    *("outbox_pending_total", "outbox_claimed_total", "outbox_sent_total", "outbox_failed_total", "outbox_dead_total"),
    "outbox_unparked_total",
    *("outbox_claim_duration_ms", "outbox_delivery_duration_ms"),
    # Their siblings: the projector's.
    *("outbox_projected_total", "outbox_enqueued_total", "outbox_duplicate_total", "outbox_parked_events"),
    *("outbox_projector_lag", "outbox_projector_behind_seconds"),
    # By the specification of messages.
    *("queue_message_publish_duration_seconds", "queue_message_consume_duration_seconds", "queue_wait_time_seconds"),
    *("queue_message_ack_total", "queue_message_nack_total", "queue_message_redelivery_total"),
    *("queue_depth_messages", "queue_consumers_active", "queue_connection_status"),
    *("queue_channel_opens_total", "queue_channel_closes_total"),
    # Their siblings.
    *("queue_message_publish_failed_total", "queue_message_deduplicated_total", "queue_message_attempts"),
    *("queue_message_failed_total", "queue_message_lost_total", "queue_dead_letters_messages"),
    "queue_worker_utilisation_ratio",
}
WITHOUT_PREFIX = FIXED
GAUGES_CALLED_TOTAL = {"outbox_pending_total", "outbox_claimed_total"}
IN_MILLISECONDS = {"outbox_claim_duration_ms", "outbox_delivery_duration_ms"}


def rules() -> dict[str, str]:
    """The text of every rule, by its name."""
    parts = re.split(r"\n {6}- alert: ", (DEPLOY / "alerts.yml").read_text())[1:]
    return {part.partition("\n")[0]: part for part in parts}


def run_promtool(*arguments: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    tool = str(need("promtool"))
    return subprocess.run([tool, *arguments], input=text, capture_output=True, text=True, check=False)


# Rules --------------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("W-68", "W-76")
def test_every_rule_fires_when_it_should_and_only_then(tmp_path: Path) -> None:
    for file in (DEPLOY / "alerts.yml", HERE / "alerts_test.yml"):
        shutil.copy(file, tmp_path)
    judged = run_promtool("test", "rules", str(tmp_path / "alerts_test.yml"))
    assert judged.returncode == 0, judged.stdout + judged.stderr


def test_every_rule_has_a_case_in_which_it_fires_and_one_in_which_it_does_not() -> None:
    cases = (HERE / "alerts_test.yml").read_text()
    fires = set(re.findall(r"alertname: (\w+)\n +exp_alerts:", cases))
    quiet = set(re.findall(r"alertname: (\w+)\}", cases))

    assert fires == quiet == set(rules())


def test_the_config_is_valid(tmp_path: Path) -> None:
    for file in ("alerts.yml", "prometheus.yml"):
        shutil.copy(DEPLOY / file, tmp_path)
    judged = run_promtool("check", "config", str(tmp_path / "prometheus.yml"))
    assert judged.returncode == 0, judged.stdout + judged.stderr


def test_every_expression_of_the_dashboard_is_understood(tmp_path: Path) -> None:
    panels = json.loads((DEPLOY / "grafana.json").read_text())["panels"]
    expressions = [target["expr"].replace("$queue", ".*") for panel in panels for target in panel["targets"]]
    recorded = [{"record": f"panel:{number}", "expr": each} for number, each in enumerate(expressions)]
    (tmp_path / "rules.yml").write_text(json.dumps({"groups": [{"name": "panels", "rules": recorded}]}))
    judged = run_promtool("check", "rules", str(tmp_path / "rules.yml"))
    assert judged.returncode == 0, judged.stdout + judged.stderr


def test_workers_are_scaled_by_all_jobs_that_could_run(tmp_path: Path) -> None:
    """The exporter and every worker tell of the same queue: it counts once. Queues of others do not count."""
    (query,) = re.findall(r"query: (.*)", (DEPLOY / "kubernetes.yml").read_text())
    counts = {"waiting": 3, "prioritized": 4, "delayed": 50, "active": 60, "waiting_children": 70, "failed": 80}
    series = [
        {"series": f'bullpen_queue_jobs{{queue="{queue}",state="{state}",instance="{instance}"}}', "values": f"{count}"}
        for queue in ("mails", "of-node")
        for state, count in counts.items()
        for instance in ("exporter", "worker")
    ]
    expected = {"expr": query, "eval_time": "0m", "exp_samples": [{"labels": "{}", "value": 7}]}
    case = {"interval": "1m", "input_series": series, "promql_expr_test": [expected]}
    (tmp_path / "case.yml").write_text(json.dumps({"tests": [case]}))
    judged = run_promtool("test", "rules", str(tmp_path / "case.yml"))
    assert judged.returncode == 0, judged.stdout + judged.stderr


# Names --------------------------------------------------------------------------------------------------------------


def _nothing(event: SourceEvent) -> dict[str, Any]:
    return {}


@pytest.fixture
async def families(redis_url: str, sqlite_url: str) -> AsyncIterator[dict[str, Metric]]:
    """Every family that an app with all parts, and the exporter, can show; those without a sample get one."""
    settings = Settings.load(redis_url=redis_url, ledger_url=sqlite_url, alerts_webhook_url="http://127.0.0.1:1/")
    async with Bullpen(redis_url, settings=settings) as app:
        app.observe()
        app.queue("mails")
        _ = app.use_outbox(), app.use_messages(), app.use_alerts()
        app.workflow(define())
        routes = EventRoutes()
        routes.on("paid.v1", to="webhook:shop", since="beginning")(_nothing)
        app.projector(routes)
        exporter = Exporter([ServerSource(app.connection, app.prefix), LedgerSource(app.ledger)])
        found: dict[str, Metric] = {}
        for metric in (*await app.metrics(), *await exporter.collect()):
            known = found.setdefault(metric.name, metric)
            assert (known.kind, known.help) == (metric.kind, metric.help), "one family, one kind and one text"
        await exporter.aclose()
        one = {"histogram": Sample({}, 0, [(1.0, 0), (float("inf"), 0)])}
        yield {
            name: replace(each, samples=[*each.samples] or [one.get(each.kind, Sample({}, 0))])
            for name, each in found.items()
        }


@pytest.mark.requirement("O-69", "W-68")
async def test_names_are_those_that_prometheus_wants_but_for_those_that_are_fixed(families: dict[str, Metric]) -> None:
    """`promtool check metrics` finds fault with exactly the four that the specification names so."""
    judged = await asyncio.to_thread(run_promtool, "check", "metrics", text=render(families.values()))
    blamed: dict[str, list[str]] = defaultdict(list)
    for line in judged.stderr.splitlines():
        name, _, fault = line.partition(" ")
        blamed[name].append(fault)

    assert set(blamed) == GAUGES_CALLED_TOTAL | IN_MILLISECONDS, judged.stderr
    pure = [metric for name, metric in families.items() if name not in blamed]
    clean = await asyncio.to_thread(run_promtool, "check", "metrics", text=render(pure))
    assert (clean.returncode, clean.stdout, clean.stderr) == (0, "", "")


@pytest.mark.requirement("O-69")
async def test_prefix_unit_and_ending_follow_one_rule(families: dict[str, Metric]) -> None:
    assert {name for name in families if not name.startswith("bullpen_")} == WITHOUT_PREFIX
    assert {
        name for name, metric in families.items() if name.endswith("_total") != (metric.kind == "counter")
    } == GAUGES_CALLED_TOTAL
    assert {name for name in families if re.search(r"_(ms|milliseconds|minutes|hours)(_|$)", name)} == IN_MILLISECONDS


# The whole chain ----------------------------------------------------------------------------------------------------

APP = """
from bullpen import Bullpen

app = Bullpen()


@app.task("mails")
async def welcome() -> None: ...
"""


@contextmanager
def process(*command: str, cwd: Path, environ: dict[str, str] | None = None) -> Iterator[subprocess.Popen[bytes]]:
    with (cwd / f"{Path(command[0]).name}-{len(os.listdir(cwd))}.log").open("wb") as log:
        started = subprocess.Popen(command, cwd=cwd, env=clean_environ() | (environ or {}), stdout=log, stderr=log)
    try:
        yield started
    finally:
        started.kill()
        started.wait()


def firing(receiver: HttpReceiver, name: str) -> list[bool]:
    """What the receiver was told of an alert, in order: True while it is, False when it is over."""
    told = [each for request in receiver.requests for each in json.loads(request.body)]
    ends = [datetime.fromisoformat(each["endsAt"]) for each in told if each["labels"]["alertname"] == name]
    return [end > datetime.now(UTC) for end in ends]  # of one that fires it is some minutes ahead


def is_over(receiver: HttpReceiver, name: str) -> bool:
    return firing(receiver, name)[-1] is False


async def until(holds: Callable[[], bool], what: str, within_s: float = 60.0) -> None:
    try:
        async with asyncio.timeout(within_s):
            while not holds():  # noqa: ASYNC110 - they are other processes, and tell nobody
                await asyncio.sleep(0.1)
    except TimeoutError:
        raise AssertionError(f"not within {within_s:g} s: {what}") from None


def prometheus_says(port: int, query: str) -> list[Any]:
    url = f"http://127.0.0.1:{port}/api/v1/query?query={urllib.parse.quote(query)}"
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            result: list[Any] = json.load(answer)["data"]["result"]
            return result
    except OSError:
        return []


@asynccontextmanager
async def alarmed(directory: Path, ports: dict[str, int]) -> AsyncIterator[tuple[HttpReceiver, int]]:
    """A Prometheus with our rules and our config, only faster, and somebody who is told."""
    shorter = re.sub(r"for: \d+m", "for: 1s", (DEPLOY / "alerts.yml").read_text())
    (directory / "alerts.yml").write_text(shorter)
    async with HttpReceiver() as receiver:
        config = (DEPLOY / "prometheus.yml").read_text().replace("scrape_interval: 15s", "scrape_interval: 500ms")
        config = config.replace("127.0.0.1:9464", f"127.0.0.1:{ports['worker']}")
        config = config.replace("127.0.0.1:9465", f"127.0.0.1:{ports['exporter']}")
        config += f"""
global: {{evaluation_interval: 500ms}}
alerting: {{alertmanagers: [{{static_configs: [{{targets: ["127.0.0.1:{receiver.port}"]}}]}}]}}
"""
        (directory / "prometheus.yml").write_text(config)
        port = free_port()
        command = [str(need("prometheus")), "--config.file=prometheus.yml", f"--storage.tsdb.path={directory}/data"]
        with process(*command, f"--web.listen-address=127.0.0.1:{port}", cwd=directory):
            yield receiver, port


@pytest.mark.long
@pytest.mark.requirement("W-68", "W-76")
async def test_the_only_worker_is_killed_an_alarm_is_raised_and_it_is_over_when_one_is_back(
    redis_url: str, sqlite_url: str, tmp_path: Path
) -> None:
    """Kill, wait, alarm, recover, resolved: with a real Prometheus, exporter and worker."""
    (tmp_path / "shop.py").write_text(APP)
    environ = {"BULLPEN_REDIS_URL": redis_url, "BULLPEN_DATABASE_URL": sqlite_url}
    ports = {"worker": free_port(), "exporter": free_port()}
    bullpen = (sys.executable, "-m", "bullpen.cli")
    worker = (*bullpen, "run", "shop:app", "--http", f"127.0.0.1:{ports['worker']}")
    exporter = (*bullpen, "exporter", "--http", f"127.0.0.1:{ports['exporter']}")
    async with Bullpen(redis_url) as app, alarmed(tmp_path, ports) as (told, prometheus):
        queue = app.queue("mails")
        with process(*exporter, cwd=tmp_path, environ=environ):
            with process(*worker, cwd=tmp_path, environ=environ) as first:
                await (await queue.add("welcome", {})).result(timeout=60_000)
                await until(
                    lambda: bool(prometheus_says(prometheus, 'bullpen_queue_workers{queue="mails"} > 0')),
                    "the exporter sees the worker",
                )
                assert firing(told, "BullpenNoWorker") == []
                first.send_signal(signal.SIGKILL)
                await asyncio.to_thread(first.wait)
            job: Job = await queue.add("welcome", {})
            await until(lambda: True in firing(told, "BullpenNoWorker"), "BullpenNoWorker fires")
            await until(lambda: True in firing(told, "BullpenTargetDown"), "BullpenTargetDown fires")
            with process(*worker, cwd=tmp_path, environ=environ):
                await job.result(timeout=60_000)
                for name in ("BullpenNoWorker", "BullpenTargetDown"):
                    await until(partial(is_over, told, name), f"{name} is over")
        # And now nobody is left who could tell.
        await until(lambda: True in firing(told, "BullpenExporterDown"), "BullpenExporterDown fires")
        assert firing(told, "BullpenRedisDown") == []
        assert firing(told, "BullpenLedgerDown") == []
