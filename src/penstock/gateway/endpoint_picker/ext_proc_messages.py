"""Messages of Envoy's ext_proc, as far as an Endpoint Picker reads and writes them: fields by number and type.

The published protobufs (xds-protos) are no dependency: that package overwrites opentelemetry-proto with an old copy of
it (grpc/grpc #42926). A test holds this table to them. Fields that are not here are skipped, as protobuf has it.
"""

from __future__ import annotations

from google.protobuf import struct_pb2

from penstock.rpc.messages import Message, ProtoFile

__all__ = ["Message"]

_STRUCT = ".google.protobuf.Struct"
# An enum is its number.
MESSAGES: dict[str, dict[str, tuple[int, str]]] = {
    "HeaderValue": {"key": (1, "string"), "value": (2, "string"), "raw_value": (3, "bytes")},
    "HeaderMap": {"headers": (1, "*HeaderValue")},
    "HeaderValueOption": {"header": (1, "HeaderValue"), "append_action": (3, "int32")},
    "Metadata": {"filter_metadata": (1, f"map:{_STRUCT}")},
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
_file = ProtoFile(
    "penstock/ext_proc.proto",
    "penstock.ext_proc",
    MESSAGES,
    oneofs=_ONEOFS,
    dependencies=[struct_pb2.DESCRIPTOR],
)

BodyMutation, BodyResponse, CommonResponse = _file["BodyMutation"], _file["BodyResponse"], _file["CommonResponse"]
HeaderMutation, HeadersResponse, HeaderValue = (
    _file["HeaderMutation"],
    _file["HeadersResponse"],
    _file["HeaderValue"],
)
HeaderValueOption, HttpStatus = _file["HeaderValueOption"], _file["HttpStatus"]
ImmediateResponse, StreamedBodyResponse = _file["ImmediateResponse"], _file["StreamedBodyResponse"]
ProcessingRequest, ProcessingResponse = _file["ProcessingRequest"], _file["ProcessingResponse"]
TrailersResponse = _file["TrailersResponse"]

BUFFERED, BUFFERED_PARTIAL, FULL_DUPLEX_STREAMED = 2, 3, 4  # of ProcessingMode.BodySendMode
OVERWRITE_IF_EXISTS_OR_ADD = 2  # of HeaderValueOption.HeaderAppendAction
