"""The number that a worker finds by itself, decided from values alone; and where the share of memory comes from."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from bullpen._kernel.memory import memory_share
from bullpen.errors import InvalidOption
from bullpen.worker.auto import AutoConcurrency, Governor, Observed, Reason, most_of, read_concurrency

CALM = 1.0
ROOM = 0.3


def busy(governor: Governor, *, lag_ms: float = CALM, memory: float | None = ROOM) -> Reason | None:
    """All slots were in use."""
    return governor.next(Observed(lag_ms, memory, governor.size))


def sizes(governor: Governor, count: int) -> list[int]:
    """What it comes to while all slots are in use and nothing complains."""
    found = []
    for _ in range(count):
        busy(governor)
        found.append(governor.size)
    return found


class TestGovernor:
    def test_it_doubles_while_all_slots_are_taken(self) -> None:
        """Thousands of jobs that only wait must not take minutes to get their slots."""
        assert sizes(Governor(AutoConcurrency(most=100)), 5) == [20, 40, 80, 100, 100]

    def test_it_stays_while_slots_are_free(self) -> None:
        governor = Governor(AutoConcurrency())

        assert governor.next(Observed(CALM, ROOM, governor.size - 1)) is None
        assert governor.size == 10

    def test_a_late_loop_means_fewer(self) -> None:
        governor = Governor(AutoConcurrency(lag=20))
        sizes(governor, 2)

        assert busy(governor, lag_ms=21) is Reason.LAG
        assert governor.size == 30

    def test_a_loop_that_is_just_in_time_is_not_late(self) -> None:
        assert busy(Governor(AutoConcurrency(lag=20)), lag_ms=20) is Reason.DEMAND

    def test_full_memory_means_fewer_although_the_loop_is_quick(self) -> None:
        governor = Governor(AutoConcurrency(memory=0.5))

        assert busy(governor, memory=0.5) is Reason.MEMORY
        assert governor.size == 7

    def test_it_falls_from_what_runs_and_not_from_what_might(self) -> None:
        """A hundred slots of which ten are used: 75 would change nothing."""
        governor = Governor(AutoConcurrency())
        sizes(governor, 4)

        governor.next(Observed(500, ROOM, 10))

        assert governor.size == 7

    def test_it_never_falls_below_its_least(self) -> None:
        governor = Governor(AutoConcurrency(least=4))

        for _ in range(10):
            busy(governor, lag_ms=1_000)

        assert governor.size == 4

    def test_it_rests_after_a_limit_and_grows_slowly_from_then_on(self) -> None:
        """Doubling again at once would meet the same limit every second."""
        governor = Governor(AutoConcurrency())
        sizes(governor, 2)
        busy(governor, lag_ms=100)

        assert sizes(governor, 9) == [30] * 6 + [33, 36, 39]

    def test_a_late_loop_of_an_idle_worker_is_not_its_fault(self) -> None:
        governor = Governor(AutoConcurrency())

        assert governor.next(Observed(5_000, 0.99, 0)) is None
        assert governor.size == 10

    def test_what_nobody_can_measure_limits_nothing(self) -> None:
        assert busy(Governor(AutoConcurrency(memory=0.01)), memory=None) is Reason.DEMAND

    @pytest.mark.parametrize(("least", "most", "first"), [(1, 4, 4), (50, 80, 50), (1, None, 10)])
    def test_it_begins_between_its_bounds(self, least: int, most: int | None, first: int) -> None:
        assert Governor(AutoConcurrency(least=least, most=most)).size == first


class TestBounds:
    def test_child_processes_are_as_many_as_processors(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("os.cpu_count", lambda: 6)

        assert most_of("auto", processes=True) == 6
        assert most_of("auto") == 500
        assert most_of(AutoConcurrency(most=9), processes=True) == 9
        assert most_of(7) == 7

    @pytest.mark.parametrize(
        "wrong",
        [{"least": 0}, {"least": 5, "most": 4}, {"lag": 0}, {"memory": 0}, {"memory": 1.1}, {"memory": True}],
    )
    def test_nonsense_is_refused(self, wrong: dict[str, Any]) -> None:
        with pytest.raises(InvalidOption, match=f"concurrency.{list(wrong)[-1]}"):
            AutoConcurrency(**wrong)

    @pytest.mark.parametrize("wrong", ["automatic", 0, True, None, 2.5])
    def test_a_concurrency_is_a_number_or_auto(self, wrong: Any) -> None:
        with pytest.raises(InvalidOption, match="concurrency"):
            read_concurrency(wrong)

    def test_auto_is_short_for_the_bounds_with_nothing_said(self) -> None:
        assert read_concurrency("auto") == AutoConcurrency()
        assert AutoConcurrency(lag=timedelta(seconds=1)).lag == timedelta(seconds=1)


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="ascii")
    return root


MACHINE = {"proc/meminfo": "MemTotal: 1000 kB\nMemFree: 10 kB\nMemAvailable: 600 kB\n"}


class TestMemory:
    def test_that_of_the_machine(self, tmp_path: Path) -> None:
        """What caches hold is available: it is given back before anybody is killed."""
        assert memory_share(write(tmp_path, MACHINE)) == pytest.approx(0.4)

    def test_that_of_a_container_wins_when_it_is_closer_to_its_limit(self, tmp_path: Path) -> None:
        root = write(
            tmp_path,
            {
                **MACHINE,
                "proc/self/cgroup": "0::/\n",
                "sys/fs/cgroup/memory.max": "1000\n",
                "sys/fs/cgroup/memory.current": "900\n",
                "sys/fs/cgroup/memory.stat": "anon 1\ninactive_file 100\n",
            },
        )

        assert memory_share(root) == pytest.approx(0.8)

    def test_limits_around_the_own_group_count(self, tmp_path: Path) -> None:
        """A service without a limit in a slice that has one."""
        root = write(
            tmp_path,
            {
                **MACHINE,
                "proc/self/cgroup": "0::/shop.slice/worker.service\n",
                "sys/fs/cgroup/shop.slice/worker.service/memory.max": "max\n",
                "sys/fs/cgroup/shop.slice/worker.service/memory.current": "5\n",
                "sys/fs/cgroup/shop.slice/memory.max": "100\n",
                "sys/fs/cgroup/shop.slice/memory.current": "70\n",
            },
        )

        assert memory_share(root) == pytest.approx(0.7)

    def test_the_older_kind_of_groups_is_read_too(self, tmp_path: Path) -> None:
        root = write(
            tmp_path,
            {
                **MACHINE,
                "proc/self/cgroup": "7:cpu,cpuacct:/x\n4:memory:/x\n",
                "sys/fs/cgroup/memory/x/memory.limit_in_bytes": "200\n",
                "sys/fs/cgroup/memory/x/memory.usage_in_bytes": "150\n",
                "sys/fs/cgroup/memory/x/memory.stat": "total_inactive_file 30\n",
            },
        )

        assert memory_share(root) == pytest.approx(0.6)

    def test_another_system_has_none_of_this(self, tmp_path: Path) -> None:
        assert memory_share(tmp_path) is None

    def test_this_machine_answers(self) -> None:
        share = memory_share()

        assert share is None or 0 < share <= 1
