"""A Django project with bullpen installed: its settings, its tasks, its tables, its worker, its admin, its connections.

The project (`django_site`) runs in processes of its own, because Django has one set of settings per process.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest

from bullpen.ledger.version import head
from bullpen.testing import Child, PostgresServer
from tests.databases import OWNER
from tests.environments import EnvironmentMissing
from tests.integrations._django6 import ensure_environment

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PRELUDE = """
import django
django.setup()
from django.db import connection, transaction
from bullpen.integrations.django import add_in_transaction, add_on_commit, app
from shop.models import Order
from shop.tasks import *
"""


@dataclass(frozen=True, slots=True)
class Site:
    """A copy of the project, with its own database and server."""

    place: Path
    environ: dict[str, str]
    python: str

    def run(self, source: str, *, expect: int = 0) -> str:
        """Run code in the project; what it printed, or its errors when it is expected to fail."""
        return self._finish([self.python, "-c", PRELUDE + source], expect)

    def manage(self, *words: str, expect: int = 0) -> str:
        return self._finish([self.python, "manage.py", *words], expect)

    @contextmanager
    def worker(self, *words: str) -> Iterator[Child]:
        """A worker that takes jobs. What it logs is among its output."""
        command = ["sh", "-c", 'exec "$0" "$@" 2>&1', self.python, "manage.py", "bullpen_worker", *words]
        with Child(command, env=self.environ, cwd=self.place) as child:
            child.wait_for("taking jobs", timeout=60)
            yield child
            child.terminate()
            child.wait(timeout=60)

    def _finish(self, command: list[str], expect: int) -> str:
        done = subprocess.run(
            command, cwd=self.place, env={**os.environ, **self.environ}, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == expect, done.stdout + done.stderr
        return (done.stderr if expect else done.stdout).strip()


MakeSite = Callable[..., Site]


@pytest.fixture
def python(request: pytest.FixtureRequest) -> str:
    """The interpreter of the project; that of Django 6 where a test asks for it."""
    if getattr(request, "param", 5) != 6:
        return sys.executable
    try:
        return str(ensure_environment())
    except EnvironmentMissing as missing:
        pytest.skip(str(missing))


both_versions = pytest.mark.parametrize("python", [5, pytest.param(6, marks=pytest.mark.long)], indirect=True)


@pytest.fixture
def make_site(redis_url: str, tmp_path: Path, python: str) -> MakeSite:
    def make(database: Mapping[str, Any] | None = None, **bullpen: str | None) -> Site:
        place = tmp_path / "site"
        shutil.copytree(HERE / "django_site", place, dirs_exist_ok=True)
        given = database or {"ENGINE": "django.db.backends.sqlite3", "NAME": str(tmp_path / "site.sqlite3")}
        environ = {
            "DJANGO_SETTINGS_MODULE": "site_settings",
            "PYTHONPATH": str(ROOT / "src"),
            "SITE_DATABASE": json.dumps(given),
            "SITE_BULLPEN": json.dumps(bullpen),
            "BULLPEN_REDIS_URL": redis_url,
        }
        return Site(place, environ, python)

    return make


@pytest.fixture
def postgres(postgres_server: PostgresServer) -> Iterator[tuple[dict[str, Any], str]]:
    """An empty database, as Django names it and as a URL."""
    name = postgres_server.create_database(owner=OWNER)
    url = postgres_server.url(name, role=OWNER)
    info = psycopg.conninfo.conninfo_to_dict(url)
    database = {"ENGINE": "django.db.backends.postgresql", "NAME": name, "USER": OWNER, "HOST": info["host"]}
    yield {**database, "CONN_MAX_AGE": None}, url
    postgres_server.drop_database(name)


@both_versions
def test_a_project_migrates_stores_with_its_transactions_and_runs_its_tasks(make_site: MakeSite) -> None:
    """The first afternoon: nothing is configured but the name of the database."""
    site = make_site()
    site.manage("migrate", "--verbosity=0")
    site.manage("migrate", "--verbosity=0")  # again: nothing to do

    with site.worker():
        printed = site.run("""
with transaction.atomic():
    order = Order.objects.create(email="ada@example.com")
    add_in_transaction(send_receipt, order=order.pk)
try:
    with transaction.atomic():
        lost = Order.objects.create(email="lost@example.com")
        add_in_transaction(send_receipt, order=lost.pk)
        add_on_commit(send_receipt, order=lost.pk)
        raise ValueError
except ValueError:
    pass
with transaction.atomic():
    add_on_commit(send_receipt, order=order.pk)
print(send_receipt_async.add_sync(order=order.pk).result(timeout=60_000))
while Order.objects.get().receipts < 2:
    import time; time.sleep(0.05)
print(Order.objects.get().email)
""")

    assert printed.splitlines() == ["ada@example.com", "ada@example.com"]


@pytest.mark.parametrize("kind", ["plain", "async"])
def test_jobs_survive_connections_that_the_database_dropped(
    make_site: MakeSite, postgres: tuple[dict[str, Any], str], kind: str
) -> None:
    """Between requests Django replaces a broken connection; without the same between jobs, all later ones of the thread
    would fail."""
    database, url = postgres
    site = make_site(database)
    site.manage("migrate", "--verbosity=0")
    task = "send_receipt" if kind == "plain" else "send_receipt_async"
    add_eight = f"""
order, _ = Order.objects.get_or_create(email="ada@example.com")
jobs = [{task}.add_sync(order=order.pk) for _ in range(8)]
print([job.result(timeout=60_000) for job in jobs])
"""

    with site.worker("--concurrency", "4"):
        before = site.run(add_eight)
        with psycopg.connect(url, autocommit=True) as other:
            dropped = other.execute(
                "SELECT count(pg_terminate_backend(pid, 60000)) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            ).fetchone()
        after = site.run(add_eight)

    assert dropped is not None
    assert dropped[0] >= 1
    assert before == after == str(["ada@example.com"] * 8)


def test_the_tables_are_made_in_postgres_too_and_jobs_leave_with_the_commit(
    make_site: MakeSite, postgres: tuple[dict[str, Any], str]
) -> None:
    database, _ = postgres
    site = make_site(database)
    site.manage("migrate", "--verbosity=0")

    with site.worker("--processes", "2"):
        printed = site.run("""
with transaction.atomic():
    order = Order.objects.create(email="ada@example.com")
    add_in_transaction(send_receipt, order=order.pk)
    result = add.enqueue(1, second=2)
while not Order.objects.get().receipts:
    import time; time.sleep(0.05)
while True:
    try:
        result.refresh()
    except Exception:
        pass  # stored with the transaction: it is a job a moment later
    if result.is_finished:
        break
    time.sleep(0.05)
print(result.return_value)
""")

    assert printed == "3"


@both_versions
def test_djangos_own_tasks_run_as_jobs(make_site: MakeSite) -> None:
    """What Django promises of a backend: every kind of task, results from another process, signals, errors."""
    site = make_site()
    site.manage("migrate", "--verbosity=0")

    with site.worker():
        printed = site.run("""
import time, datetime
from django.utils import timezone
try:
    from django.tasks import exceptions, signals, task_backends
except ImportError:
    from django_tasks import exceptions, signals, task_backends

def finish(result):
    while not result.is_finished:
        result.refresh()
        time.sleep(0.02)
    return result

seen = []
def note(sender, task_result, **_):
    seen.append(task_result.status)
signals.task_enqueued.connect(note)
result = add.enqueue(1, second=2)
assert result.status == "READY" and result.args == [1] and result.kwargs == {"second": 2}, result
assert seen == ["READY"]
print(finish(result).return_value, result.attempts, result.status, result.task.module_path)
print(finish(attempt.enqueue()).return_value, finish(wait.enqueue()).return_value)
failed = finish(fail.enqueue())
print(failed.status, failed.errors[0].exception_class.__name__, "no such report" in failed.errors[0].traceback)
later = add.using(run_after=timezone.now() + datetime.timedelta(hours=1)).enqueue(1)
later.refresh()
print(later.status, later.started_at)
print(add.get_result(result.id).return_value)
for get, wanted in ((lambda: add.get_result("default/none"), "TaskResultDoesNotExist"),
                    (lambda: add.get_result("elsewhere/none"), "TaskResultDoesNotExist"),
                    (lambda: wait.get_result(result.id), "TaskResultMismatch")):
    try:
        get()
    except exceptions.TaskException as error:
        assert type(error).__name__ == wanted, error
    else:
        raise AssertionError(wanted)
print(result.enqueued_at <= result.started_at <= result.finished_at)
backend = task_backends["default"]
print(backend.supports_defer, backend.supports_async_task, backend.supports_get_result, backend.supports_priority)
""")

    assert printed.splitlines() == [
        "3 1 SUCCESSFUL shop.tasks.add",
        "1 waited",
        "FAILED ValueError True",
        "READY None",
        "3",
        "True",
        "True True True True",
    ]


def test_a_job_can_name_no_function_that_is_no_task(make_site: MakeSite) -> None:
    """Whoever can write to the queue would otherwise run what he likes."""
    site = make_site()
    site.manage("migrate", "--verbosity=0")

    with site.worker():
        printed = site.run("""
from bullpen.sync import Queue
from bullpen import JobFailed
queue = Queue("default", connection=app.connection, prefix=app.prefix)
for name in ("os.getcwd", "shop.tasks.datetime", "antigravity.fly"):
    job = queue.add("django.task", {"task": name, "backend": "default", "args": [], "kwargs": {}}, attempts=3)
    try:
        job.result(timeout=60_000)
    except JobFailed as error:
        print(error.reason, error.attempts_made if hasattr(error, "attempts_made") else "")
""")

    assert [line.partition(" is no task")[0] for line in printed.splitlines()] == [
        "os.getcwd",
        "shop.tasks.datetime",
        "antigravity.fly",
    ]


@both_versions
def test_the_admin_lists_queues_and_links_to_the_dashboard(make_site: MakeSite) -> None:
    site = make_site()
    site.manage("migrate", "--verbosity=0")

    printed = site.run("""
from django.contrib.auth.models import User
from django.test import Client
User.objects.create_superuser("ada", password="x")
User.objects.create_user("eve", password="x", is_staff=True)
send_receipt.add_sync(order=1)
client = Client()
client.force_login(User.objects.get(username="ada"))
page = client.get("/admin/bullpen/jobqueue/").content.decode()
print("https://ops.example.com/bullpen/queues/emails" in page, "async-emails" in page, "<td>1</td>" in page)
print("/admin/bullpen/jobqueue/" in client.get("/admin/").content.decode())
client.force_login(User.objects.get(username="eve"))
print(client.get("/admin/bullpen/jobqueue/").status_code)
""")

    assert printed.splitlines() == ["True True True", "True", "403"]


def test_mistakes_in_the_settings_are_told_at_the_start(make_site: MakeSite) -> None:
    """Each says what is right. The first is told by a command, the others by what the command calls."""
    assert "BULLPEN['OUTBOKS'] is not known; there are APP, DASHBOARD_URL" in make_site(OUTBOKS="default").manage(
        "check", expect=1
    )

    printed = make_site().run("""
from django.core.exceptions import ImproperlyConfigured
from django.test import override_settings
from bullpen.integrations.django import _app, _options
for given in ({"OUTBOX": "other"}, {"REDIS_URL": 6379}, {"APP": "json:dumps"}, {"APP": "a:b", "PREFIX": "x"}):
    _options.options.cache_clear()
    with override_settings(BULLPEN=given):
        try:
            _app._make()
        except ImproperlyConfigured as error:
            print(error)
""")

    said = ["which is no alias in DATABASES", "must be a text, not 6379", "names no Bullpen", "leave out REDIS_URL"]
    for line, part in zip(printed.splitlines(), said, strict=True):
        assert part in line


def test_the_settings_reach_the_app(make_site: MakeSite) -> None:
    site = make_site(REDIS_URL="redis://127.0.0.1:1/5", PREFIX="shop", OUTBOX=None)

    printed = site.run("print(app.settings.redis.url, app.prefix, app.has_outbox)")

    assert printed == "redis://127.0.0.1:1/5 shop False"


def test_an_app_of_the_project_is_used(make_site: MakeSite) -> None:
    site = make_site(APP="shop_app:mine")
    (site.place / "shop_app.py").write_text("from bullpen import Bullpen\nmine = Bullpen()\n")

    assert site.run("import shop_app; print(app is shop_app.mine, app.has_outbox)") == "True True"


def test_without_an_outbox_a_project_gets_no_tables(make_site: MakeSite) -> None:
    site = make_site(OUTBOX=None)
    assert "bullpen.E002" in site.manage("check", expect=1)  # its tasks want one
    site.environ["SITE_TASKS_IN_OUTBOX"] = ""
    site.manage("migrate", "--verbosity=0")

    printed = site.run("print('integration_outbox' in connection.introspection.table_names())")

    assert printed == "False"


def test_the_newest_migration_brings_the_ledger_of_this_version() -> None:
    """Whoever changes the ledger's tables adds a Django migration."""
    newest = max((ROOT / "src/bullpen/integrations/django/migrations").glob("0*.py"))

    assert f'LedgerTables("{head()}")' in newest.read_text()


@both_versions
def test_tests_of_a_project_store_in_their_test_database(make_site: MakeSite) -> None:
    """Django's test runner makes the tables in memory and rolls back after each test."""
    site = make_site()
    (site.place / "shop" / "tests.py").write_text("""
from django.db import connection
from django.test import TestCase
from bullpen.integrations.django import add_in_transaction
from shop.tasks import send_receipt

def rows():
    with connection.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM integration_outbox")
        return cursor.fetchone()[0]

class OrderTest(TestCase):
    def test_one(self):
        add_in_transaction(send_receipt, order=1)
        self.assertEqual(rows(), 1)

    def test_other(self):
        add_in_transaction(send_receipt, order=2)
        self.assertEqual(rows(), 1)
""")

    site.manage("test", "--verbosity=0")
