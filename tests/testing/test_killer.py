"""Child processes: their lines are seen, they die as told, and none is left."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from bullpen.testing import Child, wait_until_gone

TALKER = """
import sys
print("ready")
for line in sys.stdin:
    print("got", line.strip())
print("bye", file=sys.stderr)
"""


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_lines_are_awaited_in_order_and_collected() -> None:
    """Tests wait for what a process says, not for time."""
    with Child.code(TALKER) as child:
        assert child.wait_for("ready") == "ready"
        child.send_line("one")
        child.send_line("two")
        assert child.wait_for(r"got \w+") == "got one"
        assert child.wait_for(r"got \w+") == "got two"
        child.close_stdin()

        assert child.wait() == 0

        assert child.output == "ready\ngot one\ngot two\n"
        assert child.errors == "bye\n"
        assert repr(child) == f"<Child {child.pid} ended with 0>"


async def test_an_event_loop_may_wait_too(tmp_path: Path) -> None:
    """A worker in the same loop goes on meanwhile."""
    script = tmp_path / "talker.py"
    script.write_text(TALKER)
    with Child.script(script) as child:
        assert await child.seen("ready") == "ready"
        child.close_stdin()
        assert await child.ended() == 0


def test_a_module_runs_with_environment_and_directory(tmp_path: Path) -> None:
    """`python -m` with its own settings."""
    (tmp_path / "talk.py").write_text("import os, sys; print(os.environ['WORD'], sys.argv[1], os.getcwd())")
    with Child.module("talk", "arg", env={"WORD": "hello"}, cwd=tmp_path) as child:
        assert child.wait_for("hello") == f"hello arg {tmp_path}"


def test_kill_leaves_no_time_to_clean_up() -> None:
    """SIGKILL is what a crashed worker looks like."""
    with Child.code("import atexit; atexit.register(print, 'clean'); print('ready'); input()") as child:
        child.wait_for("ready")

        child.kill()

        assert child.exit_code == -signal.SIGKILL
        assert "clean" not in child.output
        assert not child.is_running
        child.kill()  # a second time does nothing


@pytest.mark.parametrize(("how", "number"), [("terminate", signal.SIGTERM), ("interrupt", signal.SIGINT)])
def test_polite_signals_reach_the_process(how: str, number: signal.Signals) -> None:
    """Shutdown is tested with the signals that operators send."""
    code = f"""
import signal, sys
signal.signal({int(number)}, lambda *_: (print("signalled"), sys.exit(3)))
print("ready")
signal.pause()
"""
    with Child.code(code) as child:
        child.wait_for("ready")
        getattr(child, how)()
        child.wait_for("signalled")
        assert child.wait() == 3


def test_a_paused_process_says_nothing_until_resumed() -> None:
    """SIGSTOP is what a long garbage collection or a frozen machine looks like."""
    with Child.code(TALKER) as child:
        child.wait_for("ready")
        child.pause()
        child.send_line("one")
        with pytest.raises(AssertionError, match="no line with 'got'"):
            child.wait_for("got", timeout=0.1)

        child.resume()

        assert child.wait_for("got") == "got one"


def test_a_process_that_ends_early_shows_its_output() -> None:
    """The traceback of the child is the explanation; it must be in the failure."""
    with (
        Child.code("print('hello'); raise SystemExit('because')") as child,
        pytest.raises(AssertionError, match=r"ended with 1\n-- stdout\nhello\n-- stderr\nbecause"),
    ):
        child.wait_for("ready")


def test_waiting_too_short_is_an_assertion() -> None:
    """A hang is reported with what was said before it."""
    with Child.code(TALKER) as child, pytest.raises(AssertionError, match="still running after"):
        child.wait(timeout=0.05)


def test_closing_kills_what_the_child_started() -> None:
    """A worker's own children must not survive the test."""
    code = """
import subprocess, sys
grandchild = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
print("grandchild", grandchild.pid)
input()
"""
    with Child.code(code) as child:
        pid = int(child.wait_for("grandchild").split()[1])
        child.kill()
        assert _is_alive(pid)

    wait_until_gone(pid)
    child.close()


def test_waiting_for_a_stranger_that_lives_on_is_an_assertion() -> None:
    """A leaked process must be named."""
    with Child.code(TALKER) as child:
        with pytest.raises(AssertionError, match=f"process {child.pid} still runs"):
            wait_until_gone(child.pid, timeout=0.01)
        child.kill()
        wait_until_gone(child.pid)
