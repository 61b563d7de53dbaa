"""Whole texts behind each other, as one batch that is computed at once; and one vector for each made of its tokens'."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from penstock.hub.encoder import Pooling

Ints = np.ndarray[Any, np.dtype[np.int64]]


class TextGroup(NamedTuple):
    """Texts of about one length."""

    rows: Tensor  # [texts, longest] int64; behind a text's end its last row is repeated
    is_own: Tensor | None  # [texts, longest]: what is no repetition; None: nothing is


@dataclass(frozen=True)
class Texts:
    token_ids: Tensor  # [tokens] int64
    positions: Tensor  # [tokens] int64, in its own text
    lengths: list[int]  # none is 0

    @classmethod
    def of(cls, token_ids: Sequence[Sequence[int]], device: torch.device) -> Texts:
        lengths = [len(ids) for ids in token_ids]
        flat = np.concatenate([np.asarray(ids, np.int64) for ids in token_ids])
        places = np.concatenate([np.arange(length) for length in lengths])
        return cls(torch.from_numpy(flat).to(device), torch.from_numpy(places).to(device), lengths)

    @property
    def starts(self) -> list[int]:
        return [0, *accumulate(self.lengths)][:-1]

    def groups(self, step: int) -> list[TextGroup]:
        """Texts whose lengths, rounded up to a multiple of `step`, are one."""
        starts, lengths = np.array(self.starts), np.array(self.lengths)
        rounded = -(-lengths // step) * step
        return [self._group(starts[rounded == each], lengths[rounded == each], each) for each in np.unique(rounded)]

    def _group(self, starts: Ints, lengths: Ints, longest: int) -> TextGroup:
        device, places = self.token_ids.device, np.arange(longest)
        rows = starts[:, None] + np.minimum(places, lengths[:, None] - 1)
        is_own = None if lengths.min() == longest else torch.from_numpy(places < lengths[:, None]).to(device)
        return TextGroup(torch.from_numpy(rows).to(device), is_own)

    def pooled(self, pieces: Iterable[Tensor], pooling: Pooling) -> Tensor:
        """[texts, hidden] of length one, in float32, of [tokens, hidden] in pieces behind each other.

        It stays on the device of the pieces, and holds one of them at a time.
        """
        count, starts, lengths = len(self.lengths), np.array(self.starts), np.array(self.lengths)
        chosen = {"mean": np.arange(lengths.sum()), "first": starts, "last": starts + lengths - 1}[pooling]
        owners = np.repeat(np.arange(count), lengths if pooling == "mean" else 1)
        found, begin = torch.empty(0), 0
        for piece in pieces:
            if not begin:
                found = torch.zeros(count, piece.shape[1], device=piece.device)
            inside = slice(*np.searchsorted(chosen, (begin, begin + len(piece))))
            rows, owned = (torch.from_numpy(ids[inside]).to(piece.device) for ids in (chosen - begin, owners))
            found.index_add_(0, owned, piece[rows].float())
            begin += len(piece)
        assert begin == lengths.sum()
        return torch.nn.functional.normalize(found, dim=1)  # so a sum is as good as a mean
