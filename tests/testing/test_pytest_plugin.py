"""The plug-in in the hands of a user: a project of its own, with and without the plug-ins that others have."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

pytestmark = pytest.mark.measures_children  # the plug-in runs in them

ROOT = Path(__file__).resolve().parents[2]
PROJECT = Path(__file__).parent / "plugin"
SHOP = "tests.testing.plugin.shop"
ASYNCIO = ("-p", "pytest_asyncio.plugin", "-o", "asyncio_default_fixture_loop_scope=function")
PLUGIN = "bullpen.testing.pytest_plugin"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A directory like that of a user, outside of this project and of its configuration."""
    shutil.copy(PROJECT / "test_shop.py", tmp_path / "test_shop.py")
    (tmp_path / "pytest.ini").write_text(f"[pytest]\nbullpen_app = {SHOP}:app\npythonpath = {ROOT}\n")
    (tmp_path / "temporary").mkdir()
    return tmp_path


def run(project: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Only the plug-ins that are named, as if nothing else was installed."""
    left_out = ("BULLPEN_", "PYTEST_")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
    environment = {**clean, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "TMPDIR": str(project / "temporary")}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", PLUGIN, "-q", "-W", "error", *options],
        cwd=project,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def assert_clean(project: Path) -> None:
    """No data directory in the project, and nothing of ours among the temporary files."""
    assert not (project / ".bullpen").exists()
    assert [left for left in os.listdir(project / "temporary") if left.startswith("bullpen-")] == []


@pytest.mark.parametrize(
    "plugins",
    [
        pytest.param((), id="alone"),
        pytest.param((*ASYNCIO, "-o", "asyncio_mode=auto"), id="asyncio"),
        pytest.param(ASYNCIO, id="asyncio-strict"),
        pytest.param(("-p", "anyio"), id="anyio"),
        pytest.param(("-p", "xdist", "-n", "2", "--dist", "load"), id="xdist"),
    ],
)
def test_tests_of_a_user_pass_and_leave_nothing_behind(project: Path, plugins: tuple[str, ...]) -> None:
    done = run(project, *plugins)

    assert done.returncode == 0, done.stdout + done.stderr
    count = len(re.findall(r"^(?:async )?def test_", (project / "test_shop.py").read_text(), re.MULTILINE))
    assert f"{count} passed" in done.stdout
    assert_clean(project)


def test_an_address_of_the_developer_is_not_used_and_a_data_directory_is_kept(project: Path) -> None:
    """Somebody who exports one means it for queues without an app."""
    (project / "test_shop.py").write_text(
        "import os\n"
        "def test_it(bullpen_app, bullpen_server):\n"
        "    assert bullpen_app.app.connection.address.port == bullpen_server.port\n"
        "    assert os.environ['BULLPEN_DATA_DIR'] == 'mine'\n"
    )
    os.environ["BULLPEN_REDIS_URL"] = "redis://production.invalid"

    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", PLUGIN, "-q"],
        cwd=project,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "BULLPEN_DATA_DIR": "mine"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    del os.environ["BULLPEN_REDIS_URL"]

    assert done.returncode == 0, done.stdout + done.stderr


def test_a_wrong_app_in_the_configuration_is_told(project: Path) -> None:
    done = run(project, "-o", f"bullpen_app={SHOP}:emails", "-k", "seen_and_run")

    assert done.returncode != 0
    assert f"'{SHOP}:emails' is no Bullpen; write module:name" in done.stdout


def test_a_missing_app_is_told_and_not_replaced_by_an_empty_one(project: Path) -> None:
    (project / "pytest.ini").write_text(f"[pytest]\npythonpath = {ROOT}\n")
    (project / "test_shop.py").write_text("def test_it(bullpen_app): bullpen_app.run_until_drained_sync()\n")

    done = run(project)

    assert done.returncode != 0
    assert 'Set bullpen_app = "module:name"' in done.stdout


def test_an_app_may_be_given_by_a_fixture(project: Path) -> None:
    (project / "pytest.ini").write_text(f"[pytest]\npythonpath = {ROOT}\n")
    (project / "test_shop.py").write_text(
        "import pytest\n"
        f"from {SHOP} import app\n"
        "@pytest.fixture\n"
        "def bullpen_target():\n"
        "    return app\n"
        "def test_it(bullpen_app):\n"
        "    assert bullpen_app.app is app\n"
    )

    done = run(project)

    assert done.returncode == 0, done.stdout + done.stderr


def test_loading_it_imports_nothing_that_costs_time() -> None:
    """It is loaded in every run of pytest wherever bullpen is installed, also where the extra is not."""
    program = (
        f"import sys, {PLUGIN}\n"
        "heavy = ('redis', 'hiredis', 'msgspec', 'bullpen.app', 'bullpen.queue', 'bullpen.testing.servers')\n"
        "print([name for name in heavy if name in sys.modules])"
    )

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert done.stdout == "[]\n"


def test_pytest_finds_it_by_its_entry_point() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["pytest11"]

    assert declared == {"bullpen": PLUGIN}
