from __future__ import annotations

import gc
import sys
from pathlib import Path

import pytest
import torch

from penstock.model.ops.memory import CHUNK, HUGE_PAGE, MAX_SETTLED, Arena, pages, settle
from tests.model.ops.residency import resident_bytes


@pytest.mark.parametrize("huge", [False, True])
@pytest.mark.parametrize("num_bytes", [0, 1, 4096, HUGE_PAGE + 1])
def test_pages_are_zero_and_ours_to_write(num_bytes: int, huge: bool) -> None:
    found = pages(num_bytes, huge=huge)
    assert len(found) == num_bytes
    assert not found.any()
    found.fill_(7)
    assert found.data_ptr() % 4096 == 0 or num_bytes == 0


def test_huge_pages_begin_where_one_can() -> None:
    assert pages(100, huge=True).data_ptr() % HUGE_PAGE == 0


def test_parts_of_an_arena_do_not_overlap() -> None:
    arena, sizes = Arena(), [1, 4096, 5000, CHUNK // 2, CHUNK // 2, CHUNK // 2 + 1, 3 * CHUNK, 64]
    parts = [arena.pages(size) for size in sizes]
    for value, part in enumerate(parts):
        part.fill_(value)
    for value, (size, part) in enumerate(zip(sizes, parts, strict=True)):
        assert len(part) == size
        assert part.data_ptr() % 4096 == 0
        assert bool((part == value).all())


@pytest.mark.skipif(sys.platform != "linux", reason="nobody tells what is mapped")
def test_a_piece_is_given_back_with_its_last_part() -> None:
    arena = Arena()
    first, second = arena.pages(CHUNK // 2), arena.pages(CHUNK // 2)
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    start, kept = first.data_ptr(), arena.pages(1)  # of the next piece
    del first, second
    gc.collect()
    spans = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
    assert not any(int(low, 16) <= start < int(high, 16) for low, high in spans)
    assert torch.equal(kept, torch.zeros(1, dtype=torch.uint8))


@pytest.mark.skipif(sys.platform != "linux", reason="nobody tells what is resident")
def test_what_is_settled_is_in_memory_and_still_zero() -> None:
    parts = [pages(4 * HUGE_PAGE), pages(100)]
    assert [resident_bytes(part) for part in parts] == [0, 0]
    if not settle(parts):
        pytest.skip("this system takes memory only as it is touched")
    assert [resident_bytes(part) for part in parts] == [4 * HUGE_PAGE, 4096]
    assert not any(part.any() for part in parts)


def test_what_is_much_is_left_to_be_touched() -> None:
    assert not settle([pages(MAX_SETTLED), pages(1)])


def test_memory_of_others_is_left_as_it_is() -> None:
    part = torch.full((1000,), 7, dtype=torch.uint8)[3:]
    assert not settle([part])
    assert bool((part == 7).all())
