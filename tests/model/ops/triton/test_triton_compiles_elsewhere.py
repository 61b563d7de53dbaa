"""Every kernel compiles for Ampere and for Blackwell too: once for each kind of weight. Without a GPU."""

from __future__ import annotations

import pytest

from tests.model.ops.triton.compiler import launchable, report_of

pytestmark = pytest.mark.slow

# Kernels that a target never launches, each with the reason.
UNUSED: dict[int, dict[str, str]] = {80: {}, 100: {}}


@pytest.mark.parametrize("arch", sorted(UNUSED))
def test_every_kernel_compiles_as_it_is_launched(arch: int) -> None:
    report = report_of(arch)
    assert not report.failures, "\n".join(report.failures)
    assert set(report.kernels) == launchable() - set(UNUSED[arch])
