"""Who owns which block of the KV cache. Integers only: it has never seen a tensor, a request or a clock."""
