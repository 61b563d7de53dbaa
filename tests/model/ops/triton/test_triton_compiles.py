"""Every kernel compiles for Hopper, in all that its arguments and constants may be: without a GPU."""

from __future__ import annotations

import pytest

from tests.model.ops.triton.compiler import MAIN_TARGET, launchable, report_of

pytestmark = pytest.mark.slow


def test_every_kernel_compiles_as_it_is_launched_and_with_integers_of_one() -> None:
    report = report_of(MAIN_TARGET)
    assert not report.failures, "\n".join(report.failures)
    assert set(report.kernels) == launchable()
    assert report.with_ones > 0
