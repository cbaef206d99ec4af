"""A job as the code of a test that adds it, for whoever wants to see a failure again on his own machine.

In: a stored job. Out: a function for pytest. Secrets in its data stand as `***`. No input or output here.
"""

from __future__ import annotations

import pprint
import re
from typing import Any, Final

from bullpen._kernel.scrub import hide_secrets
from bullpen.errors import NotJson
from bullpen.queue import Job

__all__ = ["job_as_test"]

_MOST: Final = 64 * 1024
"""Signs of the data."""


def job_as_test(job: Job) -> str:
    """The text of the test. `queue` is a fixture of the reader's: a queue on a server for tests."""
    try:
        data: Any = hide_secrets(job.data)
    except NotJson:
        data = None
    written = pprint.pformat(data, width=96, sort_dicts=False)
    lines = [f"# Job {job.id!r} of {job.queue_name!r}" + (": its data is no JSON" if data is None else "")]
    if len(written) > _MOST:
        lines.append(f"# The first part of its data: all of it has {len(written)} signs.")
        data, written = None, repr(written[:_MOST])
    indented = written.replace("\n", "\n        ")
    options = [f"attempts={job.opts.attempts}"] if job.opts.attempts > 1 else []
    options += [f"priority={job.opts.priority}"] if job.opts.priority else []
    options += [f"job_id={job.id!r}"] if not job.id.isdigit() else []
    name = re.sub(r"\W+", "_", job.name, flags=re.ASCII).strip("_").lower() or "job"
    lines += [
        f"async def test_{name}(queue):",
        f"    data = {indented}" if "\n" not in written else f"    data = (\n        {indented}\n    )",
        f"    job = await queue.add({', '.join([repr(job.name), 'data', *options])})",
        "",
        "    assert await job.result(timeout=30_000) is None  # what it should give",
    ]
    return "\n".join(lines) + "\n"
