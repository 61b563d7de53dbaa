"""Every other rank's side: it makes the calls that the leader has told it of, in their order, on its own part."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

from penstock.core.errors import EngineFailed, PenstockError
from penstock.core.expert_placement import ExpertPlacement
from penstock.link.connection import Connection, Disconnected
from penstock.model.lora import HostAdapter
from penstock.model.ranks import Ranks
from penstock.runner.assembly import Adapters, Assembly, Experts
from penstock.runner.ranks.join import Place
from penstock.runner.ranks.leader import with_size
from penstock.runner.ranks.messages import (
    AdapterRead,
    Agreed,
    Alive,
    Chosen,
    ClearSlot,
    EmbedTexts,
    ForgetAdapter,
    KeepAdapter,
    ParkMemory,
    PlaceExperts,
    ReadAdapter,
    RunStep,
    Scores,
    ScoreTexts,
    Sized,
    Started,
    ToFollower,
    Vectors,
    WakeMemory,
    Woken,
)
from penstock.runner.ranks.rank_cache import LentPool, lent_pool, offer_cache
from penstock.runner.ranks.reading import usage_of
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
        self._answers = place.answers
        self._word = b""

    def agree(self, own: EngineSize, formats: str, placement: str = "") -> EngineSize:
        self._connection.send(Sized(own.num_blocks, own.host_blocks, own.staging_blocks, formats, placement))
        message = self._connection.receive()
        assert isinstance(message, Agreed)
        self._word = message.word
        return with_size(own, message.size)

    def serve(self, assembly: Assembly, alive_s: float, *, lends: bool = False) -> None:
        """Serves the leader until it is gone: `Disconnected`. It is told every `alive_s` how far this rank is. `lends`:
        it needs this rank's KV cache, for other engines."""
        pool = lent_pool(assembly, self._word) if lends else None
        cache = pool.offer() if pool is not None else offer_cache(assembly, self._word)
        self._connection.send(Started(assembly.device.uuid, cache))
        calls = _Calls(assembly, self._connection, pool, answers=self._answers)
        # Ranks of a stage have the same tokens, and count alike; the leader counts those of its own.
        counts = self.ranks.shard.rank == 0 and self.stage.before is not None
        experts = assembly.experts if counts else None
        threading.Thread(target=self._beat, args=(assembly, calls, experts, alive_s), name="alive", daemon=True).start()
        while True:
            calls.make(self._connection.receive())

    def _beat(self, assembly: Assembly, calls: _Calls, experts: Experts | None, alive_s: float) -> None:
        with contextlib.suppress(Disconnected):
            while True:
                usage = usage_of(assembly, self.device, self.ranks)
                loads = experts.load().layers if experts is not None else {}
                self._connection.send(Alive(calls.num_made, usage, calls.num_parts, loads))
                time.sleep(alive_s)


class _Calls:
    def __init__(
        self, assembly: Assembly, connection: Connection, pool: LentPool | None = None, *, answers: bool
    ) -> None:
        """`pool`: this rank's cache, where the leader has it mapped; `answers`: the leader gets what the model makes of
        texts from this rank."""
        self._connection = connection
        self._pool = pool
        self._answers = answers
        self.num_made = 1  # the size was the first
        self._assembly = assembly
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="read-adapter")
        self._read: dict[str, Future[HostAdapter]] = {}

    @property
    def num_parts(self) -> int:
        return self._assembly.embedder.num_parts if self._assembly.embedder is not None else 0

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
                self._read[digest] = self._reader.submit(self._read_adapter, assembly.adapters, path, digest)
            case KeepAdapter(digest):
                assert assembly.adapters is not None
                assembly.adapters.keep(self._read.pop(digest).result())
            case ForgetAdapter(digest):
                assert assembly.adapters is not None
                self._read.pop(digest, None)
                assembly.adapters.forget(digest)
            case ClearSlot(slot):
                assert assembly.adapters is not None
                assembly.adapters.clear(slot)
            case EmbedTexts(texts, num_top):
                assert assembly.embedder is not None
                embedder = assembly.embedder
                vectors = embedder.embed(texts) if num_top is None else embedder.token_logprobs(texts, num_top)
                if self._answers:
                    self._connection.send(Vectors(vectors))
            case ScoreTexts(texts, scored):
                assert assembly.embedder is not None
                scores = assembly.embedder.score(texts, scored)
                if self._answers:
                    self._connection.send(Scores(scores))
            case PlaceExperts(layer, ranks):
                assert assembly.experts is not None
                assembly.experts.place(layer, ExpertPlacement(tuple(map(tuple, ranks))))
            case ParkMemory():
                assert assembly.memory is not None
                if self._pool is not None:
                    self._pool.withdraw()
                assembly.memory.park()
            case WakeMemory():
                assert assembly.memory is not None
                assembly.memory.wake()
                if self._pool is not None:
                    self._connection.send(Woken(self._pool.offer()))
            case Agreed():
                raise AssertionError("a size is agreed on once")

    def _read_adapter(self, adapters: Adapters, path: str, digest: str) -> HostAdapter:
        answer = AdapterRead(digest)
        try:
            return adapters.read(path, digest)
        except PenstockError as error:
            answer = AdapterRead(digest, error.code, error.message)
            raise
        except Exception as error:
            answer = AdapterRead(digest, EngineFailed.code, f"the adapter could not be read: {error}")
            raise
        finally:
            with contextlib.suppress(Disconnected):
                self._connection.send(answer)
