"""Guides in the engine's process: a matcher for every guided sequence, made and asked in threads of their own.

An error of a guide ends the answer that is kept to it and nothing else, and it is the fault of the request that brought
it. No error of a matcher gets out of here.

The loop only ever tells a matcher a token, which takes microseconds. A matcher is made from a guide that was found to
be good before it came here, but not in the loop's time; masks are made while the device computes. A guide that was
slow the last time has a thread for its kind, and its sequence is not planned before its mask is there.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, TypeVar

from penstock.core.cores import usable_cores
from penstock.core.errors import EngineFailed, PenstockError, UnsupportedParameter
from penstock.core.guide import Guide
from penstock.core.request import FinishReason, Request
from penstock.engine.reasoning_budget import Only, ReasoningGuide
from penstock.sched.guiding import Follow, Mask
from penstock.text.grammars import Matcher, Vocabulary, prepare

log = logging.getLogger("penstock.engine")

QUICK_S = 0.001
_NUM_KEPT = 32  # matchers for guides that come again; each is some megabytes
_KIND = 10  # how nice the threads are that nobody should have to wait for

Made = TypeVar("Made")


class Guides:
    def __init__(self, vocabulary: Vocabulary, *, quick_s: float = QUICK_S) -> None:
        """`quick_s`: of a thread's own time, what others can be made to wait for."""
        self._vocabulary = vocabulary
        self.quick_s = quick_s
        self.waited_s = 0.0  # by the loop, for masks
        self._kept: OrderedDict[tuple[str, Guide], Matcher] = OrderedDict()
        self._news = threading.Event()
        self._wanted: dict[LiveGuide, None] = {}  # each once, however many tokens it was told
        num_cores = usable_cores()
        self._num_threads = max(1, min(8, num_cores // 2))
        self._making = ThreadPoolExecutor(1, "guides", initializer=_be_kind)
        self._quick = ThreadPoolExecutor(self._num_threads, "masks")
        self._slow = ThreadPoolExecutor(max(1, num_cores // 8), "slow-masks", initializer=_be_kind)

    def open(self, request: Request) -> LiveGuide | ReasoningGuide:
        """Guide that keeps a request to its rule, and its thoughts to their budget. It is not ready yet."""
        return LiveGuide(self, request) if request.thinking is None else ReasoningGuide(self, request)

    def open_answer(self, request: Request, num_before: int, text: bytes) -> LiveGuide:
        """Guide of a request whose thoughts took `num_before` tokens so far; `text` was in the last one."""
        return LiveGuide(self, request, num_before, text)

    def wait(self, timeout_s: float) -> None:
        """Waits until a guide may have become ready."""
        self._news.wait(timeout_s)
        self._news.clear()

    def matcher(self, guide: Guide, tenant: str) -> Matcher:
        """A fresh matcher, for the making thread alone. The time it takes tells nobody what another tenant sends."""
        key = tenant, guide
        kept = self._kept.get(key)
        if kept is None:
            kept = self._kept[key] = prepare(self._vocabulary, guide)
            if len(self._kept) > _NUM_KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return kept.copy()

    def begin(self, live: LiveGuide | ReasoningGuide) -> None:
        """Make a matcher for it, and its first mask."""
        self._making.submit(live.begin).add_done_callback(self._tell)

    def want(self, live: LiveGuide) -> None:
        self._wanted[live] = None

    def go(self) -> None:
        """Make the masks that are wanted by now: a few threads, each for its part of those that are quick."""
        if not self._wanted:
            return
        wanted, self._wanted = self._wanted, {}
        quick = [live for live in wanted if live.is_quick]
        size = -(-len(quick) // self._num_threads)
        for start in range(0, len(quick), size or 1):
            self._quick.submit(_make_all, quick[start : start + size])
        for live in wanted:
            if not live.is_quick:
                self._slow.submit(live.make).add_done_callback(self._tell)

    def mask_now(self, live: LiveGuide) -> bytes:
        """The mask that it has, or is to have: of a draft's place none is made unless somebody asks."""
        if live in self._wanted:
            del self._wanted[live]
            live.make()
        return self.wait_for(live.mask)

    def wait_for(self, made: Future[Made]) -> Made:
        """Result of a future, waited for in the loop's time, which is counted."""
        if made.done():
            return made.result()
        started_s = time.perf_counter()
        found = made.result()
        self.waited_s += time.perf_counter() - started_s
        return found

    def look_ahead(self, live: LiveGuide, drafts: Sequence[int]) -> Future[list[bytes]]:
        """Masks for the places after drafts, once its own is made."""
        self.go()
        return self._quick.submit(live.look, drafts)

    def _tell(self, _: Future[None]) -> None:
        self._news.set()

    def token_bytes(self) -> Callable[[int], bytes]:
        """Bytes of a token by its id, for the making thread: the first call reads the vocabulary."""
        return self._vocabulary.words.tokens.__getitem__

    def token_ids(self, text: bytes) -> list[int]:
        return self._vocabulary.words(text)

    @property
    def end_id(self) -> int:
        return self._vocabulary.eos_ids[0]

    @property
    def end_ids(self) -> Sequence[int]:
        return self._vocabulary.eos_ids

    def mask_of(self, token_id: int) -> bytes:
        """Nothing else may come."""
        bits = bytearray(self._vocabulary.mask_bytes)
        bits[token_id >> 3] = 1 << (token_id & 7)
        return bytes(bits)

    def any_but(self, token_ids: Sequence[int]) -> bytes:
        """All others may come."""
        bits = bytearray(((1 << self._vocabulary.size) - 1).to_bytes(self._vocabulary.mask_bytes, "little"))
        for token_id in token_ids:
            bits[token_id >> 3] &= ~(1 << (token_id & 7))
        return bytes(bits)


class LiveGuide:
    """Guide of one sequence. The loop's thread and another take turns: a mask is there before a token is chosen by it.

    Forced tokens are told to the loop at once where that is quick and nobody wants them scored. Otherwise they are
    forced one by one, by masks of one token, so that the answer is the same.
    """

    def __init__(self, guides: Guides, request: Request, num_before: int = 0, text: bytes = b"") -> None:
        """`num_before`: tokens of thoughts before its answer, which begins with this text, and then its output."""
        self._guides = guides
        self._request = request
        self._text = text
        self._num_tokens = num_before + len(request.output_ids)
        self._may_jump = request.sampling.num_logprobs is None
        self.is_quick = False  # as it was the last time
        self._coming: list[int] = []  # forced, and not taken yet
        self._matcher: Matcher | None = None
        self._error: BaseException | None = None
        self._is_jump_over = False  # nothing is forced here: that was looked for already
        self.mask: Future[bytes] = Future()
        self._looking: Future[list[bytes]] | None = None  # at what may follow drafts
        self._foreseen: list[tuple[int, list[int]]] = []  # drafts, and what is forced after each
        guides.begin(self)

    # -- the loop's side

    @property
    def is_ready(self) -> bool:
        return self.is_quick or self.mask.done()

    def bits(self) -> bytes:
        self._guides.go()
        return self._guides.wait_for(self.mask)

    def ahead(self, drafts: Sequence[int]) -> list[MaskAhead]:
        self._looking = self._guides.look_ahead(self, drafts)
        return [MaskAhead(self._guides, self._looking, place) for place in range(len(drafts))]

    def take(self, token_id: int) -> Follow:
        if self._looking is not None:  # its turn is over first: in a step that was planned and not run it may not be
            self._looking.result()
            self._looking = None
        try:
            return self._take(token_id)
        except BaseException as error:
            self._note(error, "a token could not be taken")
            return self._failed()

    def _take(self, token_id: int) -> Follow:
        matcher = self._matcher
        if matcher is None or self._error is not None:
            return self._failed()
        if token_id in self._guides.end_ids and not matcher.error and _allows(self._guides.mask_now(self), token_id):
            return Follow([], FinishReason.STOP)  # a matcher that is over takes no token, not even this one
        if not matcher.take([token_id]):
            return self._failed()
        self._coming = self._coming_after(token_id)
        is_jump = self._may_jump and self.is_quick
        forced = self._jump(matcher) if is_jump else []
        self._num_tokens += 1 + len(forced)
        if matcher.is_over:
            return self._failed() if matcher.error else Follow([*forced, self._guides.end_id], FinishReason.STOP)
        self.mask, self._is_jump_over = Future(), is_jump
        if self._coming:
            self.mask.set_result(self._guides.mask_of(self._coming[0]))
        else:
            self._guides.want(self)
        return Follow(forced)

    def allows(self, token_id: int) -> bool:
        return _allows(self._guides.mask_now(self), token_id)

    def begin_after(self, num_before: int, text: bytes) -> Follow:
        """Thoughts of so many tokens are over, and the last token brought this text, which nobody has chosen by it."""
        self._num_tokens = num_before
        if not text:
            return Follow([])
        matcher = self._matcher
        self._guides.wait_for(self.mask)
        if matcher is None or self._error is not None or not matcher.take(self._guides.token_ids(text)):
            return self._failed()
        if matcher.is_over:
            return self._failed() if matcher.error else Follow([self._guides.end_id], FinishReason.STOP)
        self.mask, self._coming, self._foreseen, self._is_jump_over = Future(), [], [], False
        self._guides.want(self)
        return Follow([])

    def ahead_from(self, text: bytes, drafts: Sequence[int]) -> list[Mask]:
        """Masks of the place where it begins, after this text, and of those after drafts."""
        if not text:
            return [self, *(self.ahead(drafts) if drafts else ())]
        masks = self._masks_from(text, drafts)
        return [
            Only(mask) for mask in masks + [self._guides.mask_of(self._guides.end_id)] * (1 + len(drafts) - len(masks))
        ]

    def _masks_from(self, text: bytes, drafts: Sequence[int]) -> list[bytes]:
        self._guides.wait_for(self.mask)
        if self._matcher is None or self._error is not None:
            return []
        matcher = self._matcher.copy()
        if not matcher.take(self._guides.token_ids(text)) or matcher.is_over:
            return []
        coming = self._forced(matcher)
        found = [self._mask_at(matcher, coming, self._num_tokens), *self._masks_after(drafts, matcher, coming)]
        self._foreseen = []  # what is forced is looked for again, after the text
        return found

    def _jump(self, matcher: Matcher) -> list[int]:
        """Takes all tokens that are forced from here, and returns them."""
        started_s = time.thread_time()
        found: list[int] = []
        forced, self._coming = self._coming, []
        forced = forced or self._forced(matcher)
        while forced and matcher.take(forced):
            found += forced
            forced = self._forced(matcher)
        self._may_jump = time.thread_time() - started_s < self._guides.quick_s  # else it would hold the loop up
        del self._foreseen[: len(found)]
        return found

    def _coming_after(self, token_id: int) -> list[int]:
        """Forced tokens after this one: the same list as when masks were made for drafts, if it is one of them."""
        if self._foreseen and self._foreseen[0][0] == token_id:
            return self._foreseen.pop(0)[1]
        self._foreseen = []
        return self._coming[1:]

    @staticmethod
    def _forced(matcher: Matcher) -> list[int]:
        return [] if matcher.is_over else matcher.forced()

    def _failed(self) -> Follow:
        error = self._error or (self._matcher.error if self._matcher is not None else "")
        code = EngineFailed.code if isinstance(error, EngineFailed) else UnsupportedParameter.code
        return Follow([], FinishReason.ERROR, f"the answer could not be kept to its guide: {error}", code)

    def _note(self, error: BaseException, what: str) -> None:
        """The library's panics are no Exceptions."""
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise error
        if not isinstance(error, PenstockError):
            log.error(what, exc_info=error)
        self._error = error

    # -- the other threads'

    def begin(self) -> None:
        try:
            guide = self._request.guide
            assert guide is not None
            self._matcher = self._guides.matcher(guide, self._request.tenant)
            if not self._matcher.take([*self._guides.token_ids(self._text), *self._request.output_ids]):
                self._error = EngineFailed("what was generated elsewhere does not follow it")
        except BaseException as error:
            self._note(error, "a guide could not be made")
        self.make()

    def make(self) -> None:
        """The mask. Never fails: whoever waits for it chooses for others too."""
        started_s = time.thread_time()
        mask: bytes | None = None
        try:
            if self._matcher is not None and self._error is None and not self._matcher.is_over:
                mask = self._next(self._matcher)
                if self._matcher.error:
                    self._error = UnsupportedParameter(self._matcher.error)
        except BaseException as error:
            self._note(error, "a mask could not be made")
        self.is_quick = time.thread_time() - started_s < self._guides.quick_s
        self.mask.set_result(mask or self._guides.mask_of(self._guides.end_id))

    def _next(self, matcher: Matcher) -> bytes:
        self._coming = [] if self._is_jump_over else self._forced(matcher)
        return self._mask_at(matcher, self._coming, self._num_tokens)

    def _mask_at(self, matcher: Matcher, coming: list[int], num_tokens: int) -> bytes:
        if coming:
            return self._guides.mask_of(coming[0])
        is_early = num_tokens < self._request.min_tokens
        return matcher.mask(self._request.stop_token_ids if is_early else ())

    def look(self, drafts: Sequence[int]) -> list[bytes]:
        """A mask for the place after each draft, as it will be once the draft is taken. No mask is asked for after a
        draft that cannot come, or that ends the answer. Never fails either."""
        self.mask.result()  # whoever makes it has its turn first
        masks: list[bytes] = []
        self._foreseen = []
        try:
            if self._matcher is not None and self._error is None:
                masks = list(self._masks_after(drafts, self._matcher.copy(), self._coming))
        except BaseException as error:
            self._note(error, "masks for drafts could not be made")
        return masks + [self._guides.mask_of(self._guides.end_id)] * (len(drafts) - len(masks))

    def _masks_after(self, drafts: Sequence[int], matcher: Matcher, coming: list[int]) -> Iterator[bytes]:
        for count, draft in enumerate(drafts, 1):
            is_barred = bool(coming) and coming[0] != draft
            if matcher.is_over or is_barred or not matcher.take([draft]) or matcher.is_over:
                return
            coming = coming[1:] or self._forced(matcher)
            self._foreseen.append((draft, coming))
            yield self._mask_at(matcher, coming, self._num_tokens + count)


class MaskAhead(NamedTuple):
    """Mask of the place after one of the drafts."""

    guides: Guides
    masks: Future[list[bytes]]
    place: int

    def bits(self) -> bytes:
        return self.guides.wait_for(self.masks)[self.place]


def _allows(mask: bytes, token_id: int) -> bool:
    return bool(mask[token_id >> 3] >> (token_id & 7) & 1)


def _make_all(part: list[LiveGuide]) -> None:
    for live in part:
        live.make()


def _be_kind() -> None:
    """Gives way to all other threads of the machine; where threads have no such thing, nothing happens."""
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _KIND)
