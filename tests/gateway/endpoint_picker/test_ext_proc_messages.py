"""The Endpoint Picker's own table of ext_proc's messages is that of the published protobufs."""

from __future__ import annotations

import pytest
from google.protobuf.descriptor import FieldDescriptor

from penstock.gateway.endpoint_picker import ext_proc_messages as own
from tests.gateway.endpoint_picker.published import descriptor, enum_number

_MODE = "envoy.extensions.filters.http.ext_proc.v3.ProcessingMode.BodySendMode"
_ACTION = "envoy.config.core.v3.HeaderValueOption.HeaderAppendAction"
_KINDS = {
    FieldDescriptor.TYPE_STRING: "string",
    FieldDescriptor.TYPE_BYTES: "bytes",
    FieldDescriptor.TYPE_BOOL: "bool",
    FieldDescriptor.TYPE_ENUM: "int32",
}


def _kind(field: FieldDescriptor) -> str:
    if field.message_type is None:
        kind = _KINDS[field.type]
    elif field.message_type.GetOptions().map_entry:
        return f"map:.{field.message_type.fields_by_name['value'].message_type.full_name}"
    else:
        kind = field.message_type.name
        kind = f".{field.message_type.full_name}" if field.message_type.full_name.startswith("google") else kind
    mark = "|" if field.containing_oneof is not None else "*" if field.is_repeated else ""
    return f"{mark}{kind}"


@pytest.mark.parametrize("name", own.MESSAGES)
def test_fields_have_the_published_numbers_and_types(name: str) -> None:
    published = descriptor(name).fields_by_name
    assert own.MESSAGES[name] == {
        field: (published[field].number, _kind(published[field])) for field in own.MESSAGES[name]
    }


def test_enums_have_the_published_numbers() -> None:
    for value in ("BUFFERED", "BUFFERED_PARTIAL", "FULL_DUPLEX_STREAMED"):
        assert getattr(own, value) == enum_number(_MODE, value)
    assert enum_number(_ACTION, "OVERWRITE_IF_EXISTS_OR_ADD") == own.OVERWRITE_IF_EXISTS_OR_ADD
