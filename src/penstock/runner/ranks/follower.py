"""Every other rank's side: it makes the calls that the leader has told it of, in their order, on its own part."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

from penstock.model.lora import HostAdapter
from penstock.model.ranks import Ranks
from penstock.runner.assembly import Assembly
from penstock.runner.ranks.connection import Connection, Disconnected
from penstock.runner.ranks.join import Place
from penstock.runner.ranks.leader import with_size
from penstock.runner.ranks.messages import (
    Agreed,
    Alive,
    Chosen,
    ClearSlot,
    EmbedTexts,
    ForgetAdapter,
    KeepAdapter,
    ParkMemory,
    ReadAdapter,
    RunStep,
    ScoreTexts,
    Sized,
    Started,
    ToFollower,
    WakeMemory,
)
from penstock.runner.ranks.reading import taken
from penstock.runner.size import EngineSize
from penstock.runner.step_inputs import StepInputs, decode_choices

log = logging.getLogger("penstock.runner")


class FollowerGroup:
    """The group while this rank starts: what `Leader` is to the first one."""

    def __init__(self, place: Place, connection: Connection) -> None:
        self.ranks: Ranks = place.ranks
        self.stage = place.stage
        self.device = place.device
        self._connection = connection

    def agree(self, own: EngineSize, formats: str) -> EngineSize:
        self._connection.send(Sized(own.num_blocks, own.host_blocks, own.staging_blocks, formats))
        message = self._connection.receive()
        assert isinstance(message, Agreed)
        return with_size(own, message.size)

    def serve(self, assembly: Assembly, alive_s: float) -> None:
        """Until the leader is gone: `Disconnected`. It is told every `alive_s` how far this rank is."""
        self._connection.send(Started())
        calls = _Calls(assembly, self._connection)
        threading.Thread(target=self._beat, args=(calls, alive_s), name="alive", daemon=True).start()
        while True:
            calls.make(self._connection.receive())

    def _beat(self, calls: _Calls, alive_s: float) -> None:
        with contextlib.suppress(Disconnected):
            while True:
                self._connection.send(Alive(calls.num_made, *taken(self.device, self.ranks)))
                time.sleep(alive_s)


class _Calls:
    def __init__(self, assembly: Assembly, connection: Connection) -> None:
        self._connection = connection
        self.num_made = 1  # the size was the first
        self._assembly = assembly
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="read-adapter")
        self._read: dict[str, Future[HostAdapter]] = {}

    def make(self, message: ToFollower) -> None:
        self._make(message)
        self.num_made += 1

    def _make(self, message: ToFollower) -> None:
        assembly = self._assembly
        match message:
            case RunStep(inputs, None):
                assembly.rank_runner.follow(StepInputs.decode(inputs))
            case RunStep(inputs, encoded) if encoded is not None:
                sampled = assembly.rank_runner.follow(StepInputs.decode(inputs), decode_choices(encoded))
                self._connection.send(Chosen(sampled))
            case ReadAdapter(path, digest):
                assert assembly.adapters is not None
                self._read[digest] = self._reader.submit(assembly.adapters.read, path, digest)
            case KeepAdapter(digest):
                assert assembly.adapters is not None
                assembly.adapters.keep(self._read.pop(digest).result())
            case ForgetAdapter(digest):
                assert assembly.adapters is not None
                assembly.adapters.forget(digest)
            case ClearSlot(slot):
                assert assembly.adapters is not None
                assembly.adapters.clear(slot)
            case EmbedTexts(texts):
                assert assembly.embedder is not None
                assembly.embedder.embed(texts)
            case ScoreTexts(texts, scored):
                assert assembly.embedder is not None
                assembly.embedder.score(texts, scored)
            case ParkMemory():
                assert assembly.memory is not None
                assembly.memory.park()
            case WakeMemory():
                assert assembly.memory is not None
                assembly.memory.wake()
            case Agreed():
                raise AssertionError("a size is agreed on once")
