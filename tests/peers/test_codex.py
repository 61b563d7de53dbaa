"""OpenAI's Codex CLI against a replica and a gateway: it speaks the Responses API and nothing else.

The engine's model is the fake one: the small real one rambles for minutes where nobody asks for few tokens."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.cli.real_gateway import real_gateway
from tests.peers.peers import program_of
from tests.server.replica import NAME, serving

pytestmark = pytest.mark.slow

CONFIG = """
model = "{model}"
model_provider = "penstock"
model_context_window = 65536
check_for_update_on_startup = false
[analytics]
enabled = false
[model_providers.penstock]
name = "penstock"
base_url = "{url}/v1"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
"""


def codex(program: str, home: Path, url: str, *words: str) -> str:
    """What it prints last. `words`: of `codex exec`."""
    (home / "config.toml").write_text(CONFIG.format(model=NAME, url=url))
    (home / "empty").mkdir(exist_ok=True)
    done = subprocess.run(
        [program, "exec", "--skip-git-repo-check", *words],
        cwd=home / "empty",
        env=os.environ | {"CODEX_HOME": str(home)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()


def test_codex_asks_and_goes_on_with_its_session(tmp_path: Path) -> None:
    """Its own prompt has thousands of tokens; the second turn sends all of the first again, through a gateway."""
    program = program_of("codex")
    with serving(num_blocks=1 << 15, chunk_tokens=4096, virtual_step_s=0.001) as replica:
        assert codex(program, tmp_path, f"http://{replica.host}:{replica.port}", "-s", "read-only", "Say hello.")
        with real_gateway(tmp_path, replica) as gateway:
            assert codex(program, tmp_path, gateway.url, "resume", "--last", "Again, please.")
        metrics = replica.final_metrics()
    assert metrics["penstock_requests_total{ok,responses,200}"] == 2
    assert metrics["penstock_prefix_hit_tokens_total"] > 10_000
