"""Ownership of the blocks of the KV cache. Integers only: it has never seen a tensor, a request or a clock."""
