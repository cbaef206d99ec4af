"""A fault that lasts is told when it begins, now and then, and when it is over."""

from __future__ import annotations

from bullpen._kernel.reminder import Reminder


def test_a_lasting_fault_is_told_at_its_beginning_every_minute_and_at_its_end() -> None:
    now = [0.0]
    reminder = Reminder(60, lambda: now[0])

    told = []
    for now[0] in range(0, 130, 10):
        if reminder.begins_or_lasts():
            told.append(now[0])

    assert told == [0, 60, 120]
    assert (reminder.is_over(), reminder.is_over()) == (True, False)
    assert reminder.begins_or_lasts(), "it begins again"
