"""Programmatic dependent launch: a kernel starts while the one before it still runs, and waits where it must. For short
kernels, which the gap between two of them limits; the kernels that use it have the figures.

Work before `wait_for_previous` overlaps the other's end. It may read weights, keys and values of earlier steps, and the
step's inputs and plan, which are complete before its first layer begins; it may not read what a layer of this step
writes, and it may write nothing.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from functools import cache

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from penstock.model.ops.triton.common.device import capability


@cache
def has_pdl() -> bool:
    """Whether this device has it: Hopper and later. Every kernel launched with `launch_pdl` waits before it ends."""
    return capability() >= (9, 0)


@triton.jit
def launch_dependents(PDL: tl.constexpr):
    """Once every program has said so, or ended, the next kernel's programs take the places that are free."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """The wait is for all kernels before this one, and what they wrote."""
    if PDL:
        gdc_wait()
