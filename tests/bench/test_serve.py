from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from penstock.bench import serve
from penstock.bench.board import Board
from penstock.bench.serve import Asked, LoadShape, Report, Target, bench_serve
from penstock.core.errors import ConfigError
from penstock.workload.lengths import Lengths
from penstock.workload.trace import read_trace
from tests.bench.fake_server import FakeServer, MemoryClient, prompt_of, serving
from tests.virtual_time import in_virtual_time

SHORT = Asked(prompt=Lengths.parse("20"), output=Lengths.parse("3"))
PROBES = 2  # questions asked before a load, for the length of words


async def bench(
    fake: FakeServer,
    asked: Asked = SHORT,
    *shapes: LoadShape,
    num_requests: int | None = 4,
    board: Board | None = None,
    target: Target | None = None,
) -> Report:
    return await bench_serve(
        target or Target(fake.url),
        asked,
        list(shapes),
        num_requests=num_requests,
        duration_s=None,
        warm_up=0,
        objective=None,
        seed="7",
        command="",
        board=board or Board(),
    )


async def test_a_sweep_asks_new_questions_at_every_load_and_the_same_again_with_the_same_seed() -> None:
    asked = []
    for _ in range(2):
        async with serving(FakeServer()) as fake:
            report = await bench(fake, SHORT, LoadShape(concurrency=1), LoadShape(concurrency=2))
        asked.append(sorted(prompt_of(body) for body in fake.bodies[PROBES:]))
    assert asked[0] == asked[1]
    assert len(set(asked[0])) == 8
    assert {len(prompt.split()) for prompt in asked[0]} == {20}
    assert [(point.label, point.num_answers) for point in report.points] == [("concurrency 1", 4), ("concurrency 2", 4)]
    assert report.model == "fake"


@in_virtual_time
async def test_a_trace_is_replayed_at_its_times_with_its_prefixes_and_sessions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = tmp_path / "mooncake.jsonl"
    rows = [(0, 700, [1, 2]), (1000, 700, [1, 3]), (2000, 9000, list(range(20, 38))), (3000, 1100, [1, 2, 4])]
    names = ("timestamp", "input_length", "hash_ids")
    lines = [dict(zip(names, row, strict=True), output_length=3) for row in rows]
    trace.write_text("\n".join(map(json.dumps, lines)))
    fake = FakeServer()
    monkeypatch.setattr(serve, "Client", lambda url, **_: MemoryClient(fake))
    asked = Asked(trace=trace, speed=10.0)
    report = await bench(fake, asked, num_requests=None, target=Target("http://127.0.0.1:1"))
    first, second, long, third = (prompt_of(body).split() for body in fake.bodies[PROBES:])
    assert first[:512] == second[:512]
    assert first[512:] != second[512:]
    assert third[:700] == first
    assert len(long) == 4096 - 8 - 3
    assert "1 of 4 requests of the trace are longer than the context" in report.notes[0]
    assert [row.intended_s for row in report.points[0].requests] == pytest.approx([0, 0.1, 0.2, 0.3])
    assert [body["user"] for body in fake.bodies[PROBES:]] == [one.session for one in read_trace(trace)]


async def test_words_are_as_long_as_the_servers_usage_says(tmp_path: Path) -> None:
    """A server that counts two tokens for a word and adds seven of its own."""

    class Wordy(FakeServer):
        async def answer(self, body, writer) -> None:  # type: ignore[no-untyped-def]
            body["messages"].append({"content": " ".join(["x"] * (7 + len(prompt_of(body).split())))})
            await super().answer(body, writer)

    async with serving(Wordy()) as fake:
        report = await bench(fake, Asked(prompt=Lengths.parse("107"), output=Lengths.parse("3")))
    assert {row.prompt_tokens for row in report.points[0].requests} == {107}
    assert "a word is 2.00 tokens" in report.notes[0]


async def test_headers_and_fields_are_those_asked_for() -> None:
    async with serving(FakeServer()) as fake:
        fields = {"top_p": 0.5, "temperature": None}
        target = Target(fake.url + "/v1", "other", "completions", api_key="sk-1", ignore_eos=False, fields=fields)
        await bench(fake, target=target, num_requests=1)
    body = fake.bodies[-1]
    assert (body["model"], body["top_p"], body["max_tokens"], body["stream"]) == ("other", 0.5, 3, True)
    assert not {"temperature", "ignore_eos", "messages", "user"} & body.keys()
    assert "POST /v1/completions" in fake.heads[-1]
    assert "authorization: Bearer sk-1" in fake.heads[-1]


async def test_a_trace_that_is_used_up_is_told(tmp_path: Path) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,7,2\n")
    async with serving(FakeServer()) as fake:
        with pytest.raises(ConfigError, match="no requests left"):
            await bench(fake, Asked(trace=trace), LoadShape(concurrency=1), LoadShape(concurrency=2))


async def test_a_server_that_is_not_there_is_told() -> None:
    async with serving(FakeServer()) as fake:
        pass
    with pytest.raises(ConfigError, match="no OpenAI-compatible server answers"):
        await bench(fake)


async def test_progress_is_plain_lines_where_there_is_no_terminal() -> None:
    stream = io.StringIO()
    async with serving(FakeServer(refuse_every=5, status=429)) as fake:
        await bench(fake, SHORT, LoadShape(concurrency=2), board=Board(stream))
    (line,) = stream.getvalue().splitlines()
    assert line.startswith("concurrency 2  4/4  0 running  1 http_429")
    assert "\x1b" not in line
