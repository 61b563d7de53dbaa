"""Capacity planning by arithmetic: bytes, operations, seconds of a step, sequences that fit, money.

Pure: no torch, no clock, no socket. `step_cost` is the roofline that the planner, the simulator and the benches share.
"""
