"""A program that was written for PyPI `bullmq` does the same with the import shim."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bullpen.testing import RedisServer
from tests.interop._pypi import PyBullmqMissing, ensure_environment

PROGRAM = Path(__file__).with_name("program.py")


def run(python: str | Path, library: str) -> dict[str, Any]:
    with RedisServer.start("valkey") as server:
        command = [str(python), "-W", "ignore", str(PROGRAM), library, server.url]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=170, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    answer: dict[str, Any] = json.loads(ran.stdout)
    return answer


@pytest.mark.measures_children
def test_a_program_for_pypi_sees_the_same_with_the_shim() -> None:
    """Returned values, events, errors with their texts, what is stored: two libraries, one program."""
    try:
        theirs = run(ensure_environment(), "bullmq")
    except PyBullmqMissing as missing:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(str(missing))

    ours = run(sys.executable, "bullpen.compat.bullmq")

    # A job that completed in the end shows no reason of an earlier attempt here.
    for seen in (ours, theirs):
        for job in seen["worked"]:
            if job["returnvalue"] is not None:
                job["failedReason"] = None
    differences = {name: [ours.get(name), told] for name, told in theirs.items() if ours.get(name) != told}
    assert differences == {}
    assert ours.keys() == theirs.keys()
