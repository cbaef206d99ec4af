"""The order in which tests that run side by side are dealt to the processes.

With `--dist worksteal` each process gets an equal part of the list, and one that has finished takes over from the end
of another's part. So what needs a costly server stands at the beginning of one part, where nobody takes it away: one
broker is started and not one per process. What takes milliseconds stands at the end: the last process to finish does so
soon after the others. In: all tests, how many processes. Out: the same tests in another order.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

COSTLY = ("rabbit", "rabbit_cluster", "real_kafka", "real_kafka_cluster")
"""Fixtures that take seconds of a core to start."""
NEIGHBOURS = "tests/interop/"
"""Has drivers in Node and Python for all of its tests."""
STORIES = "tests/first_hour/"
"""Each file is the story of one service, from its first start to its end: in one process, in order."""
QUICK = ("tests/unit/", "tests/static/", "tests/queue/")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    processes = getattr(config, "workerinput", {}).get("workercount", 1)
    if processes > 1:
        items[:] = spread(items, processes)


def _is_costly(item: pytest.Item) -> bool:
    """A test that runs on several brokers asks for its own by name, and its name or parameter says which."""
    named = item.nodeid.partition("[")[2]
    parameters = getattr(getattr(item, "callspec", None), "params", {}).values()
    asked = {*getattr(item, "fixturenames", ()), *(each for each in parameters if isinstance(each, str))}
    return "rabbitmq" in named or not asked.isdisjoint(COSTLY)


def spread(items: Sequence[pytest.Item], processes: int) -> list[pytest.Item]:
    first: list[list[pytest.Item]] = [[] for _ in range(processes)]
    files: dict[str, list[pytest.Item]] = {}
    last: list[pytest.Item] = []
    for item in items:
        if _is_costly(item):
            first[0].append(item)
        elif item.nodeid.startswith(NEIGHBOURS):
            first[1 % processes].append(item)
        elif item.nodeid.startswith(STORIES):
            first[2 % processes].append(item)
        elif item.nodeid.startswith(QUICK):
            last.append(item)
        else:
            files.setdefault(item.nodeid.partition("::")[0], []).append(item)
    parts = first
    for file in files.values():  # whole files, to whoever has least so far
        min(parts, key=len).extend(file)
    # The parts are cut by number, so they are filled up to what each process will get.
    remaining = len(items)
    for at, part in enumerate(parts):
        size = remaining // (processes - at)
        missing = max(0, size - len(part))
        part.extend(last[:missing])
        del last[:missing]
        remaining -= size
    return [*(item for part in parts for item in part), *last]
