"""The table of messages is that of the protocol as tritonclient was made with it."""

from __future__ import annotations

import pytest
from google.protobuf import descriptor_pb2
from tritonclient.grpc import model_config_pb2, service_pb2

from penstock.oip.description_messages import _NUMBERS, CONFIG, ONEOFS, STATISTICS
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


@pytest.mark.parametrize("name", MESSAGES | STATISTICS)
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


@pytest.mark.parametrize("name", CONFIG)
def test_fields_of_a_configuration_are_of_those_that_were_published(name: str) -> None:
    """Enums are numbers on the wire."""
    files = [_published(), descriptor_pb2.FileDescriptorProto()]
    model_config_pb2.DESCRIPTOR.CopyToProto(files[1])
    published = next(one for one in (_found(file, name) for file in files) if one is not None)
    theirs = {field.name: field for field in published.field}
    for field in _message(FILE.descriptor, name).field:
        other = theirs[field.name]
        kind = _FIELD.TYPE_INT32 if other.type == _FIELD.TYPE_ENUM else other.type
        assert (field.number, field.type, field.label) == (other.number, kind, other.label)
        assert field.HasField("oneof_index") == (name in ONEOFS)


def _found(file: descriptor_pb2.FileDescriptorProto, name: str) -> descriptor_pb2.DescriptorProto | None:
    try:
        return _message(file, name)
    except StopIteration:
        return None


def test_words_of_a_configuration_have_the_published_numbers() -> None:
    kinds = model_config_pb2.ModelInstanceGroup.Kind
    actions = model_config_pb2.ModelQueuePolicy.TimeoutAction
    for field, published in (("data_type", model_config_pb2.DataType), ("kind", kinds), ("timeout_action", actions)):
        assert all(published.Value(word) == number for word, number in _NUMBERS[field].items())
