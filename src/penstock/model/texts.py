"""Whole texts behind each other, as one batch that is computed at once; and one vector for each made of its tokens'."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from penstock.hub.encoder import Pooling


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

    def rows_by_length(self) -> Iterator[Tensor]:
        """For every length that there is: the rows of its texts, [texts, length]."""
        starts = np.array(self.starts)
        for length in sorted(set(self.lengths)):
            of_length = starts[np.array(self.lengths) == length]
            yield torch.from_numpy(of_length[:, None] + np.arange(length)).to(self.token_ids.device)

    def pooled(self, states: Tensor, pooling: Pooling) -> Tensor:
        """[texts, hidden] of length one, in float32, of [tokens, hidden]."""
        device, starts = states.device, torch.tensor(self.starts)
        lengths = torch.tensor(self.lengths)
        states = states.float()
        if pooling == "mean":
            owners = torch.repeat_interleave(torch.arange(len(self.lengths)), lengths).to(device)
            sums = torch.zeros(len(self.lengths), states.shape[1], device=device).index_add_(0, owners, states)
            found = sums / lengths.to(device)[:, None]
        else:
            rows = starts if pooling == "first" else starts + lengths - 1
            found = states[rows.to(device)]
        return torch.nn.functional.normalize(found, dim=1)
