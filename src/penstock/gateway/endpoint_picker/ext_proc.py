"""Envoy's external processing (ext_proc) as messages: one gRPC stream for each HTTP request.

    Envoy                                               Endpoint Picker
    request_headers, request_body…, end_of_stream  -->
                                                   <--  request_headers: the destination, as header and as metadata
                                                   <--  request_body…: what the replica is to get (or a refusal)
    response_headers, response_body…               -->
                                                   <--  response_headers, response_body…: as they are

So it goes with FULL_DUPLEX_STREAMED bodies. With BUFFERED ones Envoy waits for an answer to each message, and the
destination is in that to the body. Without a body, or with one that Envoy does not wait with, it is picked by the
headers alone.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator

from penstock.core.errors import PenstockError
from penstock.gateway.endpoint_picker import ext_proc_messages as pb
from penstock.gateway.endpoint_picker.ext_proc_messages import Message
from penstock.gateway.endpoint_picker.pick_exchange import Destination, PickExchange, Refusal, ResponseObserver
from penstock.gateway.endpoint_picker.picker import EndpointPicker
from penstock.http.message import Request

DESTINATION = "x-gateway-destination-endpoint"
SERVED = "x-gateway-destination-endpoint-served"
SUBSET = "x-gateway-destination-endpoint-subset"
DROPPED_REASON = "x-llm-d-request-dropped-reason"
LB_METADATA = "envoy.lb"
SUBSET_METADATA = "envoy.lb.subset_hint"
MAX_CHUNK_BYTES = 62_000  # of a streamed body: with its envelope it stays under the 64 KiB that Envoy takes at once

_DUPLEX = pb.FULL_DUPLEX_STREAMED
_BUFFERED = (pb.BUFFERED, pb.BUFFERED_PARTIAL)

Write = Callable[[Message], Awaitable[None]]


async def process(picker: EndpointPicker, messages: AsyncIterator[Message], write: Write) -> None:
    """One stream to its end. One that Envoy gives up is cancelled, wherever it is."""
    stream = _Stream(picker, write)
    try:
        async for message in messages:
            if not await stream.take(message):
                return
    finally:
        stream.close()


class _Stream:
    def __init__(self, picker: EndpointPicker, write: Write) -> None:
        self._picker = picker
        self._write = write
        self._head: dict[bytes, bytes] = {}
        self._request_mode = self._response_mode = _DUPLEX  # an Envoy that does not say is set up as this API wants it
        self._body: list[bytes] = []
        self._num_bytes = 0
        self._subset: frozenset[str] | None = None
        self._served: str | None = None
        self._exchange: PickExchange | None = None
        self._observer: ResponseObserver | None = None

    def close(self) -> None:
        self._picker.arrived(self._num_bytes)
        if self._exchange is not None:
            self._exchange.lost()

    async def take(self, message: Message) -> bool:
        """Answers one message. Returns whether the stream goes on."""
        if message.HasField("protocol_config"):
            self._request_mode = message.protocol_config.request_body_mode
            self._response_mode = message.protocol_config.response_body_mode
        self._read_metadata(message)
        match message.WhichOneof("request"):
            case "request_headers":
                return await self._request_headers(message.request_headers)
            case "request_body":
                return await self._request_body(message.request_body)
            case "request_trailers":
                return await self._request_trailers()
            case "response_headers":
                await self._response_headers(message.response_headers)
            case "response_body":
                await self._response_body(message.response_body)
            case "response_trailers":
                if self._observer is not None:
                    self._observer.ended()
                await self._write(pb.ProcessingResponse(response_trailers=pb.TrailersResponse()))
        return True

    # -- the request

    async def _request_headers(self, headers: Message) -> bool:
        self._head = {name.encode(): value for name, value in _pairs(headers.headers)}
        if headers.end_of_stream or self._request_mode not in (_DUPLEX, *_BUFFERED):
            found = await self._pick()
            if isinstance(found, Refusal):
                return await self._refuse(found)
            await self._write(_with_destination(found, pb.ProcessingResponse(request_headers=_headers_to(found))))
        elif self._request_mode != _DUPLEX:
            await self._write(pb.ProcessingResponse(request_headers=pb.HeadersResponse()))
        return True

    async def _request_body(self, body: Message) -> bool:
        if self._exchange is not None:  # it was picked by its headers
            await self._write(pb.ProcessingResponse(request_body=pb.BodyResponse()))
            return True
        try:
            self._picker.arrives(len(body.body), self._num_bytes + len(body.body))
        except PenstockError as error:
            exchange = self._exchange = PickExchange(self._request(), self._subset)
            self._picker.refuse(exchange, error)
            return await self._refuse(exchange.answer.result())
        self._num_bytes += len(body.body)
        self._body.append(body.body)
        return not body.end_of_stream or await self._answer_body(ends_stream=True)

    async def _request_trailers(self) -> bool:
        """The end of a body, where its last part did not say so."""
        if self._exchange is None and not await self._answer_body(ends_stream=False):
            return False
        await self._write(pb.ProcessingResponse(request_trailers=pb.TrailersResponse()))
        return True

    async def _answer_body(self, *, ends_stream: bool) -> bool:
        found = await self._pick()
        if isinstance(found, Refusal):
            return await self._refuse(found)
        assert self._exchange is not None
        original = b"".join(self._body)
        body = original if found.body is None else found.body
        self._body.clear()
        if self._request_mode != _DUPLEX:
            common = _headers_to(found).response
            if body != original:  # Envoy sets its length
                common.body_mutation.body = body
            response = pb.ProcessingResponse(request_body=pb.BodyResponse(response=common))
            await self._write(_with_destination(found, response))
            return True
        headers = _headers_to(found, None if body == original else len(body))
        await self._write(_with_destination(found, pb.ProcessingResponse(request_headers=headers)))
        for common in _chunks(body, ends_stream=ends_stream):
            await self._write(pb.ProcessingResponse(request_body=pb.BodyResponse(response=common)))
        return True

    async def _pick(self) -> Destination | Refusal:
        self._exchange = exchange = PickExchange(self._request(), self._subset)
        self._picker.pick(exchange)
        found = await exchange.answer
        if isinstance(found, Destination):
            self._observer = found.observer
        return found

    def _request(self) -> Request:
        method, target = self._head.get(b":method", b""), self._head.get(b":path", b"")
        return Request(method, target, self._head, b"".join(self._body))

    async def _refuse(self, refusal: Refusal | Destination) -> bool:
        assert isinstance(refusal, Refusal)
        pairs = [*refusal.headers, (DROPPED_REASON, refusal.reason.encode())]
        answer = pb.ImmediateResponse(
            status=pb.HttpStatus(code=refusal.status),
            headers=_mutation(pairs),
            body=refusal.body,
            details=f"penstock_{refusal.reason}",
        )
        await self._write(pb.ProcessingResponse(immediate_response=answer))
        return False

    def _read_metadata(self, message: Message) -> None:
        found = message.metadata_context.filter_metadata
        if SUBSET_METADATA in found and SUBSET in found[SUBSET_METADATA]:
            self._subset = frozenset(_texts(found[SUBSET_METADATA], SUBSET))
        if LB_METADATA in found and SERVED in found[LB_METADATA]:
            self._served = next(iter(_texts(found[LB_METADATA], SERVED)), None)

    # -- the response

    async def _response_headers(self, headers: Message) -> None:
        found = dict(_pairs(headers.headers))
        told = pb.HeadersResponse()
        if self._observer is not None:
            status = found.get(":status", b"")
            added = self._observer.answered(int(status) if status.isdigit() else 0, found, self._served)
            if added:
                told.response.header_mutation.CopyFrom(_mutation(added))
            if headers.end_of_stream:
                self._observer.ended()
        await self._write(pb.ProcessingResponse(response_headers=told))

    async def _response_body(self, body: Message) -> None:
        if self._observer is not None:
            self._observer.data(body.body)
            if body.end_of_stream:
                self._observer.ended()
        if self._response_mode != _DUPLEX:
            await self._write(pb.ProcessingResponse(response_body=pb.BodyResponse()))
            return
        for common in _chunks(body.body, ends_stream=body.end_of_stream):
            await self._write(pb.ProcessingResponse(response_body=pb.BodyResponse(response=common)))


def _pairs(headers: Message) -> Iterator[tuple[str, bytes]]:
    for one in headers.headers:
        yield one.key.lower(), one.raw_value or one.value.encode()


def _texts(metadata: Message, key: str) -> list[str]:
    """A list of texts, or one text with commas."""
    value = metadata.fields[key]
    if value.WhichOneof("kind") == "list_value":
        return [one.string_value for one in value.list_value.values]
    return [part.strip() for part in value.string_value.split(",") if part.strip()]


def _mutation(pairs: Iterable[tuple[str, bytes]], removed: Iterable[str] = ()) -> Message:
    options = [
        pb.HeaderValueOption(
            header=pb.HeaderValue(key=name, raw_value=value), append_action=pb.OVERWRITE_IF_EXISTS_OR_ADD
        )
        for name, value in pairs
    ]
    return pb.HeaderMutation(set_headers=options, remove_headers=removed)


def _headers_to(found: Destination, num_bytes: int | None = None) -> Message:
    """`num_bytes`: of a body that is not the client's."""
    pairs = [(DESTINATION, ",".join(found.endpoints).encode()), *found.headers]
    if num_bytes is not None:
        pairs.append(("content-length", b"%d" % num_bytes))
    common = pb.CommonResponse(header_mutation=_mutation(pairs, found.removed), clear_route_cache=True)
    return pb.HeadersResponse(response=common)


def _with_destination(found: Destination, response: Message) -> Message:
    """The same as in the header: Envoy's load balancer reads this one, and Envoys behind it the other."""
    response.dynamic_metadata.update({LB_METADATA: {DESTINATION: ",".join(found.endpoints)}})
    return response


def _chunks(body: bytes, *, ends_stream: bool) -> Iterator[Message]:
    for start in range(0, max(1, len(body)), MAX_CHUNK_BYTES):
        is_last = start + MAX_CHUNK_BYTES >= len(body)
        streamed = pb.StreamedBodyResponse(
            body=body[start : start + MAX_CHUNK_BYTES], end_of_stream=ends_stream and is_last
        )
        yield pb.CommonResponse(body_mutation=pb.BodyMutation(streamed_response=streamed))
