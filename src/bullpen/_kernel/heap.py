"""Give memory back to the system after large payloads.

In: the moment when a burst of them is over. Out: nothing. The C library keeps what was freed for the next time: after a
few payloads of ten megabytes tens of them, for ever, in each process of a service. Elsewhere: noticing that it is over
(`bullpen.redis.socket`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["give_back"]

_trim: Callable[[int], Any] | None = None
_is_known = False


def give_back() -> None:
    """Return what is free. Takes a millisecond or two; nothing where the C library does not offer it."""
    global _trim, _is_known
    if not _is_known:
        _trim, _is_known = _find(), True
    if _trim is not None:
        _trim(0)


def _find() -> Callable[[int], Any] | None:
    try:
        import ctypes  # takes a while to load, and most programs never have a large payload

        trim: Callable[[int], Any] = ctypes.CDLL(None).malloc_trim
    except (ImportError, OSError, TypeError, AttributeError):  # another C library, or none to be found
        return None
    return trim
