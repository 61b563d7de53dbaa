"""Messages of Envoy's ext_proc, as far as an Endpoint Picker reads and writes them: fields by number and type.

The published protobufs (xds-protos) are no dependency: that package overwrites opentelemetry-proto with an old copy of
it (grpc/grpc #42926). A test holds this table to them. Fields that are not here are skipped, as protobuf has it.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, struct_pb2

Message = Any  # classes of which are made at run time

_STRUCT = ".google.protobuf.Struct"
# `*` repeated, `map` of texts to Struct, `|` in the message's oneof; an enum is its number.
MESSAGES: dict[str, dict[str, tuple[int, str]]] = {
    "HeaderValue": {"key": (1, "string"), "value": (2, "string"), "raw_value": (3, "bytes")},
    "HeaderMap": {"headers": (1, "*HeaderValue")},
    "HeaderValueOption": {"header": (1, "HeaderValue"), "append_action": (3, "int32")},
    "Metadata": {"filter_metadata": (1, "map")},
    "HttpHeaders": {"headers": (1, "HeaderMap"), "end_of_stream": (3, "bool")},
    "HttpBody": {"body": (1, "bytes"), "end_of_stream": (2, "bool")},
    "HttpTrailers": {"trailers": (1, "HeaderMap")},
    "ProtocolConfiguration": {"request_body_mode": (1, "int32"), "response_body_mode": (2, "int32")},
    "ProcessingRequest": {
        "request_headers": (2, "|HttpHeaders"),
        "response_headers": (3, "|HttpHeaders"),
        "request_body": (4, "|HttpBody"),
        "response_body": (5, "|HttpBody"),
        "request_trailers": (6, "|HttpTrailers"),
        "response_trailers": (7, "|HttpTrailers"),
        "metadata_context": (8, "Metadata"),
        "protocol_config": (11, "ProtocolConfiguration"),
    },
    "HeaderMutation": {"set_headers": (1, "*HeaderValueOption"), "remove_headers": (2, "*string")},
    "StreamedBodyResponse": {"body": (1, "bytes"), "end_of_stream": (2, "bool")},
    "BodyMutation": {"body": (1, "|bytes"), "streamed_response": (3, "|StreamedBodyResponse")},
    "CommonResponse": {
        "header_mutation": (2, "HeaderMutation"),
        "body_mutation": (3, "BodyMutation"),
        "clear_route_cache": (5, "bool"),
    },
    "HeadersResponse": {"response": (1, "CommonResponse")},
    "BodyResponse": {"response": (1, "CommonResponse")},
    "TrailersResponse": {"header_mutation": (1, "HeaderMutation")},
    "HttpStatus": {"code": (1, "int32")},
    "ImmediateResponse": {
        "status": (1, "HttpStatus"),
        "headers": (2, "HeaderMutation"),
        "body": (3, "bytes"),
        "details": (5, "string"),
    },
    "ProcessingResponse": {
        "request_headers": (1, "|HeadersResponse"),
        "response_headers": (2, "|HeadersResponse"),
        "request_body": (3, "|BodyResponse"),
        "response_body": (4, "|BodyResponse"),
        "request_trailers": (5, "|TrailersResponse"),
        "response_trailers": (6, "|TrailersResponse"),
        "immediate_response": (7, "|ImmediateResponse"),
        "dynamic_metadata": (8, _STRUCT),
    },
}
_ONEOFS = {"ProcessingRequest": "request", "ProcessingResponse": "response", "BodyMutation": "mutation"}
_PACKAGE = "penstock.ext_proc"
_SCALARS = {"string": 9, "bytes": 12, "bool": 8, "int32": 5}  # by descriptor.proto
_MESSAGE, _OPTIONAL, _REPEATED = 11, 1, 3


def _file() -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto(
        name="penstock/ext_proc.proto", package=_PACKAGE, syntax="proto3", dependency=[struct_pb2.DESCRIPTOR.name]
    )
    for name, fields in MESSAGES.items():
        message = file.message_type.add(name=name)
        if name in _ONEOFS:
            message.oneof_decl.add(name=_ONEOFS[name])
        for field, (number, kind) in fields.items():
            _add_field(message, field, number, kind)
    return file


def _add_field(message: Message, name: str, number: int, kind: str) -> None:
    """A map is what protobuf makes of it: a repeated pair."""
    if kind == "map":
        pair = message.nested_type.add(name="FilterMetadataEntry")
        pair.options.map_entry = True
        _add_field(pair, "key", 1, "string")
        _add_field(pair, "value", 2, _STRUCT)
        kind = f"*.{_PACKAGE}.{message.name}.{pair.name}"
    plain = kind.lstrip("*|")
    field = message.field.add(name=name, number=number, label=_REPEATED if kind.startswith("*") else _OPTIONAL)
    field.type = _SCALARS.get(plain, _MESSAGE)
    if field.type == _MESSAGE:
        field.type_name = plain if plain.startswith(".") else f".{_PACKAGE}.{plain}"
    if kind.startswith("|"):
        field.oneof_index = 0


_pool = descriptor_pool.DescriptorPool()
_pool.AddSerializedFile(struct_pb2.DESCRIPTOR.serialized_pb)
_pool.AddSerializedFile(_file().SerializeToString())


def _class(name: str) -> Any:
    return message_factory.GetMessageClass(_pool.FindMessageTypeByName(f"{_PACKAGE}.{name}"))


BodyMutation, BodyResponse, CommonResponse = _class("BodyMutation"), _class("BodyResponse"), _class("CommonResponse")
HeaderMutation, HeadersResponse, HeaderValue = (
    _class("HeaderMutation"),
    _class("HeadersResponse"),
    _class("HeaderValue"),
)
HeaderValueOption, HttpStatus = _class("HeaderValueOption"), _class("HttpStatus")
ImmediateResponse, StreamedBodyResponse = _class("ImmediateResponse"), _class("StreamedBodyResponse")
ProcessingRequest, ProcessingResponse = _class("ProcessingRequest"), _class("ProcessingResponse")
TrailersResponse = _class("TrailersResponse")

BUFFERED, BUFFERED_PARTIAL, FULL_DUPLEX_STREAMED = 2, 3, 4  # of ProcessingMode.BodySendMode
OVERWRITE_IF_EXISTS_OR_ADD = 2  # of HeaderValueOption.HeaderAppendAction
