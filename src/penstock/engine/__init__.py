"""The engine: a loop in its own process that plans, runs and commits steps, and the mailbox it is reached by.

It is handed a runner and knows it only as a protocol: no torch here, and no HTTP.
"""
