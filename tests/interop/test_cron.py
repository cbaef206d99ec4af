"""Patterns and zones mean the same to us as to the package that Node's library asks."""

import random

import pytest

from bullpen._kernel.cron import next_after
from bullpen.errors import InvalidOption

from ._sides import PeerSide

ZONES = ["UTC", "Europe/Berlin", "America/New_York", "Asia/Kolkata", "UTC+3", "utc-5:30", "europe/paris", "Etc/GMT+5"]
BY_HAND = [
    *(f"@{name}" for name in ("yearly", "annually", "monthly", "weekly", "daily", "hourly", "minutely", "secondly")),
    *("@weekdays", "@weekends", "0 0 ? * ?", "0 12 ? * MON-FRI", "0 0 L * *", "0 0 L,15 * *", "0 0 * * 5L"),
    *("0 0 * * friL", "0 0 * * 5#3", "0 0 * * sun#1", "0 0 13 * 5", "0 0 1 * */2", "0 0 */2 * 1", "0 0 * * 7"),
    *("0 0 * * 1-7", "0 0 * * 5-7/2", "H H * * *", "H(10-20) H(2-4) * * *", "H/15 * * * *", "H(5-50)/10 * * * *"),
    *("0 0 H * *", "0 0 * H *", "0 0 * * H", "H H H H H H", "5/15 * * * *", "*/7 */5 * * *", "0 9-17/2 * jan-jun *"),
    *("3 4", "5", "* * *", " 0  5 * * * ", "0 0 29 2 *", "0 0 31 */3 *", "1-5-9 * * * *", "05 08 * * *"),
]


def _field(draw: random.Random, lowest: int, highest: int, names: tuple[str, ...] = ()) -> str:
    """One field: a star, a value, a range, a step, a list, a spread value."""
    low = draw.randint(lowest, highest)
    high = draw.randint(low, highest)
    values = sorted(draw.sample(range(lowest, highest + 1), 3))
    name = draw.choice(names) if names else str(low)
    forms = ["*", "*", "?", str(low), f"{low}-{high}", f"*/{draw.randint(1, highest)}", f"{low}/{draw.randint(1, 9)}"]
    forms += [
        f"{low}-{high}/{draw.randint(1, 5)}",
        ",".join(map(str, values)),
        "H",
        f"H({low}-{high})",
        name,
        name.upper(),
    ]
    return draw.choice(forms)


def _generated(count: int) -> list[str]:
    draw = random.Random(20_260_101)
    months = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
    days = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")
    patterns = []
    for _ in range(count):
        day = draw.choice([_field(draw, 1, 28), "L", "*", "L,1"])
        weekday = draw.choice([_field(draw, 0, 6, days), "*", f"{draw.randint(0, 7)}#{draw.randint(1, 4)}", "3L"])
        fields = [_field(draw, 0, 59), _field(draw, 0, 23), day, _field(draw, 1, 12, months), weekday]
        if draw.random() < 0.3:
            fields.insert(0, _field(draw, 0, 59))
        patterns.append(" ".join(fields))
    return patterns


async def test_every_pattern_that_the_package_reads_gives_the_same_time(node: PeerSide) -> None:
    draw = random.Random(7)
    patterns = BY_HAND + _generated(400)
    # Winter, hours away from any clock change: there the rules differ on purpose, and have their own tests.
    asked = [
        (pattern, zone, 1_768_000_000_000 + draw.randrange(10**9), "a seed")
        for pattern in patterns
        for zone in draw.sample(ZONES, 2)
    ]

    theirs = await node.peer.call("cronNext", asked=asked)

    ours: list[int | None] = []
    for pattern, zone, after, seed in asked:
        try:
            ours.append(next_after(pattern, zone, after, seed=seed))
        except InvalidOption:
            ours.append(None)
    different = [
        (question, they, we) for question, they, we in zip(asked, theirs, ours, strict=True) if they not in (we, None)
    ]
    assert different == []
    read = {pattern for (pattern, *_), they in zip(asked, theirs, strict=True) if they is not None}
    assert len(read) > 300, f"only {len(read)} patterns were compared"
    assert read >= set(BY_HAND)


async def test_both_refuse_the_same_nonsense(node: PeerSide) -> None:
    nonsense = [
        "@never",
        "60 * * * *",
        "* 24 * * *",
        "* * 0 * *",
        "* * * 13 *",
        "* * * * 8",
        "* * * * fry",
        "5-1 * * * *",
    ]
    nonsense += [
        "*/0 * * * *",
        "a * * * *",
        "* * * * * * *",
        "* * * * L",
        "* * * * 5#6",
        "/5 * * * *",
        ", * * * *",
        "* * * * fry",
    ]

    theirs = await node.peer.call("cronNext", asked=[(pattern, "UTC", 1_768_000_000_000, "") for pattern in nonsense])

    assert theirs == [None] * len(nonsense)
    for pattern in nonsense:
        with pytest.raises(InvalidOption):
            next_after(pattern, "UTC", 1_768_000_000_000)


async def test_unknown_zones_are_refused_by_both(node: PeerSide) -> None:
    zones = ["Mars/Olympus", "CETX", "Europe"]

    theirs = await node.peer.call("cronNext", asked=[("0 0 * * *", zone, 1_768_000_000_000, "") for zone in zones])

    assert theirs == [None] * len(zones)
    for zone in zones:
        with pytest.raises(InvalidOption):
            next_after("0 0 * * *", zone, 1_768_000_000_000)
