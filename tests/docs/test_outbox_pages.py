"""What the pages about the outbox must say, beside that their code runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = {
    name: (DOCS / name).read_text()
    for name in (
        "guides/outbox.md",
        "guides/projector.md",
        "recipes/outbox-layers.md",
        "operate/outbox-checklist.md",
    )
}


@pytest.mark.requirement("O-87")
def test_the_checklist_repeats_the_eight_checks() -> None:
    rows = re.findall(r"^\| (\d) \| (.+?) \| .+ \|$", PAGES["operate/outbox-checklist.md"], re.MULTILINE)

    words = [
        "metadata",
        "unique",
        "SKIP LOCKED",
        "Retries",
        "idempotency key",
        "personal data",
        "dead-lettered",
        "backoff",
    ]
    assert [int(number) for number, _ in rows] == list(range(1, 9))
    for (_, check), word in zip(rows, words, strict=True):
        assert word in check
    assert "source event's id" in rows[4][1]
    assert "last attempt" in rows[6][1]
    assert {"concurrency", "idempotency", "backoff"} <= set(re.findall(r"\w+", rows[7][1]))


@pytest.mark.requirement("O-86", "O-78")
def test_the_recipe_has_every_part_as_code_that_runs() -> None:
    """The page itself is run by the tests of all pages."""
    code = "\n".join(re.findall(r"```python\n(.*?)```", PAGES["recipes/outbox-layers.md"], re.DOTALL))

    for part in (
        "OutboxRepository",
        '"payment.completed.v1", to="kafka:payments"',
        "claim_batch_size=100",
        'key="event"',
        "def test_pauses_grow",
        "def test_the_same_event_is_stored_once",
    ):
        assert part in code
    domain = re.search(r"# payments_domain\.py\n(.*?)```", PAGES["recipes/outbox-layers.md"], re.DOTALL)
    assert domain is not None
    assert "bullpen.plugins" not in domain[1]
    assert "bullpen.ledger" not in domain[1]


@pytest.mark.requirement("O-5", "O-6", "O-33", "O-58")
def test_the_guide_says_what_is_whose_business() -> None:
    guide, recipe = PAGES["guides/projector.md"], PAGES["recipes/outbox-layers.md"]

    assert "How aggregates are built and other projections (read models) are not bullpen's business." in guide
    assert "The row is the only truth about a delivery, and the queue only does the work." in guide
    assert "The event store is history and is never changed." in guide
    assert "identifiers and required fields" in guide
    assert "Deliveries hold no business logic" in recipe


@pytest.mark.requirement("X-17", "O-4")
@pytest.mark.parametrize("name", PAGES)
def test_no_page_promises_more_than_at_least_once(name: str) -> None:
    text = " ".join(PAGES[name].split())

    assert not re.search(r"exactly[ -]once", text, re.IGNORECASE)
    if "effectively once" in text.lower():
        assert re.search(r"effectively once (only )?where", text, re.IGNORECASE)


@pytest.mark.requirement("X-14")
def test_the_guide_to_retries_says_what_a_node_worker_does() -> None:
    text = " ".join((DOCS / "guides" / "retries.md").read_text().split())

    assert "Cap and spread are applied when a bullpen worker handles the failure." in text
    assert "A Node worker on the same queue knows neither" in text


@pytest.mark.requirement("O-59", "X-96", "O-28")
def test_the_guide_names_the_settings_of_the_event_store() -> None:
    assert "ESDB_CONNECTION_STRING=esdb+discover://" in PAGES["guides/projector.md"]
    assert "ESDB_SUBSCRIPTION_PREFIX=payment.,account." in PAGES["guides/projector.md"]
