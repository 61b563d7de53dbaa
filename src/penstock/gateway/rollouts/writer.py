"""A thread that folds what this gateway observed of rollouts, and writes blocks and users' feedback into the store.

The event loop appends to a list, and once a block hands it over. While the store does not answer, blocks of one step
become one, so that an outage costs resolution and not numbers. A block that was tried is tried again as it is: the
store may have it already. What the store refuses is given up, and counted: it is in the way of nothing that comes after
it, and no word of a user stands before blocks.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from queue import SimpleQueue
from typing import NamedTuple, Protocol

from penstock.core.errors import Overloaded, StoreUnavailable
from penstock.core.rollout import BLOCK_S, Block, Metric, RolloutOrder
from penstock.gateway.rollouts.folding import BlockFolder, merged
from penstock.gateway.rollouts.memory import AnswerMemory
from penstock.gateway.rollouts.observation import Observation
from penstock.http.clock import Timer, TimerClock
from penstock.observe.background import Worker, count_error, outliving

log = logging.getLogger(__name__)

MAX_OBSERVED = 1 << 17  # observations of one block: no process has more
MAX_WAITING = 64  # blocks that were not tried yet, when those of one step are one
_MAX_TRIED = 16  # blocks in one transaction
_MAX_FEEDBACK = 1000  # words of users that are not written yet
_NAME = "rollout writer"


class GivenFeedback(Protocol):
    @property
    def number(self) -> int: ...
    @property
    def tenant(self) -> str: ...
    @property
    def request_id(self) -> str: ...
    @property
    def score(self) -> float: ...


class Book(Protocol):
    """The store's part of rollouts, as far as gateways know it."""

    def write_blocks(self, blocks: Iterable[Block]) -> None: ...
    def add_feedback(self, tenant: str, request_id: str, score: float, comment: str = "") -> object: ...
    def feedback_since(self, number: int) -> Sequence[GivenFeedback]: ...
    def last_feedback(self) -> int: ...


class _Taken(NamedTuple):
    """Batch that the event loop hands over."""

    wall_s: float
    observed: Sequence[Observation]
    orders: Mapping[str, RolloutOrder]  # those that are on, by id


class Said(NamedTuple):
    """A user's word on an answer."""

    tenant: str
    request_id: str
    score: float  # 0 bad, 1 good
    comment: str


class Lost:
    """Counts of what was given up, for /metrics."""

    def __init__(self) -> None:
        self.observations = 0
        self.blocks = 0
        self.feedback = 0

    def counts(self) -> dict[str, int]:
        return {"observations": self.observations, "blocks": self.blocks, "feedback": self.feedback}


class RolloutWriter:
    """Give it a book of its own: its writes wait for others'. Works from `start` to `close`."""

    def __init__(
        self,
        book: Book,
        gateway: str,
        clock: TimerClock,
        wall: Callable[[], float] = time.time,
        *,
        block_s: float = BLOCK_S,
    ) -> None:
        """`block_s`: how often the event loop hands over; a block has the length that all gateways' have."""
        self.lost = Lost()
        self._book = book
        self._clock = clock
        self._wall = wall
        self._observed: deque[Observation] = deque()
        self._orders: Mapping[str, RolloutOrder] = {}
        self._num_said = 0  # that wait to be written
        self._items: SimpleQueue[_Taken | Said | None] = SimpleQueue()
        self._timer: Timer | None = None
        self._thread = threading.Thread(target=self._run, name=_NAME, daemon=True)
        self._worker: Worker | None = None
        # The thread's own
        self._folder = BlockFolder(gateway)
        self._memory = AnswerMemory()
        self._tried: list[Block] = []
        self._waiting: deque[Block] = deque()
        self._heard: int | None = None  # the last word of a user that was looked at; None: not known where they begin
        self._said: deque[Said] = deque()
        self._is_silent = False  # the store, as was told

    # -- in the event loop

    def start(self) -> None:
        self._thread.start()
        self._worker = Worker(_NAME, self._thread.is_alive)

    def close(self) -> None:
        """Writes what there is. Blocks."""
        if self._timer is not None:
            self._timer.cancel()
        if self._worker is not None:
            self._worker.stop()
            self.hand_over()
            self._items.put(None)
            self._thread.join()

    def add(self, seen: Observation) -> None:
        if len(self._observed) < MAX_OBSERVED:
            self._observed.append(seen)
        else:
            self.lost.observations += 1

    def follow(self, orders: Iterable[RolloutOrder]) -> None:
        """The rollouts that are on. While there are any, what was observed is handed over once a block."""
        self._orders = {order.id: order for order in orders}
        self.hand_over()
        if self._timer is None:
            self._wait()

    def say(self, said: Said) -> None:
        """A user's word, to be written soon. Raises Overloaded where too many wait for the store."""
        if self._num_said >= _MAX_FEEDBACK:
            raise Overloaded("too much feedback waits for the store", reason="feedback", retry_after_s=5.0)
        self._num_said += 1
        self._items.put(said)
        if self._timer is None:  # or what the store does not take now would wait for the next one
            self._wait()

    def hand_over(self) -> None:
        observed, self._observed = self._observed, deque()
        self._items.put(_Taken(self._wall(), observed, self._orders))

    def _wait(self) -> None:
        """To the end of this block, which is the same for all gateways."""
        self._timer = self._clock.call_later(BLOCK_S - self._wall() % BLOCK_S, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self.hand_over()
        if self._orders or self._tried or self._waiting or self._said:
            self._wait()

    # -- in the thread

    def _run(self) -> None:
        while (item := self._items.get()) is not None:
            with outliving(_NAME):
                if isinstance(item, Said):
                    self._said.append(item)
                    self._try(self._write_said)
                else:
                    self._take(item)
        with outliving(_NAME):
            self._end()

    def _take(self, taken: _Taken) -> None:
        for seen in taken.observed:
            if seen.request_id:
                self._memory.add(seen.request_id, seen.order.id, seen.arm, seen.tenant)
            self._folder.add(seen)
        self._waiting.extend(self._folder.close(taken.wall_s))
        self._folder.keep(taken.orders)
        if self._try(self._write) and self._try(self._write_said) and self._try(lambda: self._hear(taken)):
            self._is_silent = False
        if len(self._waiting) > 1:
            self._waiting = deque(merged(self._waiting))
        while len(self._waiting) > MAX_WAITING:  # so many steps of so many rollouts
            self._waiting.popleft()
            self.lost.blocks += 1

    def _try(self, step: Callable[[], None]) -> bool:
        try:
            step()
            return True
        except StoreUnavailable as error:
            if not self._is_silent:
                self._is_silent = True
                log.warning("what this gateway measures of rollouts waits for the store: %s", error.message)
            return False

    def _write(self) -> None:
        while self._tried or self._waiting:
            if not self._tried:
                self._tried = [self._waiting.popleft() for _ in range(min(_MAX_TRIED, len(self._waiting)))]
            if not self._is_taken(lambda: self._book.write_blocks(self._tried)):
                while self._tried:  # one of them: the others are written
                    self.lost.blocks += not self._is_taken(lambda: self._book.write_blocks(self._tried[:1]))
                    del self._tried[0]
            self._tried = []

    def _write_said(self) -> None:
        while self._said:
            one = self._said[0]
            add = partial(self._book.add_feedback, one.tenant, one.request_id, one.score, one.comment)
            self.lost.feedback += not self._is_taken(add)
            self._said.popleft()
            self._num_said -= 1

    @staticmethod
    def _is_taken(write: Callable[[], object]) -> bool:
        """False: the store refuses it, and would the next time. Raises StoreUnavailable."""
        try:
            write()
            return True
        except StoreUnavailable:
            raise
        except Exception as error:
            count_error(_NAME, error)
            return False

    def _hear(self, taken: _Taken) -> None:
        """Users' words to any gateway on answers that this one gave. Those that are said while nothing is measured are
        not counted."""
        if not taken.orders:
            self._heard = None
            return
        if self._heard is None:  # what was said before the rollout is of no answer that is remembered
            self._heard = self._book.last_feedback()
        while found := self._book.feedback_since(self._heard):
            for one in found:
                order = taken.orders.get(self._memory.rollout_of(one.request_id) or "")
                if order is None or not order.is_measured:
                    continue
                if (complaint := self._memory.complain(one.request_id, one.tenant, one.score)) is None:
                    continue
                if complaint.before is None:
                    values = ((Metric.COMPLAINTS, complaint.value),)
                    self._folder.add(Observation(order, complaint.arm, taken.wall_s, one.tenant, values))
                    self._memory.count(one.request_id, order.step)
                elif complaint.counted_in == order.step:  # what was counted in a step that is over stays
                    before, after = complaint.before, complaint.value
                    self._folder.correct(order, complaint.arm, Metric.COMPLAINTS, one.tenant, before, after)
            self._heard = found[-1].number

    def _end(self) -> None:
        self._waiting.extend(self._folder.close_all(self._wall()))
        self._try(self._write)
        self._try(self._write_said)
        if left := len(self._tried) + len(self._waiting):
            self.lost.blocks += left
            log.error("%d blocks of what this gateway measured of rollouts were not written", left)
        if self._said:
            self.lost.feedback += len(self._said)
            log.error("%d words of users were not written", len(self._said))
