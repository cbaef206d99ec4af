"""The kit of the queue suites serves here too."""

from __future__ import annotations

from tests.queue.conftest import kit

__all__ = ["kit"]
