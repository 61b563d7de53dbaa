"""A whole replica but for the model: the real application under a real HTTP server, with a real engine process over
the fake runner, and a small real tokenizer."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import signal
import socket
import threading
from asyncio.subprocess import Process
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from typing import Any

import openai
from prometheus_client.parser import text_string_to_metric_families

from penstock.api.asgi import Receive, Scope, Send
from penstock.api.relay import SECRET_HEADER
from penstock.core.clock import MonotonicClock
from penstock.core.errors import PenstockError
from penstock.core.model_config import ModelConfig
from penstock.core.settings import ServerSettings
from penstock.core.slo import Slo
from penstock.engine.client import EngineClient, EngineState
from penstock.engine.fake import adapter_seed
from penstock.http.outside import Outside
from penstock.server.app import Replica as ReplicaApp
from penstock.server.recorder import Recorder
from penstock.server.served_model import ServedImages, ServedModel
from penstock.text.chat import ChatTemplate
from penstock.text.tokenizer import Tokenizer
from penstock.websocket.endpoint import WebSockets
from tests import waiting
from tests.api.serving import running
from tests.engine.expecting import expected
from tests.engine.fake_engine import Options, launcher
from tests.sdk import Unverified
from tests.text import small
from tests.waiting import GIVE_UP_S

NAME = "small"
CHAT = """{% for message in messages %}<s>{{ message.role }}: {{ message.content }}</s>{% endfor %}
{%- if add_generation_prompt %}<s>assistant: {% endif %}"""
EOS = 2
SEED = 1  # of requests that have none: with one that is drawn the fake model ends an answer where it likes

Message = dict[str, str]


@dataclass
class Replica:
    host: str
    port: int
    model: ServedModel
    engine: EngineClient
    processes: list[Process]  # every engine process so far
    app: ReplicaApp
    known: dict[str, str] = field(default_factory=dict)  # headers with its secret, if it has one

    @cached_property
    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"http://{self.host}:{self.port}/v1", api_key="none", max_retries=0, http_client=Unverified()
        )

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The server's event loop."""
        assert self.engine._supervisor is not None
        return self.engine._supervisor.get_loop()

    def call(self, method: str, path: str, body: object = None, **headers: str) -> tuple[int, dict[str, str], Any]:
        """Status, headers and body, as JSON where it is JSON."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=GIVE_UP_S)
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        with contextlib.closing(connection):
            typed = {"content-type": "application/json"} if method == "POST" else {}
            connection.request(method, path, data, typed | headers)
            response = connection.getresponse()
            content = response.read()
        is_json = response.headers.get("content-type") == "application/json"
        lowered = {name.lower(): value for name, value in response.headers.items()}
        return response.status, lowered, json.loads(content) if is_json else content

    def post(self, path: str, **body: object) -> tuple[int, dict[str, str], Any]:
        return self.call("POST", path, {"model": NAME, **body})

    def metrics(self) -> dict[str, float]:
        """Samples by name; those with labels as `name{a,b}`, in the order of the labels' names."""
        _, _, content = self.call("GET", "/metrics", **self.known)
        found = {}
        for family in text_string_to_metric_families(content.decode()):
            for sample in family.samples:
                labels = ",".join(value for _, value in sorted(sample.labels.items()))
                found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
        return found

    def final_metrics(self) -> dict[str, float]:
        """Returns the metrics once every request is noted: a client has its answer a moment before that."""
        return waiting.eventually(self.metrics, lambda found: found["penstock_requests_open"] == 0)

    def is_idle(self) -> bool:
        """Whether the replica is idle by the engine's own account."""
        load = self.engine.measured.load
        return (load.num_running, load.num_waiting, load.kv_active_tokens, self.engine.num_open) == (0, 0, 0, 0)

    def kill_engine(self) -> None:
        os.kill(self.processes[-1].pid, signal.SIGKILL)

    @contextlib.contextmanager
    def engine_paused(self) -> Iterator[None]:
        """Stops the engine for as long as a test needs: what the server has sent to it stays where it is."""
        process_id = self.processes[-1].pid
        os.kill(process_id, signal.SIGSTOP)
        try:
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process_id, signal.SIGCONT)

    # -- what the fake model says

    def prompt_ids(self, prompt: str | list[Message]) -> list[int]:
        if isinstance(prompt, str):
            return self.model.tokenizer.encode(prompt, add_special_tokens=True)
        return self.model.tokenizer.encode(self.model.chat_template.render(prompt), add_special_tokens=False)

    def adapted_answer(self, prompt: str, count: int, adapter: str, *, ignore_eos: bool = False) -> str:
        """Returns the answer by the adapter of this name."""
        seed = adapter_seed(self.model.adapters[adapter].digest)
        if not ignore_eos:
            return self.answer(prompt, count, seed=seed)
        ids = expected(self.prompt_ids(prompt), count, vocab_size=self.model.tokenizer.vocab_size, seed=seed)
        return self.model.tokenizer.decode(ids)

    def answer_ids(self, prompt: str | list[Message], count: int, *, seed: int = 0) -> list[int]:
        """Returns the ids of the answer up to and without the end of sequence."""
        token_ids = expected(self.prompt_ids(prompt), count, vocab_size=self.model.tokenizer.vocab_size, seed=seed)
        return token_ids[: token_ids.index(EOS)] if EOS in token_ids else token_ids

    def answer(self, prompt: str | list[Message], count: int, *, seed: int = 0) -> str:
        return self.model.tokenizer.decode(self.answer_ids(prompt, count, seed=seed))


@cache
def small_tokenizer() -> Tokenizer:
    return small.load(small.byte_level())


@contextlib.contextmanager
def engines_paused(replicas: Iterable[Replica]) -> Iterator[None]:
    """No answer ends while a test places requests, however slow the machine is."""
    with contextlib.ExitStack() as stack:
        for replica in replicas:
            stack.enter_context(replica.engine_paused())
        yield


@contextlib.contextmanager
def serving(
    settings: ServerSettings | None = None,
    *,
    mount: Callable[[ReplicaApp, Recorder], Any] | None = None,
    restores: dict[str, str] | None = None,
    generates: bool = True,
    template: str = CHAT,
    tokenizer: Tokenizer | None = None,
    may_return: threading.Event | None = None,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    images: ServedImages | None = None,
    outside: Outside | None = None,
    **options: Any,
) -> Iterator[Replica]:
    """`mount`: puts another application in front of the replica's, in the event loop; `restores`: it begins like
    `penstock serve`, with these adapters and those of an earlier life; `may_return`: when an engine that died may;
    `sleep`: before it is started again."""
    words = tokenizer or small_tokenizer()
    vocab_size = words.vocab_size
    options = {"vocab_size": vocab_size} | options
    clock = MonotonicClock()
    recorder = Recorder(clock, NAME, Slo())
    processes: list[Process] = []

    async def launch(theirs: socket.socket) -> Process:
        if may_return is not None and processes:
            await asyncio.to_thread(may_return.wait)
        processes.append(await launcher(**options)(theirs))
        return processes[-1]

    engine = EngineClient(launch, clock, on_report=recorder.engine_report, sleep=sleep)
    shape = Options(**options)
    config = ModelConfig(
        architecture="llama",
        vocab_size=vocab_size,
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
    model = ServedModel(
        NAME,
        config,
        words,
        ChatTemplate(template),
        max_model_len=shape.num_blocks * shape.block_size,
        created=1,
        max_loras=shape.max_loras,
        generates=generates,
        embeds=True,
        images=images,
    )
    app = ReplicaApp(engine, recorder, clock, settings or ServerSettings())
    app.trust.draw_seed = lambda: SEED
    app.outside = outside
    app.open(model)
    front: list[Any] = [app]

    async def start_and_serve(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            with contextlib.suppress(PenstockError):
                await engine.start()
                if restores is not None:
                    await app.adapters(model).restore(restores)
            if mount is not None:
                front[0] = mount(app, recorder)
        await front[0](scope, receive, send)

    sockets = partial(WebSockets, admit=app.trust.admit_socket, pages=app.trust.pages, registry=recorder.registry)
    with running(start_and_serve, front=sockets) as (host, port):
        known = {SECRET_HEADER: settings.gateway_secret} if settings and settings.gateway_secret else {}
        yield Replica(host, port, model, engine, processes, app, known)
    assert engine.state is EngineState.STOPPED
