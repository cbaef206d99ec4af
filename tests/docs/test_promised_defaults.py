"""What the guides of the four systems promise without a setting is what the code does without one.

Each line: where the promise stands, its words, and the default that must keep it. Whoever changes one of the two is led
to the other.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

from bullpen._kernel.policy import OUTBOX_DELIVERY, SCHEDULED_MESSAGE, WORKFLOW_RUN
from bullpen.ledger import OutboxItem
from bullpen.messages import Late
from bullpen.messages.enqueuer import SchedulerOptions
from bullpen.messages.occasions import OccasionKind
from bullpen.messages.sender import SenderOptions
from bullpen.outbox import DispatcherOptions
from bullpen.runs import RunOptions
from bullpen.settings import Settings
from bullpen.workflow import BullMQ, DefaultJobOptions, Definition, RedisEntities
from bullpen.workflow.context import _LONGEST_KEY
from bullpen.workflow.engine import _MOST_CONFLICTS
from bullpen.workflow.locks import _SHORT_LEASE_MS, LocalLocks, RedisLocks

GUIDES = Path(__file__).parents[2] / "docs" / "guides"
SETTINGS = Settings.load(environ={})
JOB, RUNS, DISPATCHER, SCHEDULER = DefaultJobOptions(), RunOptions(), DispatcherOptions(), SchedulerOptions()


def default(function: Any, name: str) -> Any:
    return inspect.signature(function).parameters[name].default


def pauses(policy: Any, count: int) -> list[int]:
    """Milliseconds before each further attempt, without their random part."""
    return [policy.backoff.delay_for(number + 1, lambda: 0.0) for number in range(count)]


PROMISES: dict[str, list[tuple[str, bool]]] = {
    "workflows.md": [
        ("the next 10,000 events of the entity (`keep_applied`)", default(RedisEntities, "keep_applied") == 10_000),
        ("last 1000 moves", default(RedisEntities, "keep_history") == 1_000),
        ("More than `max_steps` (100) of them", default(Definition, "max_steps") == 100),
        ("(3 attempts, 30 s and 60 s apart, `{queue}-dlq`)", JOB.attempts == 3 and pauses(JOB, 2) == [30_000, 60_000]),
        ("(3 attempts, 30 s and 60 s apart, `{queue}-dlq`)", BullMQ(events=[]).dead_letter_queue.suffix == "-dlq"),
        ("handles one event of a queue at a time unless the binding says", BullMQ(events=[]).concurrency == 1),
        ("after a crash it is free again within ten seconds", _SHORT_LEASE_MS == 10_000),
        ("(30 for access without\nversions)", default(RedisLocks, "lease") == 30_000),
        ("turn for 30 s behind events of its own process", default(LocalLocks, "wait") == 30_000),
        ("as long behind those of others", default(RedisLocks, "wait") == 30_000),
        ("It is ASCII and has at most 200 characters", _LONGEST_KEY == 200),
        ("decided anew, up to ten times", _MOST_CONFLICTS == 10),
    ],
    "outbox.md": [
        ("are counted in the row: ten,", SETTINGS.outbox.max_attempts == 10),
        ("ten, after 1, 2, 4, 8, then 15 minutes", OUTBOX_DELIVERY.policy.attempts == 10),
        (
            "after 1, 2, 4, 8, then 15 minutes",
            pauses(OUTBOX_DELIVERY.policy, 6) == [60_000, 120_000, 240_000, 480_000, 900_000, 900_000],
        ),
        ("about an hour and a half after the first", sum(pauses(OUTBOX_DELIVERY.policy, 9)) == 90 * 60_000),
        ("When its lease (60 s, `BULLPEN_OUTBOX_LEASE_MS`)", SETTINGS.outbox.lease_ms == DISPATCHER.lease_ms == 60_000),
        ("(a webhook 5 s, `WEBHOOK_TIMEOUT_MS`)", SETTINGS.webhooks.timeout_ms == 5_000),
        ("`SENT` rows are removed after seven days", DISPATCHER.keep_sent_ms == 7 * 86_400_000),
        ("(`OUTBOX_DEADLETTER_TOPIC`)", SETTINGS.outbox.dead_letter_topic == "outbox.dead"),
        ("`BULLPEN_OUTBOX_FAIR_TENANTS=false` claims by due time alone", SETTINGS.outbox.fair_tenants),
        ("is `DEAD` at once with `UNKNOWN_INTEGRATION_TYPE`", SETTINGS.outbox.unknown_types == "dead"),
        ("whatever its route, set\n`BULLPEN_OUTBOX_STRICT_SOURCES=true`", not SETTINGS.outbox.strict_sources),
        ("`max_attempts` and `backoff` of\n  `enqueue` change that", default(OutboxItem, "max_attempts") is None),
    ],
    "runs.md": [
        ("given up after 3 attempts", WORKFLOW_RUN.policy.attempts == 3),
        ("| `retry` | 3 attempts, 5 s doubling", pauses(WORKFLOW_RUN.policy, 2) == [5_000, 10_000]),
        ("(every 15 s, `heartbeat_ms`)", RUNS.heartbeat_ms == 15_000),
        ("five minutes and\ntwenty seconds by default", (RUNS.lock, RUNS.stalled_interval) == (300_000, 10_000)),
        ("results are JSON of at most 1 MiB", RUNS.max_result_bytes == 1024 * 1024),
        ("| `max_payload_bytes`, `max_result_bytes` | 10 MiB, 1 MiB", RUNS.max_payload_bytes == 10 * 1024 * 1024),
        ("`WORKER_CONCURRENCY`, 100", SETTINGS.runs.concurrency == RUNS.concurrency == 100),
        ("runs it every 30 seconds", RUNS.sweep_every_ms == 30_000),
        ("| `lane_per_tenant` | true", RUNS.lane_per_tenant),
        ("| `price` | as the app's (`configure`), else 0", RUNS.price == 0),
        ("attempt may take as long as it does unless `timeout` bounds it", RUNS.timeout is None),
    ],
    "scheduled-messages.md": [
        ("published an hour before their instant", SCHEDULER.look_ahead_ms == 3_600_000),
        ("whose next occurrence lies within two days", SCHEDULER.horizon_ms == 2 * 86_400_000),
        ("**Scheduler.** On the cron pattern `CRON_MINUTE_SCHEDULE` in UTC", SCHEDULER.schedule == "* * * * *"),
        ("again after 2, 4, 8, 16, 32 s", pauses(SCHEDULED_MESSAGE.policy, 5) == [2_000, 4_000, 8_000, 16_000, 32_000]),
        ("32 s, six deliveries in all", SenderOptions().attempts == SCHEDULED_MESSAGE.policy.attempts == 6),
        ("`Late.expire(after)` (default, 24 h)", OccasionKind(name="x").late == Late.expire(86_400_000)),
        ("30 s after its instant (`late_after_ms`)", SCHEDULER.late_after_ms == 30_000),
        ("A sender begins with 5 messages at a time", SETTINGS.messages.concurrency == 5),
        ("TTL 24 h, 100 000 messages", SETTINGS.messages.message_ttl_ms == 86_400_000),
        ("TTL 24 h, 100 000 messages", SETTINGS.messages.max_queue_length == 100_000),
        ("the default `bullmq` uses the Redis", SETTINGS.messages.transport == "bullmq"),
    ],
}


@pytest.mark.parametrize(
    ("page", "words", "is_kept"),
    [(page, words, is_kept) for page, promises in PROMISES.items() for words, is_kept in promises],
)
def test_a_promise_of_a_guide_is_kept_without_a_setting(page: str, words: str, is_kept: bool) -> None:
    assert words in (GUIDES / page).read_text(encoding="utf-8"), "the guide no longer says so: change this list, too"
    assert is_kept
