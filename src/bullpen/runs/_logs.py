"""One log line per thing that happened to a run, always with the same fields: `jobId`, `runId`, `tenantId`.

Fields travel as attributes of the record (`extra`) under their wire names; `bullpen.ops.logs` writes them as JSON. Ids
and summaries, never payloads.
"""

from __future__ import annotations

from typing import Any

from bullpen._kernel.logs import get_logger

logger = get_logger("bullpen.runs")


def log(
    level: int, message: str, *, job_id: str | None, run_id: str | None, tenant_id: str | None, **fields: Any
) -> None:
    """Write one line. `message` is text for people; what machines look for is in the fields."""
    extra = {"jobId": job_id, "runId": run_id, "tenantId": tenant_id, **fields}
    logger.log(level, "%s", message, extra={name: value for name, value in extra.items() if value is not None})
