"""The README, followed to the letter by somebody who has a checkout, Python and nothing else."""

from __future__ import annotations

import itertools
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from bullpen._version import DISTRIBUTION
from bullpen.testing import RedisServer, free_port
from tests.docs.run_page import Block, blocks_of
from tests.environments import ROOT, make_wheels
from tests.interop._node import NodeMissing, find_node

README = (ROOT / "README.md").read_text()

PRELUDE = """
set -e -o pipefail
end() { test -z "$(jobs -p)" || { kill $(jobs -p); wait; }; }
trap end EXIT
until_it_says() { until grep -q "$2" "$1"; do kill -0 $!; sleep 0.1; done; }
"""


def script_of(blocks: Iterable[Block], *, leave_out: str | tuple[str, ...]) -> str:
    """One shell script out of a page's blocks: files are written, commands run, what they print is compared."""
    steps = [PRELUDE]
    printed = ""
    for block in blocks:
        name = re.match(r"(?:#|//) (at the end of )?((?:\w+/)*\w+\.\w+)\n", block.source)
        match block.language:
            case "python" | "js" if name is not None:
                how = ">>" if name[1] else ">"
                steps.append(f"cat {how} {name[2]} <<'END-OF-FILE'\n{block.source}END-OF-FILE\n")
            case "python":
                raise AssertionError(f"line {block.line}: a reader cannot know which file this is")
            case "js":
                steps.append(f"cat > worker.cjs <<'END-OF-FILE'\n{block.source}END-OF-FILE\n")
                steps.append(_command("node worker.cjs", printed))
            case "sh":
                printed = f"printed.{block.line}"
                lines = (line for line in block.source.splitlines() if not line.startswith(leave_out))
                steps += [_command(line, printed) for line in lines]
            case "text":
                steps.append(f"diff - {printed} <<'END-OF-TEXT' >&2\n{block.source}END-OF-TEXT\n")
    return "".join(steps)


_GOES_ON = {
    "bullpen run": "taking jobs",
    "node worker": "ready",
    "python manage.py bullpen_worker": "taking jobs",
    "uvicorn": "startup complete",
}
"""Commands that a reader leaves running in a terminal of its own, and what they say when they are ready."""


def _command(line: str, printed: str) -> str:
    for start, ready in _GOES_ON.items():
        if line.startswith(start):
            log = f"{start.split()[0]}.log"
            return f"{line} > {log} 2>&1 &\nuntil_it_says {log} '{ready}'\n"
    if line.startswith((". ", "cd ", "export ")):
        return f"{line}\n"  # changes the shell itself
    return f"echo {shlex.quote('$ ' + line)}\n{line} | tee -a {printed}\n"


def follow(
    blocks: Iterable[Block],
    tmp_path: Path,
    environ: Mapping[str, str],
    *,
    leave_out: str | tuple[str, ...],
    path: str = "",
) -> str:
    """Do what the blocks say in a checkout, with no variables but these; returns what was printed."""
    place = tmp_path / "checkout"
    _check_out(place)
    programs = tmp_path / "bin"
    programs.mkdir()
    # What this machine calls python3 may be another version than the one that runs the tests.
    (programs / "python3").symlink_to(getattr(sys, "_base_executable", sys.executable))
    search = os.pathsep.join([str(programs), *filter(None, [path]), "/usr/bin", "/bin"])
    shell = subprocess.Popen(
        ["bash", "-c", script_of(blocks, leave_out=leave_out)],
        cwd=place,
        env={"HOME": str(tmp_path), "LANG": "C.UTF-8", "PATH": search, **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, errors = shell.communicate()
    except BaseException:
        os.killpg(shell.pid, signal.SIGTERM)
        raise
    logs = "".join(log.read_text() for log in sorted(place.rglob("*.log")))
    assert shell.returncode == 0, f"{out}\n{errors}\n{logs}"
    return out


def _check_out(place: Path) -> None:
    """What `git clone` gives: the tracked files, as they are now."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in listed.split("\0"):
        if (ROOT / name).is_file():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, place / name)


# Above two seconds with a reason: an environment is made, pip builds our wheel and installs it with all it needs.
@pytest.mark.long
def test_the_install_lines_and_the_first_program_work_as_printed_in_an_empty_environment(tmp_path: Path) -> None:
    """The registry is played by wheels of the same packages, so that no network is needed."""
    first = [*itertools.takewhile(lambda block: block.language != "text", blocks_of(README))]
    wheels = make_wheels(tmp_path / "wheels", f"{DISTRIBUTION}[embedded,cli]", "hatchling")
    offline = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels), "PIP_NO_COMPILE": "1"}

    said = follow(first, tmp_path, offline, leave_out="make ")

    assert re.search(rf"^Successfully installed .*\b{DISTRIBUTION}-\d", said, re.MULTILINE)
    assert said.endswith("$ python first.py\n{'sent to': 'ada@example.com'}\n")


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_whole_readme_works_as_printed_in_an_empty_environment(tmp_path: Path) -> None:
    """Everything but `make test`, which runs us: the demo, the packages of both registries, Node beside Python."""
    try:
        tools = find_node()
    except NodeMissing as missing:
        pytest.skip(str(missing))
    (npm,) = set(re.findall(r"`npm (install [^`]+)`", README))
    subprocess.run([*tools.npm, *npm.split(), "--prefix", str(tmp_path / "node")], check=True, capture_output=True)
    reach = ("PIP_", "SSL_")  # how this machine reaches the registry
    environ = {name: value for name, value in os.environ.items() if name.startswith(reach)}
    environ["NODE_PATH"] = str(tmp_path / "node" / "node_modules")

    with RedisServer.start() as server:
        blocks = blocks_of(README.replace("6379", str(server.port)))
        said = follow(blocks, tmp_path, environ, leave_out="make test", path=str(Path(tools.node[0]).parent))

    assert "$ make demo" in said
    assert "Hello Ada, says Node" in said
    assert "print {'amount': -5} after 2 attempts" in said


TUTORIALS = {"tutorial/fastapi.md": "fastapi", "guides/django.md": "django", "tutorial/node.md": ""}
"""Pages that begin with nothing, and what they install besides bullpen."""


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", TUTORIALS)
def test_a_tutorial_works_as_printed_in_an_empty_environment(name: str, tmp_path: Path) -> None:
    """Nothing is typed that the page does not say. pip builds our wheel; the packages that it needs come from those of
    the tests, npm's from its registry."""
    page = (ROOT / "docs" / name).read_text()
    (install,) = re.findall(r"^pip install (.+)$", page, re.MULTILINE)
    extras, *others = shlex.split(install)
    wheels = make_wheels(tmp_path / "wheels", f"{DISTRIBUTION}{extras[1:]}", "hatchling", *others)
    environ = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels), "PIP_NO_COMPILE": "1"}
    path = ""
    if "```js" in page:
        try:
            tools = find_node()
        except NodeMissing as missing:
            pytest.skip(str(missing))
        path = str(Path(tools.node[0]).parent)

    with RedisServer.start() as server:
        page = (
            page.replace("6379", str(server.port)).replace("8000", str(free_port())).replace("9467", str(free_port()))
        )
        follow(blocks_of(page), tmp_path, environ, leave_out="make ", path=path)

    commands = [line for block in blocks_of(page) if block.language == "sh" for line in block.source.splitlines()]
    lines = sum(len(block.source.splitlines()) for block in blocks_of(page) if block.language in ("python", "js"))
    print(f"{name}: {len(commands)} commands, {lines} lines of code")
    assert len(commands) <= 15
    assert lines <= 130
