"""Tests that run side by side: nothing is lost by the order, one process starts the broker, quick ones are last."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from tests.spread import spread


@dataclass(frozen=True)
class Item:
    nodeid: str
    fixturenames: tuple[str, ...] = ()


def items() -> list[Any]:
    return [
        *(Item(f"tests/transports/test_rabbit.py::test_{number}", ("rabbit",)) for number in range(5)),
        *(Item(f"tests/unit/test_unit.py::test_{number}") for number in range(60)),
        *(Item(f"tests/interop/test_node.py::test_{number}") for number in range(4)),
        *(Item(f"tests/outbox/test_{file}.py::test_{number}") for file in "abcdef" for number in range(3)),
        *(Item(f"tests/messages/test_rabbit.py::test_{number}", ("x", "rabbit_cluster")) for number in range(1)),
        Item("tests/workflow/test_rabbit.py::test_a_transport[rabbitmq-1]"),
    ]


@pytest.mark.parametrize("processes", [2, 3, 5])
def test_every_test_is_in_one_part_and_costly_ones_begin_one(processes: int) -> None:
    given = items()

    ordered = spread(given, processes)

    assert sorted(item.nodeid for item in ordered) == sorted(item.nodeid for item in given)
    assert {item.nodeid.rpartition("/")[2].partition("::")[0] for item in ordered[:7]} == {"test_rabbit.py"}
    second = len(given) // processes
    assert all("interop" in item.nodeid for item in ordered[second : second + 4])
    assert "unit" in ordered[second - 1].nodeid
    assert "unit" in ordered[-1].nodeid


def test_a_file_of_one_part_stays_together() -> None:
    ordered = [item.nodeid.partition("::")[0] for item in spread(items(), 3) if "outbox" in item.nodeid]

    assert ordered == [file for file in dict.fromkeys(ordered) for _ in range(3)]


def test_few_tests_are_spread_too() -> None:
    given = items()[:2]

    assert spread(given, 3) == given
