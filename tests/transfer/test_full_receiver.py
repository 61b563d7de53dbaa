"""A real server whose cache is full of its own streams is told to pull a prompt: it answers as if it had not been told,
and neither side holds a block afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest
from openai.types import Completion

from tests.cli.real_server import RealServer, eventually, tiny_server, write_tiny_model
from tests.transfer.test_processes import Servers, answer

pytestmark = pytest.mark.slow

CONTEXT = 4096  # tokens; the cache has room for four
NUM_STREAMS = 8  # that want all of it, and more, before they end


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Servers]:
    write_tiny_model(tmp_path, max_position_embeddings=CONTEXT)
    flags = ("--threads", "1", "--kv-port", "0", "--speculate", "off")
    with tiny_server(tmp_path, *flags) as lender, tiny_server(tmp_path, *flags) as puller:
        yield Servers(lender, puller, "shm")


def fill(server: RealServer, prompt: str) -> openai.Stream[Completion]:
    return server.openai.completions.create(
        model=server.model, prompt=prompt, max_tokens=CONTEXT // 2, stream=True, extra_body={"ignore_eos": True}
    )


def test_a_prompt_is_computed_where_there_is_no_room_to_pull_it_to(servers: Servers) -> None:
    source, prompts = f"127.0.0.1:{servers.kv_port};prefill", [servers.prompt() for _ in range(6)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        streams = [fill(servers.puller, servers.prompt()) for _ in range(NUM_STREAMS)]
        eventually(lambda: servers.puller.metrics()["penstock_kv_usage_ratio"], lambda used: used > 0.9)
        asked = [pool.submit(answer, servers.puller, prompt, source) for prompt in prompts]
        found = [one.result() for one in asked]
        for stream in streams:
            stream.close()
    totals = servers.puller.metrics()
    assert totals["penstock_kv_failed_pulls_total"] + totals["penstock_preemptions_total"] > 0  # there was no room
    servers.settle()
    assert found == [answer(servers.lender, prompt) for prompt in prompts]
