"""Blocks for engines that ask for them: which, and how long they are held.

A block is held from the moment it is found until its bytes are read, the other side drops it or is gone, or its lease
ends. A prompt that is to be computed first becomes a request of this engine's own, and blocks follow step by step.
Integers only: it has never seen a socket or a clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from penstock.core.hashing import BlockHash
from penstock.core.request import Request, TokenEvent
from penstock.kv.cache import KVCache
from penstock.transfer.messages import Ask, Ended
from penstock.transfer.ports import Asked, Credited, Dropped, Event, Kept, Network, PeerGone, Sent

LEASE_S = 30.0
_WORKING_S = 0.5  # how often the other side hears that this engine lives
_MAX_SHARE = 0.5  # of all blocks, held for others
_MAX_LOANS = 1024

Key = tuple[int, int]  # peer, ticket


@dataclass
class Loan:
    ask: Ask
    credit: int
    kept_s: float  # when the other side last said that it wants it
    request_id: str | None = None  # that computes it; None: nobody does
    held: list[int] = field(default_factory=list)  # blocks of the chain from its start, that are not sent yet
    num_found: int = 0
    num_given: int = 0  # to the network
    num_sent: int = 0
    computed_tokens: int = 0
    device_s: float = 0.0
    kv_block_s: float = 0.0
    is_dropped: bool = False  # nothing more is given; what is being read is held until it is read
    reason: str = ""


class Lender:
    def __init__(self, cache: KVCache, network: Network, is_awaited: Callable[[BlockHash], bool]) -> None:
        """`is_awaited`: this engine itself waits for such a block from another one."""
        self.given_tokens = 0
        self.requests: list[Request] = []  # to be computed: taken by the engine
        self.aborted: list[str] = []  # likewise
        self._cache = cache
        self._network = network
        self._loans: dict[Key, Loan] = {}
        self._by_request: dict[str, Key] = {}
        self._is_awaited = is_awaited
        self._said_s = 0.0
        self.num_held = 0  # blocks

    @property
    def has_work(self) -> bool:
        return bool(self._loans)

    def receive(self, event: Event, now: float, *, is_open: bool) -> None:
        """`is_open`: this engine takes requests."""
        match event:
            case Asked(peer, ask):
                self._begin((peer, ask.ticket), ask, now, is_open=is_open)
            case Credited(peer, ticket, blocks):
                if (loan := self._loans.get((peer, ticket))) is not None:
                    loan.credit = max(loan.credit, blocks)
            case Kept(peer, tickets):
                for ticket in tickets:
                    if (loan := self._loans.get((peer, ticket))) is not None:
                        loan.kept_s = now
            case Dropped(peer, ticket):
                if (loan := self._loans.get((peer, ticket))) is not None:
                    self._drop((peer, ticket), loan, "it was dropped")
            case Sent(peer, ticket, count):
                if (loan := self._loans.get((peer, ticket))) is not None:
                    self._sent((peer, ticket), loan, count)
            case PeerGone(peer):
                for key in [key for key in self._loans if key[0] == peer]:
                    loan = self._loans[key]
                    self._release(loan, 0, len(loan.held))
                    self._stop_computing(loan)
                    del self._loans[key]

    def _begin(self, key: Key, ask: Ask, now: float, *, is_open: bool) -> None:
        reason = self._refusal(key, ask) if is_open else "it takes no requests"
        if reason:
            self._network.end(key[0], Ended(ask.ticket, reason))
            return
        loan = self._loans[key] = Loan(ask, ask.credit, now)
        request = ask.prefill
        if request is not None and any(self._cache.find_settled(own) is None for own in ask.hashes):
            loan.request_id = f"kv:{key[0]}:{ask.ticket}"
            self._by_request[loan.request_id] = key
            self.requests.append(
                replace(
                    request,
                    id=loan.request_id,
                    max_tokens=1,
                    output_ids=[],
                    guide=None,
                    is_resumed=False,
                    kv_source=None,
                )
            )

    def _refusal(self, key: Key, ask: Ask) -> str:
        size = self._cache.pool.block_size
        if key in self._loans:
            return "this ticket is in use"
        if not self._cache.shares_prefixes:
            return "its prefix cache is off"
        if not 0 < len(ask.hashes) <= self._cache.pool.num_blocks:
            return "the chain is empty, or longer than its cache"
        if ask.prefill is not None and not ask.prefill.prompt_ids:
            return "there is no prompt to compute"
        if ask.prefill is not None and any(map(self._is_awaited, ask.hashes)):
            return "it pulls these blocks itself"  # else two engines could wait for each other
        if len(self._loans) >= _MAX_LOANS:
            return "it lends to too many"
        if ask.prefill is not None and len(ask.prefill.prompt_ids) + 1 > self._cache.capacity_tokens - size:
            return "the prompt does not fit its cache"
        return ""

    # -- progress of requests that compute for others

    def is_own(self, request_id: str) -> bool:
        return request_id in self._by_request

    def charge(self, request_id: str, device_s: float, kv_block_s: float) -> None:
        if (key := self._by_request.get(request_id)) is not None:
            loan = self._loans[key]
            loan.device_s += device_s
            loan.kv_block_s += kv_block_s

    def finished(self, event: TokenEvent) -> None:
        """A request of `requests` has ended."""
        loan = self._loans[self._by_request.pop(event.request_id)]
        loan.request_id = None
        if event.error is not None:
            loan.reason = event.error
        elif loan.ask.prefill is not None:
            loan.computed_tokens = len(loan.ask.prefill.prompt_ids) - (event.cached_tokens or 0)

    # -- between steps

    def advance(self, now: float) -> None:
        """Hold what has been found since, give what there is credit for, end what is over."""
        for key, loan in list(self._loans.items()):
            if loan.is_dropped:
                continue
            has_met_limit = self._find(loan)
            self._give(key, loan)
            if now - loan.kept_s > LEASE_S:
                self._drop(key, loan, "its lease has ended")
            elif loan.request_id is None and loan.num_given == loan.num_found and not has_met_limit:
                is_whole = loan.num_found == len(loan.ask.hashes)
                loan.reason = "" if is_whole else loan.reason or "the rest is not in its cache"
                self._end(key, loan)
        if self._loans and now - self._said_s >= _WORKING_S:
            self._said_s = now
            for peer in {peer for peer, _ in self._loans}:
                self._network.working(peer, [ticket for its, ticket in self._loans if its == peer])

    def _find(self, loan: Loan) -> bool:
        """Hold what is there of the rest of its chain. True: more is, but too much is held already."""
        pool, hashes = self._cache.pool, loan.ask.hashes
        most = max(1, int(_MAX_SHARE * pool.num_blocks))
        while loan.num_found < len(hashes):
            block_id = self._cache.find_settled(hashes[loan.num_found])
            if block_id is None:
                return False
            if self.num_held >= most:
                return True
            pool.retain(block_id)
            loan.held.append(block_id)
            loan.num_found += 1
            self.num_held += 1
        return False

    def _release(self, loan: Loan, start: int, end: int) -> None:
        self._cache.pool.release(loan.held[start:end])
        self.num_held -= end - start
        del loan.held[start:end]

    def _give(self, key: Key, loan: Loan) -> None:
        end = min(loan.num_found, loan.credit)
        if end > loan.num_given:
            first = loan.num_given - loan.num_sent
            blocks = loan.held[first : end - loan.num_sent]
            self._network.send(key[0], key[1], loan.num_given, blocks)
            loan.num_given = end

    def _sent(self, key: Key, loan: Loan, count: int) -> None:
        self._release(loan, 0, count)
        loan.num_sent += count
        self.given_tokens += count * self._cache.pool.block_size
        if loan.is_dropped and loan.num_sent == loan.num_given:
            del self._loans[key]

    # -- ends

    def _drop(self, key: Key, loan: Loan, reason: str) -> None:
        """Give back what is not being read now; the rest when it is."""
        if loan.is_dropped:
            return
        loan.reason = reason
        in_flight = loan.num_given - loan.num_sent
        self._release(loan, in_flight, len(loan.held))
        self._end(key, loan)

    def _end(self, key: Key, loan: Loan) -> None:
        self._network.end(key[0], Ended(key[1], loan.reason, loan.computed_tokens, loan.device_s, loan.kv_block_s))
        loan.is_dropped = True
        self._stop_computing(loan)
        if loan.num_sent == loan.num_given:
            del self._loans[key]

    def _stop_computing(self, loan: Loan) -> None:
        if loan.request_id is not None:
            del self._by_request[loan.request_id]
            self.aborted.append(loan.request_id)
            loan.request_id = None

    def take_requests(self) -> tuple[Sequence[Request], Iterable[str]]:
        requests = [one for one in self.requests if one.id in self._by_request]  # or it was dropped before it began
        self.requests = []
        aborted, self.aborted = self.aborted, []
        return requests, aborted
