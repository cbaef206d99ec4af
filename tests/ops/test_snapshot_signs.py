"""What a snapshot of a queue says is wrong with it."""

from __future__ import annotations

import pytest

from bullpen.ops.alert_options import SymptomLimits
from bullpen.ops.overview import QueueSnapshot
from bullpen.ops.symptoms import symptoms_of_snapshot


@pytest.mark.parametrize(
    ("waiting", "oldest_ms", "changes", "expected"),
    [
        (1, 180_000, {}, [("queue_late", "bullpen queues resume mails")]),
        (1, 60_000, {}, []),
        (0, None, {}, []),
        (1, 180_000, {"no_worker_ms": 0}, []),
        (1, 180_000, {"no_worker_ms": 0, "queue_late_ms": 120_000}, [("queue_late", "bullpen queues resume mails")]),
        (1, 180_000, {"no_worker_ms": 0, "queue_late_ms": 0}, []),
    ],
)
def test_a_paused_queue_is_named_when_its_jobs_have_waited(
    waiting: int, oldest_ms: int | None, changes: dict[str, int], expected: list[tuple[str, str]]
) -> None:
    paused = QueueSnapshot("mails", waiting=waiting, paused=True, oldest_ms=oldest_ms, workers=1)

    found = list(symptoms_of_snapshot(paused, SymptomLimits(**changes)))

    assert [(sign.rule, sign.fix) for sign in found] == expected
    assert all("the queue is paused" in sign.message for sign in found)
