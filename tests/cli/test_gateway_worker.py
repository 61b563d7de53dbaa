"""One worker in the test's own process: how it hands listening sockets on."""

import asyncio
import os
import socket
from pathlib import Path

import uvloop

from penstock.cli.gateway_worker import Address, GatewayWorker, WorkerSpec, take_listeners, worker_sockets
from penstock.cli.supervisor import Listeners

ADDRESSES = [Address(None, "127.0.0.1", 0), Address("admin_port", "127.0.0.1", 0)]


async def none_ready() -> int:
    return 0


def worker(directory: Path, listeners: Listeners) -> GatewayWorker:
    descriptors = [os.dup(sock.fileno()) for sock in listeners.sockets]
    _, sent = os.pipe()
    spec = WorkerSpec(3, str(directory), ADDRESSES, descriptors, is_replacement=False, report=-1, heartbeats=sent)
    return GatewayWorker(spec)


def ports(sockets: list[socket.socket]) -> list[int]:
    return [sock.getsockname()[1] for sock in sockets]


def test_supervisor_gets_the_sockets_of_a_worker_and_none_of_them_ever_blocks(tmp_path: Path) -> None:
    """A socket that blocked in one process would in all, and hang the workers."""
    first = Listeners.take_over(ADDRESSES, tmp_path)
    (tmp_path / "0.1.sock").touch()  # of a worker that is gone
    seen: list[bool] = []

    async def serve_and_take_over() -> Listeners:
        one = worker(tmp_path, first)
        async with one.answering(list, none_ready):
            seen.append(any(os.get_blocking(sock.fileno()) for sock in first.sockets))
            servers = [one.public_listener(), one.admin_listener()]
            seen.append(any(os.get_blocking(sock.fileno()) for sock in (*servers, *first.sockets)))
            for sock in servers:
                sock.close()
            return await asyncio.to_thread(Listeners.take_over, ADDRESSES, tmp_path)

    second = uvloop.run(serve_and_take_over())
    assert ports(second.sockets) == ports(first.sockets)
    assert [path.name for path in second.orphans] == [f"3.{os.getpid()}.sock"]
    assert seen == [False, False]
    assert not any(os.get_blocking(sock.fileno()) for sock in (*first.sockets, *second.sockets))
    assert worker_sockets(tmp_path) == []
    first.close()
    second.close()


def test_supervisor_of_another_address_binds_it_and_knows_who_is_to_be_replaced(tmp_path: Path) -> None:
    first = Listeners.take_over(ADDRESSES, tmp_path)

    async def take_over() -> Listeners:
        async with worker(tmp_path, first).answering(list, none_ready):
            changed = [ADDRESSES[0], Address("admin_port", "127.0.0.2", 0)]
            return await asyncio.to_thread(Listeners.take_over, changed, tmp_path)

    second = uvloop.run(take_over())
    assert ports(second.sockets)[0] == ports(first.sockets)[0]
    assert second.sockets[1].getsockname()[0] == "127.0.0.2"
    assert len(second.orphans) == 1
    first.close()
    second.close()


def test_worker_that_drains_offers_no_socket(tmp_path: Path) -> None:
    first = Listeners.take_over(ADDRESSES, tmp_path)
    told = asyncio.Event()

    async def drain() -> list[tuple[Address, socket.socket]]:
        one = worker(tmp_path, first)
        async with one.answering(list, none_ready):
            told.set()
            await one.until_told(told)
            return await asyncio.to_thread(take_listeners, worker_sockets(tmp_path)[0])

    assert uvloop.run(drain()) == []
    first.close()
