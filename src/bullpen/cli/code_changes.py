"""Notice that Python files below a directory were changed, added or removed: for `bullpen run --reload`.

In: a directory. Out: the names of changed files, as often as there are some. Files are looked at twice a second: that
works on every file system, network mounts and containers included, and needs no library. Environments, caches and
hidden directories are left out.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

__all__ = ["CodeChanges"]

_EVERY_S: Final = 0.5
_LEFT_OUT: Final = frozenset({"__pycache__", "node_modules", "site-packages"})


class CodeChanges:
    """What has changed since the last look, or since this was made."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._seen = self._scan()

    def look(self) -> list[str]:
        """The changed files, as paths below the directory."""
        before, self._seen = self._seen, self._scan()
        names = before.keys() | self._seen.keys()
        return sorted(
            str(Path(name).relative_to(self._directory)) for name in names if before.get(name) != self._seen.get(name)
        )

    async def follow(self) -> AsyncIterator[list[str]]:
        """The changed files, each time there are some."""
        while True:
            await asyncio.sleep(_EVERY_S)
            if changed := await asyncio.to_thread(self.look):
                yield changed

    def _scan(self) -> dict[str, tuple[int, int]]:
        found: dict[str, tuple[int, int]] = {}
        for directory, below, files in os.walk(self._directory):
            below[:] = [
                name
                for name in below
                if name not in _LEFT_OUT
                and not name.startswith(".")
                and not os.path.exists(os.path.join(directory, name, "pyvenv.cfg"))
            ]
            for name in files:
                if name.endswith(".py"):
                    path = os.path.join(directory, name)
                    try:
                        status = os.stat(path)
                    except OSError:  # removed just now
                        continue
                    found[path] = (status.st_mtime_ns, status.st_size)
        return found
