"""Logs for machines and for people, and the fields of the job that runs.

`JobFilter` is for a program's own logging: with it on a handler, every line that is logged while a job is handled says
which job that is. The formatters are those of `bullpen run`. Elsewhere: how they work (`bullpen._kernel.logs`,
`bullpen._kernel.log_formats`), what is logged, at each part.
"""

from __future__ import annotations

from bullpen._kernel.log_formats import FIELDS, ConsoleFormatter, JsonFormatter, configure
from bullpen._kernel.logs import JobFilter

__all__ = ["FIELDS", "ConsoleFormatter", "JobFilter", "JsonFormatter", "configure"]
