"""The embedded server between processes: one for all, gone with the last, back after a crash."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from bullpen import embedded
from bullpen.errors import EmbeddedError
from bullpen.testing import Child, wait_until_gone

USER = """
import os, sys
from pathlib import Path
from bullpen import embedded

server = embedded.acquire(Path(sys.argv[1]))
print("using", server.url)
for line in sys.stdin:
    word = line.strip()
    if word == "release":
        server.release()
    elif word == "ensure":
        server.ensure_running()
    elif word == "fork":
        child = os.fork()
        if child == 0:
            os.setsid()
            print("forked", os.getpid())
            os.read(0, 1)
            os._exit(0)
    print("done", word)
"""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / ".bullpen"


@pytest.fixture
def start_user(directory: Path) -> Iterator[list[Child]]:
    """Users of the server in processes of their own; killed at the end, and the server with them."""
    users: list[Child] = []
    yield users
    pid = _running_pid(directory)
    for user in users:
        user.close()
    if pid is not None:
        wait_until_gone(pid)


def _new_user(users: list[Child], directory: Path) -> Child:
    user = Child.code(USER, str(directory))
    users.append(user)
    user.wait_for("using")
    return user


def _socket(directory: Path) -> Path:
    return directory / str(json.loads((directory / "server.json").read_text())["socket"])


def _client(directory: Path) -> redis.Redis:
    path = str(_socket(directory))
    return redis.Redis(unix_socket_path=path, protocol=2, socket_timeout=5, retry=Retry(NoBackoff(), 0))


def _pid(directory: Path) -> int:
    with _client(directory) as client:
        return int(client.info("server")["process_id"])


def _running_pid(directory: Path) -> int | None:
    try:
        return _pid(directory)
    except redis.RedisError:
        return None


def _parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _set(directory: Path, value: str) -> None:
    with _client(directory) as client:
        client.set("key", value)


def _get(directory: Path) -> bytes | None:
    with _client(directory) as client:
        value = client.get("key")
        assert value is None or isinstance(value, bytes)
        return value


def test_the_first_user_starts_a_private_server(directory: Path) -> None:
    """Nothing but Python is installed, and the queue works."""
    with embedded.acquire(directory) as server:
        assert server.url == f"unix://{server.socket_path}"
        assert server.tcp_url is None
        assert server.directory == server.socket_path.parent == directory
        assert (server.name, server.version.split(".")[0]) == ("valkey", "9")
        assert repr(server) == f"<EmbeddedServer {directory}, valkey {server.version}>"
        assert directory.stat().st_mode & 0o777 == 0o700
        assert (directory / ".gitignore").read_text() == "*\n"
        with redis.Redis.from_url(server.url) as client:
            assert client.config_get("appendonly")["appendonly"] == "yes"
            assert client.config_get("maxmemory-policy")["maxmemory-policy"] == "noeviction"
            assert client.config_get("port")["port"] == "0"
            client.hset("job", mapping={"data": "x" * 512})
            assert client.object("encoding", "job") == b"listpack"  # not a table, which takes much more memory
        pid = _pid(directory)
    assert repr(server) == f"<EmbeddedServer {directory}, released>"
    wait_until_gone(pid)


def test_a_second_process_uses_the_same_server(directory: Path, start_user: list[Child]) -> None:
    """Two programs of one project share their queues."""
    _new_user(start_user, directory)
    pid = _pid(directory)

    _new_user(start_user, directory)
    with embedded.acquire(directory):
        assert _pid(directory) == pid


def test_killing_the_starter_leaves_the_server_to_the_others(directory: Path, start_user: list[Child]) -> None:
    """A web process that is killed must not take the worker's server away."""
    owner = _new_user(start_user, directory)
    _new_user(start_user, directory)
    pid = _pid(directory)
    _set(directory, "kept")

    owner.kill()

    third = _new_user(start_user, directory)
    assert third.is_running
    assert _pid(directory) == pid
    assert _get(directory) == b"kept"


def test_killing_the_last_user_ends_the_server_and_keeps_the_data(directory: Path, start_user: list[Child]) -> None:
    """No server is left behind by a test run or a crashed machine session."""
    owner = _new_user(start_user, directory)
    other = _new_user(start_user, directory)
    pid = _pid(directory)
    supervisor = _parent_of(pid)
    _set(directory, "kept")

    owner.kill()
    other.kill()

    wait_until_gone(pid)
    wait_until_gone(supervisor)
    assert not _socket(directory).exists()
    with embedded.acquire(directory):
        assert _get(directory) == b"kept"


def test_a_released_server_ends_and_can_be_acquired_at_once(directory: Path) -> None:
    """A restart of a program must not race with the end of its last server."""
    for expected in (None, b"round 0", b"round 1"):
        with embedded.acquire(directory):
            assert _get(directory) == expected
            _set(directory, "round 0" if expected is None else "round 1")


def test_eight_starters_elect_one(directory: Path, start_user: list[Child]) -> None:
    """`bullpen run --processes 8` on an empty directory."""
    start_user += [Child.code(USER, str(directory)) for _ in range(8)]
    for user in start_user:
        user.wait_for("using")

    log = (directory / "server.log").read_text()

    assert log.count("Ready to accept connections") == log.count("Server initialized") == 1


def test_threads_of_one_process_share_too(directory: Path) -> None:
    """A server that a short-lived thread started lives on."""
    servers: list[embedded.EmbeddedServer] = []
    threads = [threading.Thread(target=lambda: servers.append(embedded.acquire(directory))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    pid = _pid(directory)
    for server in servers[1:]:
        server.release()
    assert _pid(directory) == pid
    servers[0].release()
    wait_until_gone(pid)


def test_a_killed_server_comes_back_when_a_client_asks(directory: Path) -> None:
    """The out-of-memory killer takes the server; acknowledged data is there afterwards."""
    with embedded.acquire(directory) as server:
        pid = _pid(directory)
        _set(directory, "kept")
        os.kill(pid, signal.SIGKILL)
        wait_until_gone(pid)

        server.ensure_running()

        assert _pid(directory) != pid
        assert _get(directory) == b"kept"
        server.ensure_running()


def test_a_killed_server_is_started_again_by_any_process(directory: Path, start_user: list[Child]) -> None:
    """Whoever comes first starts it; the others find it in the same place."""
    first, second = _new_user(start_user, directory), _new_user(start_user, directory)
    pid = _pid(directory)
    os.kill(pid, signal.SIGKILL)
    wait_until_gone(pid)

    with embedded.acquire(directory):
        again = _pid(directory)
        for user in (first, second):
            user.send_line("ensure")
            user.wait_for("done ensure")
        assert _pid(directory) == again
    assert first.output == second.output


def test_a_killed_supervisor_ends_the_server_and_a_new_one_takes_over(directory: Path) -> None:
    """A server that nobody watches would stay for ever."""
    with embedded.acquire(directory) as server:
        pid = _pid(directory)
        _set(directory, "kept")

        os.kill(_parent_of(pid), signal.SIGKILL)
        wait_until_gone(pid)
        server.ensure_running()

        assert _get(directory) == b"kept"
        assert _parent_of(_pid(directory)) != 1


def test_a_server_that_outlives_its_supervisor_is_never_doubled(directory: Path, start_user: list[Child]) -> None:
    """Two servers on one append-only file damage it; the second must wait, however long the first takes to end."""
    user = _new_user(start_user, directory)
    pid = _pid(directory)
    _set(directory, "kept")
    os.kill(pid, signal.SIGSTOP)
    supervisor = _parent_of(pid)
    os.kill(supervisor, signal.SIGKILL)
    wait_until_gone(supervisor)

    user.send_line("ensure")
    with pytest.raises(AssertionError, match="no line with 'done ensure'"):
        user.wait_for("done ensure", timeout=0.5)
    os.kill(pid, signal.SIGCONT)
    user.wait_for("done ensure")

    assert _pid(directory) != pid
    assert _get(directory) == b"kept"


def test_an_unsupervised_server_that_lives_is_replaced(directory: Path) -> None:
    """Where the system cannot tie the server to its supervisor (macOS), the next user ends the orphan."""
    with embedded.acquire(directory) as server:
        command = Path(f"/proc/{_pid(directory)}/exe").resolve()
        _set(directory, "kept")
        pid = _pid(directory)
    wait_until_gone(pid)
    # The same server again, holding the directory's lock, but started by nobody who would end it.
    code = """
import fcntl, os, subprocess, sys
binary, directory, socket = sys.argv[1:]
lock = os.open(os.path.join(directory, "server.lock"), os.O_RDWR)
fcntl.flock(lock, fcntl.LOCK_EX)
os.set_inheritable(lock, True)
os.execv(binary, [binary, "--port", "0", "--unixsocket", socket, "--dir", directory,
                  "--appendonly", "yes", "--save", "", "--daemonize", "no"])
"""
    with Child.code(code, str(command), str(directory), str(_socket(directory))) as orphan:
        orphan.wait_for("Ready to accept connections")

        with embedded.acquire(directory):
            assert orphan.wait() == 0
            assert _pid(directory) != orphan.pid
            assert _get(directory) == b"kept"
    assert server.directory == directory


def test_a_stale_socket_is_replaced(directory: Path, start_user: list[Child]) -> None:
    """After a machine crash the socket file is there and nobody listens."""
    user = _new_user(start_user, directory)
    pid = _pid(directory)
    os.kill(_parent_of(pid), signal.SIGSTOP)  # cannot tidy up
    os.kill(pid, signal.SIGKILL)
    os.kill(_parent_of(pid), signal.SIGKILL)
    wait_until_gone(pid)
    user.kill()
    assert _socket(directory).exists()

    with embedded.acquire(directory):
        assert _pid(directory)


def test_interrupting_the_starters_terminal_leaves_the_server_alone(directory: Path, start_user: list[Child]) -> None:
    """Ctrl-C goes to the whole foreground group of one program, not to the server of all."""
    owner = _new_user(start_user, directory)
    _new_user(start_user, directory)
    pid = _pid(directory)

    os.killpg(owner.pid, signal.SIGINT)

    assert owner.wait() != 0
    assert _pid(directory) == pid


def test_a_forked_child_is_a_user_of_its_own(directory: Path, start_user: list[Child]) -> None:
    """A pre-forking web server: the parent may end, and the children still have their server."""
    parent = _new_user(start_user, directory)
    pid = _pid(directory)
    parent.send_line("fork")
    child = int(parent.wait_for("forked").split()[1])

    parent.kill()
    with embedded.acquire(directory):
        assert _pid(directory) == pid  # and not one that ended meanwhile
    assert _pid(directory) == pid

    os.kill(child, signal.SIGKILL)
    wait_until_gone(pid)


def test_a_forked_child_does_not_hold_the_parents_use(directory: Path) -> None:
    """What the child releases is its own; what the parent keeps stays."""
    code = """
import os, sys
from pathlib import Path
from bullpen import embedded

server = embedded.acquire(Path(sys.argv[1]))
released = embedded.acquire(Path(sys.argv[1]))
released.release()
child = os.fork()
if child == 0:
    server.release()
    os._exit(0)
os.waitpid(child, 0)
print("collected")
input()
"""
    with Child.code(code, str(directory)) as parent:
        parent.wait_for("collected")
        pid = _pid(directory)
        with embedded.acquire(directory):
            assert _pid(directory) == pid
        assert (directory / "server.log").read_text().count("Server initialized") == 1
    wait_until_gone(pid)


def test_releasing_twice_is_fine_and_using_it_afterwards_is_not(directory: Path) -> None:
    """A clean-up may run twice; a forgotten reference must not start servers."""
    server = embedded.acquire(directory)
    pid = _pid(directory)

    server.release()
    server.release()

    wait_until_gone(pid)
    with pytest.raises(EmbeddedError, match="was released; acquire it again"):
        server.ensure_running()


def test_a_removed_directory_is_made_again(directory: Path) -> None:
    """`git clean -dfx` while the program runs: a new, empty server instead of an endless error."""
    with embedded.acquire(directory) as server:
        old = _pid(directory)
        shutil.rmtree(directory)

        server.ensure_running()

        new = _pid(directory)
        assert new != old
        wait_until_gone(old)  # nobody holds its lock any more
    wait_until_gone(new)


def test_a_directory_that_is_moved_takes_its_server_along(tmp_path: Path) -> None:
    """A renamed project folder: new processes and old ones still meet."""
    (tmp_path / "old").mkdir()
    with embedded.acquire(tmp_path / "old" / ".bullpen") as server:
        pid = _pid(server.directory)
        (tmp_path / "old").rename(tmp_path / "new")

        with embedded.acquire(tmp_path / "new" / ".bullpen") as moved:
            assert moved.socket_path.parent == moved.directory
            assert _pid(moved.directory) == pid
    wait_until_gone(pid)


def test_a_frozen_server_is_an_error_and_not_a_hang(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message says what is known, and ends with the server's log."""
    with embedded.acquire(directory):
        pid = _pid(directory)
        os.kill(pid, signal.SIGSTOP)
        monkeypatch.setattr("bullpen.embedded.starting._START_DEADLINE_S", 0.2)
        monkeypatch.setattr("bullpen.embedded.starting._ANSWER_DEADLINE_S", 0.1)

        with pytest.raises(EmbeddedError, match=r"runs but has not answered[^$]*Ready to accept connections"):
            embedded.acquire(directory)

        os.kill(pid, signal.SIGCONT)
    wait_until_gone(pid)


def test_a_process_that_is_frozen_while_it_starts_does_not_block_for_ever(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever waits for its turn learns why it does not come."""
    monkeypatch.setattr("bullpen.embedded.locks.TURN_DEADLINE_S", 0.1)
    directory.mkdir()
    code = """
import fcntl, os, sys
lock = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
fcntl.flock(lock, fcntl.LOCK_EX)
print("locked")
input()
"""
    with Child.code(code, str(directory / "start.lock")) as holder:
        holder.wait_for("locked")
        with pytest.raises(EmbeddedError, match=r"start\.lock has been locked by another process"):
            embedded.acquire(directory)


def _appendfsync(directory: Path) -> str:
    with _client(directory) as client:
        return str(client.config_get("appendfsync")["appendfsync"])


def test_the_wish_to_sync_always_holds_for_a_server_that_runs(directory: Path) -> None:
    """One process needs it, the others keep their server, and nobody takes it back while it runs."""
    with embedded.acquire(directory) as first:
        assert _appendfsync(directory) == "everysec"
        with embedded.acquire(directory, appendfsync="always"):
            assert _appendfsync(directory) == "always"
        with pytest.raises(EmbeddedError, match="others may rely on it"):
            embedded.acquire(directory, appendfsync="everysec")

        pid = _pid(directory)
        os.kill(pid, signal.SIGKILL)
        wait_until_gone(pid)
        first.ensure_running()  # by one who never asked for it

        assert _appendfsync(directory) == "always"
        pid = _pid(directory)
    wait_until_gone(pid)
    with embedded.acquire(directory, appendfsync="everysec"):
        assert _appendfsync(directory) == "everysec"
        pid = _pid(directory)
    wait_until_gone(pid)
