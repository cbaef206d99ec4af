"""What MkDocs does not do by itself for our site; mkdocs.yml names this file as a hook.

Pages for files that lie beside docs/ (changes, contributing, security), with their links put right; one page for each
public module, from which mkdocstrings makes the API reference. Nothing of it is stored: a docstring changes in one
place.
"""

from __future__ import annotations

import importlib
import posixpath
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT: Final = Path(__file__).resolve().parent.parent
BESIDE: Final = {
    "CHANGELOG.md": "project/changes.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "SECURITY.md": "project/security.md",
}
"""Files of the checkout that are pages of the site, too."""
MODULES: Final = (
    "bullpen",
    "bullpen.channels",
    "bullpen.compat.arq",
    "bullpen.compat.bullmq",
    "bullpen.compat.celery",
    "bullpen.compat.rq",
    "bullpen.dashboard",
    "bullpen.integrations.django",
    "bullpen.integrations.fastapi",
    "bullpen.integrations.sentry",
    "bullpen.integrations.starlette",
    "bullpen.messages",
    "bullpen.middleware",
    "bullpen.outbox",
    "bullpen.runs",
    "bullpen.sources",
    "bullpen.sync",
    "bullpen.testing",
    "bullpen.transports",
    "bullpen.workflow",
)
FIRST: Final = (
    "Bullpen",
    "Queue",
    "Job",
    "Worker",
    "Task",
    "QueueEvents",
    "Connection",
    "Settings",
    "Backoff",
    "RetryPolicy",
)
"""What a reader of a page asks for most; the rest follows by its name."""
_SHOWN: Final = ("tests/", "examples/", "deploy/", "src/")
"""Folders whose files are copied into the site when a page links to one."""
_LINK: Final = re.compile(r"(\]\()(?!https?:|#|mailto:)([^)#\s]+)(#[^)\s]*)?(\))")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the pages of modules into the list of pages."""
    for section in config.nav or []:
        for entry in next(iter(section.values())):
            if isinstance(entry, dict) and "API" in entry:
                entry["API"] = [page for page, _ in api_pages()]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what lies nowhere below docs/."""
    for name, page in BESIDE.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text()))
    for name in sorted(_linked_files()):
        files.append(File.generated(config, _copy_of(name), content=(ROOT / name).read_text()))
    for page, text in api_pages():
        files.append(File.generated(config, page, content=text))
    return files


def _linked_files() -> set[str]:
    """Files of the checkout, no pages, that pages of docs/ link to."""
    pages = (ROOT / "docs").rglob("*.md")
    targets = {
        posixpath.normpath(posixpath.join(page.parent.relative_to(ROOT).as_posix(), link[2]))
        for page in pages
        for link in _LINK.finditer(page.read_text())
    }
    return {target for target in targets if target.startswith(_SHOWN) and (ROOT / target).is_file()}


def _copy_of(name: str) -> str:
    """As text: a browser shows it, where it would save a program."""
    return f"project/files/{name}.txt"


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links between docs/ and the files beside it lead to pages of the site."""
    return "".join(_relinked(markdown, page.file.src_uri))


def _relinked(markdown: str, page: str) -> Iterator[str]:
    """`[a](../CHANGELOG.md)` on a page of docs/ and `[b](docs/start.md)` in CHANGELOG.md, outside of code."""
    stands = {target: name for name, target in BESIDE.items()}
    here = stands.get(page, f"docs/{page}")

    def put_right(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(here), link[2]))
        if target in BESIDE:
            wanted = BESIDE[target]
        elif target.startswith("docs/"):
            wanted = target.removeprefix("docs/")
        elif target.startswith(_SHOWN) and (ROOT / target).is_file():
            wanted = _copy_of(target)
        else:
            return link[0]
        relative = posixpath.relpath(wanted, posixpath.dirname(page))
        return f"{link[1]}{relative}{link[3] or ''}{link[4]}"

    for number, part in enumerate(re.split(r"(^```.*?^```$)", markdown, flags=re.MULTILINE | re.DOTALL)):
        yield part if number % 2 else _LINK.sub(put_right, part)


# ---- the API reference -----------------------------------------------------------------------------------------------


def api_pages() -> Iterator[tuple[str, str]]:
    """The page of each public module, and for `bullpen` itself a second one with the errors."""
    for module in MODULES:
        names = [name for name in importlib.import_module(module).__all__ if not name.startswith("__")]
        if module == "bullpen":
            failed = [name for name in names if _is_error(module, name)]
            yield "api/bullpen.md", _api_page(module, module, [name for name in names if name not in failed])
            yield "api/errors.md", _api_page("Errors", module, failed)
        else:
            yield f"api/{module.removeprefix('bullpen.')}.md", _api_page(module, module, names)


def _is_error(module: str, name: str) -> bool:
    found = getattr(importlib.import_module(module), name)
    return isinstance(found, type) and issubclass(found, BaseException)


def _api_page(title: str, module: str, names: Sequence[str]) -> str:
    about = importlib.import_module(module).__doc__ or ""
    asked_first = [name for name in FIRST if name in names]
    ordered = [*asked_first, *(name for name in names if name not in asked_first)]
    entries = "\n\n".join(f"::: {module}.{name}" for name in ordered)
    return f"# {title}\n\n{about.strip() if title == module else ''}\n\n{entries}\n"


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Let wide tables and blocks scroll by themselves, and not the page with them."""
    return re.sub(r"<table>(.*?)</table>", r'<div class="wide"><table>\1</table></div>', output, flags=re.DOTALL)
