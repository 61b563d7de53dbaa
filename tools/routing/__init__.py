"""The router on a manual clock: what each strategy makes of a trace, and how long a pick takes.

    python -m tools.routing.table TRACE    hit rate and times to a first token, by strategy, on 4 and 16 replicas
    python -m tools.routing.speed          microseconds for a pick, by replicas and prompt

TRACE is a Mooncake trace: JSON lines with timestamp, input_length, output_length and hash_ids.
"""
