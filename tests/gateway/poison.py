"""Replicas that do not survive a request with a certain word in it: their engine is killed when it gets there, or when
it has answered a little."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

from tests.server.replica import Replica, serving

WORD = b"poison"
ROOMY: dict[str, Any] = {"num_blocks": 8192, "max_num_seqs": 128, "chunk_tokens": 512, "step_s": 0.01}


class Fleet:
    def __init__(self) -> None:
        self.replicas: list[Replica] = []
        self.num_killed = 0
        self.after_events = 0  # 0: before the first byte
        self.word = WORD

    def _mount(self, number: int) -> Any:
        def mount(app: Any, _recorder: Any) -> Any:
            async def front(scope: Any, receive: Any, send: Any) -> None:
                if scope["type"] != "http" or scope["method"] != "POST":
                    await app(scope, receive, send)
                    return
                replica = self.replicas[number]
                engine, num_open, is_poison, num_events = replica.engine, replica.engine.num_open, False, 0

                def kill() -> None:
                    self.num_killed += 1
                    replica.kill_engine()

                async def lie_in_wait() -> None:
                    while engine.num_open <= num_open:  # noqa: ASYNC110 (nobody sets an event)
                        await asyncio.sleep(0)
                    kill()

                async def receive_and_see() -> Any:
                    nonlocal is_poison
                    message = await receive()
                    if self.word in message.get("body", b"") and not is_poison:
                        is_poison = True
                        if not self.after_events:
                            waiting.append(asyncio.create_task(lie_in_wait()))
                    return message

                async def send_and_count(message: Any) -> None:
                    nonlocal num_events
                    await send(message)
                    before, num_events = num_events, num_events + message.get("body", b"").count(b"data: ")
                    if is_poison and before < self.after_events <= num_events:
                        kill()

                waiting: list[asyncio.Task[None]] = []
                await app(scope, receive_and_see, send_and_count)
                for task in waiting:
                    task.cancel()

            return front

        return mount


@contextlib.contextmanager
def mortal_fleet(size: int) -> Iterator[Fleet]:
    fleet = Fleet()
    with ExitStack() as stack:
        for number in range(size):
            fleet.replicas.append(stack.enter_context(serving(mount=fleet._mount(number), **ROOMY)))
        yield fleet
