import asyncio
import itertools

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.http.call import FailureKind
from penstock.http.exchange import Exchange
from penstock.http.forward import End, Outcome, forward
from penstock.http.upstream import Upstream
from tests.http.scripted import EVENTS, ScriptedUpstream, Stream, answering, chunk, whole
from tests.waiting import eventually_async


async def test_answers_come_back_whole_and_connections_are_reused(stand):
    one = await stand(answering)
    client = await one.client()
    for number in range(20):
        await client.post(b"%d" % number)
        response = await client.response()
        assert (response.status, response.body) == (200, b"%d" % number)
        assert response.headers == {"content-type": "application/json", "content-length": str(len(b"%d" % number))}
    assert one.upstreams[0].num_accepted == 1
    outcome = one.gateway.outcomes[-1]
    assert (outcome.end, outcome.status, outcome.num_bytes, outcome.tail) == (End.COMPLETED, 200, 2, b"19")


async def test_outcome_says_when_the_first_byte_came_and_when_the_last(stand, clock):
    async def script(stream: Stream) -> None:
        await stream.request()
        clock.advance(2.0)
        await stream.send(EVENTS + chunk(b"data: 1\n\n"))
        await stream.reader.readexactly(1)  # never comes

    one = await stand(script)
    client = await one.client()
    await client.post()
    await client.head()
    clock.advance(3.0)
    client.close()
    await eventually_async(lambda: one.gateway.outcomes)
    outcome = one.gateway.outcomes[0]
    assert (outcome.end, outcome.first_byte_s, outcome.total_s) == (End.CLIENT_GONE, 2.0, 5.0)


async def test_large_bodies_pass_both_ways(stand):
    one = await stand(answering)
    client = await one.client()
    body = bytes(range(256)) * (3 << 12)  # 3 MB
    sending = asyncio.create_task(client.post(body))
    assert (await client.response()).body == body
    await sending


BODY = b'data: {"a": 1}\n\ndata: {"b": 2}\n\ndata: [DONE]\n\n'


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(chunks=st.sets(st.integers(1, len(BODY) - 1), max_size=6), cuts=st.sets(st.integers(1, 250), max_size=8))
async def test_any_chunks_in_any_pieces_are_the_same_stream(stand, chunks, cuts):
    edges = [0, *sorted(chunks), len(BODY)]
    raw = EVENTS + b"".join(chunk(BODY[a:b]) for a, b in itertools.pairwise(edges)) + b"0\r\n\r\n"
    at = [0, *sorted(cut for cut in cuts if cut < len(raw)), len(raw)]

    async def script(stream: Stream) -> None:
        await stream.request()
        await stream.send(*(raw[a:b] for a, b in itertools.pairwise(at)))
        await stream.request()

    one = await stand(script)
    client = await one.client()
    await client.post()
    response = await client.response()
    assert (response.headers["content-type"], response.body) == ("text/event-stream", BODY)
    client.close()


async def test_only_whole_events_are_passed_on_and_the_head_waits_for_the_first(stand):
    go = asyncio.Event()

    async def script(stream: Stream) -> None:
        await stream.request()
        await stream.send(EVENTS, chunk(b"data: 1\n\ndata: ha"), gap_s=0.001)
        await go.wait()
        stream.reset()

    one = await stand(script)
    client = await one.client()
    await client.post()
    assert await client.head()
    assert await client.reader.readexactly(14) == chunk(b"data: 1\n\n")
    go.set()
    assert await client.ended()  # aborted: no last chunk, so nobody takes it for the whole
    outcome = one.gateway.outcomes[0]
    assert (outcome.end, outcome.num_bytes, outcome.failure.kind) == (End.FAILED_AFTER, 9, FailureKind.BROKEN)


async def test_answer_without_a_length_ends_with_its_connection(stand):
    async def script(stream: Stream) -> None:
        await stream.request()
        await stream.send(b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\n\r\n", b"one ", b"two", gap_s=0.001)

    one = await stand(script)
    client = await one.client()
    await client.post()
    assert (await client.response()).body == b"one two"
    assert one.gateway.outcomes[0].end is End.COMPLETED


async def test_interim_answers_are_skipped_and_bodyless_ones_end_at_once(stand):
    async def script(stream: Stream) -> None:
        await stream.request()
        await stream.send(b"HTTP/1.1 102 Processing\r\n\r\n", b"HTTP/1.1 204 No Content\r\n\r\n")
        await stream.request()
        await stream.send(whole(b"next"))
        await stream.request()

    one = await stand(script)
    client = await one.client()
    await client.post()
    assert (await client.response(to_head=True)).status == 204
    await client.post()
    assert (await client.response()).body == b"next"


async def test_head_requests_pass(stand):
    async def script(stream: Stream) -> None:
        await stream.request()
        await stream.send(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n")
        await stream.request()

    one = await stand(script)
    client = await one.client()
    await client.send(b"HEAD / HTTP/1.1\r\nhost: x\r\n\r\n")
    assert (await client.response(to_head=True)).headers["content-length"] == "5"


async def test_what_follows_an_answer_uninvited_is_never_another_clients_answer(stand):
    async def script(stream: Stream) -> None:
        await stream.request()
        await stream.send(whole(b"mine") + whole(b"forged"))
        await stream.request()

    one = await stand(script)
    for _ in range(2):
        client = await one.client()
        await client.post()
        assert (await client.response()).body == b"mine"
    assert one.upstreams[0].num_accepted == 2


async def test_declined_answers_are_kept_for_the_caller_and_the_stream_can_go_elsewhere(serve):
    """What a gateway does: tries another after a refusal, and carries a broken stream on."""

    async def busy(stream: Stream) -> None:
        await stream.request()
        await stream.send(whole(b'{"error": "busy"}', "429 Too Many Requests"))
        await stream.request()

    async def breaking(stream: Stream) -> None:
        await stream.request()
        await stream.send(EVENTS + chunk(b"data: 1\n\n") + chunk(b"data: 2\n\n") + b"9\r\ndata: 3")

    async def going_on(stream: Stream) -> None:
        await stream.request()
        await stream.send(EVENTS + chunk(b"data: 3\n\n") + b"0\r\n\r\n")
        await stream.request()

    servers = [await ScriptedUpstream.start(script) for script in (busy, breaking, going_on)]
    ways = [Upstream("127.0.0.1", server.port) for server in servers]
    outcomes: list[Outcome] = []
    tapped: list[bytes] = []

    def app(exchange: Exchange) -> None:
        turns = iter(ways)

        def attempt() -> None:
            forward(
                exchange,
                next(turns),
                target=b"/",
                headers=b"",
                body=b"{}",
                done=done,
                tap=tapped.append,
                wanted=lambda head: head.status < 400,
                extra_headers=b"x-request-id: r1\r\n",
            )

        def done(outcome: Outcome) -> None:
            outcomes.append(outcome)
            if outcome.end is not End.COMPLETED:
                attempt()

        attempt()

    _, connect = await serve(app)
    client = await connect()
    await client.post()
    response = await client.response()
    assert (response.body, response.headers["x-request-id"]) == (b"data: 1\n\ndata: 2\n\ndata: 3\n\n", "r1")
    assert [outcome.end for outcome in outcomes] == [End.DECLINED, End.FAILED_AFTER, End.COMPLETED]
    assert (outcomes[0].status, outcomes[0].tail) == (429, b'{"error": "busy"}')
    assert b"".join(tapped) == response.body
    for way, server in zip(ways, servers, strict=True):
        way.close()
        await server.stop()
