"""A request inside the scheduler: tokens known, tokens computed, and the blocks it owns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.core.request import FinishReason, Request, RequestTimings
from penstock.kv.cache import BlockTable, TokenHashes
from penstock.sched.guiding import Follow, TokenGuide

if TYPE_CHECKING:
    from penstock.sched.fairness import Share


class Sequence:
    """There is no prefill phase and no decode phase: every step tries to close the gap between known and computed.

    `num_computed` runs ahead of the device: it counts tokens whose keys and values are written or being written by a
    step in flight. `num_in_flight` counts tokens that such a step will sample but that nobody has read yet.
    """

    share: Share  # its tenant's
    guide: TokenGuide | None = None
    slot: int | None = None  # where its adapter lies while it runs
    is_pulled = False  # its blocks are on their way from another engine: it waits for them, in no line
    pulled: tuple[BlockTable, int] | None = None  # that have come, and for how many tokens; it enters with them
    pull_s = 0.0  # how long it waited for them
    num_pulled = 0  # tokens whose blocks have come
    is_pull_whole = False  # all have that were asked for
    num_computed_elsewhere = 0  # of them, for this request
    has_fetched = False  # more of its prefix from disk than was there when it was first looked at
    has_drafts = False  # in flight: how many tokens they come to is not known before they are read

    def __init__(self, request: Request, *, arrival_s: float, order: int, block_size: int) -> None:
        self.request = request
        self.arrival_s = arrival_s
        self.order = order  # of arrival; breaks every tie
        self.block_size = block_size
        self.prompt_len = len(request.prompt_ids)
        self.token_ids = self._known_tokens()
        self.num_computed = 0
        self.num_in_flight = 0
        self.table: BlockTable | None = None
        self.hashes = self._hash(block_size)
        self.epoch = 0
        self.num_lost = 0  # tokens that were computed when it was preempted
        self.first_run_s: float | None = None
        self.num_cached: int | None = None  # prompt tokens found in the cache when it first ran

    def _known_tokens(self) -> list[int]:
        return [*self.request.prompt_ids, *self.request.output_ids]

    def _hash(self, block_size: int) -> TokenHashes:
        hashes = TokenHashes(self.request.namespace, block_size, self.request.adapter)
        hashes.extend(self.token_ids)
        return hashes

    @property
    def num_generated(self) -> int:
        """Number of tokens generated here or, before it came here, elsewhere."""
        return len(self.token_ids) - self.prompt_len

    @property
    def has_begun(self) -> bool:
        """Its first token made here is known."""
        return self.num_generated > len(self.request.output_ids)

    @property
    def is_resuming(self) -> bool:
        """Its client has a part of the answer and waits for the first token made here."""
        return self.request.is_resumed and not self.has_begun

    @property
    def num_known_elsewhere(self) -> int:
        """Tokens that it came with: its prompt, and the answer so far."""
        return self.prompt_len + len(self.request.output_ids)

    @property
    def num_wanted(self) -> int:
        """Tokens this sequence could compute now, the one in flight included."""
        return len(self.token_ids) + self.num_in_flight - self.num_computed

    @property
    def must_wait(self) -> bool:
        """Its next token depends on one in flight in a way only the host knows: on which tokens came before. Its guide
        may also take long to tell what may come."""
        if self.guide is not None and not (self.guide.is_quick or (self.guide.is_ready and self.num_in_flight == 0)):
            return True
        return self.num_in_flight > 0 and (self.has_drafts or self.request.sampling.looks_back)

    @property
    def may_draft(self) -> bool:
        """Its next token is to be chosen, and the one before is known."""
        return self.num_in_flight == 0 and not self.must_wait and (self.guide is None or self.guide.is_quick)

    @property
    def will_draft(self) -> bool:
        """It may, once what is in flight is read."""
        return self.num_in_flight > 0 and not self.is_settled and (self.guide is None or self.guide.is_quick)

    @property
    def is_settled(self) -> bool:
        """Its output limit is reached by what is in flight: nothing more is worth computing."""
        return self.num_generated + self.num_in_flight >= self.request.max_tokens

    def append(self, token_id: int) -> FinishReason | None:
        """Take one generated token; a stop token ends the sequence and is kept as its last."""
        self.token_ids.append(token_id)
        return self.request.finish_after(self.num_generated, token_id)

    def take(self, token_ids: list[int]) -> Follow:
        """Take generated tokens, and after each what its guide makes follow: that need not be chosen, only computed."""
        taken: list[int] = []
        for place, token_id in enumerate(token_ids):
            if place < len(taken):  # a forced token is there already
                if taken[place] != token_id:
                    break
                continue
            taken.append(token_id)
            finish = self.append(token_id)
            if self.guide is not None:
                forced = self.guide.take(token_id)
                if forced.finish is FinishReason.ERROR:
                    return forced._replace(token_ids=taken)
                finish = finish or self._follow(forced, taken)
            if finish is not None:
                return Follow(taken, finish)
        return Follow(taken)

    def _follow(self, forced: Follow, taken: list[int]) -> FinishReason | None:
        for token_id in forced.token_ids:
            taken.append(token_id)
            if (finish := self.append(token_id)) is not None:
                return finish
        return forced.finish

    def timings(self, now: float) -> RequestTimings:
        assert self.first_run_s is not None
        queue_s = self.first_run_s - self.arrival_s - self.pull_s
        return RequestTimings(queue_s, now - self.first_run_s, self.pull_s, self.num_pulled, self.is_pull_whole)

    def preempt(self) -> None:
        """Give up all blocks; the known tokens stay and are computed again, or found in the cache, later."""
        assert self.table is not None
        self.table.release()
        self.table = None
        self.num_lost, self.num_computed = self.num_computed, 0
        self.epoch += 1
        self.has_drafts = self.has_fetched = False
