"""Replay: what another policy would have done with the requests of a gateway's decision log, or in the rounds of a
fleet controller (`scaling`).

    log ──▶ replay ──▶ each other policy: which replica, how many tokens reused, when a first token
              │
              └─ world   what other choices would have changed, carried along

A log says what was known of every replica when a choice was made, and what came of the chosen one. What would have come
of the others is an estimate, so the estimate is first held against what was measured. Nothing here sends a request.
"""
