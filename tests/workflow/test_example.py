"""The order example: one file, four transports, one output."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import forks
from tests.flows._cli import environment

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "order_workflow.py"
SAYS = """\
urn:order:1 is shipped: 20 paid, 1 receipt
urn:order:1: new -> paid by pay (event)
urn:order:1: paid -> packed by pack (automatic)
urn:order:1: packed -> shipped by ship (event)
urn:order:2: new -> failed by pay (failed) because urn:order:2: card is stolen
"""


@pytest.mark.requirement("W-1", "W-2", "W-3", "W-7", "W-49", "X-38", "X-53")
@pytest.mark.parametrize("transport", ["memory", "bullmq", "rabbitmq", "kafka"])
def test_the_example_is_the_same_on_every_transport(
    transport: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Byte for byte the same program and the same answer: only the setting differs."""
    given = {"BULLPEN_TRANSPORT": transport, "BULLPEN_DATA_DIR": str(tmp_path / "data")}
    match transport:
        case "rabbitmq":
            given["RABBITMQ_URL"] = request.getfixturevalue("rabbit").url
        case "kafka":
            given["KAFKA_BROKERS"] = request.getfixturevalue("kafka").address

    answer = forks.run([str(EXAMPLE)], cwd=tmp_path, env=environment(given))

    assert answer.returncode == 0, answer.stderr
    assert answer.stdout == SAYS
