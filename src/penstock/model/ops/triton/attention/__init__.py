"""Attention over the paged KV cache: prefill, decode with split KV, shared prefixes; storing and copying of blocks."""
