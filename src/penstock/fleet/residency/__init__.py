"""Several models that share one device: how much memory each gets, and which of them are in it.

memory_plan     weights and KV cache of models that are loaded together, to the byte; pure
policy          which models are loaded, parked and unloaded; pure
settings        the file of `penstock serve --models`
"""
