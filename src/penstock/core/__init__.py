"""The vocabulary both columns share: plain data, no I/O, standard library and msgspec only."""
