"""What a reader needs to run a block stands before it: how, and with which extras."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bullpen.testing import RedisServer
from tests.docs.run_page import Block, blocks_of
from tests.docs.test_pages import PAGES, node_environment
from tests.environments import ROOT, clean_environ, make_environment

ALL = [ROOT / "README.md", *PAGES]
INSTALLED = ("embedded", "cli")  # the line of the README
NAMES = r"((?:`[a-z-]+`(?:, and | and |, | or )?)+)"

# What a block uses -> the extras, or packages of others, of which one must be named before it.
NEEDS = {
    r"^(from|import) sqlalchemy": {"sqlite", "postgres"},
    r"^(from|import) psycopg": {"postgres"},
    r"^from bullpen\.(outbox|runs|messages)\b|\bSqlEntities\b|\bSqlEvents\b": {"sqlite", "postgres"},
    r"\bapp\.(use_\w+\(|ledger|projector)": {"sqlite", "postgres"},
    r"\bruns_api\b": {"http"},
    r"^from bullpen\.channels import .*\b(Webhook|Slack|Sms)\b": {"http"},
    r"\bchannels\.(webhook|slack|sms)\(": {"http"},
    r"\bEmailTemplate\b": {"email"},
    r"\bKafkaChannel\b|\bKafkaClient\b": {"kafka"},
    r"\bRabbitMQClient\b|^from bullpen\.transports import .*\bTopology\b": {"rabbitmq"},
    r"\bKurrentSource\b": {"kurrent"},
    r"\binstall_tracing\b": {"tracing"},
    r"\bMockKafka\b": {"confluent-kafka"},
    r"^(from|import) fastapi": {"fastapi"},
    r"^(from|import) django": {"django"},
    r"^from bullpen\.testing import .*\b(FaultProxy|RedisServer|assert_sound)\b": {"testing"},
}


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def python_blocks(page: Path) -> list[Block]:
    return [block for block in blocks_of(page.read_text()) if block.language == "python"]


def has_top_level_await(block: Block) -> bool:
    try:
        compile(block.source, "block", "exec")
    except SyntaxError:
        return True
    return False


def named_in(text: str) -> tuple[set[str], set[str]]:
    """The extras and the packages that a text names."""
    found = []
    for word in (r"extras?", r"packages?"):
        lists = re.findall(rf"\b{word}\s+{NAMES}", " ".join(text.split()))
        found.append({name for each in lists for name in re.findall(r"`([a-z-]+)`", each)})
    lines = {name for each in re.findall(r"pip install \"bullpen-mq\[([a-z,]+)\]", text) for name in each.split(",")}
    return found[0] | lines, found[1]


@pytest.mark.parametrize("page", ALL, ids=name_of)
def test_a_page_with_top_level_await_says_first_how_to_run_it(page: Path) -> None:
    """Python refuses such a file: `'await' outside function`."""
    lines = page.read_text().splitlines()

    for block in python_blocks(page):
        if has_top_level_await(block):
            before = "\n".join(lines[: block.line - 1])
            assert "python -m asyncio" in before
            assert "async def main()" in before


@pytest.mark.parametrize("page", ALL, ids=name_of)
def test_what_a_block_needs_is_named_before_it(page: Path) -> None:
    """A reader has what the README's line installs; everything else is an error in the middle of an example."""
    lines = page.read_text().splitlines()
    missing = []

    for block in python_blocks(page):
        extras, packages = named_in("\n".join(lines[: block.line - 1]))
        for use, either in NEEDS.items():
            if re.search(use, block.source, re.MULTILINE) and not either & (extras | packages):
                missing.append(f"line {block.line}: {' or '.join(sorted(either))}")

    assert missing == []


@pytest.mark.parametrize("page", ALL, ids=name_of)
def test_the_examples_of_a_page_fit_into_one_main(page: Path) -> None:
    """The way that `start.md` shows must be possible: what a module may hold, a function may not always."""
    compile(_in_main(page), str(page), "exec")


def _in_main(page: Path) -> ast.Module:
    """A program whose `async def main()` holds all blocks of a page that are no files and no programs."""
    program = ast.parse("import asyncio\nasync def main():\n    pass\nasyncio.run(main())")
    main = program.body[1]
    assert isinstance(main, ast.AsyncFunctionDef)
    for block in python_blocks(page):
        if not re.match(r"# \w+\.py\n", block.source) and "asyncio.run(" not in block.source:
            body = compile(block.source, str(page), "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT | ast.PyCF_ONLY_AST)
            assert isinstance(body, ast.Module)
            main.body += body.body
    return ast.fix_missing_locations(program)


@pytest.mark.long
@pytest.mark.parametrize("page", ALL, ids=name_of)
def test_a_page_runs_with_what_it_names_and_nothing_else(page: Path, tmp_path: Path) -> None:
    """The environment of the tests has everything, so only a poorer one notices what a page forgot to name."""
    extras, packages = named_in(page.read_text())
    python = make_environment(tmp_path / "venv", {*INSTALLED, *extras} - {"dev"}, also=packages)
    node = node_environment() if "```js" in page.read_text() else {}
    answer = subprocess.run(
        [python, "-m", "tests.docs.run_page", str(page)],
        env={**clean_environ(), **node},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )

    assert answer.returncode == 0, answer.stdout + answer.stderr


@pytest.mark.long
@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if {each.language for each in blocks_of(page.read_text())} <= {"python", "text"}],
    ids=name_of,
)
def test_a_page_runs_inside_one_main(page: Path, tmp_path: Path) -> None:
    for block in python_blocks(page):
        if name := re.match(r"# (\w+\.py)\n", block.source):
            (tmp_path / name[1]).write_text(block.source)
    with RedisServer.start() as server:  # where the page says that there is one
        program = ast.unparse(_in_main(page)).replace("6379", str(server.port))
        (tmp_path / "page.py").write_text(program)
        answer = subprocess.run(
            [sys.executable, "page.py"], cwd=tmp_path, env=clean_environ(), capture_output=True, text=True, check=False
        )

    assert answer.returncode == 0, answer.stdout + answer.stderr
