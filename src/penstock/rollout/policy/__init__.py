"""The policy of rollouts: evidence in, decision out. No I/O, no clock, no log.

plan         steps, gates and margins, from a file or from the model's objectives
state        what is kept of a rollout, what is observed beside the evidence, and what is to be in force
evidence     blocks of all gateways, folded into what the tests need
sequential   tests whose error rate holds however often they are looked at
gates        one verdict per gate: better, equal, worse or undecided
decide       the next state, with a reason
"""
