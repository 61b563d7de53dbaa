"""Rollouts simulated: traffic of two versions from a model, measured as gateways do, decided by the real policy.

traffic    what two pools answer, minute by minute, as blocks; with a regression planted, or none
run        one rollout from its start to its end
report     many of them: how many were found, how late, and how many were aborted for nothing
events     the same policy on flights of the event simulator, where latency comes from steps and queues
"""
