"""The protocol over gRPC: `inference.GRPCInferenceService` with Triton's streaming call, health checks and reflection.

    ModelStreamInfer    client ── request a ──────────────── request b ──────>
                               <── a ─ a ─ b ─ a, final ─ b, final ───────────

Requests on one stream are answered side by side, each piece with the id of its request. A refused one is answered with
an error_message, and the stream goes on. A call that its client cancels, or whose deadline passes, is given up as if an
HTTP client had left.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import unquote

from penstock.api.oip.answer import Refusal
from penstock.api.oip.request import STREAM
from penstock.core.errors import ConfigError, InvalidRequest, PenstockError, RequestTimeout, UnsupportedParameter
from penstock.http import clock as clocks
from penstock.http.clock import LOOP_CLOCK, TimerClock
from penstock.http.exchange import NOBODY
from penstock.http.limits import ClientLimits
from penstock.oip.calls import Calls
from penstock.oip.inner_exchange import Caller
from penstock.oip.tensor_calls import TensorBody, TensorCalls

try:
    import grpc
    from google.protobuf.message import DecodeError

    from penstock.oip.description_messages import config_fields
    from penstock.oip.infer_messages import InferRequest, read_infer, write_failure, write_infer, write_piece
    from penstock.oip.messages import FILE, METHODS, SERVICE
    from penstock.oip.tensor_messages import infer_body, infer_piece, infer_response
    from penstock.rpc import health, reflection
    from penstock.rpc.health import Serving, health_service
    from penstock.rpc.listening import bind, credentials_of
    from penstock.rpc.messages import MAX_FIELDS, Message
except ImportError as missing:
    raise ConfigError(f"gRPC needs the extra penstock[grpc]: {missing}", param="grpc_port") from None

logger = logging.getLogger("penstock")

_ENVELOPE_BYTES = 64 << 10  # of a message, besides its text
_MAX_STREAMS = 256  # of one connection
_MAX_CALLS = 1024  # at once, of which each may have a message that has not come to its end; more are refused
_MAX_ON_STREAM = 64  # requests that a stream answers side by side; the next waits to be read
_PLACE_BYTES = 512 << 10  # a larger message counts as several of these
_MAX_METADATA_BYTES = 16 << 10
_MAX_DETAILS = 2048  # characters of an error: it goes in a header
_LIMITS = ClientLimits()
_STALL_S = _LIMITS.stall_timeout_s
_OPTIONS = [
    ("grpc.max_metadata_size", _MAX_METADATA_BYTES),
    ("grpc.max_concurrent_streams", _MAX_STREAMS),
    ("grpc.compression_enabled_algorithms_bitset", 1),  # none: a small message could become any number of bytes
    ("grpc.keepalive_time_ms", 60_000),  # a client that is gone without a word is found out
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),  # of clients
    ("grpc.max_connection_idle_ms", 600_000),
]

_CODES = {  # by HTTP status, which the one table of errors gives
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    402: grpc.StatusCode.RESOURCE_EXHAUSTED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    405: grpc.StatusCode.UNIMPLEMENTED,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    409: grpc.StatusCode.FAILED_PRECONDITION,
    413: grpc.StatusCode.INVALID_ARGUMENT,
    422: grpc.StatusCode.INVALID_ARGUMENT,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    431: grpc.StatusCode.INVALID_ARGUMENT,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}


class _StalledError(Exception):
    """A client that takes nothing."""


class _Writer:
    """Writes for the requests of one stream, one message after the other."""

    def __init__(self, context: Any, clock: TimerClock) -> None:
        self._context = context
        self._clock = clock
        self._lock = asyncio.Lock()
        self._stalled: asyncio.Future[None] | None = None  # a message that the client does not take

    async def write(self, message: Message) -> None:
        """Waits while the client takes nothing, as long as it may; then raises _StalledError."""
        async with self._lock:
            if self._stalled is not None:
                raise _StalledError
            sending = asyncio.ensure_future(self._context.write(message))
            try:
                async with clocks.timeout(self._clock, _STALL_S):
                    await asyncio.shield(sending)
            except TimeoutError:
                self._stalled = sending
                raise _StalledError from None
            except asyncio.CancelledError:
                sending.cancel()
                raise

    async def is_stalled(self) -> bool:
        """Whether the client took nothing for too long. gRPC takes back no message, and has no status for a client
        before it: so the call stays, without work, until the client takes the message or has gone."""
        if self._stalled is None:
            return False
        await self._stalled
        return True


@dataclass(frozen=True)
class GrpcPort:
    """Listening address. `shares`: other processes of this host listen there too, and connections are shared out."""

    host: str
    port: int
    tls_cert: str | None = None
    tls_key: str | None = None
    client_ca: str | None = None
    shares: bool = False


class OverGrpc:
    def __init__(self, calls: Calls, where: GrpcPort, clock: TimerClock = LOOP_CLOCK) -> None:
        self._calls = calls
        self._where = where
        self._clock = clock
        self._stopping = asyncio.Event()
        self._server: Any = None
        self.port = 0
        self.num_streams = 0  # of requests, that are open

    async def listen(self) -> str:
        """Returns where, in words. Raises ConfigError."""
        where = self._where
        size = self._calls.max_body_bytes + _ENVELOPE_BYTES
        options = [*_OPTIONS, ("grpc.max_receive_message_length", size), ("grpc.so_reuseport", int(where.shares))]
        self._server = grpc.aio.server(options=options, maximum_concurrent_rpcs=_MAX_CALLS)
        files = [FILE, health.FILE]
        services = [self._inference(), health_service(self._status, self._stopping)]
        self._server.add_generic_rpc_handlers((*services, *reflection.reflection_services(files)))
        credentials = None
        if where.tls_cert is not None:
            credentials = credentials_of(where.tls_cert, where.tls_key, where.client_ca, "tls_cert")
        self.port = bind(self._server, where.host, where.port, "grpc_port", credentials)
        await self._server.start()
        name = f"[{where.host}]" if ":" in where.host else where.host
        return f"gRPC (Open Inference Protocol) at {name}:{self.port}{'' if credentials is None else ', with TLS'}"

    async def stop(self, grace_s: float, *, idle_grace_s: float = 0.0) -> int:
        """Takes no more calls, nor requests on streams that are open, and drops after `grace_s` what has not ended.
        Clients of an idle connection are told, so it needs no grace. Returns 0: what was dropped is not counted."""
        self._stopping.set()
        if self._server is not None:
            await self._server.stop(grace_s)
        return 0

    async def _status(self, service: str) -> Serving | None:
        if service not in ("", SERVICE):
            return None
        is_ready = not self._stopping.is_set() and await self._calls.is_ready(Caller({}))
        return Serving.SERVING if is_ready else Serving.NOT_SERVING

    def _inference(self) -> Any:
        answers: dict[str, Callable[[Message, Caller], Awaitable[dict[str, Any]]]] = {
            "ServerLive": self._server_live,
            "ServerReady": self._server_ready,
            "ModelReady": self._model_ready,
            "ServerMetadata": self._server_metadata,
            "ModelMetadata": self._model_metadata,
            "ModelConfig": self._model_config,
            "ModelStatistics": self._model_statistics,
            "RepositoryIndex": self._repository_index,
            "RepositoryModelLoad": self._repository_load,
            "RepositoryModelUnload": self._repository_unload,
        }
        handlers = {}
        for name, (request, response) in METHODS.items():
            write = FILE[response.lstrip("*")].SerializeToString
            if name == "ModelStreamInfer":
                handlers[name] = grpc.stream_stream_rpc_method_handler(self._stream_infer, None, write)
            elif name == "ModelInfer":
                # A stream of one, so that its caller is known before it is read.
                handlers[name] = grpc.stream_unary_rpc_method_handler(self._infer, None, write)
            else:
                answering = _answering(FILE[request], answers[name], FILE[response])
                handlers[name] = grpc.unary_unary_rpc_method_handler(answering, None, write)
        return grpc.method_handlers_generic_handler(SERVICE, handlers)

    # -- questions

    async def _server_live(self, request: Message, caller: Caller) -> dict[str, Any]:
        return {"live": await self._calls.is_live(caller)}

    async def _server_ready(self, request: Message, caller: Caller) -> dict[str, Any]:
        return {"ready": not self._stopping.is_set() and await self._calls.is_ready(caller)}

    async def _model_ready(self, request: Message, caller: Caller) -> dict[str, Any]:
        """A model that is none is not ready, as Triton has it."""
        try:
            is_ready = await self._calls.is_model_ready(caller, request.name, request.version)
        except Refusal as refusal:
            if refusal.status != 404:
                raise
            is_ready = False
        return {"ready": is_ready and not self._stopping.is_set()}

    async def _server_metadata(self, request: Message, caller: Caller) -> dict[str, Any]:
        return await self._calls.server_metadata(caller)

    async def _model_metadata(self, request: Message, caller: Caller) -> dict[str, Any]:
        return await self._calls.model_metadata(caller, request.name, request.version)

    async def _model_config(self, request: Message, caller: Caller) -> dict[str, Any]:
        tensors = self._calls.known_tensors_of(request.name)
        return config_fields(await tensors.config(caller, request.name, request.version))

    async def _model_statistics(self, request: Message, caller: Caller) -> dict[str, Any]:
        return await self._calls.known_tensors_of(request.name).statistics(caller, request.name, request.version)

    # -- the repository

    async def _repository_index(self, request: Message, caller: Caller) -> dict[str, Any]:
        return {"models": await self._calls.repository.index(_named(caller), only_ready=request.ready)}

    async def _repository_load(self, request: Message, caller: Caller) -> dict[str, Any]:
        await self._calls.repository.load(_named(caller), request.model_name, _parameters(request))
        return {}

    async def _repository_unload(self, request: Message, caller: Caller) -> dict[str, Any]:
        await self._calls.repository.unload(_named(caller), request.model_name, _parameters(request))
        return {}

    # -- inference

    async def _infer(self, requests: AsyncIterator[bytes], context: Any) -> Message:
        async with _refusing(context):
            caller = self._known_caller(context)
            data = await self._first(requests)
            message = await self._calls.read(len(data), lambda: _infer_message(data))
            if (tensors := self._calls.tensors_of(message.model_name)) is not None:
                found = await self._infer_tensors(tensors, message, caller)
                context.set_trailing_metadata(_metadata(found.headers))
                return infer_response(found)
            asked = await self._calls.read(len(data), lambda: read_infer(message))
            if asked.stream:
                said = f"{STREAM}: ModelInfer answers once; ModelStreamInfer streams"
                raise UnsupportedParameter(said, param=STREAM)
            inference = self._calls.inference(caller, asked)
            answer = await inference.whole()
            context.set_trailing_metadata(_metadata(inference.headers))
            return write_infer(asked, answer)

    async def _infer_tensors(self, tensors: TensorCalls, message: Message, caller: Caller) -> TensorBody:
        body = infer_body(message)
        return await tensors.infer(caller, message.model_name, message.model_version, body)

    async def _stream_infer(self, requests: AsyncIterator[bytes], context: Any) -> None:
        async with _refusing(context):
            caller = self._known_caller(context)
        places, writer = asyncio.Semaphore(_MAX_ON_STREAM), _Writer(context, self._clock)
        self.num_streams += 1
        try:
            async with asyncio.TaskGroup() as group:
                async for request in _until(self._stopping, requests):
                    taken = min(_MAX_ON_STREAM, 1 + len(request) // _PLACE_BYTES)
                    for _ in range(taken):
                        await places.acquire()
                    task = group.create_task(self._answer(request, caller, writer.write))
                    task.add_done_callback(partial(_give_back, places, taken))
        except* _StalledError:
            pass
        finally:
            self.num_streams -= 1
        if await writer.is_stalled():
            await context.abort(grpc.StatusCode.ABORTED, f"this client took nothing of its answers for {_STALL_S:g} s")
        if self._stopping.is_set():
            await context.abort(grpc.StatusCode.UNAVAILABLE, "this server is stopping: open a stream to another")

    def _known_caller(self, context: Any) -> Caller:
        """Raises before a message is read where it would not be wanted."""
        caller = _caller(context)
        try:
            self._calls.body_owner(caller)
        except PenstockError as error:
            self._calls.turn_away(caller, error)
            raise
        return caller

    async def _first(self, requests: AsyncIterator[bytes]) -> bytes:
        try:
            async with clocks.timeout(self._clock, _LIMITS.body_timeout_s):
                return await anext(requests, b"")
        except TimeoutError:
            raise RequestTimeout("the request did not arrive in time") from None

    async def _answer(self, data: bytes, caller: Caller, write: Callable[[Message], Awaitable[None]]) -> None:
        """One request of a stream. No error of it gets out of here."""
        request = InferRequest()
        try:
            request = await self._calls.read(len(data), lambda: _infer_message(data))
            if (tensors := self._calls.tensors_of(request.model_name)) is not None:
                await write(infer_piece(await self._infer_tensors(tensors, request, caller)))
                return
            asked = await self._calls.read(len(data), lambda: read_infer(request))
            pieces = self._calls.inference(caller, asked).pieces(streams=bool(asked.stream))
            async with contextlib.aclosing(pieces):
                async for piece in pieces:
                    await write(write_piece(asked, piece))
        except Refusal as refusal:
            await write(write_failure(request, refusal))
        except PenstockError as error:
            await write(write_failure(request, Refusal.of(error)))
        except _StalledError:
            raise
        except Exception:
            logger.exception("a request on a stream failed")
            await write(write_failure(request, Refusal.of(PenstockError("internal error"))))


def _parameters(request: Message) -> dict[str, object]:
    found = {name: (one, one.WhichOneof("parameter_choice")) for name, one in request.parameters.items()}
    return {name: getattr(one, kind) if kind else None for name, (one, kind) in found.items()}


def _give_back(places: asyncio.Semaphore, taken: int, _: object) -> None:
    for _ in range(taken):
        places.release()


async def _until(stopping: asyncio.Event, requests: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Requests of a stream until it ends, or the server is to."""
    stop = asyncio.ensure_future(stopping.wait())
    try:
        while True:
            coming = asyncio.ensure_future(anext(requests, None))
            try:
                await asyncio.wait((coming, stop), return_when=asyncio.FIRST_COMPLETED)
                if not coming.done():
                    return
            finally:
                coming.cancel()
            if (request := coming.result()) is None:
                return
            yield request
    finally:
        stop.cancel()


def _answering(
    request: Message, answer: Callable[[Message, Caller], Awaitable[dict[str, Any]]], response: Message
) -> Callable[[bytes, Any], Awaitable[Message]]:
    async def handle(data: bytes, context: Any) -> Message:
        async with _refusing(context):
            return response(**await answer(_parsed(request, data), _caller(context)))

    return handle


def _infer_message(data: bytes) -> Message:
    if not FILE.has_few_fields("ModelInferRequest", data):
        raise InvalidRequest(f"this message has more than {MAX_FIELDS} fields")
    return _parsed(InferRequest, data)


def _parsed(kind: Message, data: bytes) -> Message:
    """Messages are read here and not by gRPC, which would answer INTERNAL."""
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise InvalidRequest(f"this is not the message of the call: {error}") from None


@contextlib.asynccontextmanager
async def _refusing(context: Any) -> AsyncIterator[None]:
    """Errors become the call's status, with what else there is to tell in its trailing metadata."""
    try:
        yield
    except PenstockError as error:
        await _abort(context, Refusal.of(error))
    except Refusal as refusal:
        await _abort(context, refusal)
    except (asyncio.CancelledError, grpc.aio.AbortError):
        raise
    except Exception:
        logger.exception("a call over gRPC failed")
        await _abort(context, Refusal.of(PenstockError("internal error")))


async def _abort(context: Any, refusal: Refusal) -> None:
    found = {
        "x-penstock-error-code": refusal.code,
        "x-penstock-error-param": refusal.param,
        "x-penstock-error-reason": refusal.reason,
        "x-request-id": refusal.request_id,
    }
    if (wait_s := refusal.retry_after_s) is not None:
        found |= {"retry-after": str(wait_s), "grpc-retry-pushback-ms": str(1000 * wait_s)}
    trailing = tuple(
        (name, value) for name, value in found.items() if value and value.isascii() and value.isprintable()
    )
    code = _CODES.get(refusal.status, grpc.StatusCode.INTERNAL)
    await context.abort(code, refusal.message[:_MAX_DETAILS], trailing)


def _caller(context: Any) -> Caller:
    """Metadata are headers; binary ones mean nothing here."""
    metadata = context.invocation_metadata() or ()
    headers = {name.encode(): value.encode("latin-1") for name, value in metadata if isinstance(value, str)}
    return Caller(headers, _peer(context.peer()))


def _named(caller: Caller) -> Caller:
    """The caller with the host name that orders need where no key is asked for. That check is against pages in a
    browser, which speak no gRPC, so a caller from this machine has used one of its own names."""
    is_local = caller.peer == "::1" or caller.peer.startswith("127.")
    return caller._replace(headers={**caller.headers, b"host": b"127.0.0.1"}) if is_local else caller


def _peer(peer: str) -> str:
    """An address, of `ipv4:127.0.0.1:4711` or `ipv6:%5B::1%5D:4711`."""
    family, _, rest = unquote(peer).partition(":")
    if family not in ("ipv4", "ipv6"):
        return NOBODY
    return rest.rpartition(":")[0].strip("[]")


def _metadata(headers: Mapping[bytes, bytes]) -> tuple[tuple[str, str], ...]:
    return tuple((name.decode("latin-1"), value.decode("latin-1")) for name, value in headers.items())
