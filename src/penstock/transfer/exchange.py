"""KV transfer as the engine's thread sees it: blocks lent and pulled, between steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from penstock.core.measurements import KvTransferTotals
from penstock.core.request import Cost, Request, TokenEvent
from penstock.kv.cache import KVCache
from penstock.sched.sequence import Sequence as Sequences
from penstock.transfer.lending import Lender
from penstock.transfer.ports import Heard, Landed, Network, Told
from penstock.transfer.pulling import Puller


class KvExchange:
    def __init__(self, cache: KVCache, network: Network, *, timeout_s: float) -> None:
        self.costs: list[tuple[str, Cost]] = []  # of our requests elsewhere: taken by the engine
        self.ended: list[Sequences] = []  # those that wait for no other engine any more: likewise
        self._network = network
        self._puller = Puller(cache, network, self.costs, self.ended, timeout_s=timeout_s)
        self._lender = Lender(cache, network, self._puller.is_awaited)

    @property
    def has_work(self) -> bool:
        return self._lender.has_work or self._puller.has_work

    def wait(self, timeout_s: float) -> None:
        self._network.wait(timeout_s)

    def begin(self, sequence: Sequences, now: float) -> bool:
        """A request has come. True: its sequence waits for another engine."""
        source = sequence.request.kv_source
        return source is not None and self._puller.begin(sequence, source, now)

    def abandon(self, request_id: str) -> None:
        self._puller.abandon(request_id)

    def advance(
        self, now: float, *, is_open: bool, has_room: bool, launched: int, done: int
    ) -> tuple[Sequence[Request], Iterable[str]]:
        """Take what has come and go on with it. Requests to begin and to abort, that compute for others. `has_room`:
        nobody in the queue waits for blocks; `launched`, `done`: steps since the start."""
        for event in self._network.take():
            if isinstance(event, Landed | Told | Heard):
                self._puller.receive(event, now)
            else:
                self._lender.receive(event, now, is_open=is_open)
        self._puller.advance(now, has_room=has_room, launched=launched, done=done)
        self._lender.advance(now)
        return self._lender.take_requests()

    # -- requests that compute for others

    def is_own(self, request_id: str) -> bool:
        return self._lender.is_own(request_id)

    def charge(self, request_id: str, device_s: float, kv_block_s: float) -> None:
        self._lender.charge(request_id, device_s, kv_block_s)

    def finished(self, event: TokenEvent) -> None:
        self._lender.finished(event)

    # -- what it says

    @property
    def pull_tokens_per_s(self) -> float | None:
        return self._puller.tokens_per_s

    @property
    def totals(self) -> KvTransferTotals:
        pulled = self._puller.totals
        return KvTransferTotals(
            pulled_tokens=pulled.pulled_tokens,
            pulls=pulled.pulls,
            failed_pulls=pulled.failed,
            pull_s=pulled.seconds,
            lent_tokens=self._lender.given_tokens,
            kv_sources=tuple(self._network.sources_by_mover().items()),
        )
