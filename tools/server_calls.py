"""Python calls, files and CPU time of one request at a replica's server: `python -m tools.server_calls [--names]`.

The real application behind the real HTTP exchange, over an engine that answers at once and without a process: one token
per turn of the event loop. Calls and files are counted for one request, which does not depend on the machine; CPU time
is the best of some rounds. What sockets and the HTTP parser cost is left out.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections import Counter
from types import FrameType

import msgspec
from tests.text import small

from penstock.core.clock import MonotonicClock
from penstock.core.model_config import ModelConfig
from penstock.core.request import FinishReason, RequestTimings, TokenEvent
from penstock.core.settings import ServerSettings
from penstock.core.slo import Slo
from penstock.engine.client import EngineClient, EngineState
from penstock.engine.messages import StepReport, Submit, ToEngine
from penstock.http.asgi import AsgiApp
from penstock.http.exchange import Exchange
from penstock.http.message import Request
from penstock.server.app import Replica
from penstock.server.recorder import Recorder
from penstock.server.served_model import ServedModel
from penstock.text.chat import ChatTemplate

REQUESTS, ROUNDS, TOKENS = 300, 5, 16
TEMPLATE = "{% for message in messages %}<s>{{ message.role }}: {{ message.content }}</s>{% endfor %}<s>assistant: "
EOS = 2
TURN = {"messages": [{"role": "user", "content": "what is a penstock?"}], "max_tokens": TOKENS}
SHAPE = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}}
CASES: dict[str, tuple[bytes, dict[str, object]]] = {
    "chat, whole": (b"/v1/chat/completions", TURN),
    "chat, stream": (b"/v1/chat/completions", {**TURN, "stream": True}),
    "chat with tools, stream": (b"/v1/chat/completions", {**TURN, "tools": [SHAPE], "stream": True}),
    "completion, stream": (b"/v1/completions", {"prompt": "a penstock is", "max_tokens": TOKENS, "stream": True}),
    "messages, stream": (b"/v1/messages", {**TURN, "stream": True}),
}


class FakeEngine(EngineClient):
    """A ready engine without a process: it gives each request its tokens, one per turn of the event loop."""

    def __init__(self, token_id: int) -> None:
        super().__init__(_no_process, MonotonicClock())
        self._token_id = token_id
        self.state = EngineState.READY

    def _send(self, message: ToEngine) -> None:
        if isinstance(message, Submit):
            asyncio.get_running_loop().call_soon(self._step, message.request.id, 1)

    def _step(self, request_id: str, number: int) -> None:
        is_first, is_last = number == 1, number == TOKENS
        event = TokenEvent(
            request_id,
            [self._token_id],
            FinishReason.LENGTH if is_last else None,
            cached_tokens=0 if is_first else None,
            timings=RequestTimings(0.0, 0.0) if is_first else None,
        )
        self._receive(StepReport([event]))
        if not is_last:
            asyncio.get_running_loop().call_soon(self._step, request_id, number + 1)


async def _no_process(_: object) -> asyncio.subprocess.Process:
    raise AssertionError("there is no process")


class FakeChannel:
    peer = "127.0.0.1"

    def __init__(self) -> None:
        self.sent = bytearray()
        self.answered_once = asyncio.Event()

    def send(self, data: bytes) -> None:
        self.sent += data

    def answered(self, close: bool) -> None:
        self.answered_once.set()

    def drop(self) -> None:
        raise AssertionError("dropped")


class Bench:
    def __init__(self) -> None:
        tokenizer = small.load(small.byte_level())
        (token_id, *_) = tokenizer.encode("hello", add_special_tokens=False)
        clock = MonotonicClock()
        config = ModelConfig(
            architecture="llama",
            vocab_size=tokenizer.vocab_size,
            hidden_size=8,
            intermediate_size=8,
            num_layers=1,
            num_heads=1,
            num_kv_heads=1,
            head_dim=8,
            context_length=4096,
            eos_token_ids=(EOS,),
            bos_token_id=1,
        )
        model = ServedModel("m", config, tokenizer, ChatTemplate(TEMPLATE), max_model_len=4096, created=1)
        replica = Replica(FakeEngine(token_id), Recorder(clock, "m", Slo()), clock, ServerSettings())
        replica.open(model)
        self._app = AsgiApp(replica)

    async def run(self, path: bytes, fields: dict[str, object]) -> bytes:
        """One request, from its arrival to its end."""
        channel, body = FakeChannel(), msgspec.json.encode({"model": "m", **fields})
        headers = {b"host": b"localhost", b"content-type": b"application/json", b"content-length": b"%d" % len(body)}
        self._app(Exchange(channel, Request(b"POST", path, headers, body), keep_alive=True, speaks_chunked=True))
        await channel.answered_once.wait()
        await asyncio.sleep(0)  # the record of the request
        return bytes(channel.sent)

    async def calls(self, path: bytes, fields: dict[str, object]) -> Counter[str]:
        """Python functions of penstock that one request calls; a coroutine that goes on counts again."""
        counts: Counter[str] = Counter()

        def count(frame: FrameType, event: str, _: object) -> None:
            code = frame.f_code
            if event == "call" and "penstock/" in code.co_filename:
                counts[f"{code.co_filename.rpartition('penstock/')[2]}:{code.co_qualname}"] += 1

        sys.setprofile(count)
        try:
            await self.run(path, fields)
        finally:
            sys.setprofile(None)
        return counts

    async def cpu_us(self, path: bytes, fields: dict[str, object]) -> float:
        best = float("inf")
        for _ in range(ROUNDS):
            began = time.process_time()
            for _ in range(REQUESTS):
                await self.run(path, fields)
            best = min(best, time.process_time() - began)
        return 1e6 * best / REQUESTS


async def measure(*, names: bool) -> None:
    bench = Bench()
    for what, (path, fields) in CASES.items():
        for _ in range(20):  # metrics open their series, caches fill
            answer = await bench.run(path, fields)
        assert answer.startswith(b"HTTP/1.1 200"), answer
        counts = await bench.calls(path, fields)
        files = {name.partition(":")[0] for name in counts}
        ours = sorted(name for name in files if name.startswith("server/"))
        cpu_us = await bench.cpu_us(path, fields)
        print(
            f"{what}: {sum(counts.values())} calls of {len(counts)} functions in {len(files)} files, {len(ours)} of "
            f"them the server's, {cpu_us:.0f} us of CPU"
        )
        if names:
            print("  " + " ".join(ours))
            for name, number in counts.most_common():
                print(f"  {number:4d} {name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--names", action="store_true", help="each function, with its calls")
    asyncio.run(measure(names=parser.parse_args().names))


if __name__ == "__main__":
    main()
