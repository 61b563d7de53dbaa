"""Number of recurrent states that an engine has room for: its memory, its cache and its plans must agree on it."""

from __future__ import annotations

_SHARE = 8  # sequences for each snapshot
_MIN_SNAPSHOTS = 4


def num_snapshots(max_num_seqs: int, *, prefix_cache: bool = True) -> int:
    """Copies of states beside those of running sequences, from which prompts with the same beginning go on."""
    return max(_MIN_SNAPSHOTS, max_num_seqs // _SHARE) if prefix_cache else 0


def num_states(max_num_seqs: int, *, prefix_cache: bool = True) -> int:
    """Number of states that memory is set aside for, with one for padding."""
    return 1 + max_num_seqs + num_snapshots(max_num_seqs, prefix_cache=prefix_cache)
