"""The load: conversations with a server, in a closed loop or an open one.

Closed: so many clients, each beginning its next conversation when its last has ended. Open: each begins at its own time
whatever became of the others, and its latency counts from that time, so a server that stalls cannot hide the requests
that it would have kept waiting (coordinated omission).
"""

from __future__ import annotations

import asyncio
import gc
from array import array
from collections.abc import Callable, Coroutine, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count, islice

from penstock.bench.answer import Answer, Reader
from penstock.bench.board import Board
from penstock.bench.client import Client, Recording, RequestFailed
from penstock.bench.lag import GeneratorHealth, LagWatch
from penstock.bench.speech import Speech
from penstock.workload.conversations import Conversation, Message, Source, Turn

NO_GAPS = array("d")


@dataclass(frozen=True, slots=True)
class Result:
    """One request. Times are seconds since the load began; latencies count from `intended_s`."""

    number: int  # of its conversation
    turn: int
    intended_s: float
    sent_s: float
    ended_s: float
    asked_tokens: int  # of output
    first_s: float | None = None  # None: no usable answer
    last_s: float = 0.0
    gaps: array[float] = field(default_factory=lambda: NO_GAPS)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None  # its kind
    message: str = ""

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_s is None else self.first_s - self.intended_s

    @property
    def ttft_from_send_s(self) -> float | None:
        return None if self.first_s is None else self.first_s - self.sent_s

    @property
    def e2e_s(self) -> float | None:
        return None if self.first_s is None else self.last_s - self.intended_s

    @property
    def tpot_s(self) -> float | None:
        """None: a single token has no time between tokens."""
        if self.first_s is None or self.output_tokens < 2:
            return None
        return (self.last_s - self.first_s) / (self.output_tokens - 1)


@dataclass(frozen=True)
class Run:
    """One load from its begin to its last answer."""

    wall_s: float
    window_s: float  # in which conversations began
    results: list[Result]
    health: GeneratorHealth
    num_conversations: int
    was_interrupted: bool = False


class Load:
    def __init__(
        self, client: Client, speech: Speech, board: Board, *, count_tokens: Callable[[str], int] | None = None
    ) -> None:
        """`count_tokens` is for servers that do not say how many there were."""
        self._client = client
        self._clock = client.clock
        self._speech = speech
        self._board = board
        self._count_tokens = count_tokens
        self._results: list[Result] = []
        self._began_s = 0.0
        self._num_begun = 0
        self._last_begun_s = 0.0

    async def closed(
        self, source: Source, *, concurrency: int, total: int | None, first: int = 0, duration_s: float | None = None
    ) -> Run:
        """Conversations `first` to `first + total`, or as many as begin in `duration_s`."""
        numbers = iter(count(first) if total is None else range(first, first + total))
        clients = [self._client_loop(source, numbers, duration_s) for _ in range(concurrency)]
        return await self._run(clients, window_s=None)

    async def open(
        self,
        source: Source,
        times: Iterable[float],
        *,
        total: int | None,
        first: int = 0,
        duration_s: float | None = None,
        drain_s: float | None = None,
    ) -> Run:
        """The n-th begins at the n-th of `times`. Those that still run `drain_s` after the last began are given up."""
        arrivals = self._arrivals(source, islice(times, total), first, duration_s, drain_s)
        return await self._run([arrivals], window_s=duration_s or 0.0)

    # -- inside

    async def _client_loop(self, source: Source, numbers: Iterator[int], duration_s: float | None) -> None:
        for number in numbers:
            if duration_s is not None and self._now() >= duration_s:
                return
            conversation = source.conversation(number)
            await self._converse(number, conversation, self._now())

    async def _arrivals(
        self, source: Source, times: Iterator[float], first: int, duration_s: float | None, drain_s: float | None
    ) -> None:
        running: set[asyncio.Task[None]] = set()
        try:
            for number, at_s in enumerate(times, first):
                if duration_s is not None and at_s >= duration_s:
                    break
                conversation = source.conversation(number)  # made before its time: making it takes some
                await self._sleep_until(at_s)
                task = asyncio.ensure_future(self._converse(number, conversation, at_s))
                running.add(task)
                task.add_done_callback(running.discard)
            if running:
                await asyncio.wait(running, timeout=drain_s)
        finally:
            await _give_up(running)

    async def _converse(self, number: int, conversation: Conversation, intended_s: float) -> None:
        self._num_begun += 1
        self._last_begun_s = max(self._last_begun_s, intended_s)
        messages: list[Message] = []
        for index, turn in enumerate(conversation.turns):
            if index:
                intended_s = self._now() + turn.think_s
                await self._sleep_until(intended_s)
            messages += turn.messages
            answered = await self._ask(number, index, turn, messages, conversation.session, intended_s)
            if answered is None:
                break  # the conversation cannot go on without this answer
            messages.append({"role": "assistant", "content": answered})
        self._board.conversation_over()

    async def _ask(
        self, number: int, index: int, turn: Turn, messages: list[Message], session: str | None, intended_s: float
    ) -> str | None:
        """The answer's text, or None if there is none."""
        recording = Recording()
        body = self._speech.body(messages, turn, session)
        self._board.begun()
        answer: Answer | None = None
        kind, message = None, ""
        try:
            await self._client.post(self._speech.path, body, recording)
            answer = await _read(recording)
        except RequestFailed as failure:
            kind, message = failure.kind, failure.message
        except asyncio.CancelledError:
            kind, message = "abandoned", "it still ran when the load had ended"
            raise
        finally:
            sent_s, ended_s = recording.sent_s - self._began_s, (recording.ended_s or self._clock()) - self._began_s
            # Timers are good to a millisecond: one that fires early has sent the request at its time.
            intended_s = min(intended_s, sent_s)
            result = Result(number, index, intended_s, sent_s, ended_s, turn.output_tokens, error=kind, message=message)
            result = result if answer is None else self._answered(result, answer)
            self._results.append(result)
            self._board.ended(result.ttft_s, result.output_tokens, kind)
        return answer.text if answer is not None else None

    def _answered(self, result: Result, answer: Answer) -> Result:
        output_tokens = answer.output_tokens
        if output_tokens is None:
            output_tokens = self._count_tokens(answer.text) if self._count_tokens else answer.num_pieces
        return Result(
            result.number,
            result.turn,
            result.intended_s,
            result.sent_s,
            result.ended_s,
            result.asked_tokens,
            first_s=answer.first_s - self._began_s,
            last_s=answer.last_s - self._began_s,
            gaps=answer.gaps,
            prompt_tokens=answer.prompt_tokens or 0,
            cached_tokens=answer.cached_tokens,
            output_tokens=output_tokens,
        )

    def _now(self) -> float:
        return self._clock() - self._began_s

    async def _sleep_until(self, at_s: float) -> None:
        left_s = at_s - self._now()
        await asyncio.sleep(max(0.0, left_s))

    async def _run(self, work: list[Coroutine[None, None, None]], *, window_s: float | None) -> Run:
        """`window_s`: None is a closed loop, in which nothing has a time of its own."""
        self._results = []
        self._num_begun, self._last_begun_s = 0, 0.0
        watch = LagWatch(self._clock)
        gc.collect()
        gc.freeze()  # what is there stays: a collection during the load looks at what the load made only
        self._began_s = self._clock()
        watch.start()
        async with self._board.shown(watch):
            was_interrupted = await _all(work)
        results = self._results
        delays = [] if window_s is None else [one.sent_s - one.intended_s for one in results if not one.turn]
        health = watch.stop(delays)
        gc.unfreeze()
        wall_s = max((one.ended_s for one in results), default=self._now())
        window_s = wall_s if window_s is None else max(window_s, self._last_begun_s)
        return Run(wall_s, window_s, results, health, self._num_begun, was_interrupted)


async def _all(work: list[Coroutine[None, None, None]]) -> bool:
    """Waits for all. Whether it was interrupted: who interrupts a load wants to see what there is."""
    tasks = {asyncio.ensure_future(one) for one in work}
    was_interrupted = False
    try:
        await asyncio.wait(tasks)
    except asyncio.CancelledError:
        was_interrupted = True
        if (current := asyncio.current_task()) is not None:
            current.uncancel()
    await _give_up(tasks)
    for task in tasks:
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error
    return was_interrupted


async def _read(recording: Recording) -> Answer:
    reader = Reader(recording)
    while reader.read():  # noqa: ASYNC110 - nothing is waited for: the others' reads are due
        await asyncio.sleep(0)
    return reader.answer()


async def _give_up(tasks: set[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)
