"""Pages that list arguments, causes and fields list all of them."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from bullpen._kernel.outcome import Cause
from bullpen.app import Bullpen
from bullpen.ops.pauses import PAUSED_BY_FIELD
from bullpen.queue import Queue, QueueEvents
from bullpen.queue.codec import OWNER_FIELD
from bullpen.queue.late_wakeups import LATE_FIELDS
from bullpen.redis import Connection
from bullpen.wire import events
from bullpen.worker import Worker
from bullpen.worker.options import WorkerArguments

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
LUA = ROOT / "src" / "bullpen" / "wire" / "lua"


def names_in(page: str, heading: str) -> list[str]:
    """Names in backticks that open the rows below a heading."""
    text = (DOCS / page).read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE)


@pytest.mark.parametrize(
    ("kind", "positional"),
    [
        (Queue, {"name"}),
        (Worker, {"queue", "handler"}),
        (QueueEvents, {"queue"}),
        (Connection, set()),
        (Bullpen, set()),
    ],
)
def test_every_argument_is_on_the_page(kind: type, positional: set[str]) -> None:
    taken = [
        name
        for name, parameter in inspect.signature(kind).parameters.items()
        if name not in positional and parameter.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    taken += WorkerArguments.__annotations__ if kind is Worker else []

    assert names_in("reference/arguments.md", kind.__name__) == taken


def test_every_cause_is_on_the_page() -> None:
    page = (DOCS / "guides" / "dead-letters.md").read_text()

    assert [cause.value for cause in Cause if f"`{cause.value}`" not in page] == []


def test_every_event_is_on_the_page() -> None:
    page = (DOCS / "guides" / "events.md").read_text()

    assert [name.value for name in events.EventName if f"`{name.value}`" not in page] == []


def test_every_field_of_ours_is_on_the_page() -> None:
    scripts = "".join(script.read_text() for script in LUA.rglob("*.lua"))
    rules = (LUA.parent / "schedules.py").read_text()
    written = {*re.findall(r'"(bp[a-z]*):?"', scripts + rules), *LATE_FIELDS.values(), OWNER_FIELD, PAUSED_BY_FIELD}
    listed = {*names_in("reference/wire-extensions.md", "Fields of a job")}
    listed |= {*names_in("reference/wire-extensions.md", "Fields of `meta`")}
    listed |= {*names_in("reference/wire-extensions.md", "Fields of a scheduler")}

    assert listed == written


@pytest.mark.requirement("O-5", "O-6", "Q-20", "Q-57", "X-14", "X-42", "X-54", "X-118", "X-121")
@pytest.mark.parametrize(
    ("page", "said"),
    [
        ("guides/outbox.md", "what an aggregate looks like and other projections of its events are not its subject"),
        ("guides/outbox.md", "A row is the only truth about its delivery"),
        ("guides/queues.md", "Large payloads belong into object storage"),
        ("guides/queues.md", "needs one worker with concurrency 1 and jobs without retries"),
        ("guides/events.md", "Older ones are gone; history for months belongs into a database"),
        ("guides/retries.md", "Cap and spread are applied when a bullpen worker handles the failure"),
        ("guides/dead-letters.md", "LLEN bull:parcels-dlq:wait"),
        ("guides/workflows.md", "keep the order of arrival only with concurrency 1 and without retries"),
        ("guides/workers.md", "closing takes at most `close_timeout`"),
        ("guides/workers.md", "takeover ≤ lock + 2 × stalled_interval"),
        ("guides/workers.md", "Node workers on the same queue fail any job at its second stall"),
    ],
)
def test_what_users_must_know_is_said(page: str, said: str) -> None:
    assert said in " ".join((DOCS / page).read_text().split())


@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))], ids=lambda page: page.name)
def test_no_page_promises_more_than_at_least_once(page: Path) -> None:
    """A promise that cannot be kept is worse than none."""
    if page.name == "requirements.md":
        return

    assert re.findall(r"(?i)exactly[- ]once|guaranteed delivery|never loses", page.read_text()) == []
