from __future__ import annotations

from array import array

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from penstock.core.clock import MonotonicClock
from penstock.core.errors import EngineFailed
from penstock.core.request import FinishReason, Request
from penstock.engine.embedding import EmbedQueue
from penstock.engine.encoder import EncoderEngine
from penstock.engine.fake_embedder import FakeEmbedder, fake_vector
from penstock.engine.loop import EngineLoop
from penstock.engine.mailbox import Disconnected
from penstock.engine.messages import Abort, Embed, Embedded, FromEngine, StepReport, Stop, Submit, ToEngine
from tests.engine.expecting import engine

TEXT = st.lists(st.integers(0, 99), min_size=1, max_size=12)
POISON = 77


def vectors(*texts: list[int]) -> bytes:
    return b"".join(array("f", fake_vector(text)).tobytes() for text in texts)


def drained(queue: EmbedQueue) -> dict[str, Embedded]:
    found = {}
    while queue.has_work:
        for answer in queue.step(MonotonicClock()).answers:
            assert answer.request_id not in found
            found[answer.request_id] = answer
    assert queue.num_tokens == 0
    return found


@settings(max_examples=40)
@given(st.lists(st.lists(TEXT, min_size=1, max_size=6), min_size=1, max_size=6), st.integers(1, 30))
def test_everybody_gets_the_vectors_of_its_own_texts_in_their_order(texts: list[list[list[int]]], most: int) -> None:
    embedder = FakeEmbedder(most)
    queue = EmbedQueue(embedder)
    for number, own in enumerate(texts):
        queue.add(Embed(str(number), own, [1] * len(own) if number % 3 == 2 else None))
    answers = drained(queue)
    for number, own in enumerate(texts):
        expected = vectors(*own)
        if number % 3 == 2:
            expected = array("f", [(1 - len(text)) / 10 for text in own]).tobytes()
        assert answers[str(number)].values == expected


@given(st.lists(TEXT, min_size=1, max_size=40))
def test_batches_are_filled_by_tokens_and_never_beyond_them(texts: list[list[int]]) -> None:
    embedder = FakeEmbedder(24)
    queue = EmbedQueue(embedder)
    for number, text in enumerate(texts):
        queue.add(Embed(str(number), [text]))
    drained(queue)
    lengths = [len(text) for text in texts]
    expected: list[list[int]] = [[]]
    for length in lengths:
        if sum(expected[-1]) + length > 24:
            expected.append([])
        expected[-1].append(length)
    assert embedder.batches == [len(batch) for batch in expected]


def test_a_text_longer_than_a_batch_is_one_by_itself() -> None:
    embedder = FakeEmbedder(4)
    queue = EmbedQueue(embedder)
    queue.add(Embed("a", [[1], list(range(9)), [2, 3]]))
    drained(queue)
    assert embedder.batches == [1, 1, 1]


def test_time_is_shared_by_tokens() -> None:
    queue = EmbedQueue(FakeEmbedder())
    queue.add(Embed("a", [[1] * 30]))
    queue.add(Embed("b", [[1] * 10]))
    batch = queue.step(MonotonicClock())
    one, other = batch.answers
    assert one.device_s == pytest.approx(3 * other.device_s)
    assert one.device_s + other.device_s == pytest.approx(batch.device_s)


def test_who_is_in_a_batch_that_fails_is_told_and_nobody_else() -> None:
    queue = EmbedQueue(FakeEmbedder(4, poison=POISON))
    queue.add(Embed("bad", [[1, 2, 3], [POISON] * 4, [5]]))
    queue.add(Embed("good", [[1, 2, 3, 4]]))
    answers = drained(queue)
    assert "poison" in (answers["bad"].error or "")
    assert answers["good"].values == vectors([1, 2, 3, 4])


def test_what_is_aborted_is_forgotten_wherever_it_is() -> None:
    queue = EmbedQueue(FakeEmbedder(2))
    queue.add(Embed("a", [[1, 2], [3, 4]]))
    queue.add(Embed("b", [[5, 6]]))
    queue.add(Embed("c", [[7]]))
    queue.step(MonotonicClock())
    queue.abort("a")
    queue.abort("c")
    queue.abort("nobody")
    assert list(drained(queue)) == ["b"]


def test_without_an_embedder_everybody_is_refused() -> None:
    queue = EmbedQueue(None)
    queue.add(Embed("a", [[1], [2]]))
    assert "embeds no texts" in (drained(queue)["a"].error or "")


class Letters:
    """A mailbox that holds some mail, batch by batch, and then is closed."""

    def __init__(self, *batches: list[ToEngine]) -> None:
        self._batches = list(batches)
        self.sent: list[FromEngine] = []

    def receive(self, *, wait: bool) -> list[ToEngine]:
        if not self._batches:
            if wait:
                raise Disconnected
            return []
        return self._batches.pop(0)

    def send(self, message: FromEngine) -> None:
        self.sent.append(message)


def test_an_encoder_answers_until_its_server_is_gone_and_generates_nothing() -> None:
    letters = Letters([Embed("a", [[1, 2], [3]]), Submit(Request("g", [1], 4))], [Embed("b", [[4]]), Abort("x")])
    EngineLoop(EncoderEngine(EmbedQueue(FakeEmbedder())), letters, MonotonicClock()).run()
    answers = {message.request_id: message for message in letters.sent if isinstance(message, Embedded)}
    assert answers["a"].values == vectors([1, 2], [3])
    assert answers["b"].values == vectors([4])
    reports = [message for message in letters.sent if isinstance(message, StepReport)]
    assert [event.finish for report in reports for event in report.events] == [FinishReason.ERROR]
    assert reports[-1].measured.load.steps == 2
    assert reports[-1].measured.cache.prompt_tokens == 4


def test_an_encoder_stops_when_it_is_told() -> None:
    letters = Letters([Stop()], [Embed("late", [[1]])])
    EngineLoop(EncoderEngine(EmbedQueue(FakeEmbedder())), letters, MonotonicClock()).run()
    assert letters.sent == []


async def test_vectors_come_over_the_engines_socket_beside_tokens() -> None:
    async with engine() as client:
        answer = await client.embeddings(Embed("a", [[1, 2, 3], [4]]))
        assert answer.values == vectors([1, 2, 3], [4])
        assert answer.device_s > 0
        scores = array("f", (await client.embeddings(Embed("b", [[1, 2, 3]], [2]))).values).tolist()
        assert scores == pytest.approx([-0.1])
        assert client.embeddings.num_texts == 0


async def test_a_failure_reaches_who_waits() -> None:
    from tests.engine.fake_engine import POISON as DEADLY

    async with engine() as client:
        with pytest.raises(EngineFailed, match="poison"):
            await client.embeddings(Embed("a", [[DEADLY]]))
        assert (await client.embeddings(Embed("b", [[1]]))).values == vectors([1])
