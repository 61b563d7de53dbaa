"""Drills: real gateways, real replicas and a store, each a process of its own, attacked and counted from outside.

    python -m tools.drills.survival      hundreds of streams while replicas are killed, stopped and drained
    python -m tools.drills.limits        a tenant's tokens by the minute, with four gateways, one of them killed
    python -m tools.drills.refusals      whether a Retry-After holds, for limits and for load
    python -m tools.drills.spike         what one tenant's tenfold spike does to the others
    python -m tools.drills.pressure      more long prompts, and more decodes, than the KV cache holds
    python -m tools.drills.slow_provider a provider that takes its time, and a model of one's own behind it
    python -m tools.drills.slow_clients  hundreds of clients that stop reading, and some that leave
    python -m tools.drills.fleet         a fleet that grows, shrinks to nothing and back, and loses its parts meanwhile
    python -m tools.drills.zone          the loss of a zone, and its return
    python -m tools.drills.spot          spot capacity that is taken away, refused and offered again
    python -m tools.drills.fuzz          wrong requests by the thousand

Each prints a table and exits with 1 if a promise was broken; short versions are slow tests. They know penstock by its
command and by HTTP alone. The replicas are penstock's own, with a model so small that two cores carry hundreds of
streams.
"""
