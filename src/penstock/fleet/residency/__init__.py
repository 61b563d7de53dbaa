"""Several models that share one device: how much memory each gets, and which of them are in it. Pure.

memory_plan     weights and KV cache of models that are loaded together, to the byte
"""
