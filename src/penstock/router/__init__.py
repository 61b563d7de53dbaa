"""Routing to a replica: filter, score, pick, over snapshots; and which route comes next when one fails.

Pure: no I/O, no clock, no log. Time and randomness are arguments. It has never seen a socket, nor, rules
aside, a prompt's text.
"""
