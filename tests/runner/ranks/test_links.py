"""The way between two pipeline stages, over a real socket: what is sent arrives, and a stage that is gone is named."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from penstock.core.ranks import RankLost
from penstock.runner.ranks.links import SocketLink

WIDE = 1 << 16  # numbers of a row: a few hundred rows are more than any socket holds


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def link(sock: socket.socket, *, hidden: int = 5, timeout_s: float = 60.0) -> SocketLink:
    return SocketLink(sock, hidden=hidden, other=3, where="node 1, 10.0.0.8", timeout_s=timeout_s)


def test_streams_come_whole_and_in_the_order_in_which_they_were_sent(
    sockets: tuple[socket.socket, socket.socket],
) -> None:
    before, after = (link(one, hidden=WIDE) for one in sockets)
    steps = [torch.full((rows, WIDE), float(rows)) for rows in (300, 1, 2)]
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(lambda: [before.send(step) for step in steps])
        for step in steps:
            assert torch.equal(after.receive(len(step)), step)
        sending.result()


def test_a_stage_whose_process_has_ended_is_named(sockets: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = sockets
    here = link(ours)
    theirs.close()
    with pytest.raises(
        RankLost, match=r"rank 3 of the model \(node 1, 10\.0\.0\.8\) is lost: it closed its connection"
    ):
        here.receive(1)
    with pytest.raises(RankLost, match=r"rank 3 .* it does not take the stream of a step"):
        here.send(torch.zeros(1, 5))


def test_a_stage_that_hangs_is_named_by_the_one_before_and_the_one_after(
    sockets: tuple[socket.socket, socket.socket],
) -> None:
    after = link(sockets[0], timeout_s=0.02)
    with pytest.raises(RankLost, match=r"rank 3 .* it does not send the stream of a step"):
        after.receive(1)
    before = link(sockets[0], hidden=WIDE, timeout_s=0.02)
    with pytest.raises(RankLost, match=r"rank 3 .* it does not take the stream of a step"):
        before.send(torch.zeros(300, WIDE))
