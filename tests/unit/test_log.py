"""Two accounts of the same events: all for the log, the story for the operator."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

EVENTS = """
import logging
import structlog
from node.log import configure

configure("info", json={json})
configure("info", json={json})
log = structlog.get_logger("node.daemon.app")
log.debug("too much")
log.info("round committed", round=3, loss=2.5)
logging.getLogger("libp2p.host").warning("gossip")
logging.getLogger("trio").warning("a library's word")
try:
    1 / 0
except ZeroDivisionError:
    log.exception("a defect")
"""


def accounts(*, as_json: bool) -> tuple[list[str], list[str]]:
    code = EVENTS.format(json=as_json)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    return done.stdout.splitlines(), done.stderr.splitlines()


@pytest.mark.slow
def test_the_story_is_brief_and_ours() -> None:
    story, log = accounts(as_json=False)
    assert [line[9:] for line in story] == ["round committed loss=2.5 round=3", "[error] a defect"]
    assert "[info] round committed [node.daemon.app] loss=2.5 round=3" in log[0]
    assert "a library's word" in log[1]
    assert log[-1] == "ZeroDivisionError: division by zero"
    assert "gossip" not in "".join(log)


@pytest.mark.slow
def test_json_lines_are_json() -> None:
    story, log = accounts(as_json=True)
    assert [json.loads(line)["event"] for line in story] == ["round committed", "a defect"]
    assert json.loads(log[0])["round"] == 3
    assert json.loads(log[-1])["exception"][0]["exc_type"] == "ZeroDivisionError"
