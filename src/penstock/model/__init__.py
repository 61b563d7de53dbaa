"""Transformers: families over shared layers, over a small set of operations. Torch lives here.

It knows shapes, weights and one step's batch. It has never seen a request, a scheduler or a socket.
"""
