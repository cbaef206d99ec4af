"""The comparison of the guide says something about every aspect of every transport, and its numbers were measured."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.transports import HEADER, measure
from bullpen.plugins.transports.memory import MemoryClient
from bullpen.testing.rabbitmq import DEAD_LETTER_TIMEOUT_MS

GUIDE = (Path(__file__).parents[2] / "docs" / "guides" / "transports.md").read_text()
ASPECTS = [
    *("infrastructure", "message ordering", "retry logic", "dead letters", "priorities", "delayed jobs"),
    *("job tracking", "horizontal scaling", "persistence", "complexity"),
]


def rows(below: str) -> list[list[str]]:
    """Cells of the first table after a text, without its two lines of heading."""
    table = re.search(r"(?:^\|.*\n)+", GUIDE.partition(below)[2], re.MULTILINE)
    assert table is not None
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[0].splitlines()[2:]]


@pytest.mark.requirement("W-70")
def test_every_aspect_is_compared_on_every_transport() -> None:
    compared = {aspect: cells for aspect, *cells in rows("## Comparison")}

    assert [aspect for aspect in ASPECTS if aspect not in compared] == []
    assert all(len(cells) == 4 and all(cells) for cells in compared.values())


@pytest.mark.requirement("W-70", "S-14", "S-43", "S-44", "S-45", "X-70")
def test_throughput_and_latency_are_there_for_every_transport() -> None:
    """What was measured keeps the targets: hundreds of confirmed messages, p99 below 100 ms, 550 slow ones a minute."""
    assert HEADER.splitlines()[0] in GUIDE
    measured = {name: cells for name, *cells in rows("benchmarks.transports --write -->")}
    numbers = {name: [float(re.sub(r"[^\d.]", "", cell)) for cell in cells] for name, cells in measured.items()}

    assert list(numbers) == ["memory", "BullMQ", "RabbitMQ, 1 node", "RabbitMQ, 3 nodes", "Kafka (mock)"]
    assert all(number > 0 for cells in numbers.values() for number in cells)
    for nodes in ("RabbitMQ, 1 node", "RabbitMQ, 3 nodes"):
        _, batched, _, _, p99_ms, slow_per_minute = numbers[nodes]
        assert batched > 200
        assert p99_ms < 100
        assert slow_per_minute > 550


@pytest.mark.requirement("W-70")
async def test_the_benchmark_measures() -> None:
    measured = await measure(MemoryClient, messages=50)

    assert min(measured.one_by_one, measured.batched, measured.handled, measured.slow_per_minute) > 0
    assert measured.p99_ms >= measured.p50_ms > 0
    assert measured.row("memory").count("|") == HEADER.splitlines()[0].count("|")


@pytest.mark.requirement("S-14", "S-50")
def test_the_clusters_of_the_tests_run_as_the_guide_tells() -> None:
    """Retries that outlive a node in time are promised only with this setting."""
    assert f"[{{rabbit, [{{dead_letter_worker_publisher_confirm_timeout, {DEAD_LETTER_TIMEOUT_MS}}}]}}]." in GUIDE
