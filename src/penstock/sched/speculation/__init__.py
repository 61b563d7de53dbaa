"""Speculative decoding: who proposes drafts, how many are worth their time, and how a plan carries them.

| file | what it holds |
|---|---|
| `speculation` | the policy: which sequences get how many drafts in the next step |
| `ngram`, `draft_model` | proposers: the text itself, and a small model |
| `draft_budget` | how many drafts pay, as arithmetic of chances |
| `step_costs`, `device_costs` | what drafts cost on a device that waits for each step, and on one that overlaps |
| `drafting` | drafts in a plan: attached to slices, and kept as far as they held |
"""
