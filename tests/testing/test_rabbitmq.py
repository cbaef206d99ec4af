"""A private broker that does not start says why, and leaves nothing behind."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from bullpen.testing.rabbitmq import DEAD_LETTER_TIMEOUT_MS, RabbitServer, need_rabbitmq


def test_a_broker_that_does_not_start_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    need_rabbitmq()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def write_nonsense(self: RabbitServer, *_: object) -> None:
        (self._directory / "rabbit.conf").write_text("no.such.setting = 1\n")

    monkeypatch.setattr(RabbitServer, "_write_configuration", write_nonsense)

    with pytest.raises(RuntimeError, match=r"(?s)did not start:.*no\.such\.setting"):
        RabbitServer.start()

    assert list(tmp_path.iterdir()) == []


def test_a_refused_dead_letter_is_tried_again_as_soon_as_the_guide_says(rabbit: RabbitServer) -> None:
    told = rabbit.control("eval", "application:get_env(rabbit, dead_letter_worker_publisher_confirm_timeout).")

    assert told.strip() == f"{{ok,{DEAD_LETTER_TIMEOUT_MS}}}"
