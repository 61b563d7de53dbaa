"""Cost of a step: its time is split over its sequences by what each adds to it.

A step's time is measured; how it is shared out is a matter of weights, of which only the ratios count. A sequence's
part is the work that would not be done without it: tokens computed, and the context that is read and looked at for
them. Fixed costs of a step, such as reading the weights, are shared in the same ratio. So nobody pays for a step that
they are not in, and tokens found in the cache cost what they take: a little to read, nothing to compute.

Most slices of most steps are decodes that made their token. Their shares need not be listed: with the `price` of a unit
of work whoever gets the token can tell them, and a step of hundreds of decodes is split in microseconds.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from penstock.core.request import TokenEvent
from penstock.sched.plan import Slice


@dataclass(frozen=True)
class Work:
    """Prices of a step's parts, in units of any size."""

    token: float = 1.0  # a token computed
    choice: float = 0.0  # the next token chosen
    read: float = 0.0  # a token of context read from the cache
    pair: float = 0.0  # a token of context looked at by a token

    def decode(self, context: int) -> float:
        """Work of one token that sees `context` tokens, itself among them, and is followed by another."""
        return self.token + self.choice + context * (self.read + self.pair)

    def decodes(self, count: int, context: int) -> float:
        """Work of `count` decoded tokens that see `context` tokens all together."""
        return count * (self.token + self.choice) + context * (self.read + self.pair)

    def slice(self, part: Slice) -> float:
        """Work of the tokens at [start, end): the one at p sees p + 1. The context is read once for all of them."""
        start, end = part.start, part.start + part.num_tokens
        pairs = (end * (end + 1) - start * (start + 1)) // 2
        choice = self.choice * (1 + len(part.ahead)) if part.sample is not None else 0.0
        return (end - start) * self.token + choice + end * self.read + pairs * self.pair


class Share(NamedTuple):
    request_id: str
    seconds: float
    num_blocks: int  # that it held meanwhile


class Split(NamedTuple):
    """The time of a step, without a rest: `price` times the work of every decode that made a token, and `shares`."""

    price: float  # seconds for a unit of work
    num_tokens: int
    num_decodes: int  # slices of one token
    context: int  # tokens that were read from the cache, all together
    shares: Sequence[Share] = ()  # of all other slices: parts of prompts, and what was computed for one that had ended


def split(slices: Sequence[Slice], events: Sequence[TokenEvent], seconds: float, work: Work) -> Split:
    """`events`: what came of this step, for the sequences that were still there."""
    lengths = [part.num_tokens for part in slices]
    num_tokens, num_decodes = sum(lengths), lengths.count(1)
    context = sum([part.start for part in slices]) + num_tokens
    if len(events) == len(slices) == num_decodes:  # no sequence is in a step twice, so each has its token
        return Split(seconds / work.decodes(num_decodes, context), num_tokens, num_decodes, context)
    listed = [part for part in slices if part.num_tokens > 1 or part.sample is None]
    listed_context = sum(part.start + part.num_tokens for part in listed)
    total = work.decodes(len(slices) - len(listed), context - listed_context) + sum(map(work.slice, listed))
    if len(events) < len(slices) - sum(part.sample is None for part in listed):
        sampled = [part for part in slices if part.sample is not None] if listed else slices
        listed += [part for part in _unanswered(sampled, events) if part.num_tokens == 1]
    price = seconds / total
    shares = [Share(part.request_id, price * work.slice(part), len(part.block_ids)) for part in listed]
    return Split(price, num_tokens, num_decodes, context, shares)


def _unanswered(sampled: Sequence[Slice], events: Sequence[TokenEvent]) -> list[Slice]:
    """Slices of sequences that had ended while the step ran. Events come in the order of the slices, so that each gap
    is found by halving."""
    found: list[Slice] = []
    at = 0
    while len(events) + len(found) < len(sampled):
        skipped = len(found)
        at = bisect_left(
            range(len(events)), True, lo=at, key=lambda i: sampled[i + skipped].request_id != events[i].request_id
        )
        found.append(sampled[at + skipped])
    return found
