"""The table of messages is that of the protocol as tritonclient was made with it."""

from __future__ import annotations

import pytest
from google.protobuf import descriptor_pb2
from tritonclient.grpc import service_pb2

from penstock.oip.messages import FILE, MESSAGES, METHODS

_FIELD = descriptor_pb2.FieldDescriptorProto


def _published() -> descriptor_pb2.FileDescriptorProto:
    found = descriptor_pb2.FileDescriptorProto()
    service_pb2.DESCRIPTOR.CopyToProto(found)
    return found


def _message(file: descriptor_pb2.FileDescriptorProto, name: str) -> descriptor_pb2.DescriptorProto:
    messages = file.message_type
    for part in name.split("."):
        found = next(one for one in messages if one.name == part)
        messages = found.nested_type
    return found


@pytest.mark.parametrize("name", MESSAGES)
def test_fields_are_those_that_were_published(name: str) -> None:
    published, own = _message(_published(), name), _message(FILE.descriptor, name)

    def fields(message: descriptor_pb2.DescriptorProto) -> list[tuple[object, ...]]:
        return [(f.name, f.number, f.type, f.label, f.type_name, f.HasField("oneof_index")) for f in message.field]

    assert fields(own) == fields(published)
    assert [one.name for one in own.oneof_decl] == [one.name for one in published.oneof_decl]


def test_calls_are_those_that_were_published() -> None:
    def calls(file: descriptor_pb2.FileDescriptorProto) -> dict[str, tuple[object, ...]]:
        (service,) = file.service
        found = ((m.name, m.input_type, m.output_type, m.client_streaming, m.server_streaming) for m in service.method)
        return {name: rest for name, *rest in found if name in METHODS}

    assert calls(FILE.descriptor) == calls(_published())
