"""One log line per thing that happened to a run, always with the same fields: `jobId`, `runId`, `tenantId`.

Fields travel as attributes of the record (`extra`) under their wire names; `bullpen.ops.logs` writes them as JSON. Ids
and summaries, never payloads.
"""

from __future__ import annotations

from typing import Any

from bullpen._kernel.report import Reporter

_reporter = Reporter("bullpen.runs")


def log(
    level: int,
    message: str,
    *,
    job_id: str | None = None,
    run_id: str | None = None,
    tenant_id: str | None = None,
    **fields: Any,
) -> None:
    """Write one line about a run, or about all of them."""
    _reporter.log(level, message, jobId=job_id, runId=run_id, tenantId=tenant_id, **fields)
