"""Engines on a fake network: what each says is compared with what the fake model says."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.core.request import FinishReason, Request, RequestTimings
from penstock.engine.engine import Engine
from penstock.engine.fake import fake_token
from penstock.engine.messages import Abort, ParkAnswer, StepReport, Submit, ToEngine
from penstock.kv.cache import KVCache
from penstock.sched.budget import StepBudget
from penstock.sched.lora import AdapterSlots
from penstock.sched.scheduler import Scheduler
from penstock.transfer.exchange import KvExchange
from tests.transfer.fakes import FakeNetwork, FakeWeb, MemoryRunner

BLOCK, CHUNK, MAX_SEQS, VOCAB = 4, 12, 4, 50


@dataclass
class Client:
    request: Request
    output: list[int] = field(default_factory=list)
    timings: RequestTimings | None = None
    cached_tokens: int | None = None
    device_s: float = 0.0


class Peer:
    """An engine, its cache and its place on the web."""

    def __init__(
        self,
        web: FakeWeb,
        name: str,
        num_blocks: int,
        host_blocks: int = 0,
        *,
        overlaps: bool = False,
        max_num_seqs: int = MAX_SEQS,
        num_loras: int = 0,
    ) -> None:
        self.name = name
        self.cache = KVCache(num_blocks, BLOCK, host_blocks=host_blocks)
        budget = StepBudget(CHUNK, target_s=None, floor=4)
        scheduler = Scheduler(
            self.cache, budget, max_num_seqs=max_num_seqs, aging_s=1.0, adapters=AdapterSlots(num_loras)
        )
        self.runner = MemoryRunner(num_blocks, BLOCK, vocab_size=VOCAB, overlaps=overlaps, host_blocks=host_blocks)
        self.network: FakeNetwork = web.network(name, self.runner.memory)
        self.exchange = KvExchange(self.cache, self.network, timeout_s=30.0)
        self.engine = Engine(scheduler, self.runner, transfer=self.exchange, memory=self.runner)
        self.open: dict[str, Client] = {}
        self.ended: dict[str, Client] = {}
        self.last_report: StepReport | None = None
        self.sent_tokens = 0  # of prompts, to its engine

    def submit(self, request: Request, now: float, *, steps: bool = True) -> None:
        self.open[request.id] = Client(request, list(request.output_ids))
        self.sent_tokens += len(request.prompt_ids)
        self.turn([Submit(request)], now, steps=steps)

    def abort(self, name: str, now: float, *, steps: bool = True) -> None:
        del self.open[name]
        self.turn([Abort(name)], now, steps=steps)

    def turn(self, messages: list[ToEngine], now: float, *, steps: bool = True) -> None:
        """Goes once around the engine's loop; without `steps`, what is on the device stays there meanwhile."""
        engine = self.engine
        engine.receive(messages, now)
        if not steps:
            self._hear()
            return
        if not engine.may_launch:
            self._read(now)
        is_behind = bool(engine.in_flight)
        is_launched = engine.launch(now)
        if is_behind and (len(engine.in_flight) == engine.max_in_flight or not is_launched):
            self._read(now)
        self._hear()

    def _read(self, now: float) -> None:
        result = self.engine.result()
        assert result is not None, "a step failed"
        self.engine.commit(result, now)

    def _hear(self) -> None:
        for message in self.engine.outbox:
            if isinstance(message, ParkAnswer):
                continue
            assert isinstance(message, StepReport)
            self.last_report = message
            for charge in message.charges:
                if (paying := self.open.get(charge.request_id)) is not None:
                    paying.device_s += charge.device_s
            for event in message.events:
                client = self.open[event.request_id]
                client.timings = event.timings or client.timings
                client.cached_tokens = event.cached_tokens if event.cached_tokens is not None else client.cached_tokens
                for token in event.token_ids:
                    expected = fake_token([*client.request.prompt_ids, *client.output], VOCAB)
                    assert token == expected, f"{event.request_id} on {self.name} got a wrong token"
                    client.output.append(token)
                if event.finish is not None:
                    assert event.finish is not FinishReason.ERROR, event.error
                    self.ended[event.request_id] = self.open.pop(event.request_id)
        self.engine.outbox.clear()

    def check_contents(self) -> None:
        """Checks that whatever the cache can find is what its hash says, unless a step has still to copy it."""
        if self.engine.in_flight or self.cache.pool.moves:
            return
        for block_id in self.cache.pool._by_hash.values():
            tokens = self.cache.pool._blocks[block_id].token_ids
            assert list(self.runner.memory[block_id]) == list(tokens), f"block {block_id} of {self.name}"

    def check_idle(self) -> None:
        pool = self.cache.pool
        assert pool.num_free == pool.num_blocks, f"{self.name} holds {pool.num_blocks - pool.num_free} blocks"
        assert not self.cache._pending
        assert not self.cache._arriving or self.cache.pool.moves
        assert not self.exchange.has_work
        assert self.exchange._lender.num_held == 0
        assert not self.exchange._puller._awaited
        received = self.engine._measured().totals.received_tokens
        assert received == self.sent_tokens, "what it computes for others does not count as sent to it"
        assert sorted(self.network.told) == sorted(self.network.asked), "each ask is told its end once"
