"""Fakes of vLLM and SGLang servers that share requests, held to the shapes that the engines publish: what they are sent
is checked, and refused as the engine refuses it. No KV moves. And a gateway in front of such servers."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from penstock.gateway.records.recorder import GatewayRecorder
from penstock.gateway.settings.gateway import ModelSettings
from penstock.router.strategies import RoutingSettings
from tests.clocks import ManualClock
from tests.dialects.servers import FakeSglang, FakeVllm, Reply, as_json
from tests.gateway.running import RunningGateway, running_gateway
from tests.waiting import GIVE_UP_S, eventually

TO_PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
BLOCKS = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[3, 4, 5]],
    "remote_engine_id": "an-engine",
    "remote_request_id": "cmpl-1",
    "remote_host": "127.0.0.1",
    "remote_port": 9,  # where nobody is
    "tp_size": 1,
    "dcp_size": 1,
    "pp_size": 1,
    "remote_num_tokens": 300,
    "remote_blocks_expiry_time": None,
    "transfer_mode": "pull",
    "remote_prefill_cached_tokens": 0,
}


_FAILED = {"error": {"message": "Internal server error", "type": "InternalServerError", "param": None, "code": 500}}


def stream_of(failure: Reply) -> Reply:
    """An error as both engines say it in a stream."""
    return 200, {"content-type": "text/event-stream"}, b"data: " + failure[2] + b"\n\ndata: [DONE]\n\n"


def bad_request(message: str) -> Reply:
    return as_json({"error": {"message": message, "type": "BadRequestError", "code": 400}}, 400)


@dataclass
class PairedVllm(FakeVllm):
    """A vLLM with NixlConnector, so that it may be on either side."""

    has_connector: bool = True
    garbage: bytes | None = None  # what it answers prefills with
    can_pull: bool = True
    may_answer: threading.Event = field(default_factory=threading.Event)  # set, unless a test holds it back

    def __post_init__(self) -> None:
        self.may_answer.set()

    def refusal(self, path: str, asked: dict[str, Any]) -> Reply | None:
        limit = asked.get("max_completion_tokens") or asked.get("max_tokens")
        if asked.get("stream_options") and not asked.get("stream"):
            return bad_request("Stream options can only be defined when `stream=True`.")
        if limit is not None and (asked.get("min_tokens") or 0) > limit:
            return bad_request(f"min_tokens must be less than or equal to max_tokens={limit}")
        params = asked.get("kv_transfer_params")
        if params is not None and not isinstance(params, dict):
            return bad_request("kv_transfer_params: Input should be a valid dictionary")
        if params is not None and params.get("do_remote_decode") and params != TO_PREFILL:
            return bad_request("these are not the parameters of a prefill")
        if params is not None and params.get("do_remote_prefill") and params != BLOCKS:
            return bad_request("nobody handed these blocks out")
        if params is not None and params.get("do_remote_prefill") and not self.can_pull:
            failure = as_json(_FAILED, 500)
            return stream_of(failure) if asked.get("stream") else failure
        return super().refusal(path, asked)

    def answer(self, path: str, asked: dict[str, Any]) -> tuple[bool, list[bytes]]:
        is_stream, parts = super().answer(path, asked)
        params = asked.get("kv_transfer_params") or {}
        if not params.get("do_remote_decode"):
            return is_stream, parts
        self.may_answer.wait(GIVE_UP_S)
        if self.garbage is not None:
            return False, [self.garbage]
        if self.has_connector:
            parts = [parts[0][:-1] + b', "kv_transfer_params": ' + as_json(BLOCKS)[2] + b"}"]
        return is_stream, parts

    @property
    def prompts(self) -> list[dict[str, Any]]:
        return [asked for path, asked, _ in self.asked if path.endswith("completions")]

    @property
    def ids(self) -> list[str | None]:
        return [{k.lower(): v for k, v in headers.items()}.get("x-request-id") for _, _, headers in self.asked]


@dataclass
class Rooms:
    """Rooms in which the two sides of SGLang's transfer meet."""

    opened: dict[int, threading.Event] = field(default_factory=dict)
    num_failures: int = 0  # that prefills have still before them, whoever computes them
    noticed: threading.Event | None = None  # who decodes says so first; then the prefill fails
    lock: threading.Lock = field(default_factory=threading.Lock)

    def of(self, number: int) -> threading.Event:
        with self.lock:
            return self.opened.setdefault(number, threading.Event())


@dataclass
class PairedSglang(FakeSglang):
    """An SGLang with --disaggregation-mode: it takes nothing without a room, and decodes what was put into one."""

    mode: str = "decode"
    rooms: Rooms = field(default_factory=Rooms)
    bootstrap_port: int = 8998
    fails: bool = False

    def refusal(self, path: str, asked: dict[str, Any]) -> Reply | None:
        if "bootstrap_room" not in asked:
            return bad_request("Disaggregated request received without bootstrap room id")
        host, port, room = (asked[f"bootstrap_{name}"] for name in ("host", "port", "room"))
        if isinstance(asked.get("prompt"), list):
            is_right = all(isinstance(one, list) and len(one) == len(asked["prompt"]) for one in (host, port, room))
            rooms = room if is_right else []
        else:
            is_right, rooms = isinstance(host, str) and isinstance(port, int), [room]
        if not is_right or not all(isinstance(one, int) and 0 <= one < 1 << 63 for one in rooms):
            return bad_request(f"no such room: {host} {port} {room}")
        return self.meet(asked, rooms)

    def meet(self, asked: dict[str, Any], rooms: list[int]) -> Reply | None:
        """Each side does its part of the transfer. An error, if that fails."""
        failure = as_json({"error": {"message": "KVTransferError", "code": 500}}, 500)
        if self.mode == "prefill":
            if self.fails or self.rooms.num_failures:
                if self.rooms.noticed is not None:
                    self.rooms.noticed.wait(GIVE_UP_S)
                self.rooms.num_failures -= not self.fails
                return failure
            for one in rooms:
                self.rooms.of(one).set()
            return None
        if self.rooms.num_failures and self.rooms.noticed is not None:
            return stream_of(failure) if asked.get("stream") else failure
        for one in rooms:
            self.rooms.of(one).wait(GIVE_UP_S)
        return None


class Server(Protocol):
    @property
    def url(self) -> str: ...
    @property
    def dialect(self) -> str: ...


@contextlib.contextmanager
def in_front_of(
    *servers: tuple[Server, str] | tuple[Server, str, int],
    clock: ManualClock | None = None,
    recorder: GatewayRecorder | None = None,
    **options: Any,
) -> Iterator[RunningGateway]:
    """A gateway that shares every request it can between servers of the model m, each with its role, and its bootstrap
    port if it has one of its own."""
    names = ("role", "bootstrap_port")
    entries: list[str | dict[str, Any]] = [
        {"url": server.url, **dict(zip(names, facts, strict=False))} for server, *facts in servers
    ]
    pools = {"m": ModelSettings(replicas=entries, dialect=servers[0][0].dialect, split="always", **options)}
    with running_gateway(pools=pools, waits=False, clock=clock, recorder=recorder) as gateway:
        gateway.call(lambda: gateway.app.admission.router.configure(RoutingSettings(), {}, {"m": "always"}))
        wait = eventually if clock is None else gateway.until
        wait(gateway.states, lambda states: set(states) <= {"ready"})
        yield gateway
        eventually(gateway.is_idle)  # of neither leg anything is left, whatever happened


def handovers(gateway: RunningGateway, outcome: str) -> bool:
    return f'penstock_gateway_kv_handovers_total{{model="m",outcome="{outcome}"}} 1' in gateway.metrics()
