"""What is asked of a fleet: traces, lengths, arrivals, and prompts of so many tokens. It knows no server and no clock.

`trace`: the requests of a public trace, in one form whatever file they come from.
"""
