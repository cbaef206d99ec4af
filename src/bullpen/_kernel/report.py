"""Say what happened, once for people and once for machines.

In: the fields of what happened. Out: a log record that carries them under their wire names (`extra`), absent ones left
out, and a telemetry event. Ids, names and numbers; never payloads and never secrets.
Elsewhere: how records are written (`log_formats`), what is hidden in them (`logs`), who listens (`telemetry`).
"""

from __future__ import annotations

from typing import Any

from bullpen._kernel import telemetry
from bullpen._kernel.logs import get_logger

__all__ = ["Reporter", "present"]


class Reporter:
    """Reports of one component under the name of its logger. `common` stands in every event."""

    def __init__(self, name: str, **common: Any) -> None:
        self.logger = get_logger(name)
        self._common = common

    def log(self, level: int, text: str, error: BaseException | None = None, /, **fields: Any) -> None:
        """Write one line, if anybody wants it. `text` is for people; what machines look for is in the fields."""
        if self.logger.isEnabledFor(level):
            self.logger.log(level, "%s", text, exc_info=error, extra=present(fields))

    def emit(self, event: str, /, **fields: Any) -> None:
        telemetry.emit(event, **self._common, **fields)


def present(fields: dict[str, Any]) -> dict[str, Any]:
    """Without those that are None."""
    return {name: value for name, value in fields.items() if value is not None}
