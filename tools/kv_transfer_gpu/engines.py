"""Engines with random weights, each in a process of its own with the loop and the mailbox of a replica's engine. No
server is in front of them: whoever starts one hands it token ids."""

from __future__ import annotations

import multiprocessing
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from time import perf_counter

import msgspec

from penstock.core.clock import MonotonicClock
from penstock.core.model_config import ModelConfig
from penstock.core.request import KvSource, Request, RequestTimings
from penstock.core.sampling import SamplingParams
from penstock.core.settings import EngineSettings, Settings
from penstock.engine.mailbox import FrameReader, Mailbox, frame
from penstock.engine.messages import Abort, FromEngine, Park, ParkAnswer, StepReport, Submit, ToEngine, Wake

_SPAWN = multiprocessing.get_context("spawn")


def serve(
    config: ModelConfig, engine: EngineSettings, sock: socket.socket, pipe: Connection, max_blocks: int | None
) -> None:
    """The engine's process."""
    from penstock.engine.engine import Engine
    from penstock.engine.loop import EngineLoop
    from penstock.engine_process.transfer import make_transfer
    from penstock.kv.cache import KVCache
    from penstock.model.random_weights import RandomCheckpoint
    from penstock.runner.ranks.assemble import assemble_ranks
    from penstock.sched.budget import StepBudget
    from penstock.sched.scheduler import Scheduler

    mailbox = Mailbox(sock)
    assembly = assemble_ranks(RandomCheckpoint(config), config, engine, lambda *_: None, max_blocks=max_blocks)
    limits = assembly.limits
    cache = KVCache(assembly.size.num_blocks, limits.block_size)
    transfer = make_transfer(Settings(engine=engine), config, None, assembly, cache, mailbox)
    scheduler = Scheduler(
        cache,
        StepBudget(limits.chunk_tokens, target_s=None, floor=limits.block_size),
        max_num_seqs=limits.max_num_seqs,
        num_batches=assembly.parallelism.pp,
    )
    made = Engine(scheduler, assembly.runner, transfer=transfer.exchange, memory=transfer.memory)
    pipe.send((transfer.port, transfer.movers))
    EngineLoop(made, mailbox, MonotonicClock()).run()


@dataclass
class Answer:
    """A request, and what came of it so far."""

    request: Request
    sent_s: float
    tokens: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)  # when each came
    timings: RequestTimings | None = None
    error: str | None = None
    is_done: threading.Event = field(default_factory=threading.Event)

    @property
    def ttft_s(self) -> float:
        return self.times_s[0] - self.sent_s

    def wait(self, timeout_s: float = 120.0) -> list[int]:
        assert self.is_done.wait(timeout_s), f"{self.request.id} has {len(self.tokens)} tokens"
        assert self.error is None, self.error
        return self.tokens


class EngineProcess:
    def __init__(self, config: ModelConfig, engine: EngineSettings, max_blocks: int | None = None) -> None:
        """`max_blocks`: of its KV cache, however many there is room for."""
        own, theirs = socket.socketpair()
        self._socket, (self._ready, pipe) = own, _SPAWN.Pipe()
        self.process = _SPAWN.Process(target=serve, args=(config, engine, theirs, pipe, max_blocks), daemon=True)
        self.process.start()
        theirs.close()
        pipe.close()
        self._answers: dict[str, Answer] = {}
        self._parked = threading.Event()
        threading.Thread(target=self._listen, daemon=True).start()

    def wait_ready(self) -> None:
        """Waits until it has an address that others pull from."""
        port, self.movers = self._ready.recv()
        self.address = f"127.0.0.1:{port}"

    def submit(
        self, name: str, prompt: Sequence[int], max_tokens: int, source: str | None = None, *, prefills: bool = False
    ) -> Answer:
        kv_source = KvSource(source, prefills) if source is not None else None
        request = Request(
            id=name,
            prompt_ids=list(prompt),
            max_tokens=max_tokens,
            sampling=SamplingParams(temperature=0.0),
            kv_source=kv_source,
        )
        answer = self._answers[name] = Answer(request, perf_counter())
        self._send(Submit(request))
        return answer

    def abort(self, answer: Answer) -> None:
        if not answer.is_done.is_set():
            self._send(Abort(answer.request.id))

    def park(self) -> None:
        self._change(Park())

    def wake(self) -> None:
        self._change(Wake())

    def _change(self, message: Park | Wake) -> None:
        self._parked.clear()
        self._send(message)
        assert self._parked.wait(120.0)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def close(self) -> None:
        self._socket.close()
        self.kill()

    def _send(self, message: ToEngine) -> None:
        self._socket.sendall(frame(message))

    def _listen(self) -> None:
        reader, decode = FrameReader(), msgspec.msgpack.Decoder(FromEngine).decode
        while data := self._received():
            now_s = perf_counter()
            for payload in reader.feed(data):
                message = decode(payload)
                if isinstance(message, StepReport):
                    self._take(message, now_s)
                elif isinstance(message, ParkAnswer):
                    self._parked.set()

    def _received(self) -> bytes:
        try:
            return self._socket.recv(1 << 20)
        except OSError:  # it was closed here
            return b""

    def _take(self, report: StepReport, now_s: float) -> None:
        for event in report.events:
            answer = self._answers[event.request_id]
            answer.tokens += event.token_ids
            answer.times_s += [now_s] * len(event.token_ids)
            answer.timings = event.timings or answer.timings
            if event.finish is not None:
                answer.error = event.error
                answer.is_done.set()
