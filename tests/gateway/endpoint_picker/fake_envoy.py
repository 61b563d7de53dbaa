"""An ext_proc client that behaves as Envoy is documented to, with the published protobufs over a real gRPC channel.

One `EnvoyRequest` is one HTTP request on its way through Envoy: its headers and body go to the Endpoint Picker in
Envoy's order of messages, the picked endpoint is sent the request over HTTP, and its response passes by the Endpoint
Picker on its way back.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import queue
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc

from tests.gateway.endpoint_picker.published import enum_number, message
from tests.waiting import GIVE_UP_S

_MODE = "envoy.extensions.filters.http.ext_proc.v3.ProcessingMode.BodySendMode"
DUPLEX, BUFFERED, NONE = (enum_number(_MODE, name) for name in ("FULL_DUPLEX_STREAMED", "BUFFERED", "NONE"))
_PROCESS = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"

ProcessingRequest, ProcessingResponse = message("ProcessingRequest"), message("ProcessingResponse")
HttpHeaders, HttpBody = message("HttpHeaders"), message("HttpBody")
HeaderMap, HeaderValue = message("HeaderMap"), message("HeaderValue")
ProtocolConfiguration = message("ProtocolConfiguration")

DESTINATION = "x-gateway-destination-endpoint"
_READ_BYTES = 1000


@dataclass
class Answer:
    """The answer that Envoy's client gets."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class EnvoyRequest:
    messages: queue.SimpleQueue[Any]
    call: Any
    mode: int
    headers: dict[str, str]
    refusal: Answer | None = None  # the Endpoint Picker's own answer
    endpoints: list[str] = field(default_factory=list)
    chunks: list[bytes] = field(default_factory=list)  # of the body, as the Endpoint Picker sent it back

    def send(self, message: Any) -> None:
        self.messages.put(message)

    def receive(self) -> Any:
        return next(self.call)

    def cancel(self) -> None:
        """Resets the stream, as when Envoy's client goes away."""
        self.call.cancel()

    # -- the request

    def send_request(self, body: bytes, subset: Iterable[str] | None = None, *, chunk_bytes: int = 1000) -> None:
        """Headers and, as far as Envoy does not wait before, the body."""
        first = ProcessingRequest(
            request_headers=HttpHeaders(headers=_header_map(self.headers), end_of_stream=not body),
            protocol_config=ProtocolConfiguration(request_body_mode=self.mode, response_body_mode=self.mode),
        )
        if subset is not None:
            hint = first.metadata_context.filter_metadata["envoy.lb.subset_hint"]
            hint.update({f"{DESTINATION}-subset": list(subset)})
        self.send(first)
        if self.mode == DUPLEX:
            for start in range(0, len(body), chunk_bytes):
                part = body[start : start + chunk_bytes]
                is_last = start + chunk_bytes >= len(body)
                self.send(ProcessingRequest(request_body=HttpBody(body=part, end_of_stream=is_last)))

    def ask(self, body: bytes, subset: Iterable[str] | None = None, *, chunk_bytes: int = 1000) -> None:
        """Sends the request to the Endpoint Picker, and takes its decision."""
        self.send_request(body, subset, chunk_bytes=chunk_bytes)
        if not body:
            self._take_destination(self.receive(), "request_headers")
        elif self.mode == BUFFERED:
            answer = self.receive()
            assert answer.WhichOneof("response") == "request_headers", answer
            assert not answer.request_headers.response.header_mutation.set_headers
            self.send(ProcessingRequest(request_body=HttpBody(body=body, end_of_stream=True)))
            self._take_buffered(body)
        else:
            self.take_destination()

    def _take_buffered(self, body: bytes) -> None:
        answer = self.receive()
        if self._take_destination(answer, "request_body"):
            mutation = answer.request_body.response.body_mutation
            self.chunks = [mutation.body if mutation.WhichOneof("mutation") == "body" else body]
            self.headers["content-length"] = str(len(self.chunks[0]))  # Envoy's own doing

    def take_destination(self) -> None:
        """The decision about a request with a streamed body."""
        if not self._take_destination(self.receive(), "request_headers"):
            return
        while True:
            answer = self.receive()
            assert answer.WhichOneof("response") == "request_body", answer
            streamed = answer.request_body.response.body_mutation.streamed_response
            self.chunks.append(streamed.body)
            if streamed.end_of_stream:
                return

    def _take_destination(self, answer: Any, kind: str) -> bool:
        if answer.WhichOneof("response") == "immediate_response":
            now = answer.immediate_response
            headers = {one.header.key: one.header.raw_value.decode() for one in now.headers.set_headers}
            self.refusal = Answer(now.status.code, headers, now.body)
            assert list(self.call) == []  # and then the stream ends
            return False
        assert answer.WhichOneof("response") == kind, answer
        common = getattr(answer, kind).response
        assert common.clear_route_cache
        self._mutate(self.headers, common.header_mutation)
        said = answer.dynamic_metadata["envoy.lb"][DESTINATION]
        assert said == self.headers[DESTINATION]
        self.endpoints = said.split(",")
        return True

    @property
    def body(self) -> bytes:
        return b"".join(self.chunks)

    # -- the response

    def forward(self, *, served: str | None = None) -> Answer:
        """Sends the request to the endpoint that serves it, and its response past the Endpoint Picker."""
        if self.refusal is not None:
            return self.refusal
        parts = self.response(served)
        status, headers = next(parts)
        return Answer(status, headers, b"".join(parts))

    def response(self, served: str | None = None) -> Iterator[Any]:
        """Status and headers, then the parts of the body as they come."""
        where = served or self.endpoints[0]
        connection = http.client.HTTPConnection(where, timeout=GIVE_UP_S)
        with contextlib.closing(connection):
            plain = {name: value for name, value in self.headers.items() if not name.startswith(":")}
            connection.request(self.headers[":method"], self.headers[":path"], self.body or None, plain)
            response = connection.getresponse()
            headers = {":status": str(response.status)} | {k.lower(): v for k, v in response.getheaders()}
            told = ProcessingRequest(response_headers=HttpHeaders(headers=_header_map(headers)))
            told.metadata_context.filter_metadata["envoy.lb"].update({f"{DESTINATION}-served": where})
            self.send(told)
            answer = self.receive()
            assert answer.WhichOneof("response") == "response_headers", answer
            self._mutate(headers, answer.response_headers.response.header_mutation)
            yield response.status, headers
            while True:
                data = response.read1(_READ_BYTES)
                yield self._pass_by(data, is_last=not data)
                if not data:
                    break
        self.messages.put(None)
        assert list(self.call) == []

    def _pass_by(self, data: bytes, *, is_last: bool) -> bytes:
        self.send(ProcessingRequest(response_body=HttpBody(body=data, end_of_stream=is_last)))
        answer = self.receive()
        assert answer.WhichOneof("response") == "response_body", answer
        mutation = answer.response_body.response.body_mutation
        if self.mode != DUPLEX:
            assert mutation.WhichOneof("mutation") is None
            return data
        assert mutation.streamed_response.end_of_stream == is_last
        return bytes(mutation.streamed_response.body)

    @staticmethod
    def _mutate(headers: dict[str, str], mutation: Any) -> None:
        for name in mutation.remove_headers:
            headers.pop(name, None)
        for option in mutation.set_headers:
            headers[option.header.key] = option.header.raw_value.decode()


class FakeEnvoy:
    def __init__(
        self, port: int, root_certificate: bytes | None = None, name: str = "localhost", host: str = "127.0.0.1"
    ) -> None:
        """`root_certificate`: of a CA that the Endpoint Picker's certificate, which has this `name`, is trusted by;
        None: no TLS."""
        address = f"{host}:{port}"
        if root_certificate is None:
            self.channel = grpc.insecure_channel(address)
        else:
            credentials = grpc.ssl_channel_credentials(root_certificate)
            self.channel = grpc.secure_channel(address, credentials, [("grpc.ssl_target_name_override", name)])
        self._process = self.channel.stream_stream(
            _PROCESS, ProcessingRequest.SerializeToString, ProcessingResponse.FromString
        )

    def open(
        self, method: str = "POST", path: str = "/v1/completions", mode: int = DUPLEX, **more: str
    ) -> EnvoyRequest:
        """`more`: headers, with _ for -."""
        messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
        call = self._process(iter(messages.get, None), timeout=GIVE_UP_S)
        headers = {":method": method, ":path": path, ":authority": "models", "content-type": "application/json"}
        return EnvoyRequest(messages, call, mode, headers | {k.replace("_", "-"): v for k, v in more.items()})

    def ask(
        self,
        body: bytes | dict[str, Any] = b"",
        *,
        subset: Iterable[str] | None = None,
        method: str = "POST",
        path: str = "/v1/completions",
        mode: int = DUPLEX,
        **headers: str,
    ) -> EnvoyRequest:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = self.open(method, path, mode, content_length=str(len(data)), **headers)
        request.ask(data, subset)
        return request

    def close(self) -> None:
        self.channel.close()


def _header_map(headers: dict[str, str]) -> Any:
    return HeaderMap(headers=[HeaderValue(key=name, raw_value=value.encode()) for name, value in headers.items()])
