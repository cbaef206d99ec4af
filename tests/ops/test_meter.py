"""Metrics for OpenTelemetry: what became of jobs, under the names and attributes that npm `bullmq` records."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from bullpen import Backoff, DelayJob, Job, JobFailed, Queue, ReturnToWait, WaitForChildren, Worker
from bullpen.ops.meter import COUNTERS, DEPTH, DURATION, JobMeter, install_meter
from tests.interop._node import NODE_DIR, NodeMissing, find_node, install_packages


class Recorded:
    """What was recorded until now: by metric, its unit, text and points."""

    def __init__(self, reader: InMemoryMetricReader) -> None:
        self._reader = reader

    def metrics(self) -> dict[str, Any]:
        data = self._reader.get_metrics_data()
        found = [] if data is None else [scope for one in data.resource_metrics for scope in one.scope_metrics]
        return {metric.name: metric for scope in found for metric in scope.metrics}

    def points(self, name: str) -> dict[tuple[str, ...], Any]:
        """By the values of the attributes, in the order of their names."""
        metric = self.metrics().get(name)
        points = [] if metric is None else metric.data.data_points
        return {tuple(str(value) for _, value in sorted(point.attributes.items())): point for point in points}

    def value(self, name: str, *attributes: str) -> Any:
        return self.points(name)[attributes].value


@pytest.fixture
def recorded() -> Iterator[tuple[JobMeter, Recorded]]:
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader], shutdown_on_exit=False)
    meter = install_meter(provider)
    yield meter, Recorded(reader)
    meter.close()
    provider.shutdown()


async def test_what_becomes_of_jobs_is_counted(redis_url: str, recorded: tuple[JobMeter, Recorded]) -> None:
    """A retry after a pause is delayed, one without is retried, as Node counts; only the last failure is one."""

    async def handle(job: Job) -> None:
        started = job.attempts_started
        match job.name:
            case "bad":
                raise ValueError("no")
            case "later" if started == 1:
                raise DelayJob(1)
            case "back" if started == 1:
                raise ReturnToWait
            case "again" if started == 1:
                raise ValueError("at once")

    async with Queue("mails", connection=redis_url, attempts=2, backoff=1) as queue:
        async with Worker("mails", handle, connection=redis_url, backoff={"none": lambda failures, error, job: 0}):
            for name in ("good", "good", "later", "back"):
                await (await queue.add(name)).result(20_000)
            await (await queue.add("again", backoff=Backoff.custom("none"))).result(20_000)
            with pytest.raises(JobFailed):
                await (await queue.add("bad")).result(20_000)
        meter, seen = recorded
        counts = await meter.record_counts(queue)

        def value(state: str, name: str) -> Any:
            return seen.value(COUNTERS[state], name, state, "mails")

        assert (value("completed", "good"), value("failed", "bad"), value("delayed", "bad")) == (2, 1, 1)
        assert (value("delayed", "later"), value("waiting", "back"), value("retried", "again")) == (1, 1, 1)
        duration = seen.points(DURATION)
        assert {(name, state): point.count for (name, state, _), point in duration.items()} == {
            ("good", "completed"): 2,
            ("bad", "delayed"): 1,
            ("bad", "failed"): 1,
            ("later", "delayed"): 1,
            ("later", "completed"): 1,
            ("back", "waiting"): 1,
            ("back", "completed"): 1,
            ("again", "retried"): 1,
            ("again", "completed"): 1,
        }
        assert counts["completed"] == 5
        assert seen.value(DEPTH, "completed", "mails") == 5
        assert seen.value(DEPTH, "failed", "mails") == 1


async def test_a_parent_that_waits_for_its_children_is_counted(
    redis_url: str, recorded: tuple[JobMeter, Recorded]
) -> None:
    async with Queue("parents", connection=redis_url) as queue, Queue("children", connection=redis_url) as others:

        async def handle(job: Job) -> None:
            if job.attempts_started == 1:
                await others.add("child", parent=job.key, on_failure="ignore", delay=600_000)
                raise WaitForChildren

        parked = asyncio.Event()
        worker = Worker("parents", handle, connection=redis_url)
        worker.on("returned", lambda job: parked.set())
        async with worker:
            await queue.add("parent")
            await asyncio.wait_for(parked.wait(), 60)

    state = "waiting-children"
    assert recorded[1].value(COUNTERS[state], "parent", state, "parents") == 1


async def test_a_closed_meter_records_nothing(redis_url: str, recorded: tuple[JobMeter, Recorded]) -> None:
    async def handle(job: Job) -> None: ...

    meter, seen = recorded
    meter.close()
    async with Queue("mails", connection=redis_url) as queue, Worker("mails", handle, connection=redis_url):
        await (await queue.add("good")).result(20_000)

    assert seen.points(COUNTERS["completed"]) == {}


async def test_ids_in_names_fill_no_memory(redis_url: str, recorded: tuple[JobMeter, Recorded]) -> None:
    async def handle(job: Job) -> None: ...

    async with Queue("mails", connection=redis_url) as queue, Worker("mails", handle, connection=redis_url):
        jobs = await queue.add_many([(f"mail-{number}", None) for number in range(60)])
        for job in jobs:
            await job.result(20_000)

    points = recorded[1].points(COUNTERS["completed"])
    assert len(points) == 51
    assert points["other", "completed", "mails"].value == 10


PROGRAM = """
const { Queue, Worker, DelayedError } = require('bullmq');
const [host, port] = process.argv.slice(1);
const connection = { host, port: Number(port), maxRetriesPerRequest: null };
const seen = {};
const made = (kind, key) => (name, options) => ({
  [key]: (value, attributes) => {
    seen[name] = { kind, ...options, attributes: Object.keys(attributes).sort() };
  },
});
const span = {
  setSpanOnContext: (context) => context, setAttribute() {}, setAttributes() {}, addEvent() {}, recordException() {},
  end() {},
};
const telemetry = {
  tracer: { startSpan: () => span },
  contextManager: {
    with: (context, next) => next(), active: () => ({}), getMetadata: () => '', fromMetadata: (context) => context,
  },
  meter: {
    createCounter: made('counter', 'add'),
    createHistogram: made('histogram', 'record'),
    createGauge: made('gauge', 'record'),
  },
};
(async () => {
  const queue = new Queue('metered', { connection, telemetry });
  const ended = [];
  const worker = new Worker('metered', async (job, token) => {
    if (job.name === 'bad') throw new Error('no');
    if (job.name === 'later' && job.attemptsStarted === 1) {
      await job.moveToDelayed(Date.now() + 1, token);
      throw new DelayedError();
    }
  }, { connection, telemetry });
  const all = new Promise((resolve) => {
    const note = (job) => { ended.push(job.id); if (ended.length === 4) resolve(); };
    worker.on('completed', note);
    worker.on('failed', note);
  });
  await queue.add('good', {});
  await queue.add('bad', {}, { attempts: 2 });
  await queue.add('later', {});
  await all;
  await queue.recordJobCountsMetric();
  console.log(JSON.stringify(seen));
  await worker.close();
  await queue.close();
})();
"""


async def test_names_units_and_attributes_are_those_of_npm_bullmq(
    redis_url: str, recorded: tuple[JobMeter, Recorded]
) -> None:
    """What is there is told by the package itself: by its list of names, and by a worker that records."""
    try:
        tools = find_node()
        install_packages(tools)
    except NodeMissing as missing:
        pytest.skip(str(missing))
    names = (NODE_DIR / "node_modules/bullmq/dist/cjs/enums/telemetry-attributes.js").read_text()
    assert set(re.findall(r'MetricNames\["\w+"\] = "([\w.]+)"', names)) == {*COUNTERS.values(), DURATION, DEPTH}
    node = shutil.which("node") or "node"
    host, _, port = redis_url.removeprefix("redis://").partition(":")
    process = await asyncio.create_subprocess_exec(
        *(node, "-e", PROGRAM, "--", host, port.partition("/")[0]),
        cwd=NODE_DIR,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, err.decode()
    theirs = json.loads(out)

    async def handle(job: Job) -> None:
        if job.name == "bad":
            raise ValueError("no")
        if job.name == "later" and job.attempts_started == 1:
            raise DelayJob(1)

    meter, seen = recorded
    async with Queue("ours", connection=redis_url, attempts=2, backoff=Backoff.custom("none")) as queue:
        async with Worker("ours", handle, connection=redis_url, backoff={"none": lambda failures, error, job: 0}):
            for name in ("good", "later"):
                await (await queue.add(name)).result(20_000)
            with pytest.raises(JobFailed):
                await (await queue.add("bad")).result(20_000)
        await meter.record_counts(queue)
    ours = {
        name: {
            "kind": {"Sum": "counter", "Histogram": "histogram", "Gauge": "gauge"}[type(metric.data).__name__],
            "description": metric.description,
            "unit": metric.unit,
            "attributes": sorted(metric.data.data_points[0].attributes),
        }
        for name, metric in seen.metrics().items()
    }

    assert len(theirs) == 6
    assert {name: ours.get(name) for name in theirs} == theirs
