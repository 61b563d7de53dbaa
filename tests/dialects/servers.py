"""Small servers that speak as engines do which cannot run here, written from the engines' own documentation.

They are fakes: what they answer, where, and with which status is the engine's; what they say is a few words. The same
contract is asked of them and of the real server that can run here (`test_contract.py`).
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar
from urllib.parse import urlsplit

Reply = tuple[int, dict[str, str], bytes]
WORDS = ["The", " quick", " brown", " fox", " jumps"]
PROMPT_TOKENS = 7


def as_json(content: object, status: int = 200, **headers: str) -> Reply:
    return status, {"content-type": "application/json", **headers}, json.dumps(content).encode()


def as_text(text: str, status: int = 200) -> Reply:
    return status, {"content-type": "text/plain; version=0.0.4"}, text.encode()


@dataclass
class FakeServer:
    """A process that answers, starts, hangs, is overloaded or is dead, as it is told."""

    model: str = "m"
    port: int = 0
    running: int = 0
    waiting: int = 0
    steps: int = 0  # it makes one whenever it is looked at
    is_hung: bool = False  # and then it does not, though it answers
    is_starting: bool = False
    is_overloaded: bool = False
    has_metrics: bool = True
    can_park: bool = True
    is_parked: bool = False
    token_s: float = 0.0
    asked: list[tuple[str, dict[str, Any], dict[str, str]]] = field(default_factory=list)
    num_refused: int = 0
    num_left: int = 0  # clients that went before their answer was complete
    num_polls: int = 0
    connections: set[socket.socket] = field(default_factory=set)
    _held: socket.socket | None = None  # bound to its port and not listening, so that it can come back to it

    dialect: ClassVar[str]
    answer_headers: ClassVar[dict[str, str]] = {}  # of a whole one

    def __enter__(self) -> FakeServer:
        if self._held is None:
            self._held = socket.socket()
            self._held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._held.bind(("127.0.0.1", self.port))
            self.port = self._held.getsockname()[1]
        self._server = _Listening(("127.0.0.1", self.port), _speaking_for(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread.is_alive():
            self.kill()

    def kill(self) -> None:
        """Closes the server: from now on nobody listens, and nobody else gets the port."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        for connection in list(self.connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    # -- what an engine is asked

    def get(self, path: str) -> Reply:
        if self.is_starting:
            return self.starting()
        if path in ("/metrics", "/prometheus/metrics", "/v1/loads"):
            self.num_polls += 1
            self.steps += not self.is_hung
        return self.documents().get(path, as_json({"detail": "Not Found"}, 404))

    def starting(self) -> Reply:
        return as_json({}, 503)

    def documents(self) -> dict[str, Reply]:
        raise NotImplementedError

    def overloaded(self) -> Reply:
        return as_json({"error": {"message": "full", "type": "ServiceUnavailableError", "code": 503}}, 503)

    def models(self, **card: Any) -> Reply:
        return as_json({"object": "list", "data": [{"id": self.model, "object": "model", **card}]})

    def control(self, path: str) -> Reply | None:
        """Returns the reply to a request that is no client's."""
        return None

    def refusal(self, path: str, asked: dict[str, Any]) -> Reply | None:
        """Returns the reply to a request that this engine does not take."""
        return None

    def answer(self, path: str, asked: dict[str, Any]) -> tuple[bool, list[bytes]]:
        """Whether it is a stream, and its parts."""
        return _openai(self.model, path, asked)


class FakeVllm(FakeServer):
    dialect = "vllm"
    policy = "fcfs"

    def documents(self) -> dict[str, Reply]:
        labels = f'engine="0",model_name="{self.model}"'
        metrics = as_text(
            "# HELP vllm:num_requests_running Number of requests in model execution batches.\n"
            f"vllm:num_requests_running{{{labels}}} {float(self.running)}\n"
            f"vllm:num_requests_waiting{{{labels}}} {float(self.waiting)}\n"
            f"vllm:kv_cache_usage_perc{{{labels}}} 0.5\n"
            'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="1000"} 1.0\n'
            f"vllm:iteration_tokens_total_count{{{labels}}} {float(self.steps)}\n"
            f"vllm:request_prefill_kv_computed_tokens_sum{{{labels}}} 100000.0\n"
            f"vllm:request_prefill_time_seconds_sum{{{labels}}} 1.0\n"
            f'vllm:engine_sleep_state{{{labels},sleep_state="awake"}} {float(not self.is_parked)}\n'
        )
        return {
            "/health": (200, {}, b""),
            "/version": as_json({"version": "0.32.0"}),
            **({"/is_sleeping": as_json({"is_sleeping": self.is_parked})} if self.can_park else {}),
            "/v1/models": self.models(owned_by="vllm", max_model_len=4096),
            **({"/metrics": metrics} if self.has_metrics else {}),
        }

    def control(self, path: str) -> Reply | None:
        if not self.can_park:
            return None
        match path:
            case "/sleep?level=1&mode=wait":
                self.is_parked = True
            case "/wake_up":
                self.is_parked = False
            case _:
                return None
        return 200, {}, b""

    def refusal(self, path: str, asked: dict[str, Any]) -> Reply | None:
        if path.startswith(("/sleep", "/wake_up")):
            return as_json({"detail": "Not Found"}, 404)
        if self.is_parked:
            return as_json({"error": {"message": "asleep", "type": "Internal", "code": 500}}, 500)
        if asked.get("priority") and self.policy != "priority":
            message = "Got priority 1 but priority scheduling is not enabled"
            return as_json({"error": {"message": message, "type": "BadRequestError", "code": 400}}, 400)
        return None


class FakeSglang(FakeServer):
    dialect = "sglang"

    def documents(self) -> dict[str, Reply]:
        load = {
            "dp_rank": 0,
            "num_running_reqs": self.running,
            "num_waiting_reqs": self.waiting,
            "num_waiting_uncached_tokens": 100 * self.waiting,
            "num_used_tokens": 8000 + self.steps,
            "max_total_num_tokens": 16_000,
            "max_running_requests": 48,
            "token_usage": 0.5,
            "gen_throughput": 10.0,
        }
        info = {"mem_fraction_static": 0.8, "page_size": 1, "chunked_prefill_size": 256, "version": "0.5.23"}
        return {
            "/health": (200, {}, b""),
            "/health_generate": (200, {}, b""),
            "/v1/models": self.models(owned_by="sglang", max_model_len=4096),
            "/server_info": as_json(info),
            **({"/v1/loads": as_json({"loads": [load]})} if self.has_metrics else {}),
        }

    def control(self, path: str) -> Reply | None:
        match path:
            case "/release_memory_occupation":
                assert not self.running, "its scheduler asserts this, and dies"
                self.is_parked = True
            case "/resume_memory_occupation":
                self.is_parked = False
            case _:
                return None
        return 200, {}, b""

    def overloaded(self) -> Reply:
        return as_json({"object": "error", "message": "The request queue is full.", "code": 503}, 503)


class FakeTrtllm(FakeServer):
    dialect = "trtllm"

    def starting(self) -> Reply:
        return as_json({}, 503, **{"retry-after": "1", "x-trtllm-server-state": "starting"})

    def documents(self) -> dict[str, Reply]:
        labels = f'model_name="{self.model}"'
        metrics = as_text(
            f"trtllm_num_requests_waiting{{{labels}}} {self.waiting}\n"
            f"trtllm_num_requests_running{{{labels}}} {self.running}\n"
            f"trtllm_kv_cache_utilization{{{labels}}} 0.5\n"
            f"trtllm_kv_cache_tokens_per_block{{{labels}}} 32\n"
            f"trtllm_kv_cache_max_blocks{{{labels}}} 500\n"
            f"trtllm_time_per_output_token_seconds_count{{{labels}}} {self.steps}\n"
        )
        return {
            "/health": (200, {}, b""),
            "/health_generate": (200, {}, b""),
            "/version": as_json({"version": "1.2.0"}),
            "/v1/models": self.models(owned_by="tensorrt_llm"),
            **({"/prometheus/metrics": metrics} if self.has_metrics else {}),
        }


class FakeTgi(FakeServer):
    dialect = "tgi"
    answer_headers: ClassVar[dict[str, str]] = {"x-prompt-tokens": str(PROMPT_TOKENS)}

    def starting(self) -> Reply:
        return as_json({"error": "unhealthy", "error_type": "healthcheck"}, 503)

    def documents(self) -> dict[str, Reply]:
        metrics = as_text(
            f"tgi_queue_size {self.waiting}\n"
            f"tgi_batch_current_size {self.running}\n"
            "tgi_batch_current_max_tokens 8000\n"
            "tgi_batch_max_total_tokens 16000\n"
            f'tgi_batch_inference_count{{method="decode"}} {self.steps}\n'
        )
        info = {"model_id": "org/m", "max_concurrent_requests": 128, "max_input_tokens": 4095, "max_total_tokens": 4096}
        info |= {"max_best_of": 2, "max_stop_sequences": 4, "max_client_batch_size": 4, "validation_workers": 2}
        info |= {"router": "text-generation-router"}
        return {
            "/health": (200, {}, b""),
            "/info": as_json(info | {"version": "3.3.6"}),
            "/v1/models": self.models(owned_by="org/m"),
            **({"/metrics": metrics} if self.has_metrics else {}),
        }

    def overloaded(self) -> Reply:
        return as_json({"error": "Model is overloaded", "error_type": "overloaded"}, 429)

    def refusal(self, path: str, asked: dict[str, Any]) -> Reply | None:
        if path.startswith("/v1/") and asked.get("model") not in (None, "tgi"):
            return as_json({"error": "unknown adapter", "error_type": "validation"}, 422)
        return None

    def answer(self, path: str, asked: dict[str, Any]) -> tuple[bool, list[bytes]]:
        if path.startswith("/v1/"):
            is_stream, parts = super().answer(path, asked)
            return is_stream, [_as_tgi(part) for part in parts]
        words = WORDS[: asked["parameters"].get("max_new_tokens", 100)]
        reason = "length" if len(words) < len(WORDS) else "eos_token"
        details: dict[str, Any] = {"finish_reason": reason, "generated_tokens": len(words), "seed": None}
        tokens = [{"id": i, "text": word, "logprob": -0.1, "special": False} for i, word in enumerate(words)]
        if path == "/generate" or (path == "/" and not asked.get("stream")):  # a header tells the prompt's length
            whole: Any = {"generated_text": "".join(words), "details": details | {"prefill": [], "tokens": tokens}}
            return False, [json.dumps([whole] if path == "/" else whole).encode()]
        details["input_length"] = PROMPT_TOKENS
        events = []
        for index in range(len(words)):
            is_end = index == len(words) - 1
            rest = {"generated_text": "".join(words) if is_end else None, "details": details if is_end else None}
            events.append({"index": index + 1, "token": tokens[index], **rest})
        return True, [b"data:" + json.dumps(each).encode() + b"\n\n" for each in events]


class FakeTriton(FakeServer):
    """A Triton with vLLM's backend: its metrics do not say what runs."""

    dialect = "triton"
    config: ClassVar[dict[str, Any]] = {"backend": "vllm"}

    def documents(self) -> dict[str, Reply]:
        return {
            "/v2": as_json({"name": "triton", "version": "2.51.0", "extensions": ["generate"]}),
            "/v2/health/live": (200, {}, b""),
            "/v2/health/ready": (200, {}, b""),
            f"/v2/models/{self.model}/config": as_json({"name": self.model, **self.config}),
            **({"/metrics": as_text(self.metrics())} if self.has_metrics else {}),
        }

    def metrics(self) -> str:
        return f'nv_inference_pending_request_count{{model="{self.model}",version="1"}} {self.waiting}\n'

    def overloaded(self) -> Reply:
        return as_json({"error": "Exceeds maximum queue size"}, 400)

    def refusal(self, path: str, asked: dict[str, Any]) -> Reply | None:
        for name, value in asked.get("parameters", {}).items():
            if not isinstance(value, int | bool | str):
                return as_json({"error": f"parameter '{name}' has invalid type"}, 400)
        return None

    def answer(self, path: str, asked: dict[str, Any]) -> tuple[bool, list[bytes]]:
        given = asked | json.loads(asked.get("sampling_parameters", "{}"))
        is_stream = path.endswith("/generate_stream")
        assert given["stream"] is is_stream
        words = WORDS[: int(given.get("max_tokens", 100))]
        common = {"model_name": self.model, "model_version": "1"}
        if not is_stream:
            counts = {"num_input_tokens": PROMPT_TOKENS, "num_output_tokens": len(words)}
            return False, [
                json.dumps(common | counts | self.finished(words) | {"text_output": "".join(words)}).encode()
            ]
        events = [
            common | {"text_output": word, "num_input_tokens": PROMPT_TOKENS, "num_output_tokens": 1} for word in words
        ]
        events[-1] |= self.finished(words)
        return True, [b"data: " + json.dumps(each).encode() + b"\n\n" for each in events]

    def finished(self, words: list[str]) -> dict[str, str]:
        return {"finish_reason": "length" if len(words) < len(WORDS) else "stop"}


class FakeTritonTrtllm(FakeTriton):
    dialect = "triton-trtllm"
    config: ClassVar[dict[str, Any]] = {"platform": "ensemble", "ensemble_scheduling": {"step": ["tensorrt_llm"]}}

    def metrics(self) -> str:
        kinds = {"waiting": self.waiting, "scheduled": self.running, "max": 64}
        blocks = {"fraction": 0.5, "tokens_per": 64, "max": 250}
        rows = [f'nv_trt_llm_request_metrics{{model="x",request_type="{k}"}} {v}' for k, v in kinds.items()]
        rows += [
            f'nv_trt_llm_kv_cache_block_metrics{{kv_cache_block_type="{k}",model="x"}} {v}' for k, v in blocks.items()
        ]
        return "\n".join(rows) + "\n"

    def finished(self, words: list[str]) -> dict[str, str]:
        return {}  # it does not say why


FAKES: list[type[FakeServer]] = [FakeVllm, FakeSglang, FakeTrtllm, FakeTgi, FakeTriton, FakeTritonTrtllm]


def _openai(model: str, path: str, asked: dict[str, Any]) -> tuple[bool, list[bytes]]:
    is_chat, limit = "chat" in path, asked.get("max_completion_tokens") or asked.get("max_tokens") or 100
    words = WORDS[:limit]
    reason = "length" if len(words) < len(WORDS) else "stop"
    usage = {
        "prompt_tokens": PROMPT_TOKENS,
        "completion_tokens": len(words),
        "total_tokens": PROMPT_TOKENS + len(words),
    }
    common = {"id": "x", "created": 1, "model": model}
    if not asked.get("stream"):
        text = "".join(words)
        said = {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
        choice = {"index": 0, "finish_reason": reason, **said}
        kind = "chat.completion" if is_chat else "text_completion"
        return False, [json.dumps(common | {"object": kind, "choices": [choice], "usage": usage}).encode()]
    kind = "chat.completion.chunk" if is_chat else "text_completion"
    choices: list[dict[str, Any]] = [{"delta": {"role": "assistant", "content": ""}}] if is_chat else []
    choices += [{"delta": {"content": word}} if is_chat else {"text": word} for word in words]
    choices += [{"delta": {}, "finish_reason": reason} if is_chat else {"text": "", "finish_reason": reason}]
    chunks = [common | {"object": kind, "choices": [{"index": 0, "finish_reason": None, **c}]} for c in choices]
    if (asked.get("stream_options") or {}).get("include_usage"):
        chunks.append(common | {"object": kind, "choices": [], "usage": usage})
    return True, [b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks] + [b"data: [DONE]\n\n"]


def _as_tgi(part: bytes) -> bytes:
    """An answer of OpenAI's as TGI has it: every piece of a message names its role."""
    begin = b"data: " if part.startswith(b"data: ") else b""
    if (content := part.removeprefix(begin).rstrip()) == b"[DONE]":
        return part
    found = json.loads(content) | {"system_fingerprint": "3.3.6-native"}
    for choice in found["choices"]:
        if "delta" in choice:
            choice["delta"] = {"role": "assistant", "content": "", **choice["delta"]}
    return begin + json.dumps(found).encode() + (b"\n\n" if begin else b"")


class _Listening(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients leave as they like."""


def _speaking_for(fake: FakeServer) -> type[BaseHTTPRequestHandler]:
    class Speaker(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def setup(self) -> None:
            super().setup()
            fake.connections.add(self.connection)

        def finish(self) -> None:
            fake.connections.discard(self.connection)
            with contextlib.suppress(OSError):
                super().finish()

        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            self._send(fake.get(urlsplit(self.path).path))

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
            fake.asked.append((self.path, asked, dict(self.headers.items())))
            refusal = fake.starting() if fake.is_starting else fake.control(self.path) or fake.refusal(self.path, asked)
            if fake.is_overloaded:
                refusal = fake.overloaded()
            if refusal is not None:
                self._send(refusal)
                fake.num_refused += 1
                return
            is_stream, parts = fake.answer(self.path, asked)
            fake.running += 1
            try:
                self._generate(is_stream, parts)
            except OSError:
                fake.num_left += 1
                self.close_connection = True
            finally:
                fake.running -= 1

        def _generate(self, is_stream: bool, parts: list[bytes]) -> None:
            if not is_stream:
                self._work(len(WORDS))
                self._send((200, {"content-type": "application/json", **fake.answer_headers}, b"".join(parts)))
                return
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            for part in parts:
                self._work(1)
                self.wfile.write(b"%x\r\n%b\r\n" % (len(part), part))
            self.wfile.write(b"0\r\n\r\n")

        def _work(self, num_tokens: int) -> None:
            """Works as engines do: a client that has gone is noticed between two steps."""
            for _ in range(num_tokens):
                if fake.token_s:
                    time.sleep(fake.token_s)
                    self.connection.setblocking(False)
                    try:
                        if self.connection.recv(1) == b"":
                            raise ConnectionResetError
                    except BlockingIOError:
                        pass
                    finally:
                        self.connection.setblocking(True)

        def _send(self, reply: Reply) -> None:
            status, headers, body = reply
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    return Speaker
