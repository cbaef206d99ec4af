"""What one job may use of the machine when handlers run in child processes.

In: numbers, given to `Worker(processes=ChildLimits(...))`. Out: limits of the operating system, set by the child on
itself before it imports the handler; what a handler starts has them too. Elsewhere: time (`timeout` of the worker).
"""

from __future__ import annotations

import signal
import sys
from dataclasses import asdict, dataclass
from typing import Final, Self

from bullpen._kernel.duration import check_int
from bullpen.errors import require

_MEGABYTE: Final = 1024 * 1024
_LEAST_MEMORY_MB: Final = 64
"""Python and bullpen themselves need most of it."""
_LEAST_FILES: Final = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildLimits:
    """A limit that is None is not set."""

    memory_mb: int | None = None
    """What a child may allocate, in MiB; beyond it Python raises MemoryError, and other code may crash."""
    cpu_ms: int | None = None
    """Processor time of one run of a handler, in steps of a second; the child that has used it up is killed."""
    open_files: int | None = None
    """Files and sockets that a child may have open at the same time."""

    def __post_init__(self) -> None:
        if self.memory_mb is not None:
            check_int("memory_mb", self.memory_mb, minimum=_LEAST_MEMORY_MB)
        if self.cpu_ms is not None:
            check_int("cpu_ms", self.cpu_ms, minimum=1)
        if self.open_files is not None:
            check_int("open_files", self.open_files, minimum=_LEAST_FILES)
        is_limited = (self.memory_mb, self.cpu_ms, self.open_files) != (None, None, None)
        require("processes", not is_limited or sys.platform != "win32", "no limits on this system", self)

    @property
    def cpu_s(self) -> int | None:
        """In whole seconds, which is all that the system counts in; never less than was asked for."""
        return None if self.cpu_ms is None else -(-self.cpu_ms // 1000)

    def to_message(self) -> dict[str, int | None]:
        return asdict(self)

    @classmethod
    def from_message(cls, message: dict[str, int | None]) -> Self:
        return cls(**message)

    # In the child ---------------------------------------------------------------------------------------------------

    def set(self) -> None:
        """Once, for the life of the process. A limit that is lower already stays."""
        if sys.platform == "win32":
            return
        import resource

        if self.memory_mb is not None:
            _lower(resource.RLIMIT_DATA, self.memory_mb * _MEGABYTE)
        if self.open_files is not None:
            _lower(resource.RLIMIT_NOFILE, self.open_files)

    def begin_job(self) -> None:
        """The system counts from the start of the process, so each job moves the end."""
        if self.cpu_s is None or sys.platform == "win32":
            return
        import resource

        used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        wanted = int(used) + 1 + self.cpu_s
        resource.setrlimit(resource.RLIMIT_CPU, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))


def _lower(limit: int, wanted: int) -> None:
    import resource

    _, hard = resource.getrlimit(limit)
    value = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(limit, (value, value))


def says_cpu_used_up(exit_code: int) -> bool:
    """Whether the system killed a child because of its processor time."""
    return sys.platform != "win32" and exit_code == -signal.SIGXCPU
