"""A real server with KV blocks on disk that is killed, and another that finds them."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import pytest

from tests.cli.real_server import SLOW, RealServer, eventually, tiny_server, write_tiny_model

pytestmark = pytest.mark.slow

TOKENS = 900  # of a prompt
NUM_PROMPTS = 24  # five and more than the device has room for


def ask(server: RealServer, prompt: list[int]) -> str:
    answer = server.openai.completions.create(model=server.model, prompt=prompt, max_tokens=8, temperature=0)
    return answer.choices[0].text


def test_a_prefix_is_found_on_disk_after_kill_9(tmp_path: Path) -> None:
    model, path = tmp_path / "tiny", tmp_path / "kv"
    model.mkdir()
    write_tiny_model(model, **SLOW, max_position_embeddings=1024)  # a cache of 16,384
    flags = ("--speculate", "off", "--host-kv-gib", "0.05")
    disk = ("--disk-kv-gib", "0.05", "--disk-kv-path", str(path))
    draw = random.Random(1)
    prompts = [[draw.randrange(3, 500) for _ in range(TOKENS)] for _ in range(NUM_PROMPTS)]
    with tiny_server(model, *flags, *disk) as server:
        assert "more on disk" in server.banner
        answers = [ask(server, prompt) for prompt in prompts[:3]]
        for prompt in prompts[3:]:
            ask(server, prompt)
        eventually(lambda: len(list(path.glob("*/*.kv"))), lambda count: count >= 100)
        os.kill(server.engine_process().pid, signal.SIGKILL)
        os.kill(server.process.pid, signal.SIGKILL)
    for file in path.glob("*/*"):
        assert file.stat().st_mode & 0o777 == 0o600
    with tiny_server(model, *flags, *disk) as server:
        before = eventually(server.metrics, lambda found: found["penstock_disk_kv_blocks"] > 0)
        assert before["penstock_disk_kv_bytes"] <= 0.05 * (1 << 30)
        assert [ask(server, prompt) for prompt in prompts[:3]] == answers
        after = server.metrics()
        # A machine that is very busy may have been late for some.
        assert after["penstock_disk_kv_tokens_total"] + after["penstock_disk_kv_late_blocks_total"] > 0
        assert after["penstock_disk_kv_damaged_blocks_total"] == after["penstock_disk_kv_errors_total"] == 0
