"""The locks by which processes that share a server agree: `flock`, which the system drops however its holder dies."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from bullpen._kernel.ownership import NO_FOLLOW
from bullpen.embedded.stamp import ELSEWHERE
from bullpen.errors import EmbeddedError

TURN_DEADLINE_S = 120.0
POLL_S = 0.004

turns: set[int] = set()
"""Descriptors of `start.lock` that are held right now; a forked child must not keep them."""


@contextlib.contextmanager
def my_turn(directory: Path) -> Iterator[None]:
    """Hold `start.lock`: nobody else decides or starts meanwhile."""
    descriptor = lock_file(directory / "start.lock", shared=False, deadline_s=TURN_DEADLINE_S)
    turns.add(descriptor)
    try:
        yield
    finally:
        import fcntl

        turns.discard(descriptor)
        # Unlocked, not only closed: a child forked in this moment has a copy of the descriptor.
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def lock_file(path: Path, *, shared: bool, deadline_s: float) -> int:
    """Lock a file and return its descriptor. Polls, because a blocking flock knows no deadline."""
    import fcntl

    how = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    give_up = time.monotonic() + deadline_s
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | NO_FOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, how | fcntl.LOCK_NB)
            if holds_file(descriptor, path):
                return descriptor
        except BlockingIOError:
            pass
        except OSError as error:
            os.close(descriptor)
            raise EmbeddedError(f"{path} cannot be locked ({error.strerror}); {ELSEWHERE}") from error
        # Not ours yet, or the file was replaced between opening and locking.
        os.close(descriptor)
        if time.monotonic() >= give_up:
            raise EmbeddedError(
                f"{path} has been locked by another process for more than {deadline_s:.0f} s; it may be frozen while "
                "it starts or stops the server"
            )
        time.sleep(POLL_S)


def holds_file(descriptor: int, path: Path) -> bool:
    """Whether the path still leads to the open file; a directory may be removed and made again under our feet."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError:
        return False


def is_held(path: Path) -> bool:
    """Whether a process holds this lock exclusively."""
    import fcntl

    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
