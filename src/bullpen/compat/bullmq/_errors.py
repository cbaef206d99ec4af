"""Our errors as PyPI's `bullmq` raises them: a TypeError with its text and BullMQ's number."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bullpen.compat.bullmq.error_code import ErrorCode
from bullpen.errors import JobNotFound, JobStateConflict, NotJson


@contextmanager
def as_pypi(
    command: str, job_id: str | None = None, *, state: str = "active", parent: str | None = None
) -> Iterator[None]:
    """Translate what bullpen raises for a job that is gone, or is not where it should be."""
    try:
        yield
    except JobNotFound as error:
        if parent is not None:
            text = f"Missing key for parent job {parent}. {command}"
            raise _refusal(text, ErrorCode.ParentJobNotExist) from error
        raise _refusal(f"Missing key for job {job_id or error.job_id}. {command}", ErrorCode.JobNotExist) from error
    except JobStateConflict as error:
        text = f"Job {job_id or error.job_id} is not in the {state} state. {command}"
        raise _refusal(text, ErrorCode.JobNotInState) from error


@contextmanager
def as_json(value: Any) -> Iterator[None]:
    """Let what cannot be JSON be refused in the words of the standard library."""
    try:
        yield
    except NotJson:
        json.dumps(value, allow_nan=False)
        raise


def _refusal(text: str, code: ErrorCode) -> TypeError:
    error = TypeError(text)
    error.code = code.value  # type: ignore[attr-defined]  # as theirs has it
    return error
