"""What a process holds when there is nothing to do."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest

from bullpen.testing import RedisServer
from tests.bench._large_payloads import ROOM_KB


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library decides by itself")
def test_memory_is_given_back_after_a_burst_of_large_jobs(redis_server: RedisServer) -> None:
    """The C library kept sixty megabytes of it for ever, in each process of a service."""
    redis_server.flush()
    program = Path(__file__).with_name("_large_payloads.py")

    answer = subprocess.run(
        [sys.executable, "-m", "tests.bench._large_payloads", redis_server.url],
        cwd=program.parents[2],
        capture_output=True,
        text=True,
        check=True,
        timeout=200,
    )

    before, after = map(int, answer.stdout.split())
    assert after < before + ROOM_KB, f"{(after - before) // 1000} MB are still held"
    redis_server.flush()
