"""The four types of a definition are followed from actions to what `emit` returns, by a strict checker."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

SOURCE = """
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from bullpen import Bullpen
from bullpen.workflow import BullMQ, BullMQEvent, Definition, InlineEntities, States, Transition, Workflow


class Status(StrEnum):
    NEW = "new"
    PAID = "paid"


class Event(StrEnum):
    PAY = "pay"


@dataclass
class Payment:
    amount: int


@dataclass
class Order:
    urn: str
    status: Status


async def charge(order: Order, payment: Payment) -> Order:
    return order


async def mistaken(order: Order, payment: str) -> Order:
    return order


def rich(order: Order, payment: Payment) -> bool:
    return payment.amount > 5


entities = InlineEntities[Order, Status](
    new=lambda: Order("u", Status.NEW),
    load=lambda urn: None,
    update=lambda order, status: order,
    status=lambda order: order.status,
    urn=lambda order: order.urn,
)
definition = Definition[Order, Payment, Event, Status](
    name="order",
    states=States(failed=Status.NEW, idles=[Status.NEW]),
    transitions=[Transition(event=Event.PAY, from_=[Status.NEW], to=Status.PAID, actions=[charge], conditions=[rich])],
    entity=entities,
    bullmq=BullMQ(events=[BullMQEvent(queue="q", event=Event.PAY)]),
)
workflow = Bullpen().workflow(definition)


async def use() -> None:
    reveal_type(workflow)  # 1
    reveal_type(await workflow.emit(Event.PAY, "u", Payment(5)))  # 2
    await workflow.emit("pay", "u")  # 3 wrong: text is no Event
    await workflow.emit(Event.PAY, "u", "five")  # 4 wrong: no Payment
    reveal_type(workflow.store.status(workflow.store.new()))  # 5


Bullpen().workflow(definition, bullmq=BullMQ[int](events=[BullMQEvent(queue="q", event=5)]))  # 8 wrong: no Event
wrong_action: Transition[Order, Payment, Event, Status] = Transition(
    event=Event.PAY,
    from_=Status.NEW,
    to=Status.PAID,
    actions=[mistaken],  # 6 wrong: takes another payload
)
wrong_state: Transition[Order, Payment, Event, Status] = Transition(
    event=Event.PAY,
    from_=Status.NEW,
    to="paid",  # 7 wrong: no Status
)
"""


@pytest.mark.requirement("W-5", "W-8")
def test_types_are_followed_and_mistakes_are_found(tmp_path: Path) -> None:
    path = tmp_path / "typed.py"
    path.write_text(SOURCE)

    answer = subprocess.run(
        [
            sys.executable,
            "-m",
            "mypy",
            "--strict",
            "--no-error-summary",
            f"--cache-dir={ROOT / '.mypy_cache'}",
            str(path),
        ],
        cwd=ROOT,
        env={"MYPYPATH": str(ROOT / "src"), "PATH": "", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )

    marks = {n: line.rpartition("# ")[2][0] for n, line in enumerate(SOURCE.splitlines(), 1) if "  # " in line}
    found: dict[str, list[str]] = {}
    for line in answer.stdout.splitlines():
        # By name, not by path: mypy repeats what it has remembered of the same file elsewhere. What it says about our
        # own modules is another check's affair.
        matched = re.fullmatch(r".*/typed\.py:(\d+):(.*)", line)
        if matched is not None:
            found.setdefault(marks.get(int(matched[1]), f"line {matched[1]}"), []).append(matched[2])
    assert sorted(found) == [*"12345678"], answer.stdout + answer.stderr
    assert "Workflow[typed.Order, typed.Payment, typed.Event, typed.Status]" in found.pop("1")[0]
    assert 'Revealed type is "typed.Order"' in found.pop("2")[0]
    assert 'Revealed type is "typed.Status"' in found.pop("5")[0]
    assert all(" error: " in text for texts in found.values() for text in texts if " note: " not in text)
