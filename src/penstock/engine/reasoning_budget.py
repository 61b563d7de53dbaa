"""Reasoning before an answer, token by token: it is kept to a budget, and the answer's guide begins after them.

Any token may come while a model thinks. Thoughts whose budget is used up are ended by force: the mark that ends them is
put in, as a guide's forced tokens are. An answer's end is barred from thoughts that a guided answer has to follow.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from penstock.core.errors import EngineFailed
from penstock.core.request import FinishReason, Request
from penstock.sched.guiding import Follow, Mask
from penstock.text.reasoning import FORMATS, ReasoningTracker

if TYPE_CHECKING:
    from penstock.engine.guides import Guides, LiveGuide

log = logging.getLogger("penstock.engine")


class ReasoningPath:
    """Progress of an answer before its guide begins, and the tokens that must come next. It knows no guide; thoughts of
    an answer without one may begin again, as in formats whose messages have channels."""

    def __init__(self, request: Request, tracker: ReasoningTracker) -> None:
        assert request.thinking is not None
        self._thinking = request.thinking
        self._is_guided = request.guide is not None
        self._tracker = tracker
        self.coming: list[int] = []  # forced, and not taken yet
        self.num_tokens = 0
        self.text: bytes | None = None  # the guide's turn has come, and its answer begins with this; None: it has not
        if self._is_guided and tracker.is_answering:
            self.text = b""
        self._force_end()  # of thoughts that may have no token

    def copy(self) -> ReasoningPath:
        other = object.__new__(ReasoningPath)
        other.__dict__.update(self.__dict__, _tracker=self._tracker.copy(), coming=list(self.coming))
        return other

    @property
    def decides(self) -> bool:
        """Its first token decides whether there are thoughts or an answer by the guide."""
        is_first = self.text is None and not self.num_tokens and not self._tracker.is_inside
        return is_first and self._is_guided and bool(self._thinking.opening_ids)

    def take(self, token_id: int) -> None:
        is_opening = self.decides and token_id == self._thinking.opening_ids[0]
        was_inside, was_forced = self._tracker.is_inside, bool(self.coming)
        self.num_tokens += 1
        text = self._tracker.take(token_id)
        if was_forced:
            assert token_id == self.coming[0], "nothing else could be chosen"
            del self.coming[0]
        elif is_opening:
            self.coming = self._thinking.opening_ids[1:]
        elif self._is_guided and not text.strip() and was_inside and not self._tracker.is_inside:
            self.coming = list(self._thinking.gap_ids)
        if self.coming:
            return
        # The gap may end within the header of a call, whose rest is the guide's.
        is_led = was_forced and bool(self._thinking.gap_ids) and not self._tracker.is_inside
        if self._is_guided and (is_led or self._tracker.is_answering):
            self.text = text if text.strip() else b""
        else:
            self._force_end()

    def _force_end(self) -> None:
        tracker, budget = self._tracker, self._thinking.budget
        if budget is not None and tracker.is_inside and tracker.num_tokens >= budget and tracker.is_whole:
            self.coming = [*self._thinking.closing_ids, *self._thinking.gap_ids]


class Only(NamedTuple):
    """A mask that is known."""

    mask: bytes

    def bits(self) -> bytes:
        return self.mask


class ReasoningGuide:
    """One sequence's, in place of its guide's own, which it holds."""

    def __init__(self, guides: Guides, request: Request) -> None:
        self._guides = guides
        self._request = request
        self._may_jump = request.sampling.num_logprobs is None
        self._path: ReasoningPath | None = None  # None: the vocabulary is being read
        self._guide: LiveGuide | None = None
        self._error: str | None = None
        self._begun: Future[None] = Future()
        guides.begin(self)

    # -- the loop's side

    @property
    def is_quick(self) -> bool:
        return self._begun.done() and (self._guide is None or self._guide.is_quick)

    @property
    def is_ready(self) -> bool:
        return self._begun.done() and (self._guide is None or self._guide.is_ready)

    def bits(self) -> bytes:
        self._guides.wait_for(self._begun)
        path = self._path
        if path is None:
            return self._guides.mask_of(self._guides.end_id)  # it failed, and so does its next token
        if self._guide is None or path.coming:
            return self._free(path)
        if path.decides:
            return _with(self._guide.bits(), self._opening)
        return self._guide.bits() if path.text is not None else self._free(path)

    def take(self, token_id: int) -> Follow:
        path, guide = self._path, self._guide
        if self._error is not None or path is None:
            return Follow([], FinishReason.ERROR, self._error, EngineFailed.code)
        if guide is not None and self._is_guides(path, token_id):
            path.text = b""
            return guide.take(token_id)
        path.take(token_id)
        forced: list[int] = []
        while path.coming and self._may_jump:
            forced.append(path.coming[0])
            path.take(forced[-1])
        if guide is None or path.text is None:
            return Follow(forced)
        after = guide.begin_after(path.num_tokens, path.text)
        return after._replace(token_ids=[*forced, *after.token_ids])

    def ahead(self, drafts: Sequence[int]) -> Sequence[Mask]:
        path, guide, masks = self._path, self._guide, list[Mask]()
        assert path is not None
        if guide is not None and self._is_guides(path, drafts[0]):
            return guide.ahead(drafts)
        path = path.copy()
        for place, draft in enumerate(drafts, 1):
            if path.coming and path.coming[0] != draft:
                break  # it cannot be taken, and nobody asks what would follow
            path.take(draft)
            if guide is not None and path.text is not None:
                return [*masks, *guide.ahead_from(path.text, drafts[place:])]
            masks.append(Only(self._free(path)))
        return masks + [Only(self._guides.mask_of(self._guides.end_id))] * (len(drafts) - len(masks))

    def _is_guides(self, path: ReasoningPath, token_id: int) -> bool:
        """The guide's turn has come, or comes with this token, which opens no thoughts."""
        if self._guide is None or path.coming:
            return False
        is_answer = path.decides and (token_id != self._opening or self._guide.allows(token_id))
        return is_answer or path.text is not None

    @property
    def _opening(self) -> int:
        assert self._request.thinking is not None
        return self._request.thinking.opening_ids[0]

    def _free(self, path: ReasoningPath) -> bytes:
        if path.coming:
            return self._guides.mask_of(path.coming[0])
        is_early = path.num_tokens < self._request.min_tokens
        return self._guides.any_but(self._request.stop_token_ids if is_early or self._guide is not None else ())

    # -- the making thread's

    def begin(self) -> None:
        """Begins with what was generated elsewhere. Never fails: a thread that waits for it waits for others too."""
        try:
            self._begin()
        except Exception as error:
            log.exception("an answer's thoughts could not be begun")
            self._error = f"the answer's thoughts could not be begun: {error}"
        self._begun.set_result(None)

    def _begin(self) -> None:
        request = self._request
        thinking, known = request.thinking, list(request.output_ids)
        assert thinking is not None
        splitter = FORMATS[thinking.format].splitter(thinking.prompt_end, may_call=thinking.may_call)
        path = ReasoningPath(request, ReasoningTracker(splitter, self._guides.token_bytes()))
        if known and path.decides and known[0] != self._opening:
            path.text = b""
        while known and path.text is None:
            if path.coming and path.coming[0] != known[0]:
                raise ValueError("what was generated elsewhere does not follow them")
            path.take(known.pop(0))
        if request.guide is not None:
            rest = msgspec.structs.replace(request, output_ids=known, thinking=None)
            self._guide = self._guides.open_answer(rest, path.num_tokens, path.text or b"")
        self._path = path


def _with(mask: bytes, token_id: int) -> bytes:
    bits = bytearray(mask)
    bits[token_id >> 3] |= 1 << (token_id & 7)
    return bytes(bits)
