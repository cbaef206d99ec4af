"""`bullpen init`: writes a small project whose tests pass."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Final

from bullpen.cli.context import Output, WrongCommand
from bullpen.cli.tree import Argument

__all__ = ["init"]

_JOBS: Final = '''\
"""The app and its tasks. `bullpen run jobs:app --reload` runs them."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator

from bullpen import Bullpen, Depends, Job

app = Bullpen()
logger = logging.getLogger("jobs")


class Mailer:
    """Stands for your mail service. It drops a mail whose key it has seen."""

    def __init__(self) -> None:
        self.sent: dict[str, str] = {}

    async def send(self, to: str, text: str, *, key: str) -> None:
        if key not in self.sent:
            self.sent[key] = f"{to}: {text}"
            logger.info("mail to %s: %s", to, text)


@app.provide
async def mailer() -> AsyncIterator[Mailer]:
    """Opened once per process, when the first job asks for it."""
    yield Mailer()


@app.task("emails", attempts=5, timeout=30_000)
async def send_welcome(job: Job, to: str, name: str = "there", mailer: Mailer = Depends()) -> str:
    """May run twice for one job, after a crash: the key lets the service send one mail."""
    text = f"Welcome, {name}!"
    await mailer.send(to, text, key=job.idempotency_key)
    return text


@app.task("reports", cron="0 7 * * 1-5", tz="UTC")
async def morning_report() -> None:
    """Runs by itself on working days at seven."""
    logger.info("good morning")
'''

_TEST: Final = '''\
"""Run with `pytest`: each test has an empty server of its own."""

from __future__ import annotations

from bullpen.testing import AppTester
from jobs import Mailer, app, send_welcome


async def test_a_welcome_is_sent(bullpen_app: AppTester) -> None:
    mailer = Mailer()

    with app.override(Mailer, mailer):
        await send_welcome.add(to="ada@example.com", name="Ada")
        bullpen_app.assert_enqueued(send_welcome, to="ada@example.com")
        done = await bullpen_app.run_until_drained()

    assert [job.return_value for job in done.completed] == ["Welcome, Ada!"]
    assert list(mailer.sent.values()) == ["ada@example.com: Welcome, Ada!"]


async def test_a_welcome_is_sent_once_although_its_job_may_run_twice(bullpen_app: AppTester) -> None:
    mailer = Mailer()

    with app.override(Mailer, mailer):
        await bullpen_app.assert_idempotent(
            send_welcome, to="ada@example.com", effects=lambda: list(mailer.sent.values())
        )
'''

_PYPROJECT: Final = """\
[project]
name = "{name}"
version = "0.1.0"
requires-python = ">=3.11"
dependencies = ["bullpen-mq[cli,embedded]"]

[project.optional-dependencies]
dev = ["bullpen-mq[testing]", "pytest>=8.4"]

[tool.pytest.ini_options]
pythonpath = ["."]
bullpen_app = "jobs:app"
"""

_README: Final = """\
# {name}

    pip install "bullpen-mq[cli,embedded,testing]" pytest
    pytest                                                   # the tests
    bullpen run jobs:app --reload                            # the workers; again when a file changes
    bullpen jobs add emails send_welcome --data '{{"to": "ada@example.com"}}'
    bullpen shell jobs:app                                   # try: await send_welcome.add(to="ada@example.com")

Without a server address a real server is started in `.bullpen`. For another one: `export BULLPEN_REDIS_URL=redis://…`.
"""

_FILES: Final = {
    "jobs.py": _JOBS,
    "test_jobs.py": _TEST,
    "pyproject.toml": _PYPROJECT,
    "README.md": _README,
    ".gitignore": ".bullpen/\n.venv/\n__pycache__/\n",
}


def init(
    at: Output,
    directory: Annotated[str, Argument("[DIRECTORY]", "Where; made if it does not exist; default: here.")] = ".",
) -> None:
    """Write a small project: an app with two tasks, tests that pass, a README.

    No file is overwritten: when one of them exists, nothing is written.
    """
    place = Path(directory).absolute()
    if place.exists() and not place.is_dir():
        raise WrongCommand(f"{directory} is not a directory")
    taken = [name for name in _FILES if (place / name).exists()]
    if taken:
        raise WrongCommand(f"{', '.join(taken)} exists in {directory}; nothing was written")
    name = re.sub(r"[^a-z0-9]+", "-", place.name.lower()).strip("-") or "jobs"
    place.mkdir(parents=True, exist_ok=True)
    for file, text in _FILES.items():
        braces = file in ("pyproject.toml", "README.md")
        (place / file).write_text(text.format(name=name) if braces else text, encoding="utf-8")
    go = "" if place == Path.cwd() else f"cd {directory} && "
    wrote = f"wrote {', '.join(_FILES)} to {place}"
    at.say({"directory": str(place), "files": list(_FILES)}, wrote, f"next: {go}bullpen run jobs:app --reload")
