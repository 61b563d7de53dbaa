"""The way between two pipeline stages: the residual stream's bytes over a socket, on one host or between hosts."""

from __future__ import annotations

import socket
from time import perf_counter

import torch
from torch import Tensor

from penstock.core.ranks import RankLost
from penstock.link.connection import tune

_BUFFER_BYTES = 8 << 20


class SocketLink:
    """One end. It is as long as the ranks at both ends live; what breaks it is the other one's death."""

    def __init__(self, sock: socket.socket, *, hidden: int, other: int, where: str = "", timeout_s: float) -> None:
        """`other`: the rank at the other end; `where`: its node, if there are several."""
        tune(sock, timeout_s)
        sock.settimeout(timeout_s)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
        self._socket = sock
        self._hidden = hidden
        self._other = other
        self._where = where
        self.communication_s = 0.0  # waits for the other stage included

    def send(self, x: Tensor) -> None:
        began_s = perf_counter()
        try:
            self._socket.sendall(_bytes(x.float().contiguous()))
        except OSError as error:
            raise self._lost(f"it does not take the stream of a step ({error})") from None
        self.communication_s += perf_counter() - began_s

    def receive(self, num_rows: int) -> Tensor:
        began_s = perf_counter()
        out = torch.empty(num_rows, self._hidden, dtype=torch.float32)
        view = _bytes(out)
        while view:
            try:
                count = self._socket.recv_into(view)
            except OSError as error:
                raise self._lost(f"it does not send the stream of a step ({error})") from None
            if not count:
                raise self._lost("it closed its connection")
            view = view[count:]
        self.communication_s += perf_counter() - began_s
        return out

    def _lost(self, why: str) -> RankLost:
        return RankLost(self._other, why, self._where)


def _bytes(x: Tensor) -> memoryview:
    return memoryview(x.view(torch.uint8).numpy().data).cast("B")
