"""Server reflection (grpc.reflection.v1 and v1alpha): clients such as grpcurl ask which services there are, and for the
files that declare them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc

from penstock.rpc.messages import Message, ProtoFile

_MESSAGES = {
    "ExtensionRequest": {"containing_type": (1, "string"), "extension_number": (2, "int32")},
    "ServerReflectionRequest": {
        "host": (1, "string"),
        "file_by_filename": (3, "|string"),
        "file_containing_symbol": (4, "|string"),
        "file_containing_extension": (5, "|ExtensionRequest"),
        "all_extension_numbers_of_type": (6, "|string"),
        "list_services": (7, "|string"),
    },
    "FileDescriptorResponse": {"file_descriptor_proto": (1, "*bytes")},
    "ServiceResponse": {"name": (1, "string")},
    "ListServiceResponse": {"service": (1, "*ServiceResponse")},
    "ErrorResponse": {"error_code": (1, "int32"), "error_message": (2, "string")},
    "ServerReflectionResponse": {
        "valid_host": (1, "string"),
        "original_request": (2, "ServerReflectionRequest"),
        "file_descriptor_response": (4, "|FileDescriptorResponse"),
        "list_services_response": (6, "|ListServiceResponse"),
        "error_response": (7, "|ErrorResponse"),
    },
}
_METHODS = {"ServerReflectionInfo": ("*ServerReflectionRequest", "*ServerReflectionResponse")}
FILES = [
    ProtoFile(
        f"grpc/reflection/{version}/reflection.proto",
        f"grpc.reflection.{version}",
        _MESSAGES,
        oneofs={"ServerReflectionRequest": "message_request", "ServerReflectionResponse": "message_response"},
        services={"ServerReflection": _METHODS},
    )
    for version in ("v1", "v1alpha")
]


def reflection_services(files: Sequence[ProtoFile]) -> list[Any]:
    """Handlers of both versions, which tell of `files` and of themselves."""
    known = [*files, *FILES]
    return [_service(own, known) for own in FILES]


def _service(own: ProtoFile, known: Sequence[ProtoFile]) -> Any:
    request_class, response_class = own["ServerReflectionRequest"], own["ServerReflectionResponse"]
    by_name = {one.descriptor.name: one for one in known}
    by_symbol = {symbol: one for one in known for symbol in one.symbols}
    services = sorted(name for one in known for name in one.services)

    def answer(request: Message) -> Message:
        response = response_class(valid_host=request.host, original_request=request)
        kind = request.WhichOneof("message_request")
        if kind == "list_services":
            for name in services:
                response.list_services_response.service.add(name=name)
            return response
        found = None
        if kind == "file_by_filename":
            found = by_name.get(request.file_by_filename)
        elif kind == "file_containing_symbol":
            found = by_symbol.get(request.file_containing_symbol)
        if found is not None:
            response.file_descriptor_response.file_descriptor_proto.append(found.descriptor.SerializeToString())
        else:
            response.error_response.error_code = grpc.StatusCode.NOT_FOUND.value[0]
            response.error_response.error_message = "nothing of this name is declared here"
        return response

    async def info(requests: AsyncIterator[Message], context: Any) -> AsyncIterator[Message]:
        async for request in requests:
            yield answer(request)

    method = grpc.stream_stream_rpc_method_handler(info, request_class.FromString, response_class.SerializeToString)
    return grpc.method_handlers_generic_handler(own.services[0], {"ServerReflectionInfo": method})
