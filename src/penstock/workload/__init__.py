"""Workloads: traces, lengths, arrivals, and prompts of so many tokens. It knows no server and no clock.

`trace`: the requests of a public trace, in one form whatever file they come from.
`lengths`, `arrivals`: how long and when, drawn from distributions.
`words`: texts of so many tokens. `conversations`: what each user asks, turn by turn, made up, replayed or your own.
"""
