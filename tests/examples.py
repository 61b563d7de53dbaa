"""How many examples property tests try: few each time, since each run tries others, and ten times as many where
somebody looks for what a change broke (`make test-thorough`). In CI they are the same each time: what a submission did
not change does not refuse it."""

from __future__ import annotations

import os

from hypothesis import settings

_QUICK, _THOROUGH = 50, 500


def use_profiles() -> None:
    """Quick unless `--hypothesis-profile thorough` says otherwise. An example is slow where the machine is busy."""
    settings.register_profile("quick", deadline=None, max_examples=_QUICK, derandomize="CI" in os.environ)
    settings.register_profile("thorough", deadline=None, max_examples=_THOROUGH)
    settings.load_profile("quick")


def examples(quick: int) -> int:
    """For a test that needs its own number of them. Machines of states need many: a block that is freed twice is found
    by 150 runs of the scheduler's, and hardly ever by 50."""
    return quick * settings().max_examples // _QUICK
