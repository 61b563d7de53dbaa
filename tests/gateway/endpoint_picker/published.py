"""The published protobufs of ext_proc, as their descriptors: those of xds-protos 1.85.0 (Apache 2.0), with all that
they import. The package itself cannot be installed beside opentelemetry-proto (grpc/grpc #42926)."""

from __future__ import annotations

import lzma
from pathlib import Path
from typing import Any

from google.protobuf import (
    any_pb2,
    descriptor_pb2,
    descriptor_pool,
    duration_pb2,
    message_factory,
    struct_pb2,
    timestamp_pb2,
    wrappers_pb2,
)

_FILE = Path(__file__).with_name("ext_proc.binpb.xz")
_GOOGLE = (any_pb2, descriptor_pb2, duration_pb2, struct_pb2, timestamp_pb2, wrappers_pb2)
_SERVICE, _CORE = "envoy.service.ext_proc.v3", "envoy.config.core.v3"


def _pool() -> descriptor_pool.DescriptorPool:
    pool = descriptor_pool.DescriptorPool()
    for module in _GOOGLE:
        pool.AddSerializedFile(module.DESCRIPTOR.serialized_pb)
    for file in descriptor_pb2.FileDescriptorSet.FromString(lzma.decompress(_FILE.read_bytes())).file:
        pool.AddSerializedFile(file.SerializeToString())
    return pool


POOL = _pool()
PACKAGES = {
    "HeaderValue": _CORE,
    "HeaderMap": _CORE,
    "HeaderValueOption": _CORE,
    "Metadata": _CORE,
    "HttpStatus": "envoy.type.v3",
}


def descriptor(name: str) -> Any:
    return POOL.FindMessageTypeByName(f"{PACKAGES.get(name, _SERVICE)}.{name}")


def message(name: str) -> Any:
    return message_factory.GetMessageClass(descriptor(name))


def enum_number(enum: str, value: str) -> int:
    return int(POOL.FindEnumTypeByName(enum).values_by_name[value].number)
