"""What one run of one contestant measures, printed as one JSON line; shared by the contestants written in Python."""

import json
import resource
import time
from collections.abc import Sequence
from typing import Any


def quantile(values: Sequence[float], fraction: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * fraction))]


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"p50": quantile(values, 0.5), "p99": quantile(values, 0.99)}


def own_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def server_cpu_s(info: dict[str, Any]) -> float:
    return float(info["used_cpu_user"]) + float(info["used_cpu_sys"])


class Stopwatch:
    """Wall time, own CPU and server CPU between its creation and `report`."""

    def __init__(self, server_info: dict[str, Any]) -> None:
        self._server = server_cpu_s(server_info)
        self._cpu = own_cpu_s()
        self._started = time.perf_counter()
        self._seconds = 0.0
        self._cpu_used = 0.0

    def stop(self) -> None:
        self._seconds = time.perf_counter() - self._started
        self._cpu_used = own_cpu_s() - self._cpu

    def report(self, *, jobs: int, expected: int, server_info: dict[str, Any], **details: Any) -> None:
        """Print the line. `jobs` is what the server holds afterwards: a contestant that loses some is not fast."""
        line = {
            "jobs": jobs,
            "seconds": self._seconds,
            "jobs_per_s": expected / self._seconds,
            "cpu_s": self._cpu_used,
            "server_cpu_s": server_cpu_s(server_info) - self._server,
            **details,
        }
        print(json.dumps(line))
