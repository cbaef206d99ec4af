"""How much of the memory that this process may use is in use.

In: nothing. Out: a share from 0 to 1, of the machine and of every control group above us that has a limit; the greatest
counts, because that one is met first. Linux only; elsewhere None.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

_V1_LIMIT, _V1_USED, _V1_CACHE = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
_V2_LIMIT, _V2_USED, _V2_CACHE = "memory.max", "memory.current", "inactive_file"
_ROOT: Final = Path("/")


def memory_share(root: Path = _ROOT) -> float | None:
    """Used memory by its limit. `root`: where `proc` and `sys` are found."""
    shares = [share for share in (_of_machine(root), *_of_groups(root)) if share is not None]
    return max(shares, default=None)


def _of_machine(root: Path) -> float | None:
    total, available = (_field(root / "proc/meminfo", name) for name in ("MemTotal:", "MemAvailable:"))
    return None if not total or available is None else 1 - available / total


def _of_groups(root: Path) -> Iterator[float | None]:
    """Of ours and of those around it: a container sees its own as the root, a service of systemd lies deeper."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            yield from _upwards(root / "sys/fs/cgroup", path, _V2_LIMIT, _V2_USED, _V2_CACHE)
        elif "memory" in controllers.split(","):
            yield from _upwards(root / "sys/fs/cgroup/memory", path, _V1_LIMIT, _V1_USED, _V1_CACHE)


def _upwards(mount: Path, path: str, limit: str, used: str, cache: str) -> Iterator[float | None]:
    group = mount / path.strip("/")
    while True:
        yield _of_group(group, limit, used, cache)
        if group == mount or mount not in group.parents:
            return
        group = group.parent


def _of_group(group: Path, limit: str, used: str, cache: str) -> float | None:
    most, now = (_number(_read(group / name)) for name in (limit, used))
    if not most or now is None:  # `max`, or there is no such group
        return None
    # Files that nobody reads just now are given back before anybody is killed.
    return max(0, now - (_field(group / "memory.stat", cache) or 0)) / most


def _field(file: Path, name: str) -> int | None:
    for line in _read(file).splitlines():
        words = line.split()
        if words and words[0] == name:
            return _number(words[1])
    return None


def _number(text: str) -> int | None:
    return int(text) if text.strip().isdecimal() else None


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii", errors="replace")
    except OSError:  # another system, or a file that we may not read
        return ""
