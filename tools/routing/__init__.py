"""The router measured: how long a pick takes, what it saves a replica, and whether a replay tells the truth.

    python -m tools.routing.speed             microseconds for a pick, by replicas and prompt
    python -m tools.routing.prompt_ids        milliseconds that a prompt's token ids save a replica
    python -m tools.routing.replayed TRACE    what a replay says of the other strategies, and what they really come to

TRACE is a Mooncake trace: JSON lines with timestamp, input_length, output_length and hash_ids. What each strategy makes
of one is for `penstock sim compare`.
"""
