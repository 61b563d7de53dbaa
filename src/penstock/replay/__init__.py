"""Replay: what another policy would have done with a gateway's decision log, or in a fleet controller's rounds.

    log ──▶ replay ──▶ each other policy: which replica, how many tokens reused, when a first token
              │
              └─ world   what other choices would have changed, carried along

A log says what was known of every replica when a choice was made, and what came of the chosen one. What would have come
of the others is an estimate, so the estimate is first held against what was measured. Nothing here sends a request.
Rounds of a fleet controller (`scaling`) hold all that was decided by, and are decided again exactly.
"""
