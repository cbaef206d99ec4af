"""Templates, colours and files of the dashboard, without running it."""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path

import pytest

import bullpen.dashboard
from bullpen.ledger import OutboxStatus, RunStatus
from bullpen.ledger.message_records import MessageStatus
from bullpen.ops.status import (
    WorkStatus,
    duration_text,
    job_status,
    message_status,
    outbox_status,
    run_status,
    size_text,
)
from bullpen.queue import JobState

HERE = Path(bullpen.dashboard.__file__).parent
DOCS = Path(__file__).parents[2] / "docs"
TEMPLATES = sorted((HERE / "templates").glob("*.html"))
SHEETS = sorted((HERE / "static" / "css").glob("*.css"))
SCRIPTS = sorted((HERE / "static").glob("*.js"))
CSS = "".join(path.read_text() for path in SHEETS)


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.name)
@pytest.mark.requirement("D-115")
def test_a_template_has_nothing_that_the_policy_forbids(path: Path) -> None:
    text = path.read_text()

    assert not re.search(r"<script(?![^>]* src=)", text), "inline script"
    assert not re.search(r"\son\w+\s*=", text), "inline handler"
    assert not re.search(r"\sstyle\s*=|<style", text), "inline style"
    assert "|safe" not in text.replace(" ", "")
    assert "javascript:" not in text
    assert not re.search(r"https?://", text), "nothing is loaded from elsewhere"
    assert not re.search(r"#[0-9a-f]{6}\b", text), "colours stand in the style sheet"


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
@pytest.mark.requirement("D-115")
def test_nothing_turns_text_into_html(path: Path) -> None:
    script = path.read_text()

    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", script)


def luminance(colour: str) -> float:
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


PAIRS = re.findall(r"--([\w-]+): light-dark\((#[0-9a-f]{6}), (#[0-9a-f]{6})\)", CSS)
LIGHT = {role: light for role, light, _ in PAIRS}
DARK = {role: dark for role, _, dark in PAIRS}


def test_colours_stand_in_one_sheet_and_classes_exist() -> None:
    others = "".join(path.read_text() for path in SHEETS[1:])
    assert re.findall(r"#[0-9a-f]{6}\b", others) == []
    used = {word for path in TEMPLATES for word in re.findall(r'class="([a-z][a-z-]*)"', path.read_text())}
    known = set(re.findall(r"\.([a-z][a-z-]*)", CSS))
    assert used - known - {"low", "quiet", "columns-form", "wide"} == set()


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_colours_can_be_read(theme: dict[str, str]) -> None:
    for role in ("text", "muted", "link"):
        assert contrast(theme[role], theme["background"]) >= 4.5, role
        assert contrast(theme[role], theme["surface"]) >= 4.5, role
    for role in ("control", "focus"):
        assert contrast(theme[role], theme["background"]) >= 3, role
    for role in ("danger", "primary"):
        assert contrast(theme[f"on-{role}"], theme[role]) >= 4.5, role
        assert contrast(theme[role], theme["background"]) >= 1.5, role
    assert contrast(theme["dead"], theme["background"]) >= 4.5
    for word in set(WorkStatus) - {WorkStatus.PAUSED}:
        assert contrast(theme[word], theme[f"{word}-tint"]) >= 4.5, word


STORES: dict[str, tuple[type[StrEnum], Callable[[str], WorkStatus]]] = {
    "job": (JobState, job_status),
    "outbox": (OutboxStatus, outbox_status),
    "run": (RunStatus, run_status),
    "message": (MessageStatus, message_status),
}


@pytest.mark.requirement("X-19", "X-20")
def test_every_state_of_every_store_has_the_common_word_that_the_page_shows() -> None:
    """One column per store, one row per word; a state that nobody mapped would be shown as unknown."""
    page = (DOCS / "reference" / "glossary.md").read_text().partition("\n## Common words for states\n")[2]
    head, _, *rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in page.splitlines() if row[:1] == "|"]
    shown = {
        (store, state): word.strip("`")
        for word, *cells in rows
        for store, cell in zip(head[1:], cells, strict=True)
        for state in re.findall(r"`([\w-]+)`", cell)
    }

    assert shown == {(store, state): read(state) for store, (kind, read) in STORES.items() for state in kind}
    assert [state for store, state in shown if shown[store, state] == "unknown"] == ["unknown", "PARKED"]


@pytest.mark.requirement("X-19", "X-20")
def test_a_word_says_what_happens_next_whatever_the_store_calls_it() -> None:
    assert job_status("delayed", attempts_made=1, has_failed=True) is WorkStatus.RETRYING
    assert (outbox_status("FAILED"), run_status("FAILED")) == (WorkStatus.RETRYING, WorkStatus.DEAD)
    assert "for a run the same word means the end" in (DOCS / "guides" / "outbox.md").read_text()
    assert {read("nonsense") for _, read in STORES.values()} == {WorkStatus.UNKNOWN}


def test_durations_and_sizes_are_short() -> None:
    assert [duration_text(ms) for ms in (0, 999, 1_200, 59_000, 182_000, 7_500_000, 864_000_000)] == [
        *("0 ms", "999 ms", "1.2 s", "59 s", "3m 02s", "2h 05m", "10 d")
    ]
    assert [size_text(size) for size in (1, 1_234, 12_345, 10_485_760, 5_000_000_000)] == [
        *("1 B", "1.2 kB", "12 kB", "10 MB", "5.0 GB")
    ]


@pytest.mark.requirement("D-126")
def test_every_page_has_a_picture() -> None:
    """`make screenshots` opens each address that draws a page, but those that follow another step of a form."""
    from bullpen.dashboard.pages import ROUTES
    from tools.screenshots import PAGES

    shown = [tuple(part for part in path.partition("?")[0].split("/") if part) for path in PAGES.values()]
    without = {
        route.pattern
        for route in ROUTES
        if route.method == "GET" and not any(route.match(segments) is not None for segments in shown)
    }
    assert without == {
        "/stream", "/stream/{queue}", "/pulse", "/login", "/dead-letters/export", "/audit/export", "/openapi.json",
        "/queues/{queue}/jobs/{job}/raw/{part}", "/queues/{queue}/{kind}/{subject}/act/{verb}",
        "/dead-letters/{store}/groups/{mark}",
        "/dead-letters/{store}/{entry}/edit", "/operations/{id}", "/runs/{id}/act/{verb}", "/messages/{id}/act/{verb}",
    }  # fmt: skip
