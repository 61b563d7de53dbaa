"""The examples that property tests try: few and the same ones in each run of `make test`, so that nothing
fails by chance; ten times as many, and others each time, where somebody looks for what a change broke
(`make test-thorough`)."""

from __future__ import annotations

from hypothesis import settings
from hypothesis.internal.conjecture import providers
from hypothesis.internal.conjecture.providers import Constants, HypothesisProvider

_QUICK, _THOROUGH = 30, 500


def use_profiles() -> None:
    """Quick unless `--hypothesis-profile thorough` says otherwise. An example is slow where the machine is busy."""
    settings.register_profile("quick", deadline=None, max_examples=_QUICK, derandomize=True)
    settings.register_profile("thorough", deadline=None, max_examples=_THOROUGH)
    settings.load_profile("quick")


def use_no_constants() -> None:
    """Leave out constants that Hypothesis finds in the code: which it has seen depends on what else was imported, and
    so on which tests a process was given before. Its plugin would look for them in each file of tests all the same."""
    HypothesisProvider._local_constants = Constants()  # type: ignore[assignment]
    providers._get_local_constants = Constants


def examples(quick: int) -> int:
    """Returns the number for a test that needs its own. Machines of states need many: a block that is freed twice is
    found by 150 runs of the scheduler's, and hardly ever by 50."""
    return quick if settings().max_examples == _QUICK else 10 * quick
