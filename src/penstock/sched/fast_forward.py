"""Steps that decide nothing: everybody who runs gets one token, and nobody begins, ends, waits or lacks a block.

A caller that can tell the tokens before they are made, as a simulator can, takes many such steps in one commit. The
outcome is that of the same steps taken one by one; only which block has which number may differ.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence as Seq
from itertools import repeat

from penstock.kv.pool import BlockPool
from penstock.sched.fairness import DECODE_COST, Shares
from penstock.sched.sequence import Sequence


def num_steps(running: Seq[Sequence], pool: BlockPool) -> int:
    """Number of such steps that follow now, the one in flight included, if no request comes and none goes early."""
    if not running or any(s.num_wanted != 1 or s.must_wait or not s.has_begun for s in running):
        return 0
    steps = min(s.request.max_tokens - s.num_generated for s in running) - 1
    if steps > 0 and _num_missing(running, steps, pool.block_size) > pool.num_free:
        steps = bisect_right(range(steps), pool.num_free, key=lambda n: _num_missing(running, n, pool.block_size)) - 1
    return max(0, steps)


def advance(running: Seq[Sequence], steps: int, token_id: int, shares: Shares) -> None:
    """Moves all of them on by `steps`, each of which made this token. What was in flight still is, that much later."""
    for sequence in running:
        table = sequence.table
        assert table is not None
        sequence.num_computed += steps
        shares.charge(sequence, DECODE_COST * steps)
        has_room = table.grow(sequence.num_computed)
        assert has_room
        sequence.token_ids.extend(repeat(token_id, steps))
        sequence.hashes.extend(sequence.token_ids)
        table.publish(sequence.hashes, sequence.token_ids, sequence.num_computed - sequence.num_in_flight)


def _num_missing(running: Seq[Sequence], steps: int, size: int) -> int:
    """Blocks for so many more tokens of each."""
    return sum(
        max(0, -(-(s.num_computed + steps) // size) - len(s.table.block_ids)) for s in running if s.table is not None
    )
