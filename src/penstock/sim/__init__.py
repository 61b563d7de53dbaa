"""A simulated fleet on a manual clock: the real engine, admission and router, with a model of a step's time.

Nothing here computes a token or opens a socket. What a step would take is a roofline's guess (`cost`), and everything
else is decided by the code that decides it in production.
"""
