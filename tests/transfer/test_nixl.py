"""KV blocks by NIXL where its own failures are: no library, a peer that is gone, a place that is none. What all movers
promise is in test_networks.py."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from penstock.transfer.nixl import NixlMissing, NixlMover, pieces
from penstock.transfer.ports import Unreachable
from tests.transfer.networks import NEEDS_NIXL, Memory
from tests.waiting import eventually


def test_without_the_library_it_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("nixl", "nixl_cu12", "nixl_cu13"):
        monkeypatch.setitem(sys.modules, name, None)
        monkeypatch.setitem(sys.modules, f"{name}._api", None)
    with pytest.raises(NixlMissing, match="penstock\\[nixl\\]"):
        NixlMover(Memory(), timeout_s=1.0)


def test_pieces_of_blocks_are_told_part_by_part() -> None:
    parts = Memory().parts
    base, size = int(parts.addresses[0]), int(parts.sizes[0])
    found = pieces(parts, parts.addresses, [3, 1])
    assert found.dtype == np.uint64
    assert found.tolist() == [[base + 3 * size, size, 0], [base + size, size, 0]]


@NEEDS_NIXL
@pytest.mark.parametrize(
    "change",
    [lambda told: told.update(agent=b"none"), lambda told: told.update(addresses=[]), lambda told: told.clear()],
    ids=["agent", "parts", "nothing"],
)
def test_memory_that_is_not_what_it_is_said_to_be_is_not_reached(change: Callable[[dict[str, Any]], None]) -> None:
    lender, puller = (NixlMover(Memory(), timeout_s=30.0) for _ in range(2))
    told = msgspec.msgpack.decode(lender.offer())
    change(told)
    with pytest.raises(Unreachable):
        puller.open(msgspec.msgpack.encode(told))


@NEEDS_NIXL
def test_a_block_that_is_not_there_is_not_read() -> None:
    lender, puller = (NixlMover(Memory(), timeout_s=30.0) for _ in range(2))
    remote = puller.open(lender.offer())
    with pytest.raises(Unreachable, match="no such block"):
        remote.copy([99], [0])
    remote.close()


def lend(pipe: Any) -> None:
    memory = Memory()
    memory.fill()
    mover = NixlMover(memory, timeout_s=30.0)
    pipe.send(mover.offer())
    signal.pause()


@NEEDS_NIXL
def test_a_lender_that_is_killed_is_noticed_and_the_next_one_is_met() -> None:
    """One agent that lost its peer must not spoil those that come after it."""
    memory = Memory()
    expected = Memory()
    expected.fill()
    puller = NixlMover(memory, timeout_s=30.0)
    for round_ in range(2):
        ours, theirs = multiprocessing.Pipe()
        process = multiprocessing.get_context("spawn").Process(target=lend, args=(theirs,), daemon=True)
        process.start()
        remote = puller.open(ours.recv())
        remote.copy([2, 3], [5, 6 + round_])
        assert memory.content(5) == expected.content(2)
        assert memory.content(6 + round_) == expected.content(3)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()

        def fails(remote: Any = remote) -> bool:
            try:
                remote.copy([4], [9])
            except Unreachable:
                return True
            return False

        eventually(fails)
        remote.close()
