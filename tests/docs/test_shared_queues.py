"""Every line of the page about shared queues names releases that are installed for tests, and tests that exist."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/guides/shared-queues.md").read_text()


def test_each_line_is_proven_with_the_release_that_it_names() -> None:
    lines = [line for line in PAGE.splitlines() if re.match(r"\| (npm|PyPI) ", line)]
    pinned = json.loads((ROOT / "tests/interop/node/package.json").read_text())["dependencies"]
    npm = {version.rpartition("@")[2] for name, version in pinned.items() if name.startswith("bullmq")}
    pypi = set(re.findall(r'VERSION = "([\d.]+)"', (ROOT / "tests/interop/_pypi.py").read_text()))

    named = {
        kind: set(re.findall(rf"^\| {kind} `bullmq` ([\d.]+)", "\n".join(lines), re.MULTILINE))
        for kind in ("npm", "PyPI")
    }

    assert named == {"npm": npm, "PyPI": pypi}
    for line in lines:
        tests = re.findall(r"`(?:tests/interop/)?(test_\w+\.py)`", line)
        assert tests, line
        assert all((ROOT / "tests/interop" / name).exists() for name in tests), line
