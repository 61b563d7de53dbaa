"""One step's inputs as tensors: any mix of prefill chunks and single decode tokens, flattened."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """The tokens of sequence s are rows query_starts[s] to query_starts[s + 1]; they are the last ones of its
    context, so row r of them sits at position context_lens[s] - (query_starts[s + 1] - r)."""

    token_ids: Tensor  # [tokens] int32
    positions: Tensor  # [tokens] int32
    query_starts: Tensor  # [sequences + 1] int32
    context_lens: Tensor  # [sequences] int32, this step's tokens included
    block_tables: Tensor  # [sequences, most blocks of any] int32; rows are padded with 0
    logit_rows: Tensor  # [rows] int64: the rows whose next-token logits are wanted
    num_decodes: int  # sequences that bring exactly one token, padding included: known without asking the device

    @property
    def num_tokens(self) -> int:
        return int(self.token_ids.shape[0])

    @property
    def num_sequences(self) -> int:
        return int(self.context_lens.shape[0])
