"""OpenAI's Agents SDK against `penstock serve smollm2`: turns, streams, sessions, tools, typed outputs."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.cli.real_server import MODEL, real_server
from tests.peers.peers import python_of

pytestmark = pytest.mark.slow

CLIENT = Path(__file__).parents[2] / "tools/peers/agents_client.py"


def test_agents_answer_stream_remember_and_call_tools() -> None:
    python = python_of("agents")
    with real_server() as server:
        done = subprocess.run([python, str(CLIENT), server.url, MODEL], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout)
    assert "Paris" in said["capital"]
    assert said["streamed"] == said["capital"]
    assert said["num_events"] > 5
    assert "Rome" in said["again"]
    assert said["remembered"] == said["again"], "a session sends the turns before, as the list of them did"
    assert said["tool_items"][:2] == ["ToolCallItem", "ToolCallOutputItem"]
    assert said["tool_output"].startswith("It rains in ")
    assert said["color"] == "Color"
