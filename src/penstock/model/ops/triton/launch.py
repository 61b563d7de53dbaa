"""Programmatic dependent launch: a kernel starts while the one before it still runs, and waits where it must.

What a kernel does before `wait` overlaps the other's end: it may read weights, what earlier steps left in the cache,
and the step's inputs and plan, which are complete before its first layer begins; but nothing that a layer of this
step writes, and it may write nothing.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from functools import cache

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from penstock.model.ops.triton.device import capability, is_interpreted


@cache
def overlaps() -> bool:
    """Whether this device can: Hopper and later. Every kernel launched with `launch_pdl` waits before it ends."""
    return capability() >= (9, 0)


@triton.jit
def let_next_start(OVERLAPS: tl.constexpr):
    """Once every program has said so, or ended, the next kernel's programs take the places that are free."""
    if OVERLAPS:
        gdc_launch_dependents()


@triton.jit
def wait(OVERLAPS: tl.constexpr):
    """For all kernels before this one, and what they wrote."""
    if OVERLAPS:
        gdc_wait()


@cache
def assembles() -> bool:
    """Whether kernels may use a GPU's own instructions."""
    return not is_interpreted()
