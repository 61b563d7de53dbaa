"""KV transfer between engines on one GPU: engines with random weights, each in a process of its own."""
